"""Makes a multi-turn, multi-tenant workload from a seed, with statistics known in closed form
(docs/reference/formats/workload.md).

A conversation starts with a system prompt (its tenant's, or the house prompt that every tenant may use), then
turns: the user writes, the model answers, the user thinks. Some conversations branch: a second one goes on
from an earlier turn.

1. The same `WorkloadSpec` gives the same requests on every machine (numpy's PCG64, one stream a quantity).
2. Block ids are prefix-chained: a block cut by the end of a system prompt or by a branch point belongs to what
   follows.
3. `statistics.expected` states what a spec promises and `statistics.measure` counts it; tests compare them.
"""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import NamedTuple

import numpy as np
from numpy.typing import NDArray

from kvcustody.clock import MICROSECONDS
from kvcustody.lab.replay.traces.model import TraceRequest
from kvcustody.lab.replay.traces.seeded_draws import name_digest
from kvcustody.lab.replay.workload.labels import CLASSIFICATION_SHARES, Label, zipf_weights

_STREAM_BITS = 14
_INDEX_LIMIT = 1 << _STREAM_BITS
MAX_STREAMS = 1 << 20

Ints = NDArray[np.int64]
Floats = NDArray[np.float64]


@dataclass(frozen=True, slots=True)
class Lognormal:
    """A lognormal length or time, cut to [low, high]; lengths are rounded down to whole tokens."""

    median: float
    sigma: float
    low: float
    high: float

    def sample(self, rng: np.random.Generator, count: int) -> Floats:
        """Return `count` independent draws, clipped."""
        draws = rng.lognormal(math.log(self.median), self.sigma, count)
        return np.clip(draws, self.low, self.high)

    def mean(self) -> float:
        """Return mean after clipping, in closed form."""
        mu, s = math.log(self.median), self.sigma
        a, b = (math.log(self.low) - mu) / s, (math.log(self.high) - mu) / s
        middle = math.exp(mu + s * s / 2) * (normal_cdf(b - s) - normal_cdf(a - s))
        return self.low * normal_cdf(a) + middle + self.high * (1 - normal_cdf(b))


@dataclass(frozen=True, slots=True)
class WorkloadSpec:
    """Everything that shapes a generated workload."""

    seed: int = 1
    tenants: int = 8
    conversations: int = 500
    block_tokens: int = 16
    span_seconds: float = 3600.0
    zipf_exponent: float = 1.1
    prompts_per_tenant: int = 2
    house_prompt_share: float = 0.25
    subjects_per_tenant: int = 12
    turns_mean: float = 3.0
    turns_max: int = 12
    branch_share: float = 0.15
    system: Lognormal = Lognormal(600, 0.5, 64, 4096)
    user: Lognormal = Lognormal(120, 1.0, 4, 2048)
    answer: Lognormal = Lognormal(150, 0.8, 4, 1024)
    think_seconds: Lognormal = Lognormal(25, 1.0, 1, 3600)
    seconds_per_output_token: float = 0.02
    seconds_to_first_token: float = 0.5


class GeneratedWorkload(NamedTuple):
    """Generated requests in time order, their labels, and the quantities that are not visible in them."""

    spec: WorkloadSpec
    requests: list[TraceRequest]
    labels: list[Label]
    think_seconds: Floats
    house_prompt: Ints


class Prompts(NamedTuple):
    """The system prompts: lengths, and how often a conversation picks each."""

    tokens: Ints  # [tenant, prompt]; the last prompt of every tenant is the house prompt
    share: Floats  # [prompt], how often a conversation picks it


class _Turns(NamedTuple):
    """Turns of all conversations, flat; `first` has one more entry than there are conversations."""

    first: Ints
    user: Ints
    answer: Ints
    think: Floats


