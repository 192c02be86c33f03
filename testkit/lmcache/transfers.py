"""Transfers of LMCache's worker half, held between the connector that starts them and the copy itself.

    held = HeldTransfers(adapter.transfer_ctx, on_store, on_load)
    adapter.transfer_ctx = held
    held.hold(True)                                  # nothing begins
    held.hold(False)                                 # everything does, in order

1. A transfer that has not begun has touched neither the server nor a block; whoever frees a block under it is found out
   when it begins.
2. Every other call is LMCache's own.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable
from typing import Any


class HeldTransfer:
    """A transfer that may not have begun, in the form of the future that LMCache's connector polls."""

    def __init__(self, begin: Callable[[], Any]) -> None:
        self._begin = begin
        self._begun: Any = None

    def begin(self) -> None:
        """Begin the transfer."""
        self._begun = self._begin()

    def query(self) -> bool:
        """Return whether the transfer is over."""
        return self._begun is not None and bool(self._begun.query())

    def result(self, timeout: float | None = None) -> Any:
        """Return the transfer's result."""
        assert self._begun is not None, "it is over"
        return self._begun.result(timeout=timeout)


class HeldTransfers:
    """In the place of a worker's transfer context. `on_store` gets a store's key when it is handed over, `on_load` the
    request and its blocks when they are about to be written."""

    def __init__(
        self, theirs: Any, on_store: Callable[[Any], None], on_load: Callable[[str, Iterable[int]], None]
    ) -> None:
        self._theirs = theirs
        self._on_store = on_store
        self._on_load = on_load
        self._waiting: list[HeldTransfer] = []
        self.is_held = False

    def __getattr__(self, name: str) -> Any:
        return getattr(self._theirs, name)

    def submit_store(self, request: str, key: Any, *more: Any) -> HeldTransfer:
        """Submit a store as LMCache's `TransferContext` does."""
        self._on_store(key)
        return self._submit(lambda: self._theirs.submit_store(request, key, *more))

    def submit_retrieve(
        self, request: str, key: Any, caches: Any, blocks: list[list[int]], *more: Any, **named: Any
    ) -> HeldTransfer:
        """Submit a load as LMCache's `TransferContext` does."""

        def begin() -> Any:
            self._on_load(request, blocks[0])
            return self._theirs.submit_retrieve(request, key, caches, blocks, *more, **named)

        return self._submit(begin)

    def hold(self, held: bool) -> None:
        """Hold transfers, or release all that wait."""
        self.is_held = held
        while self._waiting and not held:
            self._waiting.pop(0).begin()

    def _submit(self, begin: Callable[[], Any]) -> HeldTransfer:
        made = HeldTransfer(begin)
        if self.is_held:
            self._waiting.append(made)
        else:
            made.begin()
        return made
