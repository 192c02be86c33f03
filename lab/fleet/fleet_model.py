"""A fleet's model over recorded requests: names from doors, a router that places by them, and workers' caches.

1. Names are the product's own: `RouterNamespaces` over `KnownEpochs`. An erasure ends its subject's blocks at every
   worker and raises its epoch; each door acts by it `door_delay_us` later at the latest.
2. The router is a model of prefix-aware ones (SMG's and vllm-router's `cache_aware`): it remembers which worker it
   last sent each prefix of a name to. It sends a request there if enough of its prompt is known and no worker is
   overloaded; else to the worker with the least to do. A router's own code may stand in its place (`Placing`).
3. A worker keeps `blocks_max` blocks by owner, the least recently used let go. It computes one prompt at a time, as
   `ComputeCost` says; answers of all its requests are decoded beside each other. So the time to the first token is what
   waits before a prompt, and what of it was not found.
4. The oracle finds whatever any worker has computed for this owner and nobody erased, wherever it is.
"""

from __future__ import annotations

import heapq
import random
from collections import OrderedDict
from collections.abc import Container, Hashable, Iterable, Sequence
from dataclasses import replace
from typing import Final, NamedTuple

from kvcustody.governance.edge.erase_epochs import (
    EpochScope,
    EpochTags,
    EraseEpochs,
    KnownEpochs,
    RaisedEpoch,
)
from kvcustody.governance.edge.router_namespace import NamespaceAge, RouterNamespaces
from kvcustody.governance.keys.locked_buffer import KeyBuffer
from kvcustody.lab.replay.traces.model import TraceRequest
from kvcustody.times import DAY_US, SECOND_US

ISSUER: Final = "simulated"
NOBODY: Final = ""


class ComputeCost(NamedTuple):
    """A worker's compute speed, by default that of a 70B model on one node, rounded."""

    prefill_tokens_per_second: float = 8000.0
    decode_tokens_per_second: float = 50.0


class FleetShape(NamedTuple):
    """The fleet's size. `tenants`: how many share it; 0: without isolation, and the router sees no names."""

    workers: int
    tenants: int
    doors: int = 1
    by_subject: bool = False
    erasures_per_day: int = 0
    blocks_max: int = 20_000
    door_delay_us: int = SECOND_US


class FleetOutcome(NamedTuple):
    """What a simulation found. `imbalance`: the busiest worker's requests over the mean. Times are milliseconds."""

    requests: int
    prompt_tokens: int
    found_tokens: int
    oracle_tokens: int
    erasures: int
    ttft_p50_ms: float
    ttft_p99_ms: float
    imbalance: float

    @property
    def found_share(self) -> float:
        """The share of prompt tokens that were found in a cache."""
        return self.found_tokens / self.prompt_tokens if self.prompt_tokens else 0.0

    @property
    def to_oracle(self) -> float:
        """The found tokens over those that the oracle finds."""
        return self.found_tokens / self.oracle_tokens if self.oracle_tokens else 1.0


class CacheChange(NamedTuple):
    """The blocks of an owner that a worker now has, and those in `gone` that it no longer has."""

    owner: Hashable
    blocks: Sequence[int]
    gone: Sequence[tuple[Hashable, int]]


class Placing:
    """A router: it chooses each request's worker. Requests are numbered from 0 in the order of placement.

    What it takes no notice of it need not have a method for.
    """

    def place(self, name: str, blocks: Sequence[int], loads: Sequence[int]) -> int:
        """Return the chosen worker's number; `loads` counts the running requests of each worker."""
        raise NotImplementedError

    def took(self, worker: int, name: str, change: CacheChange) -> None:
        """Take note of a worker's blocks for a request that carried this name."""

    def first_token(self, number: int) -> None:
        """Take note that a request's prompt is computed."""

    def ended(self, worker: int, number: int) -> None:
        """Take note that a request was answered."""


class PrefixRouter(Placing):
    """The router of rule 2."""

    def __init__(self, *, share_min: float = 0.3, load_gap: int = 32, load_ratio: float = 1.5) -> None:
        self._last: dict[tuple[str, int], int] = {}
        self._share_min, self._load_gap, self._load_ratio = share_min, load_gap, load_ratio

    def place(self, name: str, blocks: Sequence[int], loads: Sequence[int]) -> int:
        """Choose a worker by rule 2."""
        known, least = 0, min(loads)
        while known < len(blocks) and (name, blocks[known]) in self._last:
            known += 1
        overloaded = max(loads) - least > self._load_gap and max(loads) > self._load_ratio * least
        if overloaded or known < self._share_min * len(blocks) or not known:
            worker = loads.index(least)
        else:
            worker = self._last[name, blocks[known - 1]]
        for block in blocks:
            self._last[name, block] = worker
        return worker


