"""Runs a labelled workload through the Governor as an engine would: admit, prefill, decode, release, step.

1. Requests overlap according to their times. Each decodes one token a tick until its answer is complete.
2. `step` runs at least every `TICK_US` of the replay's clock, idle or not, as an engine's timer would.
3. Whatever ends a replay (its end, a bad trace line, Ctrl-C), every running request is released and every block is
   scrubbed. Only then are the figures read.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Iterable
from typing import TYPE_CHECKING, NamedTuple

import numpy as np
from numpy.typing import NDArray

from kvcustody.governance.admission_outcome import Admission, AdmissionRefused
from kvcustody.governance.governor.governor import Governor
from kvcustody.governance.identity.model_identity import ModelIdentity
from kvcustody.lab.replay.options import RunnerOptions
from kvcustody.lab.replay.report import Sample, TenantResult
from kvcustody.lab.replay.run.virtual_clock import RunnerClock
from kvcustody.lab.replay.traces.model import Key, TraceRequest
from kvcustody.lab.replay.traces.seeded_draws import draw
from kvcustody.lab.replay.traces.token_ids import expand
from kvcustody.lab.replay.workload.labels import Label
from kvcustody.lab.replay.workload.model import Job, Workload
from kvcustody.lab.replay.workload.tenant_assignment import LabelledPrincipals

if TYPE_CHECKING:
    from kvcustody.lab.replay.run.marked_tensors import PatternCache

TICK_US = 50_000
DECODE_US = 20_000
RETRY_US = 500_000
RETRIES_MAX = 40
STALLS_MAX = 50


def duration_us(workload: Workload) -> int:
    """Return the longest time that a replay can skip: up to its last request plus the longest answer."""
    return workload.span_us + workload.longest_answer * DECODE_US + RETRIES_MAX * RETRY_US


class _Waiting(NamedTuple):
    number: int
    due_us: int
    request: TraceRequest
    label: Label
    tries: int
    was_preempted: bool = False  # it began once, was counted then, and is computed again


class _Running:
    """An admitted request that decodes."""

    __slots__ = ("id", "inputs", "outputs", "produced", "slot", "stalls", "stop", "tenant", "waiting")

    def __init__(
        self,
        admission: Admission,
        waiting: _Waiting,
        inputs: NDArray[np.int32],
        outputs: NDArray[np.int32],
        stop: int,
    ) -> None:
        self.id = admission.request_id
        self.slot = admission.slot
        self.waiting = waiting
        self.tenant = waiting.label.tenant
        self.stalls = 0
        self.inputs = inputs
        self.outputs = outputs
        self.stop = stop  # tokens after which the client is gone; -1 where it stays
        self.produced = 0


class Runner:
    """One replay over one Governor."""

    def __init__(
        self,
        governor: Governor,
        cache: PatternCache,
        clock: RunnerClock,
        model: ModelIdentity,
        population: LabelledPrincipals,
        *,
        options: RunnerOptions,
    ) -> None:
        self._governor = governor
        self._cache = cache
        self._clock = clock
        self._model = model
        self._population = population
        self._options = options
        self._running: list[_Running] = []
        self._waiting: list[_Waiting] = []
        self._sessions: set[Key] = set()
        self.lineages: Counter[tuple[str, Key]] = Counter()
        self._number = 0
        self._decode_us = 0
        self._next_sample_us = 0
        self._sample_every_us = 1
        self.results: list[TenantResult] = []
        self._by_name: dict[str, TenantResult] = {}
        self._add_tenants()
        self.samples: list[Sample] = []

    def run(
        self,
        jobs: Iterable[Job],
        span_us: int,
        origin_us: int = 0,
        progress: Callable[[], None] = lambda: None,
    ) -> None:
        """Replay `jobs`, in time order, then let the last answers finish. `span_us` spaces the samples, and
        the replay starts where the trace's clock reads `origin_us`.
        """
        begin_us = self._clock.now_us()
        self._sample_every_us = max(1, span_us // self._options.samples)
        self._next_sample_us = begin_us
        for request, label in jobs:
            self._add_tenants()
            self._advance(begin_us + request.at_us - origin_us)
            self._number += 1
            self._offer(_Waiting(self._number, 0, request, label, 0))
            progress()
        while self._running or self._waiting:
            self._advance(self._clock.now_us() + TICK_US)
        self._sample()

    def _add_tenants(self) -> None:
        """Give each tenant that the population has more than before a row of results."""
        for name in self._population.names[len(self.results) :]:
            row = self._by_name[name] = TenantResult(name)
            self.results.append(row)

    # -- time ------------------------------------------------------------------------------------------------

    def _advance(self, until_us: int) -> None:
        """Decode, retry and step until the clock reads `until_us`."""
        while self._clock.now_us() < until_us:
            before_us = self._clock.now_us()
            self._clock.skip_to(min(before_us + TICK_US, until_us))
            self._decode(self._clock.now_us() - before_us)
            self._governor.step()
            self._drop()
            now_us = self._clock.now_us()
            if self._waiting:
                due = [waiting for waiting in self._waiting if waiting.due_us <= now_us]
                self._waiting = [waiting for waiting in self._waiting if waiting.due_us > now_us]
                for waiting in due:
                    self._offer(waiting)
            if now_us >= self._next_sample_us:
                self._sample()

    def _drop(self) -> None:
        """Forget requests that the Governor ended itself: too long ACTIVE, or erased."""
        left = self._governor.running
        if len(left) != len(self._running):
            self._running = [run for run in self._running if run.id in left]

    # -- one request -----------------------------------------------------------------------------------------

    def _offer(self, waiting: _Waiting) -> None:
        request, label = waiting.request, waiting.label
        result = self.results[label.tenant]
        inputs, outputs = self._tokens(waiting.number, request)
        result.requests += waiting.tries == 0
        outcome = self._governor.admit(
            self._population.principal(label),
            self._model,
            inputs,
            request_id=waiting.number,
        )
        if isinstance(outcome, Admission):
            self._admitted(outcome, waiting, inputs, outputs)
        elif isinstance(outcome, AdmissionRefused):
            result.refused += 1
        elif waiting.tries < RETRIES_MAX:
            due_us = self._clock.now_us() + RETRY_US
            self._waiting.append(waiting._replace(due_us=due_us, tries=waiting.tries + 1))
        else:
            result.deferred += 1

    def _admitted(
        self,
        admission: Admission,
        waiting: _Waiting,
        inputs: NDArray[np.int32],
        outputs: NDArray[np.int32],
    ) -> None:
        label, hit = waiting.label, admission.hit_tokens
        if not waiting.was_preempted:  # else it was counted, and finds its own work again
            self._count(self.results[label.tenant], label, len(inputs), hit)
            if hit:
                self.lineages[self.results[label.tenant].tenant, waiting.request.lineage] += hit
        size = self._governor.block_tokens
        if draw(self._options.seed, "checked", waiting.number) < self._options.checked_share:
            self._cache.check_handed_out(admission.blocks[hit // size :])
            self._cache.check_found(admission.blocks, inputs[:hit], self._population.readable(label.tenant))
        self._cache.write(admission.blocks, inputs[hit:], hit, label.tenant)
        self._governor.commit((admission.request_id,), (len(inputs),))
        stop = -1
        if draw(self._options.seed, "abort", waiting.number) < self._options.abort_share:
            stop = len(outputs) // 2
        self._running.append(_Running(admission, waiting, inputs, outputs, stop))

    def _count(self, result: TenantResult, label: Label, tokens: int, hit: int) -> None:
        result.input_tokens += tokens
        result.hit_tokens += hit
        result.hit_requests += hit > 0
        if label.session not in self._sessions:
            self._sessions.add(label.session)
            result.first_requests += 1
            result.first_request_hits += hit > 0
            result.first_request_hit_tokens += hit

    def _tokens(self, number: int, request: TraceRequest) -> tuple[NDArray[np.int32], NDArray[np.int32]]:
        """Return the tokens of prompt and answer. Where the chain covers the answer, the next turn repeats it
        exactly.
        """
        size = self._governor.block_tokens
        total = request.input_tokens + request.output_tokens
        blocks = request.blocks[: total // size]
        tail = total - len(blocks) * size
        text = expand(blocks, size, tail_tokens=tail, tail_key=number)
        return text[: request.input_tokens], text[request.input_tokens :]

    # -- decoding --------------------------------------------------------------------------------------------

    def _decode(self, elapsed_us: int) -> None:
        """Decode every running request for `elapsed_us`; finished requests leave."""
        self._decode_us += elapsed_us
        while self._decode_us >= DECODE_US:
            self._decode_us -= DECODE_US
            if not self._running:
                self._decode_us = 0
                return
            self._decode_once()

    def _decode_once(self) -> None:
        going: list[_Running] = []
        for run in self._running:
            if run.produced == run.stop:
                self._finish(run, aborted=True)
            elif run.produced == len(run.outputs):
                self._finish(run, aborted=False)
            else:
                going.append(run)
        self._running = going
        if not going:
            return
        slots = np.array([run.slot for run in going], dtype=np.int64)
        tokens = np.array([run.outputs[run.produced] for run in going], dtype=np.int32)
        stalled = set(self._governor.extend_slots(slots, tokens))
        for run in going:
            if run.id not in stalled:
                run.produced += 1
            else:
                run.stalls += 1
        if stalled:
            for run in [run for run in going if run.stalls > STALLS_MAX]:
                self._preempt(run)

    def _preempt(self, run: _Running) -> None:
        """Preempt a request that gets no room: it releases its blocks and is offered again, to be recomputed."""
        self._running.remove(run)
        self._governor.preempt(run.id)
        self.results[run.tenant].preempted += 1
        if run.waiting.tries >= RETRIES_MAX:
            self.results[run.tenant].deferred += 1
            return
        self._waiting.append(
            run.waiting._replace(
                due_us=self._clock.now_us() + RETRY_US, tries=run.waiting.tries + 1, was_preempted=True
            )
        )

    def _finish(self, run: _Running, *, aborted: bool) -> None:
        """Write the answer's K/V (except for the last sampled token, which has none yet) and release the request."""
        if run.produced:
            table = self._governor.blocks(run.id)
            self._cache.write(table, run.outputs[: run.produced - 1], len(run.inputs), run.tenant)
        self.results[run.tenant].output_tokens += run.produced
        if aborted:
            self._governor.abort(run.id)
        else:
            self._governor.release(run.id)

    # -- observation -----------------------------------------------------------------------------------------

    def _sample(self) -> None:
        stats = self._governor.stats()
        now_us = self._clock.now_us()
        self._next_sample_us = now_us + self._sample_every_us
        by_state = [sum(pool.by_state[name] for pool in stats.pools) for name in _STATES]
        active, cached, *leaving = by_state
        for name, thrashes in stats.thrashing.items():
            self._by_name[name].thrashing_samples += thrashes
        for name, room in stats.room.items():
            if name in self._by_name:
                self._by_name[name].room_blocks = room
        self.samples.append(
            Sample(
                now_us,
                active,
                cached,
                sum(leaving),
                sum(row.hit_tokens for row in self.results),
                sum(row.input_tokens for row in self.results),
                sum(pool.active_tokens or 0 for pool in stats.pools),
                sum(pool.active_slots or 0 for pool in stats.pools),
            )
        )


_STATES = ("active", "cached", "fenced", "dirty", "quarantined")
