"""Batches that a control plane acknowledged, kept in a worker's own files until a signed checkpoint covers them.

    kept.keep(names, leaves)             # after the acknowledgement; never raises
    for segment in kept.closed(): ...    # ask about its runs, then `drop` it
    kept.rewind()                        # all of it is spill again, to be handed in once more

1. Files are those of the spill, with another ending: a spill that was handed in is one of them from then on.
2. A kept batch survives kill -9 once `keep` has returned, and a power failure once it is a second old. Batches are
   synced together, at most once a second, and whenever their state is queried (`closed`). Only a ledger that goes back
   to an earlier state within the same second as this machine's power loses what was acknowledged in it.
3. Together they stay within `bytes_max`: beyond it the oldest go, and `dropped_bytes` counts them; so they do where the
   disk has no room for new evidence (`make_room`). What cannot be written is counted too; the batch was acknowledged
   all the same.
4. A segment of a dead predecessor counts like an own one; a live process's is never touched.
5. How many leaves were signed is pinned beside them (`pin_signed`), for the next process too. A pin that cannot be read
   or written is none: it widens nothing, and nothing waits for it.
"""

from __future__ import annotations

import threading
import time
import uuid
from collections.abc import Sequence
from contextlib import suppress
from pathlib import Path
from typing import NamedTuple

import orjson

from kvcustody.audit.evidence.subjects.subject_table import Row
from kvcustody.audit.write.spill_file import KEPT, SpillFile, SpillSegment
from kvcustody.errors import LedgerError
from kvcustody.files import write_file
from kvcustody.logger import get_logger

_ASKED = 8  # segments at once
_SYNC_SECONDS = 1.0
_log = get_logger(__name__)


class KeptRun(NamedTuple):
    """Consecutive sequences of one process, and the number of their leaves."""

    incarnation: str
    first: int
    last: int
    leaves: int


class KeptSegment(NamedTuple):
    """One file and its runs."""

    name: str
    runs: tuple[KeptRun, ...]


