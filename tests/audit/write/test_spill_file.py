"""The spill's file by itself: self-contained frames, torn tails, a full disk."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

from kvcustody.audit.write.spill_file import KEPT, SpillFile, SpillFullError, SpillSegment

LIMIT = 1 << 24


def spilled(folder: Path) -> list[bytes]:
    return [record for path in sorted(folder.glob("*.spill")) for record in read(path)[0]]


def read(path: Path) -> tuple[list[bytes], int]:
    segment = SpillSegment(path, os.open(path, os.O_RDONLY))
    try:
        return list(segment.records()), segment.torn_bytes
    finally:
        segment.close()


def records(number: int) -> list[bytes]:
    return [b"L" + b'{"sequence":%d,"text":"the same in all of them"}' % (number * 50 + one) for one in range(50)]


def test_a_torn_tail_loses_the_last_frame_alone(tmp_path: Path) -> None:
    spill = SpillFile(tmp_path, "ab" * 16, limit_bytes=LIMIT)
    ends = [0]
    for number in range(3):
        spill.append(records(number))
        [path] = tmp_path.glob("*.spill")
        ends.append(path.stat().st_size)
    spill.close()
    whole = path.read_bytes()
    raw = b"".join(record for number in range(3) for record in records(number))
    assert len(whole) < len(raw) / 3
    assert read(path) == ([record for number in range(3) for record in records(number)], 0)
    for cut in range(ends[2] + 1, ends[3]):
        path.write_bytes(whole[:cut])
        assert read(path) == ([*records(0), *records(1)], cut - ends[2])
    for place in range(ends[2], ends[3]):
        path.write_bytes(whole[:place] + bytes([whole[place] ^ 1]) + whole[place + 1 :])
        found, torn = read(path)
        assert found == [*records(0), *records(1)] and torn == ends[3] - ends[2]


def test_the_rate_is_that_of_the_last_minute(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    spill, now = SpillFile(tmp_path, "ab" * 16, limit_bytes=LIMIT), [1000.0]
    monkeypatch.setattr("kvcustody.audit.write.spill_file.time.monotonic", lambda: now[0])
    assert spill.bytes_per_second() == 0.0
    for _ in range(200):
        taken = spill.append(records(0))
        now[0] += 0.5
    assert spill.bytes_per_second() == pytest.approx(2 * taken, rel=0.05)
    now[0] += 100
    assert spill.bytes_per_second() == 0.0
    spill.close()


def test_a_segment_that_is_kept_is_the_same_file_under_another_name(tmp_path: Path) -> None:
    spill = SpillFile(tmp_path, "ab" * 16, limit_bytes=LIMIT)
    spill.append(records(0))
    [segment] = spill.segments()
    assert list(segment.records()) == records(0)
    segment.retire(keep=True)
    assert not list(tmp_path.glob("*.spill")) and spill.bytes() == 0
    [kept] = tmp_path.glob("*" + KEPT)
    assert read(kept) == (records(0), 0)
    spill.close()


def test_a_full_disk_takes_nothing_and_leaves_what_was_there(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    spill = SpillFile(tmp_path, "ab" * 16, limit_bytes=LIMIT)
    spill.append(records(0))
    write = os.write

    def half(descriptor: int, data: Any) -> int:
        write(descriptor, bytes(data)[: len(data) // 2])
        raise OSError(28, "No space left on device")

    with monkeypatch.context() as patch, pytest.raises(SpillFullError, match="No space"):
        patch.setattr(os, "write", half)
        spill.append(records(1))
    assert spilled(tmp_path) == records(0)
    spill.append(records(2))
    assert spilled(tmp_path) == [*records(0), *records(2)], "control: what comes after is whole"
    spill.close()


KILLED = """
import sys
from pathlib import Path
from kvcustody.audit.write.spill_file import SpillFile
spill = SpillFile(Path(sys.argv[1]), "ab" * 16, limit_bytes=1 << 26)
number = 0
while True:
    number += 1
    spill.append([b"L%d" % number] * 40)
    print(number, flush=True)
"""


def test_every_frame_that_was_acknowledged_survives_a_kill(tmp_path: Path) -> None:
    process = subprocess.Popen([sys.executable, "-c", KILLED, str(tmp_path)], stdout=subprocess.PIPE, text=True)
    assert process.stdout is not None
    lines = [process.stdout.readline() for _ in range(30)]
    process.send_signal(signal.SIGKILL)
    lines += process.stdout.readlines()
    process.wait()
    told = int(lines[-1])
    found = spilled(tmp_path)
    assert set(found) >= {b"L%d" % number for number in range(1, told + 1)}
    assert len(found) % 40 == 0
