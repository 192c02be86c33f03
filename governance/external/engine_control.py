"""What an engine's adapter must obey, and the engine's own books that it must show."""

from __future__ import annotations

from collections.abc import Sequence
from typing import NamedTuple, Protocol

import numpy as np
from numpy.typing import NDArray


class EngineView(NamedTuple):
    """The engine's own books, one row a block: for scans and conservation, never for decisions."""

    refs: NDArray[np.int64]
    indexed: NDArray[np.bool_]
    requests: frozenset[object]
    allocated: int  # hand-outs since the start, by the engine's own count


class EngineControl(Protocol):
    """What an adapter must obey. Called on the engine's own thread, synchronously; `wake` from any thread."""

    def evict(self, blocks: Sequence[int]) -> None:
        """Forget these blocks' keys now and hand out the unreferenced ones first; no call back into the port."""

    def abort(self, request_ids: Sequence[object], cause: str) -> None:
        """End these requests now; the adapter then calls `release` for each, as for any other end."""

    def withhold(self, blocks: Sequence[int]) -> None:
        """Never hand these out again: they did not verify."""

    def wake(self) -> None:
        """Make an idle engine take a step soon."""

    def view(self) -> EngineView:
        """The engine's own books."""
