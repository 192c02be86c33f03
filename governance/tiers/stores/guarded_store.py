"""Any store behind a deadline for each call and a circuit breaker.

    store = GuardedStore(FileStore(folder, capacity), seconds=0.5, clock=clock)

1. Calls run on threads of the guard's own, as many as the store has use for (`in_flight`). One that does not answer in
   time raises `StoreError`; while none of the threads answers, every other call is refused at once. What is started
   runs there while the caller does something else; an abandon cancels what has not begun. A store that prepares in
   memory is asked for it, and given it back, on the caller's thread: behind no write, and waking nobody.
2. Whether a call that did not answer took effect is not known. `SealedTier` asks for the deletion of what may have come
   of it; a load that answers late is over at once.
3. Whatever a store raises is a failure of its own, and reaches its caller as `StoreError`.
4. After `failures` in a row the store is not asked for `pause_seconds`, then once; each further failure doubles the
   pause, up to 64 times.
"""

from __future__ import annotations

import concurrent.futures
from collections.abc import Callable, Iterable
from functools import partial
from typing import TypeVar

from kvcustody.clock import Clock
from kvcustody.errors import StoreError
from kvcustody.governance.tiers.stores.store_protocol import Deleted, Listed, TierStore
from kvcustody.logger import get_logger

_log = get_logger(__name__)
_DOUBLINGS = 6
_PAGE_REQUESTS = 20
Answer = TypeVar("Answer")


