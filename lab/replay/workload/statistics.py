"""The statistics of a generated workload, twice: promised in closed form, and counted from the requests.

1. `expected()` is arithmetic over the spec and the drawn lengths of its system prompts, no simulation.
2. `measure()` sees only requests and labels, and a cache of its own: a set of (owner, block).
"""

from __future__ import annotations

import bisect
import math
from collections.abc import Hashable, Sequence
from typing import NamedTuple

import numpy as np

from kvcustody.lab.replay.traces.model import TraceRequest
from kvcustody.lab.replay.workload.generator import (
    GeneratedWorkload,
    Lognormal,
    WorkloadSpec,
    normal_cdf,
    prompt_table,
    tenant_shares,
)


class Statistics(NamedTuple):
    """A workload's statistics; the hit shares assume a cache that keeps everything and never waits."""

    requests: float
    input_tokens_mean: float
    output_tokens_mean: float
    turns_mean: float
    think_seconds_median: float
    tenant_shares: tuple[float, ...]
    hit_share_tenant: float  # every conversation of a tenant shares
    hit_share_conversation: float  # nothing is shared between conversations


def expected(spec: WorkloadSpec) -> Statistics:
    """Return the promised statistics; given the system prompts' lengths, all others are expectations."""
    shares, prompts, n = tenant_shares(spec), prompt_table(spec), _turn_moments(spec)
    picked = shares[:, None] * prompts.share[None, :]
    system = float((picked * prompts.tokens).sum())
    user, answer = _floor_mean(spec.user), _floor_mean(spec.answer)
    branches = spec.conversations * spec.branch_share
    depth = (n.mean + 1) / 2  # a branch leaves after a turn chosen uniformly from 1..n
    pairs = (n.square - n.mean) / 2  # E[0 + 1 + ... + (n - 1)]
    requests = (spec.conversations + branches) * n.mean
    inputs = spec.conversations * (n.mean * (system + user) + pairs * (user + answer))
    inputs += branches * (n.mean * (system + depth * (user + answer) + user) + pairs * (user + answer))
    tail = (spec.block_tokens - 1) / 2 + 1  # the last sampled token has no KV; its block is not whole
    later = spec.conversations * ((n.mean - 1) * (system - tail) + pairs * (user + answer))
    later += branches * ((n.mean - 1) * (system + depth * (user + answer) - tail) + pairs * (user + answer))
    entry = branches * (system + depth * (user + answer) - tail)  # the first request of a branch
    whole = prompts.tokens // spec.block_tokens * spec.block_tokens
    used = 1 - (1 - picked) ** spec.conversations  # the first use of each prompt in a tenant hits nothing
    opening = float((spec.conversations * picked * whole - used * whole).sum())
    return Statistics(
        requests,
        inputs / requests,
        answer,
        n.mean,
        spec.think_seconds.median,
        tuple(shares.tolist()),
        (later + entry + opening) / inputs,
        later / inputs,
    )


def measure(workload: GeneratedWorkload) -> Statistics:
    """Count a generated workload's hits in an unbounded cache, shared within a tenant and not shared at all."""
    requests, labels, spec = workload.requests, workload.labels, workload.spec
    inputs = sum(r.input_tokens for r in requests)
    conversations = len({request.session for request in requests})
    # one count a conversation, not a branch: the skew is over conversations
    per_tenant = np.bincount(
        [label.tenant for r, label in zip(requests, labels, strict=True) if r.turn == 0],
        minlength=spec.tenants,
    )
    return Statistics(
        len(requests),
        inputs / len(requests),
        sum(r.output_tokens for r in requests) / len(requests),
        len(requests) / conversations,
        float(np.median(workload.think_seconds)),
        tuple((per_tenant / per_tenant.sum()).tolist()),
        _hits(requests, [label.tenant for label in labels], spec.block_tokens) / inputs,
        _hits(requests, [r.session for r in requests], spec.block_tokens) / inputs,
    )


def _hits(requests: Sequence[TraceRequest], owners: Sequence[Hashable], block_tokens: int) -> int:
    """Return hit tokens with an unbounded cache per owner; outputs are published, all but the last sampled token.

    What is cached is prefix-closed, so the hit ends where a binary search along the chain says.
    """
    cached: dict[Hashable, set[int]] = {}
    hits = 0
    for request, owner in zip(requests, owners, strict=True):
        seen = cached.setdefault(owner, set())
        chain = request.blocks.tolist()
        whole = (request.input_tokens + request.output_tokens - 1) // block_tokens
        known = bisect.bisect_left(chain[:whole], True, key=lambda block: block not in seen)
        hits += block_tokens * min(known, (request.input_tokens - 1) // block_tokens)  # one token is computed
        seen.update(chain[known:whole])
    return hits


class _Moments(NamedTuple):
    mean: float
    square: float


def _turn_moments(spec: WorkloadSpec) -> _Moments:
    turns = np.arange(1, spec.turns_max + 1)
    stop = 1 / spec.turns_mean
    weight = stop * (1 - stop) ** (turns - 1)
    weight[-1] += 1 - weight.sum()  # longer ones are cut
    return _Moments(float((turns * weight).sum()), float((turns**2 * weight).sum()))


def _floor_mean(length: Lognormal) -> float:
    """Return mean of the length in whole tokens: rounding down takes half a token, except where the cut already is
    whole.
    """
    mu = math.log(length.median)
    inside = normal_cdf((math.log(length.high) - mu) / length.sigma) - normal_cdf(
        (math.log(length.low) - mu) / length.sigma
    )
    return length.mean() - 0.5 * inside
