"""Forks a worker with tiers on request, so that a test can kill -9 one every few moments (`tests/fork_server.py`).

The child serves on the folder's ledger, keys and tiers for ever, and every block of its device holds the canary. What
it found wrong is in FOLDER/failed-NUMBER; FOLDER/progress-NUMBER says how many requests it has served.
"""

from __future__ import annotations

import hashlib
import os
import random
import traceback
from pathlib import Path

from kvcustody.clock import VirtualClock
from kvcustody.governance.tiers import tier as tier_module
from kvcustody.governance.tiers.seal.object_layout import HEADER_BYTES
from kvcustody.governance.tiers.transfer_rates import TierUse
from standins.fork_server import serve
from standins.governance.offload_world import TOKENS, World, prompt

CANARY = hashlib.sha256(b"what a prompt said").digest()
LIFE_US = 60_000_000
TENANTS = ("acme", "beta")


class CanaryWorld(World):
    """A worker whose blocks hold the canary, every 64 bytes; life after life on one folder."""

    def __init__(self, folder: Path, number: int) -> None:
        self.number = number
        super().__init__(folder, "host nvme", host_bytes=1 << 17)

    def open(self) -> None:
        before_us = (1 + self.number) * LIFE_US
        self.clock = VirtualClock(before_us, VirtualClock().utc_us() + before_us)
        super().open()

    def uses(self) -> list[TierUse]:
        """What was stored in each tier, and came back."""
        assert self.worker.governor.offload is not None
        return self.worker.governor.offload.transfers.uses()

    def content(self, tokens: list[int], block: int) -> bytes:
        told = repr(tokens[: TOKENS * (block + 1)]).encode()
        return (CANARY + hashlib.sha256(told).digest()) * (self.size // 64)


def in_clear(key: object, name: bytes, facts: object, content: memoryview, into: memoryview, **_: object) -> int:
    """A store that keeps blocks as they are: the control."""
    into[HEADER_BYTES : HEADER_BYTES + len(content)] = content
    return len(into)


def child(folder: Path, number: int) -> None:
    """Serve until killed."""
    log = os.open(folder / "worker.log", os.O_WRONLY | os.O_CREAT | os.O_APPEND, 0o600)
    os.dup2(log, 1)
    os.dup2(log, 2)
    if (folder / "in-clear").exists():
        tier_module.seal_into = in_clear  # type: ignore[assignment]
    try:
        world, drawn = CanaryWorld(folder, number), random.Random(number)
        assert world.tiers[1].found_at_start == len(world.tiers[1].objects())
        progress = os.open(folder / f"progress-{number}", os.O_RDWR | os.O_CREAT, 0o600)
        served = hits = 0
        while True:
            hits += world.serve(drawn.choice(TENANTS), prompt(drawn.randrange(12), drawn.randrange(4, 14)))
            served += 1
            world.clock.advance(drawn.randrange(30_000))
            restored = sum(use.restored_blocks for use in world.uses())
            os.pwrite(progress, f"{served} {restored} {world.tiers[1].found_at_start}".ljust(40).encode(), 0)
    except BaseException:
        (folder / f"failed-{number}").write_text(traceback.format_exc())
    os._exit(1)


if __name__ == "__main__":
    serve(child)
