"""A governed pool that serves requests like an engine, without a model: admit, prefill, decode, release.

1. One thread owns the Governor. Others hand requests over and wait for their answers.
2. What a model would compute takes its time by a stated cost: `PREFILL_US` a token that was not found, `DECODE_US` a
   token of the answer. K/V is written into real memory, so what ends is scrubbed for real.
3. Its leaves say `simulated`. Where it is asked to, a step of its device hangs now and then.
"""

from __future__ import annotations

import queue
import threading
import zlib
from collections.abc import Callable, Hashable, Sequence
from concurrent.futures import Future, ThreadPoolExecutor, wait
from contextlib import ExitStack
from typing import Final, NamedTuple

import numpy as np
import torch
from numpy.typing import NDArray

from kvcustody.allocator.prefix.hash_index import IndexChange
from kvcustody.allocator.prefix.node import KEY_BYTES
from kvcustody.audit.kinds import SIMULATED
from kvcustody.clock import MICROSECONDS, SystemClock
from kvcustody.errors import CustodyError
from kvcustody.governance.admission_outcome import Admission, AdmissionRefused
from kvcustody.governance.governor.governor import Governor
from kvcustody.governance.identity.principal import Principal
from kvcustody.governance.request import Hints
from kvcustody.governance.settings import Settings
from kvcustody.governance.worker.worker import MemoryPlan, open_worker
from kvcustody.integrations.events.block_event import (
    REMOVED,
    BlockEvent,
    EventScope,
    split_keys,
    stored,
)
from kvcustody.integrations.events.feed import BlockEventPublisher
from kvcustody.integrations.transformers.batching.kv_events import BatchingBlockEvents, open_events
from kvcustody.lab.replay.run.marked_tensors import PatternCache, ReplayCacheShape
from kvcustody.lab.replay.run.model_identity import replay_model
from kvcustody.lab.replay.traces.token_ids import VOCABULARY
from kvcustody.lab.traffic.device_hangs import DeviceHangs

PREFILL_US: Final = 100
DECODE_US: Final = 20_000
RETRY_US: Final = 250_000
RETRIES_MAX: Final = 20
STALLS_MAX: Final = 50
HANG_SECONDS: Final = 50.0
_TICK_SECONDS = 0.02
_CLOSE_SECONDS = 30.0


class Asked(NamedTuple):
    """One request, as the worker's own door admitted it."""

    principal: Principal
    hints: Hints
    tokens: NDArray[np.int32]
    answer_tokens: int
    trace: str = ""


class ServedRequest(NamedTuple):
    """The outcome of a request: an HTTP status, and the tokens of the prompt, those cached, and those of the answer."""

    status: int
    prompt_tokens: int
    found_tokens: int = 0
    answer_tokens: int = 0
    reason: str = ""


class _Running:
    """One admitted request while it decodes."""

    __slots__ = ("answer", "asked", "begins_us", "found", "id", "produced", "stalls")

    def __init__(self, id_: Hashable, asked: Asked, answer: Future[ServedRequest], found: int, begins_us: int) -> None:
        self.id, self.asked, self.answer, self.found, self.begins_us = id_, asked, answer, found, begins_us
        self.produced = self.stalls = 0

    def served(self, status: int = 200, reason: str = "") -> ServedRequest:
        """Return the outcome up to now."""
        return ServedRequest(status, len(self.asked.tokens), self.found, self.produced, reason)


class _Waiting(NamedTuple):
    asked: Asked
    answer: Future[ServedRequest]
    came_us: int
    due_us: int
    tries: int