class KeptBatches:
    """The kept files of one worker's folder; thread-safe."""

    def __init__(self, directory: Path, *, bytes_max: int) -> None:
        self._directory = directory
        self._bytes_max = bytes_max
        self._file: SpillFile | None = None
        self._incarnation = ""
        self._runs: dict[str, tuple[KeptRun, ...]] = {}  # of files that are closed
        self._lock = threading.Lock()
        self._synced = 0.0
        self._pin = directory / "signed-size"
        self._signed_size = _pinned(self._pin)
        self.dropped_bytes = 0
        self.failed = ""  # why the last batch was not kept

    def keep(self, names: Sequence[Row], leaves: Sequence[bytes]) -> None:
        """Write an acknowledged batch (rules 2 and 3)."""
        records = [b"P" + orjson.dumps(row) for row in names]
        records += [b"L" + leaf for leaf in leaves]
        with self._lock:
            while True:
                try:
                    file = self._opened(leaves[0])
                    file.append(records)
                    self._sync(file)
                except LedgerError as problem:
                    if self._drop_oldest():
                        continue
                    self._say(problem.message)
                    return
                self.failed = ""
                return

    def closed(self) -> list[KeptSegment]:
        """Return the oldest files; closes the one being written where few others wait."""
        with self._lock:
            file = self._any_file()
            with suppress(LedgerError):  # said by the next `keep`
                self._sync(file, now=True)
            few = sum(1 for _ in self._directory.glob("*" + KEPT)) <= _ASKED
            segments = file.segments(rotate=few)
            try:
                # The newest too: what is lost is what came last.
                asked = segments if len(segments) <= _ASKED else [*segments[: _ASKED - 1], segments[-1]]
                found = [KeptSegment(one.path.name, self._read(one)) for one in asked]
            finally:
                for segment in segments:
                    segment.close()
            return [segment for segment in found if segment.runs]

    def drop(self, segment: KeptSegment) -> None:
        """Delete a file whose leaves are covered."""
        with self._lock:
            self._runs.pop(segment.name, None)
            self._any_file().forget(self._directory / segment.name)
            (self._directory / segment.name).unlink(missing_ok=True)

    def make_room(self) -> bool:
        """Delete the oldest file because the disk is full and new evidence needs the room. False where there
        is none.
        """
        with self._lock:
            return self._drop_oldest("the disk is full")

    def pin_signed(self, size: int) -> int:
        """Store the number of signed root leaves; return the number stored before (rule 5)."""
        before, self._signed_size = self._signed_size, size
        if size != before:
            with suppress(OSError):
                write_file(self._pin, b"%d\n" % size)
        return before

    def rewind(self) -> None:
        """Turn every kept file back into spill."""
        with self._lock:
            file = self._any_file()
            for segment in file.segments():
                segment.spill_again()
                file.forget(segment.path)
            self._runs.clear()

    def size_bytes(self) -> int:
        """The bytes of all kept files."""
        with self._lock:
            return self._any_file().bytes()

    def bytes_per_second(self) -> float:
        """The rate of batches over the last minute."""
        with self._lock:
            return self._any_file().bytes_per_second()

    def close(self) -> None:
        """Close the files; they stay on disk."""
        with self._lock:
            if self._file is not None:
                self._file.close()

    def _opened(self, leaf: bytes) -> SpillFile:
        """The file of the process that recorded a leaf."""
        if not self._incarnation:
            self._incarnation = str(orjson.loads(leaf)["incarnation"])
            if self._file is not None:
                self._file.close()
            self._file = self._make(self._incarnation)
        return self._any_file()

    def _any_file(self) -> SpillFile:
        if self._file is None:
            self._file = self._make(uuid.uuid4().hex)
        return self._file

    def _make(self, incarnation: str) -> SpillFile:
        return SpillFile(self._directory, incarnation, limit_bytes=self._bytes_max, suffix=KEPT, durable=False)

    def _read(self, segment: SpillSegment) -> tuple[KeptRun, ...]:
        """The runs of a closed file."""
        name = segment.path.name
        if name not in self._runs:
            counts: dict[tuple[str, int], int] = {}
            for record in segment.records():
                if record[:1] == b"L":
                    leaf = orjson.loads(record[1:])
                    key = (leaf["incarnation"], leaf["sequence"])
                    counts[key] = counts.get(key, 0) + 1
            runs: list[KeptRun] = []
            for (incarnation, sequence), leaves in sorted(counts.items()):
                if runs and runs[-1].incarnation == incarnation and runs[-1].last == sequence - 1:
                    runs[-1] = runs[-1]._replace(last=sequence, leaves=runs[-1].leaves + leaves)
                else:
                    runs.append(KeptRun(incarnation, sequence, sequence, leaves))
            self._runs[name] = tuple(runs)
        return self._runs[name]

    def _sync(self, file: SpillFile, *, now: bool = False) -> None:
        """Rule 2."""
        if now or time.monotonic() - self._synced >= _SYNC_SECONDS:
            file.sync()
            self._synced = time.monotonic()

    def _drop_oldest(self, why: str = "unsigned batches have reached their limit") -> bool:
        """Make room (rule 3); False where there is nothing to let go of."""
        file = self._any_file()
        segments = file.segments()
        if segments:
            oldest = segments[0].path
            size = oldest.stat().st_size
            _log.warning("a file of unsigned batches is deleted", reason=why, bytes=size)
            self.dropped_bytes += size
            self._runs.pop(oldest.name, None)
            file.forget(oldest)
            oldest.unlink(missing_ok=True)
        for segment in segments:
            segment.close()
        return bool(segments)

    def _say(self, why: str) -> None:
        if not self.failed:
            _log.warning("an acknowledged batch is not kept", reason=why)
        self.failed = why


def _pinned(path: Path) -> int:
    try:
        return int(path.read_bytes())
    except (OSError, ValueError):
        return 0
