"""Blocks and generations as two arrays, turned into runs only when somebody reads them: on the writer's thread."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from typing import overload

import numpy as np
from numpy.typing import NDArray

from kvcustody.audit.events.block_runs import Run, gather


class FlatRuns(Sequence[Run]):
    """A sequence of runs that costs the engine's thread one object. The arrays must not change any more."""

    __slots__ = ("_blocks", "_generations", "_pool", "_runs")

    def __init__(self, blocks: NDArray[np.int64], generations: NDArray[np.int64], pool: int = 0) -> None:
        self._blocks = blocks
        self._generations = generations
        self._pool = pool
        self._runs: tuple[Run, ...] | None = None

    def _gathered(self) -> tuple[Run, ...]:
        if self._runs is None:
            self._runs = gather(self._blocks, self._generations, self._pool)
        return self._runs

    def __len__(self) -> int:
        return len(self._gathered())

    def __iter__(self) -> Iterator[Run]:
        return iter(self._gathered())

    @overload
    def __getitem__(self, index: int) -> Run: ...
    @overload
    def __getitem__(self, index: slice) -> tuple[Run, ...]: ...
    def __getitem__(self, index: int | slice) -> Run | tuple[Run, ...]:
        return self._gathered()[index]

    def __bool__(self) -> bool:
        return len(self._blocks) > 0

    def __eq__(self, other: object) -> bool:
        return isinstance(other, Sequence) and tuple(self) == tuple(other)

    def __hash__(self) -> int:
        raise TypeError("runs are not hashable")
