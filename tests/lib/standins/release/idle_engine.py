"""An engine that allocates by itself and sleeps while nothing runs: it steps when it is woken or something is due."""

from __future__ import annotations

import threading
from collections.abc import Sequence
from types import TracebackType

import numpy as np

from kvcustody.allocator.external.scrub_queue import ScrubOrder
from kvcustody.allocator.pool.memory_protocol import UnbackedMemory
from kvcustody.clock import MICROSECONDS, SystemClock
from kvcustody.errors import CustodyError
from kvcustody.governance.external.engine_control import EngineView
from kvcustody.governance.identity.model_identity import ModelIdentity
from kvcustody.governance.identity.principal import identify
from kvcustody.governance.settings import Settings
from kvcustody.governance.worker.engine_worker import EnginePlan, EngineWorker, open_engine_worker

BLOCKS, BLOCK_TOKENS = 64, 16


class IdleEngine:
    """`open` takes one request of `holder` through it, and then it sleeps. `asleep`: nothing wakes it (the control)."""

    def __init__(self, settings: Settings, model: ModelIdentity, *, asleep: bool = False) -> None:
        self._model = model
        self._woken, self._ending = threading.Event(), False
        self._memory = UnbackedMemory(BLOCKS, 1, clock=SystemClock())
        self.worker: EngineWorker = open_engine_worker(
            settings, EnginePlan(BLOCKS, BLOCK_TOKENS, bytes_per_block=1024), self
        )
        self.port = self.worker.port
        if asleep:
            self.port.on_command = lambda: None
        self._serve()
        self._thread = threading.Thread(target=self._run, name="idle-engine")
        self._thread.start()

    def _serve(self) -> None:
        """One request, so that its tenant has keys and a domain here."""
        person = identify(issuer="idp", tenant="holder", verified={"subject": "ada"})
        residency = self.port.admit(person, self._model, [*range(1, 40)], request_id="first", max_tokens=1)
        self._step()
        self.port.release(residency, "finished")  # type: ignore[arg-type]
        while self.port.has_work():
            self._step()

    def _run(self) -> None:
        while True:
            due_us = self.port.next_due_us()
            left_us = None if due_us is None else max(0, due_us - self.port.clock.now_us())
            self._woken.wait(None if left_us is None else left_us / MICROSECONDS)
            self._woken.clear()
            if self._ending:
                return
            while self.port.has_work():
                self._step()

    def _step(self) -> None:
        order = self.port.step()
        if order is not None:
            self.scrub(order)

    def scrub(self, order: ScrubOrder) -> None:
        results = [self._memory.scrub(0, blocks, share) for share, blocks in order.batches]
        self.port.scrubbed(order.number, 0, results, self._memory.scrubbed(0))

    # -- what the port may order ----------------------------------------------------------------------------

    def evict(self, blocks: Sequence[int]) -> None: ...

    def abort(self, request_ids: Sequence[object], cause: str) -> None: ...

    def withhold(self, blocks: Sequence[int]) -> None: ...

    def wake(self) -> None:
        self._woken.set()

    def view(self) -> EngineView:
        none = np.zeros(BLOCKS, dtype=np.int64)
        return EngineView(none, none.astype(np.bool_), frozenset(), 0)

    # -- the end --------------------------------------------------------------------------------------------

    def __enter__(self) -> IdleEngine:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self._ending = True
        self._woken.set()
        self._thread.join(30)
        if self._thread.is_alive():
            raise CustodyError("the idle engine's thread did not end")
        self.worker.close(self.scrub)
