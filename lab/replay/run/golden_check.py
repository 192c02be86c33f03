"""Golden replays: recorded traces run through the Governor, compared with published reference figures.

Golden mode isolates the one question that the figures answer. It has tenant scope, one classification, no deadline and
no quota, and runs one request at a time. Outputs are not cached, the reserve is outside the capacity, and every trace
id is one full block. A hit is min(blocks x block size, prompt). Everything else is the Governor as it always runs.
"""

from __future__ import annotations

import bisect
import os
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, NamedTuple

import orjson

from kvcustody.allocator.pool.memory_protocol import UnbackedMemory
from kvcustody.allocator.pool.options import PoolOptions
from kvcustody.clock import VirtualClock
from kvcustody.errors import ConfigError, IsolationError
from kvcustody.governance.admission_outcome import Admission
from kvcustody.governance.governor.governor import Governor
from kvcustody.governance.governor.pools import Pools
from kvcustody.governance.keys.keyring import Keyring
from kvcustody.governance.ledger_protocol import CountingLedger
from kvcustody.lab.replay.options import read_policy
from kvcustody.lab.replay.run.model_identity import replay_model
from kvcustody.lab.replay.run.throwaway_keys import TemporaryKeys
from kvcustody.lab.replay.traces.model import Key, TraceRequest
from kvcustody.lab.replay.traces.readers import open_trace
from kvcustody.lab.replay.traces.timeline import arrivals_us, stagger
from kvcustody.lab.replay.traces.token_ids import expand
from kvcustody.lab.replay.workload.labels import Label, Labeller, Unit, load_weights
from kvcustody.lab.replay.workload.tenant_assignment import LabelledPrincipals
from kvcustody.policies.document.model import Policy, Scope
from kvcustody.policies.reading.load_policy import load_policy
from kvcustody.policies.table.compile import compile_policy

TENANTS = (8, 32, 128)
SEEDS = (1, 2, 3)
UNITS: tuple[Unit, ...] = ("session", "lineage")
LRU_TOLERANCE = 0.002

Progress = Callable[[str, int], Callable[[], None]]
"""Called with a name and a number of steps; what it returns is called after each step."""


def no_progress(name: str, steps: int) -> Callable[[], None]:
    """Report no progress."""
    return lambda: None


POLICY = """\
schema: kvcustody/policy@1
name: golden
description: nothing but tenant isolation, for comparison with reference replays
profile: shared
scope: tenant
classifications: [data]
classify:
  - {tenant: "*", as: data}
tenants:
  default: {quota: {guaranteed: 0%, cap: 100%, borrow: true}}
rules:
  - {id: own-scope, effect: permit, action: reuse, when: {reader: owner}}
retention:
  data: {idle: 3650d, absolute: 3650d, active_max: 3650d}
scrub:
  default: {within: 3650d, verify: none}
offload:
  data: never
audit:
  on_outage: {decisions: deny, lifecycle: spill, own_hits: aggregate}
eviction: {policy: lru}
"""


@dataclass(frozen=True, slots=True)
class GoldenTrace:
    """One recorded trace that has reference figures."""

    name: str
    file: str
    format: str

    def requests(self, folder: Path) -> list[TraceRequest]:
        """Return the requests on one time line; sessions of the agentic trace start at drawn arrivals, and 24 hours are
        kept.
        """
        trace = open_trace(folder / self.file, self.format)
        if not trace.relative_sessions:
            return list(trace)
        return stagger(trace, arrivals_us(folder / "AzureLLMInferenceTrace2023_conv.csv.gz"))


TRACES = (
    GoldenTrace("mooncake_conv_dev40", "mooncake_conv_dev40.jsonl.gz", "mooncake"),
    GoldenTrace("agentic_v6_dev", "agentic_v6_dev.jsonl.gz", "agentic"),
)


class Row(NamedTuple):
    """A reference figure and the Governor's. `tolerance` 0 means equality in the printed digits."""

    trace: str
    figure: str
    expected: float | None
    measured: float
    digits: int
    tolerance: float = 0.0

    @property
    def agrees(self) -> bool:
        """Whether the two are equal in the reference's digits, or within the tolerance."""
        if self.expected is None:
            return True
        measured = round(self.measured, self.digits)
        return abs(measured - self.expected) <= max(self.tolerance, 10.0 ** -(self.digits + 3))


def find_traces() -> Path | None:
    """Return the folder of recorded traces: `KVCUSTODY_TRACES`, or `shared/traces` next to the repository."""
    named = os.environ.get("KVCUSTODY_TRACES")
    if named:
        return Path(named)
    beside = Path(__file__).resolve().parents[4] / "shared" / "traces"
    return beside if (beside / "golden_metrics.json").exists() else None


def load_expected(folder: Path) -> dict[str, Any]:
    """Read the reference figures.

    Raises:
        ConfigError: they cannot be read.
    """
    path = folder / "golden_metrics.json"
    try:
        document: dict[str, Any] = orjson.loads(path.read_bytes())
    except (OSError, orjson.JSONDecodeError) as error:
        raise ConfigError(f"cannot read reference figures `{path}`: {error}", path=str(path)) from None
    return document


