"""Counts the blocks that the stream attributes to workers, for an operator and not for a router.

1. It reads with a reader's credentials, as an index does, and sees the same: gaps, snapshots and what erasures end.
2. Hashes alone are kept, `BLOCKS_MAX` of each worker and tenant; tokens and names are not read.
"""

from __future__ import annotations

import asyncio
from contextlib import suppress
from typing import Final, NamedTuple

from kvcustody.integrations.events.incoming import Hash, Removed, StoredBlocks, read
from kvcustody.integrations.jetstream.connection import NatsPlace
from kvcustody.integrations.jetstream.reader import StreamReader
from kvcustody.integrations.jetstream.subjects import EVERY

BLOCKS_MAX: Final = 1 << 20


class WatchedRow(NamedTuple):
    """One worker and one tenant, by its tag. `payloads`: received batches. `is_usable`: none is missing."""

    worker: str
    tenant: str
    blocks: int
    payloads: int
    is_usable: bool


class WatchedBlocks:
    """A `BlockIndex` that counts."""

    def __init__(self) -> None:
        self._held: dict[tuple[str, str], set[Hash]] = {}
        self._payloads: dict[tuple[str, str], int] = {}

    def apply(self, worker: str, tenant: str, payload: bytes) -> None:
        """See `BlockIndex`."""
        held = self._held.setdefault((worker, tenant), set())
        self._payloads[worker, tenant] = self._payloads.get((worker, tenant), 0) + 1
        for event in read(payload).events:
            if isinstance(event, StoredBlocks):
                held.update(event.hashes[: max(0, BLOCKS_MAX - len(held))])
            elif isinstance(event, Removed):
                held.difference_update(event.hashes)
            else:
                held.clear()

    def forget(self, worker: str, tenant: str) -> None:
        """See `BlockIndex`."""
        self._held.pop((worker, tenant), None)

    def rows(self, reader: StreamReader) -> list[WatchedRow]:
        """Return every worker and tenant with received events, in order."""
        return [
            WatchedRow(*key, len(self._held.get(key, ())), payloads, is_usable=reader.streams.is_usable(*key))
            for key, payloads in sorted(self._payloads.items())
        ]


def watch(place: NatsPlace, seconds: float, *, tenant: str = EVERY) -> list[WatchedRow]:
    """Return the stream's counts after reading it for this time. Raises `ConfigError` as `StreamReader` does."""
    index = WatchedBlocks()
    reader = StreamReader(place, index, tenant=tenant)

    async def run() -> None:
        with suppress(TimeoutError):
            await asyncio.wait_for(reader.run(), seconds)

    asyncio.run(run())
    return index.rows(reader)
