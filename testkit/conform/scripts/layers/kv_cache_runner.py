"""Who can read what KVCR stores in memory and files, does a block open as another, and can a tenant's blocks be ended?

    python kv_cache_runner.py clear-at-rest        # needs: kvcr 0.1.1, with nixl (their wheels run on a CPU)

KVCR runs as an engine starts it: a pool in host memory, and files behind it ("G3"), where the pool's oldest blocks go.
Its keys are the caller's, so what a key is made of is not asked here.
"""

from __future__ import annotations

import ctypes
import json
import mmap
import os
import socket
import sys
import tempfile
import time
from pathlib import Path
from typing import Any

BLOCK, SLOTS = 1 << 16, 2
_SECONDS = 20.0


class KvcrPool:
    """A KVCR over a folder; `deposit` and `deliver` move whole blocks."""

    def __init__(self, folder: Path) -> None:
        from kvcr import KVCR, KVCRBindings
        from kvcr.config import G3Options, KVCRBackendConfigs, KVCRConfig, LocalDramOptions
        from kvcr.types import PinRequestId, RegionDescriptor

        self.pool, self._engine = mmap.mmap(-1, SLOTS * BLOCK), mmap.mmap(-1, SLOTS * BLOCK)
        self.file = folder / "blocks"
        with socket.socket() as found:
            found.bind(("127.0.0.1", 0))
            port = found.getsockname()[1]
        engine = RegionDescriptor(addr=_address(self._engine), count=SLOTS, size=BLOCK, label="")
        self._kvcr = KVCR(
            KVCRConfig("asked", [("", BLOCK)], nixl_listen_port=port),
            KVCRBindings(lambda keys: PinRequestId(1), list, lambda handle: True),
            KVCRBackendConfigs(
                framework_regions=[engine],
                local_dram=LocalDramOptions([("", _address(self.pool), SLOTS * BLOCK)]),
                g3=G3Options(paths=(self.file,), capacity_bytes_per_file=8 * BLOCK, backend="POSIX"),
            ),
        )

    def deposit(self, key: bytes, content: bytes) -> None:
        """Store a block.

        Raises:
            RuntimeError: the block is not kept.
        """
        self._engine[:BLOCK] = content
        self._done(self._kvcr.deposit, key)

    def deliver(self, key: bytes) -> bytes:
        """Return the block under a key.

        Raises:
            RuntimeError: there is none.
        """
        self._engine[:BLOCK] = bytes(BLOCK)
        self._done(self._kvcr.deliver, key)
        return bytes(self._engine[:BLOCK])

    def in_files(self, key: bytes) -> bool:
        """Return whether the block has moved from the pool to a file, after a moment."""
        until = time.monotonic() + _SECONDS
        while self.where(key) != "G3":
            if time.monotonic() > until:
                return False
            time.sleep(0.01)
            self._kvcr.poll_completed()
        return True

    def where(self, key: bytes) -> str:
        """Return the tier that KVCR reports; empty for none."""
        [(_, tier)] = self._kvcr.query([key])
        return "" if tier is None else str(tier.value)

    def end(self) -> None:
        """Call everything in the interface that ends blocks."""
        self._kvcr.close()

    def ends(self) -> list[str]:
        """Return the calls in the interface whose names say that they end blocks."""
        words = ("delete", "remove", "erase", "evict", "forget", "invalidate", "purge", "clear", "drop")
        return [name for name in dir(self._kvcr) if name.startswith(words)]

    def _done(self, act: Any, key: bytes) -> None:
        from kvcr.types import MemoryRef

        handle = act({key: [MemoryRef(end_point_name="asked", element_index=0)]})
        until = time.monotonic() + _SECONDS
        while time.monotonic() < until:
            for done, results in self._kvcr.poll_completed():
                if done == handle and results[key].status.name != "SUCCESS":
                    raise RuntimeError(f"{act.__name__}: {results[key].status.name}")
                if done == handle:
                    return
            time.sleep(0.01)
        raise RuntimeError(f"{act.__name__}: no answer")


def _address(memory: mmap.mmap) -> int:
    return ctypes.addressof(ctypes.c_char.from_buffer(memory))


def main(case: str) -> dict[str, Any]:
    """Return what was seen."""
    with tempfile.TemporaryDirectory() as place:
        found, evidence = _look(case, Path(place))
    return {"found": found, "evidence": evidence}


def _look(case: str, folder: Path) -> tuple[bool, str]:
    runner = KvcrPool(folder)
    contents = {f"block-{number}".encode(): os.urandom(BLOCK) for number in range(2 * SLOTS)}
    first_key, two, *_ = contents
    for key, content in contents.items():
        runner.deposit(key, content)
    assert runner.in_files(first_key) and runner.in_files(two), "the oldest blocks are in the file"
    assert runner.deliver(first_key) == contents[first_key], "own blocks come back"
    slots = {key: runner.file.read_bytes().find(contents[key]) for key in (first_key, two)}
    if case == "clear-at-rest":
        clear, mode = sum(at >= 0 for at in slots.values()), runner.file.stat().st_mode & 0o777
        return (
            clear > 0 or mode & 0o077 > 0,
            f"{clear} of 2 blocks are in the file as they were; mode {mode:04o}",
        )
    if case == "renamed-object":
        _write(runner.file, {slots[first_key]: contents[two], slots[two]: contents[first_key]})
        wrong = [runner.deliver(first_key) == contents[two], runner.deliver(two) == contents[first_key]]
        return any(wrong), f"{sum(wrong)} of 2 blocks that changed places in the file were served as the other"
    if case == "older-object":
        older = os.urandom(BLOCK)
        _write(runner.file, {slots[first_key]: older})
        served = runner.deliver(first_key) == older
        return served, f"{int(served)} of 1 other contents, put where the block was, were served as it"
    if case == "erase-tenant":
        ends, tier = runner.ends(), runner.where(first_key)
        said = (
            f"of its calls {', '.join(ends)} end a block" if ends else "none of its calls ends a block by key or owner"
        )
        return not ends and bool(tier), f"{said}; it is still in {tier}"
    if case == "never-deleted":
        runner.end()
        left = sum(content in runner.file.read_bytes() for content in contents.values())
        return left > 0, f"{left} blocks are in the file after the runner was closed"
    assert case == "residue"
    runner.end()
    left = sum(content in bytes(runner.pool) for content in contents.values())
    return left > 0, f"{left} of {SLOTS} blocks are in the pool's memory after the runner was closed"


def _write(file: Path, pieces: dict[int, bytes]) -> None:
    with file.open("r+b") as opened:
        for place, content in pieces.items():
            opened.seek(place)
            opened.write(content)
        os.fsync(opened.fileno())


if __name__ == "__main__":
    print(json.dumps(main(sys.argv[1])), flush=True)
    os._exit(0)  # the runner's threads