class WorkerCache:
    """One worker's blocks by owner, and the time from which it is free (rule 3). Times are UTC microseconds."""

    def __init__(self, blocks_max: int) -> None:
        self._kept: OrderedDict[tuple[Hashable, int], None] = OrderedDict()
        self._blocks_max = blocks_max
        self.free_us = 0.0
        self.requests = 0

    def take(self, owner: Hashable, blocks: Sequence[int]) -> tuple[int, list[tuple[Hashable, int]]]:
        """Store the blocks. Returns how many leading blocks were cached already, and the blocks evicted for the
        others.
        """
        hit_blocks = 0
        while hit_blocks < len(blocks) and (owner, blocks[hit_blocks]) in self._kept:
            hit_blocks += 1
        for block in reversed(blocks):  # the leading ones are used last, so they go last
            self._kept[owner, block] = None
            self._kept.move_to_end((owner, block))
        gone = []
        while len(self._kept) > self._blocks_max:
            gone.append(self._kept.popitem(last=False)[0])
        return hit_blocks, gone

    def drop(self, keys: Iterable[tuple[Hashable, int]]) -> None:
        """Remove these blocks."""
        for key in keys:
            self._kept.pop(key, None)


class _Doors:
    """The names that several doors give (rule 1). All doors share one secret."""

    def __init__(self, shape: FleetShape, seed: int) -> None:
        with KeyBuffer() as secret:
            secret.writable()[:] = random.Random(seed).randbytes(32)  # noqa: S311 - equal seeds give equal runs
            self._namespaces = RouterNamespaces(secret)
        self._tags = EpochTags(bytes(32))
        self._shape = shape
        self._known = [KnownEpochs(EraseEpochs(), self._tags) for _ in range(shape.doors)]
        self._coming: list[tuple[int, int, RaisedEpoch]] = []
        self._chance = random.Random(seed)  # noqa: S311
        self._raised = 0
        self._due_us = [0] * shape.doors  # when each hears of the last one: in order, as a door's feed gives them
        self._names: list[dict[tuple[str, str | None], str]] = [{} for _ in range(shape.doors)]

    def name(self, at_us: int, number: int, tenant: str, subject: str) -> str:
        """Return the name that the request's door gives its requester."""
        while self._coming and self._coming[0][0] <= at_us:
            _, door, raised = heapq.heappop(self._coming)
            more = self._known[door].epochs.extended([raised], version=raised.number, floor=0)
            self._known[door] = KnownEpochs(more, self._tags)
            self._names[door].clear()
        door = number % self._shape.doors
        who = (tenant, subject if self._shape.by_subject else None)
        found = self._names[door].get(who)
        if found is None:
            age = NamespaceAge(self._known[door].of(ISSUER, *who))
            found = self._names[door][who] = self._namespaces.of(ISSUER, *who, None, age)
        return found

    def erased(self, at_us: int, tenant: str, subject: str) -> None:
        """Raise the erased owner's epoch; each door learns of it a little later."""
        self._raised += 1
        scope = EpochScope(ISSUER, tenant, subject)
        raised = RaisedEpoch(self._raised, self._tags.of(scope))
        for door in range(self._shape.doors):
            late = self._chance.randrange(self._shape.door_delay_us + 1)
            self._due_us[door] = due_us = max(self._due_us[door], at_us + late)
            heapq.heappush(self._coming, (due_us, door, raised))