def golden_rows(
    folder: Path,
    trace: GoldenTrace,
    *,
    units: Sequence[Unit] = UNITS,
    tenants: Sequence[int] = TENANTS,
    lru: bool = True,
    beside: str | None = None,
    progress: Progress = no_progress,
) -> Iterator[Row]:
    """Yield every reference figure of one trace with the Governor's figure; `beside` is a second policy to replay."""
    expected = load_expected(folder)[trace.name]
    requests = trace.requests(folder)
    size, total = expected["block_size"], sum(request.input_tokens for request in requests)
    replay = Replay(requests, size, progress)
    yield Row(trace.name, "requests", expected["requests"], len(requests), 0)
    yield Row(trace.name, "prompt tokens", expected["input_tokens"], total, 0)
    base = replay.hits("infinite capacity")
    yield Row(trace.name, "hit, infinite capacity", expected["inf_hit"], base / total, 6)
    for capacity, figure in expected["lru"].items() if lru else ():
        hits = replay.hits(f"LRU {capacity}", capacity_blocks=int(capacity))
        yield Row(trace.name, f"hit, LRU of {int(capacity):,} blocks", figure, hits / total, 6, LRU_TOLERANCE)
    weights = load_weights(folder / "servegen_client_skew.json")
    for unit in units:
        for count in tenants:
            lost = 0.0
            for seed in SEEDS:
                labeller = Labeller(weights, tenants=count, seed=seed, unit=unit)
                labels = [labeller.label(request) for request in requests]
                lost += 1 - replay.hits(f"{unit}, T={count}, seed {seed}", labels=labels) / base
            figure = expected[f"lost_{unit}_T{count}"][0]
            yield Row(trace.name, f"lost to isolation, {unit}, T={count}", figure, lost / len(SEEDS), 5)
    if units:
        labeller = Labeller([1.0], tenants=1, seed=1)
        labels = [labeller.label(request) for request in requests]
        alone = load_policy(POLICY.replace("scope: tenant", "scope: session"), name="golden-session.yaml")
        hits = replay.hits("session scope", labels=labels, policy=alone)
        figure = expected["lost_per_session_isolation"]
        yield Row(trace.name, "lost to isolation by session", figure, 1 - hits / base, 5)
    if beside is not None:
        labeller = Labeller(weights, tenants=32, seed=1)
        labels = [labeller.label(request) for request in requests]
        hits = replay.hits(beside, labels=labels, policy=read_policy(beside))
        yield Row(trace.name, f"hit under {beside}, 32 tenants", None, hits / total, 6)


class Replay:
    """A trace that runs through a fresh Governor for every figure, one request at a time."""

    def __init__(self, requests: Sequence[TraceRequest], block_tokens: int, progress: Progress = no_progress) -> None:
        self.requests = requests
        self.block_tokens = block_tokens
        self._progress = progress
        self._longest = max((len(request.blocks) for request in requests), default=0) + 2

    def hits(
        self,
        name: str,
        *,
        capacity_blocks: int | None = None,
        labels: Sequence[Label] | None = None,
        policy: Policy | None = None,
    ) -> int:
        """Return the prompt tokens found in the cache; without a capacity nothing is evicted."""
        policy = policy or load_policy(POLICY, name="golden.yaml")
        labels = labels or [_ANYONE] * len(self.requests)
        capacity = capacity_blocks or self._distinct(labels, policy)
        clock = VirtualClock()
        with TemporaryKeys(clock) as keyring:
            governor = self._governor(capacity, policy, keyring, clock)
            found = self._run(governor, clock, labels, policy, name)
            problems = governor.check()
            if problems:
                raise IsolationError(f"replay `{name}`: {problems[0]}", problems=problems)
            governor.close()
        return found

    def _governor(self, capacity: int, policy: Policy, keyring: Keyring, clock: VirtualClock) -> Governor:
        """Return a pool of `capacity` blocks, with a reserve on top for the longest request."""
        reserve = self._longest
        options = PoolOptions(
            block_tokens=self.block_tokens,
            reserve_low=reserve,
            reserve_high=reserve,
            evict_ahead=1,
            refill_batch=reserve,
        )
        pools = Pools(lambda blocks: UnbackedMemory(blocks, 1, clock=clock), capacity + reserve, options)
        return Governor(pools, compile_policy(policy, revision=1), keyring, CountingLedger(), clock=clock)

    def _run(self, governor: Governor, clock: VirtualClock, labels: Sequence[Label], policy: Policy, name: str) -> int:
        population = LabelledPrincipals(policy, 1 + max(label.tenant for label in labels))
        model = replay_model(self.block_tokens)
        begin_us, hit_tokens = clock.now_us(), 0
        advance = self._progress(name, len(self.requests))
        for request, label in zip(self.requests, labels, strict=True):
            clock.advance(max(0, begin_us + request.at_us - clock.now_us()))
            # one token more than the blocks: a prompt that is found whole still computes its last token
            tokens = expand(request.blocks, self.block_tokens, tail_tokens=1)
            outcome = governor.admit(population.principal(label), model, tokens)
            if isinstance(outcome, Admission):
                hit_tokens += min(outcome.hit_tokens, request.input_tokens)
                governor.commit((outcome.request_id,), (len(tokens),))
                governor.release(outcome.request_id)
            governor.step()
            advance()
        return hit_tokens

    def _distinct(self, labels: Sequence[Label], policy: Policy) -> int:
        """Return the most blocks that the replay can hold: the distinct (owner, block) pairs along the chains."""
        cached: dict[tuple[int, Key], set[int]] = {}
        for request, label in zip(self.requests, labels, strict=True):
            owner = (label.tenant, 0 if policy.scope is Scope.TENANT else label.session)
            seen = cached.setdefault(owner, set())
            chain = request.blocks.tolist()
            known = bisect.bisect_left(chain, True, key=lambda block: block not in seen)
            seen.update(chain[known:])
        return sum(map(len, cached.values()))


_ANYONE = Label(0, "anyone", 0, "data")