class GuardedStore:
    """`store` behind a deadline of `seconds` and a breaker."""

    def __init__(
        self, store: TierStore, *, seconds: float, clock: Clock, failures: int = 3, pause_seconds: float = 1.0
    ) -> None:
        self.kind, self.ends_by, self.outlives = store.kind, store.ends_by, store.outlives
        self.is_shared, self.in_flight = store.is_shared, store.in_flight
        self.capacity_bytes = store.capacity_bytes
        self.late = self.refused = 0  # calls that did not answer in time, and that were not made
        self._store = store
        self.prepares_in_memory = store.prepares_in_memory
        self._ready: bytes | None = None  # to be completed, when memory for the next was had
        self._seconds = seconds
        self._clock = clock
        self._failures = failures
        self._pause_us = int(pause_seconds * 1_000_000)
        self._in_a_row = 0
        self._closed_until_us = 0
        self._late: set[concurrent.futures.Future[object]] = set()  # nobody waits for these any more
        self._storing: dict[bytes, concurrent.futures.Future[bool]] = {}
        self._loading: dict[bytes, concurrent.futures.Future[memoryview | None]] = {}
        self._thread = concurrent.futures.ThreadPoolExecutor(
            store.in_flight, thread_name_prefix=f"kvcustody-{store.kind}"
        )

    @property
    def used_bytes(self) -> int:
        """By the store's own books."""
        return self._store.used_bytes

    @property
    def is_open(self) -> bool:
        """Whether the breaker lets calls through now."""
        return self._answers and self._clock.now_us() >= self._closed_until_us

    @property
    def _answers(self) -> bool:
        if self._late:
            self._late = {late for late in self._late if not late.done()}
        return len(self._late) < self.in_flight

    def taken(self, size: int) -> int:
        """As the store's."""
        return self._store.taken(size)

    def prepare_store(self, name: bytes, size: int, until_us: int = 0) -> memoryview | None:
        """As the store's."""
        if self.prepares_in_memory and self.is_open:
            return self._store.prepare_store(name, size, until_us)
        try:
            return self._ask(
                lambda: self._store.prepare_store(name, size, until_us),
                undo=lambda: self._store.abandon_store(name),
            )
        finally:
            self._start()

    def start_store(self, name: bytes) -> None:
        """Have the thread complete the store, at once or after the next prepare."""
        self._start()
        self._ready = name
        if self.prepares_in_memory:
            self._start()

    def _start(self) -> None:
        name, self._ready = self._ready, None
        if name is not None and self.is_open:
            self._storing[name] = self._thread.submit(self._store.complete_store, name)

    def complete_store(self, name: bytes) -> bool:
        """Complete as the store does, or return the result of a started one."""
        self._ready = None if self._ready == name else self._ready
        return self._ask(lambda: self._store.complete_store(name), started=self._storing.pop(name, None))

    def abandon_store(self, name: bytes) -> None:
        """As the store's."""
        self._ready = None if self._ready == name else self._ready
        started = self._storing.pop(name, None)
        if started is not None:
            started.cancel()
        if self.prepares_in_memory:
            self._store.abandon_store(name)
            return
        self._ask(lambda: self._store.abandon_store(name))

    def start_load(self, name: bytes) -> None:
        """Have the thread read from now on."""
        if self.is_open and name not in self._loading:
            self._loading[name] = self._thread.submit(self._store.prepare_load, name)

    def abandon_load(self, name: bytes) -> None:
        """Have the thread release what it read, after everything else it was asked."""
        started = self._loading.pop(name, None)
        if started is None or started.cancel():
            return
        let_go = partial(_undone, lambda: self._store.complete_load(name))
        if self.prepares_in_memory:
            started.add_done_callback(let_go)
        else:
            self._thread.submit(let_go, started)

    def prepare_load(self, name: bytes) -> memoryview | None:
        """Prepare as the store does, or return the result of a started load."""
        return self._ask(
            lambda: self._store.prepare_load(name),
            undo=lambda: self._store.complete_load(name),
            started=self._loading.pop(name, None),
        )

    def complete_load(self, name: bytes) -> None:
        """As the store's; nobody waits for it."""
        if self.prepares_in_memory:
            self._store.complete_load(name)
            return
        self._thread.submit(self._store.complete_load, name)

    def peek(self, name: bytes, size: int) -> bytes | None:
        """As the store's."""
        return self._ask(lambda: self._store.peek(name, size))

    def delete(self, names: Iterable[bytes]) -> Deleted:
        """As the store's."""
        listed = list(names)
        return self._ask(lambda: self._store.delete(listed))

    def page(self, after: bytes, limit: int) -> list[Listed]:
        """As the store's. A store that asks others for it has time for several requests."""
        several = _PAGE_REQUESTS if self.is_shared else 1
        return self._ask(lambda: self._store.page(after, limit), times=several)

    def is_own(self, name: bytes) -> bool:
        """As the store's, which knows it without asking."""
        return self._store.is_own(name)

    def left_by(self, name: bytes) -> bytes:
        """As the store's, which knows it without asking."""
        return self._store.left_by(name)

    def inherit(self, died: Callable[[bytes], bool]) -> dict[bytes, bytes]:
        """As the store's. Asked once, at a start, with time for several requests."""
        return self._ask(lambda: self._store.inherit(died), times=_PAGE_REQUESTS)

    def holder(self) -> bytes:
        """As the store's. Asked once, at a start."""
        return self._ask(self._store.holder)

    def write_holder(self, written: bytes, mark: bytes | None = None) -> None:
        """As the store's."""
        self._ask(lambda: self._store.write_holder(written, mark), even_closed=True)

    def close(self) -> None:
        """Close the store; one that does not answer is left until the process ends."""
        try:
            self._ask(self._store.close, even_closed=True)
        except StoreError:
            self._thread.shutdown(wait=False, cancel_futures=True)
            return
        self._thread.shutdown()

    def _ask(
        self,
        call: Callable[[], Answer],
        *,
        even_closed: bool = False,
        undo: Callable[[], None] | None = None,
        started: concurrent.futures.Future[Answer] | None = None,
        times: int = 1,
    ) -> Answer:
        """What `call` answers in `times` the time. `undo` follows an answer that nobody waited for, unless it is None.

        `started`: it was asked before.
        """
        if started is None and not (self.is_open or (even_closed and self._answers)):
            self.refused += 1
            raise StoreError(f"{self.kind} tier: is paused: it failed or did not answer")
        asked = self._thread.submit(call) if started is None else started
        try:
            answer = asked.result(
                times * self._seconds if self._answers else 0.0
            )  # behind those that are late nobody waits
        except concurrent.futures.TimeoutError:
            self.late += 1
            self._late.add(asked)  # type: ignore[arg-type]  # of whatever it answers
            self._failed()
            if undo is not None:
                asked.add_done_callback(partial(_undone, undo))
            raise StoreError(f"{self.kind} tier: did not answer within `{self._seconds}` s") from None
        except StoreError:
            self._failed()
            raise
        except Exception as error:  # of a library that could not read an answer
            self._failed()
            _log.exception("a store raised what nobody expects", tier=self.kind)
            raise StoreError(f"{self.kind} tier: failed ({type(error).__name__})") from None
        self._in_a_row = 0
        return answer

    def _failed(self) -> None:
        self._in_a_row += 1
        over = self._in_a_row - self._failures
        if over >= 0:
            self._closed_until_us = self._clock.now_us() + (self._pause_us << min(over, _DOUBLINGS))


def _undone(undo: Callable[[], None], asked: concurrent.futures.Future[Answer]) -> None:
    if not asked.cancelled() and asked.exception() is None and asked.result() is not None:
        undo()
