"""What the port may order of the reference engine, and the books that it may look at."""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING

import numpy as np

from kvcustody.governance.external.engine_control import EngineView
from kvcustody.integrations.conformance.engine_protocol import ABORTED, OVER

if TYPE_CHECKING:
    from kvcustody.integrations.conformance.engines.reference_engine import ReferenceEngine


class ReferenceControl:
    """What the port may order (`EngineControl`)."""

    def __init__(self, engine: ReferenceEngine) -> None:
        self._engine = engine

    def evict(self, blocks: Sequence[int]) -> None:
        """Forget these now; unreferenced ones are free from here on."""
        for block in blocks:
            self._engine.forget(block, "ended")

    def abort(self, request_ids: Sequence[object], cause: str) -> None:
        """End these now."""
        for request_id in request_ids:
            self._engine.end(self._engine.requests[request_id], ABORTED, cause)

    def withhold(self, blocks: Sequence[int]) -> None:
        """These never become zero: keep them out of the free list."""
        for block in blocks:
            self._engine.blocks.withhold(block)

    def wake(self) -> None:
        """The toy engine's timer looks often enough."""

    def view(self) -> EngineView:
        """The engine's own books."""
        blocks = self._engine.blocks
        indexed = np.zeros(blocks.count, dtype=np.bool_)
        indexed[list(blocks.key_of)] = True
        live = frozenset(one.number for one in self._engine.requests.values() if one.state not in OVER)
        return EngineView(blocks.refs.copy(), indexed, live, blocks.allocated)