def simulate(
    requests: Sequence[TraceRequest],
    tenants: Sequence[int],
    shape: FleetShape,
    *,
    block_tokens: int,
    cost: ComputeCost | None = None,
    router: Placing | None = None,
    seed: int = 1,
) -> FleetOutcome:
    """Run `requests`, which are in time order and carry their tenants' numbers; the session is the subject."""
    cost = ComputeCost() if cost is None else cost
    router = PrefixRouter() if router is None else router
    doors, caches = _Doors(shape, seed), [WorkerCache(shape.blocks_max) for _ in range(shape.workers)]
    loads, ahead = [0] * shape.workers, list[tuple[float, bool, int, int]]()  # first tokens, and ends
    computed: set[tuple[Hashable, int]] = set()
    of_subject: dict[str, list[tuple[Hashable, int]]] = {}
    prompt_tokens = found_tokens = oracle_tokens = 0
    waits: list[float] = []
    moments = _moments(requests, shape.erasures_per_day, seed)
    erasures, chance, subjects = 0, random.Random(seed), list[tuple[str, str]]()  # noqa: S311
    for number, (request, tenant_number) in enumerate(zip(requests, tenants, strict=True)):
        at_us = request.at_us
        while moments and subjects and moments[0] <= at_us:
            tenant, subject = chance.choice(subjects)
            keys = of_subject.pop(subject, [])
            computed.difference_update(keys)
            _drop(caches, keys, router)
            doors.erased(moments.pop(0), tenant, subject)
            erasures += 1
        _pass(ahead, at_us, loads, router)
        tenant, subject = f"tenant-{tenant_number}", f"{request.session}"
        blocks = request.blocks.tolist()
        name, owner = NOBODY, NOBODY
        if shape.tenants:
            name = doors.name(at_us, number, tenant, subject)
            owner = f"{tenant}/{subject}" if shape.by_subject else tenant
        worker = router.place(name, blocks, loads)
        cache = caches[worker]
        there, gone = cache.take(owner, blocks)
        router.took(worker, name, CacheChange(owner, blocks, gone))
        hit_tokens = min(there * block_tokens, request.input_tokens)
        oracle = _leading(computed, owner, blocks)
        computed.update((owner, block) for block in blocks)
        if shape.erasures_per_day:
            if request.turn == 0:
                subjects.append((tenant, subject))
            of_subject.setdefault(subject, []).extend((owner, block) for block in blocks)
        begins = max(at_us, cache.free_us)
        cache.free_us = begins + (request.input_tokens - hit_tokens) / cost.prefill_tokens_per_second * 1e6
        cache.requests += 1
        waits.append((cache.free_us - at_us) / 1e3)
        loads[worker] += 1
        decoded = request.output_tokens / cost.decode_tokens_per_second * 1e6
        heapq.heappush(ahead, (cache.free_us, False, worker, number))
        heapq.heappush(ahead, (cache.free_us + decoded, True, worker, number))
        prompt_tokens += request.input_tokens
        found_tokens += hit_tokens
        oracle_tokens += min(oracle * block_tokens, request.input_tokens)
    waits.sort()
    counts = [cache.requests for cache in caches]
    return FleetOutcome(
        len(waits),
        prompt_tokens,
        found_tokens,
        oracle_tokens,
        erasures,
        _at(waits, 0.5),
        _at(waits, 0.99),
        max(counts) / (sum(counts) / len(counts)) if waits else 1.0,
    )


def _pass(ahead: list[tuple[float, bool, int, int]], until_us: float, loads: list[int], router: Placing) -> None:
    """Report the first tokens and ends that happen before a moment."""
    while ahead and ahead[0][0] <= until_us:
        _, is_end, worker, number = heapq.heappop(ahead)
        if is_end:
            loads[worker] -= 1
            router.ended(worker, number)
        else:
            router.first_token(number)


def _drop(caches: Sequence[WorkerCache], keys: Sequence[tuple[Hashable, int]], router: Placing) -> None:
    for worker, cache in enumerate(caches):
        cache.drop(keys)
        router.took(worker, NOBODY, CacheChange(NOBODY, (), keys))


def _leading(computed: Container[tuple[Hashable, int]], owner: Hashable, blocks: Sequence[int]) -> int:
    """Return the number of leading blocks that the oracle finds (rule 4)."""
    found = 0
    while found < len(blocks) and (owner, blocks[found]) in computed:
        found += 1
    return found


def scaled(requests: Sequence[TraceRequest], copies: int) -> list[TraceRequest]:
    """Return the load for a larger fleet: that many copies of the trace at once, each with its own sessions and blocks.

    Copies begin at different moments of the trace, so they do not come in step.
    """
    if copies == 1:
        return [*requests]
    span = requests[-1].at_us - requests[0].at_us + 1
    above = 1 + max(int(one.blocks.max()) for one in requests if len(one.blocks))
    copied = [
        replace(
            one,
            at_us=requests[0].at_us + (one.at_us - requests[0].at_us + copy * span // copies) % span,
            blocks=one.blocks + copy * above,
            session=f"{copy}-{one.session}",
        )
        for copy in range(copies)
        for one in requests
    ]
    return sorted(copied, key=lambda one: one.at_us)


def _moments(requests: Sequence[TraceRequest], per_day: int, seed: int) -> list[int]:
    if not requests:
        return []
    first, span = requests[0].at_us, requests[-1].at_us - requests[0].at_us
    chance = random.Random(seed)  # noqa: S311
    return sorted(first + chance.randrange(span + 1) for _ in range(round(per_day * span / DAY_US)))


def _at(values: Sequence[float], share: float) -> float:
    return values[min(len(values) - 1, int(share * len(values)))] if values else 0.0