class ModellessEngine:
    """A worker on its own thread; `error` is why it ended unexpectedly, None while it runs or after a stop."""

    def __init__(self, settings: Settings, *, blocks: int, hangs_every: float = 0.0) -> None:
        """Prepare the worker. `hangs_every`: seconds between two hangs of its device; 0: never."""
        self._settings, self._blocks = settings, blocks
        self._hangs = DeviceHangs(hangs_every, HANG_SECONDS)
        self._asked: queue.SimpleQueue[_Waiting] = queue.SimpleQueue()
        self._running: list[_Running] = []
        self._due: list[_Waiting] = []
        self._waiting: list[_Waiting] = []
        self._clock = SystemClock()
        self._decoded_us = 0
        self._numbered = 0
        self._events: PromptBlockEvents | None = None
        self._stop = threading.Event()
        self._thread = ThreadPoolExecutor(1, thread_name_prefix="kvcustody-fleet-worker")
        self._served: Future[None] | None = None
        self.error: BaseException | None = None
        self.serving = threading.Event()

    @property
    def block_tokens(self) -> int:
        """The block size of its pool, in tokens."""
        return self._settings.block_tokens

    def start(self, *, when_ended: Callable[[], object] = lambda: None) -> None:
        """Open the worker and serve; `serving` is set once it serves, or has failed. `when_ended` is called on any
        thread.
        """
        self._served = self._thread.submit(self._run)
        self._served.add_done_callback(lambda _: when_ended())

    @property
    def is_running(self) -> bool:
        """Whether the worker runs: False before `start`, and after its end for any reason."""
        return self._served is not None and not self._served.done()

    def stop(self) -> None:
        """End in order: running requests are released, scrubbed and recorded."""
        self._stop.set()
        if self._served is not None:
            wait([self._served], _CLOSE_SECONDS)
        self._thread.shutdown(wait=False)

    def ask(self, asked: Asked) -> Future[ServedRequest]:
        """Hand over a request; any thread."""
        answer: Future[ServedRequest] = Future()
        answer.set_running_or_notify_cancel()  # who asked may go; nobody takes the answer from the engine
        if not self.is_running:
            answer.set_result(ServedRequest(503, len(asked.tokens), reason="the engine has ended"))
            return answer
        now_us = self._clock.now_us()
        self._asked.put(_Waiting(asked, answer, now_us, now_us, 0))
        return answer

    def _run(self) -> None:
        try:
            self._serve()
        except CustodyError as error:
            self.error = error
        except BaseException as error:
            self.error = error
            raise
        finally:
            self.serving.set()
            self._refuse_all()

    def _serve(self) -> None:
        torch.set_num_threads(1)
        size = self.block_tokens
        cache = PatternCache(self._blocks, ReplayCacheShape(block_tokens=size), device="cpu", clock=self._clock)
        plan = MemoryPlan(lambda _: cache.memory, self._blocks, 1, cache.memory.bytes_per_block)
        self._model = replay_model(size)
        with open_worker(self._settings, plan, origin=SIMULATED) as worker, ExitStack() as told:
            self._governor, self._cache = worker.governor, cache
            self._events = open_events(None, worker.governor, worker, self._settings, PromptBlockEvents)
            if self._events is not None:
                told.callback(self._events.close)
            self._decoded_us = self._clock.now_us()
            self.serving.set()
            began_us = self._decoded_us
            while not self._stop.is_set():
                self._take()
                self._decode()
                self._hangs.look((self._clock.now_us() - began_us) / MICROSECONDS, self._governor)
                self._governor.step()
                self._tell()
                self._drop()
            self._hangs.end(self._governor)

    def _take(self) -> None:
        """Offer new requests, and waiting ones that are due."""
        now_us = self._clock.now_us()
        due = [one for one in self._waiting if one.due_us <= now_us]
        self._waiting = [one for one in self._waiting if one.due_us > now_us]
        try:
            due.append(self._asked.get(timeout=_TICK_SECONDS))
            while True:
                due.append(self._asked.get_nowait())
        except queue.Empty:
            pass
        self._due = due
        while self._due:
            self._offer(self._due[0])
            del self._due[0]

    def _offer(self, waiting: _Waiting) -> None:
        governor: Governor = self._governor
        asked, self._numbered = waiting.asked, self._numbered + 1
        try:
            outcome = governor.admit(
                asked.principal, self._model, asked.tokens, hints=asked.hints, trace=asked.trace,
                request_id=self._numbered, asked_us=waiting.came_us,
            )  # fmt: skip
        except CustodyError as error:
            waiting.answer.set_result(ServedRequest(400, len(asked.tokens), reason=error.message))
            return
        if isinstance(outcome, Admission):
            self._admitted(outcome, waiting)
        elif isinstance(outcome, AdmissionRefused):
            waiting.answer.set_result(ServedRequest(400, len(asked.tokens), reason=outcome.reason))
        elif waiting.tries < RETRIES_MAX:
            due_us = self._clock.now_us() + RETRY_US
            self._waiting.append(waiting._replace(due_us=due_us, tries=waiting.tries + 1))
        else:
            waiting.answer.set_result(ServedRequest(503, len(asked.tokens), reason=outcome.reason))

    def _admitted(self, admission: Admission, waiting: _Waiting) -> None:
        tokens, hit = waiting.asked.tokens, admission.hit_tokens
        mark = zlib.crc32(waiting.asked.principal.tenant.encode()) % 1000
        self._cache.check_handed_out(admission.blocks[hit // self.block_tokens :])
        self._cache.write(admission.blocks, tokens[hit:], hit, mark)
        self._tell()
        self._governor.commit((admission.request_id,), (len(tokens),))
        self._tell(tokens)
        begins_us = self._clock.now_us() + PREFILL_US * (len(tokens) - hit)
        self._running.append(_Running(admission.request_id, waiting.asked, waiting.answer, hit, begins_us))

    def _tell(self, prompt: NDArray[np.int32] | None = None) -> None:
        """Publish what was stored and what ended, where a publisher is set; `prompt`: what was just committed."""
        if self._events is None:
            return
        if prompt is None:
            self._events.publish_pending()
        else:
            self._events.publish_prompt(prompt)

    def _decode(self) -> None:
        """Decode one more token for each running request, every `DECODE_US`; finished requests leave."""
        now_us = self._clock.now_us()
        while self._decoded_us + DECODE_US <= now_us:
            self._decoded_us += DECODE_US
            going = [one for one in self._running if one.begins_us <= self._decoded_us]
            for one in [one for one in going if one.produced >= one.asked.answer_tokens]:
                self._end(one, one.served())
                going.remove(one)
            if not going:
                continue
            tokens = [(7919 * one.produced + 13) % VOCABULARY for one in going]
            stalled = set(self._governor.extend_many([one.id for one in going], tokens))
            for one in going:
                one.produced += one.id not in stalled
                one.stalls += one.id in stalled
                if one.stalls > STALLS_MAX:
                    self._end(one, one.served(503, "no room"))

    def _end(self, one: _Running, served: ServedRequest) -> None:
        self._running.remove(one)
        self._governor.release(one.id)
        one.answer.set_result(served)

    def _drop(self) -> None:
        """Answer requests that the Governor ended itself: too long active, or erased."""
        left = self._governor.running
        if len(left) != len(self._running):
            for one in [one for one in self._running if one.id not in left]:
                self._running.remove(one)
                one.answer.set_result(one.served())

    def _refuse_all(self) -> None:
        while not self._asked.empty():
            self._waiting.append(self._asked.get_nowait())
        for waiting in (*self._due, *self._waiting):
            waiting.answer.set_result(ServedRequest(503, 0, reason="the worker ends"))
        for running in self._running:
            running.answer.set_result(running.served(503, "the worker ends"))
        self._due, self._waiting, self._running = [], [], []


# Block events of the engine without a model, with prompts' token ids, for routers that compute their own hashes.
#
# Rules of this section:
# 1. A block filled by a prompt is published with its tokens. A block filled by an answer, and every block behind it,
#    is published without tokens.
# 2. The setting `kv_events_tokens` decides whether token ids leave the process.


class PromptBlockEvents(BatchingBlockEvents):
    """Block events with prompt tokens. Used on the engine's thread; call `publish_prompt` right after a prompt's
    commit.
    """

    def __init__(
        self, governor: Governor, publisher: BlockEventPublisher, close: Callable[[], None] | None = None
    ) -> None:
        super().__init__(governor, publisher, close)
        self._prompt: Sequence[int] | NDArray[np.int32] = ()
        self._numbers: dict[bytes, int] = {}  # of blocks in their chains, by key

    def publish_prompt(self, tokens: NDArray[np.int32]) -> None:
        """Publish what this prompt's commit stored."""
        self._prompt = tokens
        try:
            self.publish_pending()
        finally:
            self._prompt = ()

    def take_pending(self) -> list[BlockEvent]:
        """See `BlockEventFeed`."""
        events = super().take_pending()
        for event in events:
            if event.kind == REMOVED:
                for key in split_keys(event.keys):
                    self._numbers.pop(key, None)
        return events

    def _stored(self, scope: EventScope, change: IndexChange) -> BlockEvent:
        size, keys = self._governor.block_tokens, split_keys(change.keys)
        first = self._numbers.get(change.parent, -1) + 1 if change.parent else 0
        end = (first + len(change.keys) // KEY_BYTES) * size
        is_known = (not change.parent or change.parent in self._numbers) and end <= len(self._prompt)
        if not is_known:
            return super()._stored(scope, change)
        self._numbers.update(zip(keys, range(first, first + len(keys)), strict=True))
        return stored(
            scope,
            change.keys,
            residency=change.residency,
            parent=change.parent,
            block_tokens=size,
            tokens=[int(token) for token in self._prompt[first * size : end]],
        )
