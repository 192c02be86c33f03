"""Which blocks a forward is about to write for the first time since they were handed out, and what is in them then.

V1  A block is looked at between preparation and forward: after every scrub that was ordered for it, before any write.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import numpy as np

from kvcustody.integrations.conformance.engine_protocol import FirstWrite
from kvcustody.integrations.transformers.batching.custody import BatchCustody
from kvcustody.integrations.transformers.batching.request_record import RequestRecord


class FirstWrites:
    """Follows the engine's block tables. `cached`: hit tokens of each request at its last start."""

    def __init__(self, custody: BatchCustody) -> None:
        self._custody = custody
        self._known: dict[str, tuple[RequestRecord, int]] = {}
        self._fresh: dict[int, tuple[str, int]] = {}
        self._hand_outs = 0
        self.cached: dict[str, int] = {}
        self.probe: Callable[[FirstWrite], None] | None = None

    def before_forward(self, batch: Sequence[Any]) -> None:
        """`batch`: what the engine has prepared; positions already count the tokens of this step."""
        page, first = self._custody.page, self._custody.blocks.first
        self._take_in(page, first)
        (memory,) = self._custody.blocks.memories
        for future in batch:
            end = future.state.position_offset
            places = range((end - future.query_length) // page, -(-end // page))
            table = self._custody.records[future.state.request_id].table
            for block in (table[at] - first for at in places):
                fresh = self._fresh.pop(block, None)
                if fresh is not None and self.probe is not None:
                    nonzero = memory.nonzero_bytes(np.array([block], dtype=np.int64))
                    self.probe(FirstWrite(fresh[0], block, nonzero, fresh[1]))

    def _take_in(self, page: int, first: int) -> None:
        """Blocks that have come into a table since the last step were handed out."""
        for name, record in self._custody.records.items():
            self.cached[name] = record.hit_tokens
            known, count = self._known.get(name, (None, 0))
            if known is not record:
                count = record.hit_tokens // page
            for block in record.table[count:]:
                self._hand_outs += 1
                self._fresh[block - first] = (name, self._hand_outs)
            self._known[name] = (record, len(record.table))