def generate(spec: WorkloadSpec) -> GeneratedWorkload:
    """Return all requests of the workload, in time order."""
    tenant = _stream(spec, "tenant").choice(spec.tenants, spec.conversations, p=tenant_shares(spec))
    table = prompt_table(spec)
    prompt = _stream(spec, "prompt").choice(len(table.share), spec.conversations, p=table.share)
    subject = _stream(spec, "subject").integers(0, spec.subjects_per_tenant, spec.conversations)
    level = _stream(spec, "class").choice(len(CLASSIFICATION_SHARES), spec.conversations, p=_class_shares())
    start = np.sort(_stream(spec, "start").uniform(0, spec.span_seconds, spec.conversations))
    parent = _branch_parents(spec)
    turns = _turns(spec, spec.conversations + len(parent), "turns")
    house = len(table.share) - 1
    streams = np.where(prompt == house, 0, 1 + tenant * spec.prompts_per_tenant + prompt)
    content = 1 + spec.tenants * spec.prompts_per_tenant  # the first stream that is not a system prompt
    if content + len(turns.first) > MAX_STREAMS:
        raise ValueError(f"at most {MAX_STREAMS} conversations and prompts, got `{content + len(turns.first)}`")
    system = table.tokens[tenant, prompt]

    labelled: list[tuple[TraceRequest, Label]] = []
    pick = _stream(spec, "branch-turn")
    for number in range(len(turns.first) - 1):
        source = number if number < spec.conversations else int(parent[number - spec.conversations])
        plan = _Plan(
            session=number,
            lineage=source,
            begin_seconds=float(start[source]),
            system_stream=int(streams[source]),
            system_tokens=int(system[source]),
            parent_stream=content + source,
            own_stream=content + number,
        )
        if number >= spec.conversations:
            plan = _branch(spec, turns, plan, pick)
        label = Label(
            int(tenant[source]),
            name_digest(spec.seed, "subject", int(tenant[source]), int(subject[source]), size=6).hex(),
            number,
            CLASSIFICATION_SHARES[int(level[source])][0],
        )
        labelled.extend((request, label) for request in _conversation(spec, turns, plan))
    labelled.sort(key=lambda item: item[0].at_us)
    return GeneratedWorkload(
        spec, [r for r, _ in labelled], [label for _, label in labelled], turns.think, house_prompt(spec)
    )


def house_prompt(spec: WorkloadSpec) -> Ints:
    """Return the blocks of the prompt that every tenant may use."""
    return _chain(0, int(prompt_table(spec).tokens[0, -1]), spec)


class _Plan(NamedTuple):
    """A conversation before its turns: when it starts, and what precedes its own text."""

    session: int
    lineage: int
    begin_seconds: float
    system_stream: int
    system_tokens: int
    parent_stream: int  # its own, unless it is a branch
    own_stream: int
    shared_tokens: int = 0  # tokens of history that are the parent's, system prompt included
    depth_turns: int = 0  # turns of the parent before the branch


def _branch(spec: WorkloadSpec, turns: _Turns, plan: _Plan, pick: np.random.Generator) -> _Plan:
    """Choose where a branch starts: after a uniformly chosen turn of its parent, once the user has thought."""
    first, end = int(turns.first[plan.lineage]), int(turns.first[plan.lineage + 1])
    depth = int(pick.integers(1, end - first + 1))
    history = slice(first, first + depth)
    shared = plan.system_tokens + int(turns.user[history].sum() + turns.answer[history].sum())
    begin = plan.begin_seconds + float((_service(spec, turns.answer[history]) + turns.think[history]).sum())
    return plan._replace(shared_tokens=shared, depth_turns=depth, begin_seconds=begin)


