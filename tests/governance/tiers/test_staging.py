"""Buffers for plaintext: nothing of it is left, in this process or a child, and none beyond the bound."""

from __future__ import annotations

import ctypes
import gc
import os
import subprocess
import sys
import threading
from collections.abc import Callable
from pathlib import Path

import pytest

from kvcustody.governance.tiers.staging import Staging, StagingCounts
from standins.governance.memory_scan import copies


def canary() -> bytes:
    """Sixteen bytes that nothing else in this process has."""
    return bytes(byte ^ 0x5A for byte in b"plain-canary-no1")


def filled(view: memoryview) -> None:
    """Written byte by byte, so that no other copy is made."""
    for at, byte in enumerate(b"plain-canary-no1"):
        view[at] = byte ^ 0x5A


def test_what_is_given_back_is_zero_whatever_happened() -> None:
    staging = Staging(1, 8192)
    mark = canary()
    before = copies(os.getpid(), mark)
    with pytest.raises(RuntimeError, match="in between"), staging.take(5000) as view:
        assert view is not None and len(view) == 5000 and not any(view)
        filled(view)
        assert copies(os.getpid(), mark) == before + 1, "void: the scan does not find it"
        raise RuntimeError("in between")
    assert copies(os.getpid(), mark) == before
    with staging.take(8192) as view:
        assert view is not None and not any(view)
    assert staging.counts == StagingCounts(2, 5000 + 8192, 0)
    staging.close()


def test_what_passes_one_after_the_other_is_zeroed_at_the_end() -> None:
    staging = Staging(1, 8192)
    mark = canary()
    before = copies(os.getpid(), mark)
    with pytest.raises(RuntimeError, match="in between"), staging.take_for_many(5000) as staged:
        first = staged(5000)
        assert first is not None and not any(first)
        filled(first)
        with staging.take(10) as other:
            assert other is None, "it is this caller's alone"
        second = staged(100)
        assert second is not None and len(second) == 100 and copies(os.getpid(), mark) == before + 1
        raise RuntimeError("in between")
    assert copies(os.getpid(), mark) == before and staging.counts == StagingCounts(1, 5000, 1)
    with staging.take_for_many(10):
        pass
    assert staging.counts.zeroed_buffers == 1, "nobody asked: no buffer was taken"
    with staging.take(8192) as view:
        assert view is not None and not any(view)
    with staging.take_for_many(8193) as staged:
        assert staged(10) is None
    staging.close()


def test_there_are_no_more_than_the_bound_and_nobody_waits() -> None:
    staging = Staging(2, 4096)
    with staging.take(10) as one, staging.take(10) as two, staging.take(10) as three:
        assert one is not None and two is not None and three is None
    with staging.take(4097) as large:
        assert large is None
    with staging.take(10) as again:
        assert again is not None
    assert staging.counts == StagingCounts(3, 30, 2)
    staging.close()


def test_threads_never_share_a_buffer() -> None:
    staging, wrong = Staging(3, 4096), list[int]()

    def run(number: int) -> None:
        for _ in range(300):
            with staging.take(64) as view:
                if view is not None:
                    wrong.extend([number] if any(view) else [])
                    view[:] = bytes([number]) * 64
                    wrong.extend([number] if set(view) != {number} else [])

    threads = [threading.Thread(target=run, args=(number,)) for number in range(1, 7)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert wrong == [] and len(staging._free) == 3
    staging.close()


def test_a_forked_child_finds_zeros() -> None:
    staging = Staging(1, 4096)
    with staging.take(64) as view:
        assert view is not None
        view[:] = b"x" * 64
        child = os.fork()
        if not child:
            os._exit(1 if any(view) else 0)
        assert os.waitstatus_to_exitcode(os.waitpid(child, 0)[1]) == 0
        assert view == b"x" * 64, "control: the parent has it"
    staging.close()


def test_it_is_locked_and_in_no_core_dump() -> None:
    staging = Staging(1, 1 << 20)
    status = Path("/proc/self/smaps").read_text()
    address = staging._free[0][1]
    part = next(one for one in status.split("\nVmFlags") if f"{address:x}-" in one)
    after = status[status.index(part) + len(part) :].splitlines()[1]
    assert {"lo", "dd", "wf"} <= set(after.split()), after
    staging.close()


LIMITED = """
import resource
resource.setrlimit(resource.RLIMIT_MEMLOCK, (65536, 65536))
from kvcustody.errors import ConfigError
from kvcustody.governance.tiers.staging import Staging
Staging(1, 4096).close()
try:
    Staging(4, 65536)
except ConfigError as error:
    print(error)
"""


def test_a_limit_that_is_too_low_is_said_at_start() -> None:
    """As a user without the right to lock whatever it likes."""
    drop = "import ctypes; ctypes.CDLL(None).prctl(24, 14, 0, 0, 0)\n"  # PR_CAPBSET_DROP of CAP_IPC_LOCK
    user = "import os; os.setuid(65534) if not os.getuid() else None\n"
    limit = "import resource; resource.setrlimit(resource.RLIMIT_MEMLOCK, (65536, 65536))\n"
    done = subprocess.run(
        [sys.executable, "-c", "import kvcustody.governance.tiers.staging\n" + drop + limit + user + LIMITED],
        capture_output=True,
        text=True,
        env={**os.environ, "PYTHONPATH": os.pathsep.join(sys.path)},
        check=False,
    )
    assert "cannot be locked in memory; raise the limit (`ulimit -l`" in done.stdout, done.stderr


def test_every_buffer_is_pinned_once_and_let_go_when_it_is_zero() -> None:
    staging, log = Staging(2, 4096), list[tuple[str, int, bytes]]()

    def pin(address: int, size: int) -> Callable[[], None]:
        assert size == 4096
        log.append(("pinned", address, b""))
        return lambda: log.append(("let go", address, ctypes.string_at(address, 16)))

    staging.pin(pin)
    staging.pin(pin)
    with staging.take(4096) as view:
        assert view is not None
        filled(view)
    staging.close()
    addresses = {address for word, address, _ in log if word == "pinned"}
    assert len(addresses) == 2 and [word for word, *_ in log] == ["pinned"] * 2 + ["let go"] * 2
    assert {address for word, address, rest in log if word == "let go" and not any(rest)} == addresses


def test_buffers_that_nobody_closed_are_let_go_before_their_memory_is() -> None:
    """A driver that kept them pinned would refuse the next memory at their addresses."""
    let_go: list[bytes] = []

    def pin(address: int, size: int) -> Callable[[], None]:
        return lambda: let_go.append(ctypes.string_at(address, size))

    staging = Staging(2, 4096)
    staging.pin(pin)
    del staging
    gc.collect()
    assert [len(each) for each in let_go] == [4096, 4096]