def _conversation(spec: WorkloadSpec, turns: _Turns, plan: _Plan) -> list[TraceRequest]:
    """Return the requests of one conversation: each turn sends the whole history and the user's new text."""
    part = slice(int(turns.first[plan.session]), int(turns.first[plan.session + 1]))
    user, answer = turns.user[part], turns.answer[part]
    before = max(plan.shared_tokens, plan.system_tokens)
    inputs = before + np.concatenate(([0], np.cumsum(user + answer)[:-1])) + user
    wait = np.cumsum(_service(spec, answer) + turns.think[part])[:-1]
    at_us = np.rint((plan.begin_seconds + np.concatenate(([0.0], wait))) * MICROSECONDS).astype(np.int64)
    whole = (inputs + answer) // spec.block_tokens
    chain = _blocks(spec, plan, int(whole[-1]))
    return [
        TraceRequest(
            int(at_us[turn]),
            int(inputs[turn]),
            int(answer[turn]),
            chain[: int(whole[turn])],
            plan.session,
            plan.lineage,
            plan.lineage,
            plan.depth_turns + turn,
        )
        for turn in range(len(user))
    ]


def _blocks(spec: WorkloadSpec, plan: _Plan, length: int) -> Ints:
    """Return the chain of `length` blocks: system prompt, the parent's up to the branch, then its own."""
    assert length < _INDEX_LIMIT, f"a conversation of {length} blocks"
    index = np.arange(length, dtype=np.int64)
    stream = np.full(length, plan.own_stream, dtype=np.int64)
    stream[: plan.shared_tokens // spec.block_tokens] = plan.parent_stream
    stream[: plan.system_tokens // spec.block_tokens] = plan.system_stream
    return (stream << _STREAM_BITS) + index


def _service(spec: WorkloadSpec, answer: Ints) -> Floats:
    """Return seconds from a request's arrival to its last token."""
    seconds: Floats = spec.seconds_to_first_token + spec.seconds_per_output_token * answer.astype(np.float64)
    return seconds


def _chain(stream: int, tokens: int, spec: WorkloadSpec) -> Ints:
    return np.arange(tokens // spec.block_tokens, dtype=np.int64) + (stream << _STREAM_BITS)


def _turns(spec: WorkloadSpec, count: int, name: str) -> _Turns:
    each = np.minimum(_stream(spec, name).geometric(1 / spec.turns_mean, count), spec.turns_max)
    first = np.concatenate(([0], np.cumsum(each)))
    total = int(first[-1])
    return _Turns(
        first,
        spec.user.sample(_stream(spec, "user"), total).astype(np.int64),
        spec.answer.sample(_stream(spec, "answer"), total).astype(np.int64),
        spec.think_seconds.sample(_stream(spec, "think"), total),
    )


def prompt_table(spec: WorkloadSpec) -> Prompts:
    """Return the drawn system prompts of every tenant."""
    tokens = spec.system.sample(_stream(spec, "system"), spec.tenants * spec.prompts_per_tenant + 1).astype(np.int64)
    own = tokens[1:].reshape(spec.tenants, spec.prompts_per_tenant)
    table = np.concatenate((own, np.full((spec.tenants, 1), tokens[0])), axis=1)
    each = (1 - spec.house_prompt_share) / spec.prompts_per_tenant
    share = np.array([each] * spec.prompts_per_tenant + [spec.house_prompt_share])
    return Prompts(table, share / share.sum())


def _branch_parents(spec: WorkloadSpec) -> Ints:
    return np.flatnonzero(_stream(spec, "branch").random(spec.conversations) < spec.branch_share)


def tenant_shares(spec: WorkloadSpec) -> Floats:
    """Return share of the conversations by tenant, heaviest first."""
    weights = np.array(zipf_weights(spec.tenants, spec.zipf_exponent))
    return np.asarray(weights / weights.sum(), dtype=np.float64)


def _class_shares() -> list[float]:
    return [share for _, share in CLASSIFICATION_SHARES]


def _stream(spec: WorkloadSpec, name: str) -> np.random.Generator:
    return np.random.Generator(np.random.PCG64(int.from_bytes(name_digest(spec.seed, "workload", name), "big")))


def normal_cdf(x: float) -> float:
    """Return the standard normal distribution function at `x`."""
    return 0.5 * (1 + math.erf(x / math.sqrt(2)))
