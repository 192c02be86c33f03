"""The generated workload keeps what docs/how-to/operate/size-a-pool.md promises, measured from its requests."""

from __future__ import annotations

import math
from dataclasses import replace

import numpy as np
import pytest

from kvcustody.lab.replay.workload.generator import Lognormal, WorkloadSpec, generate
from kvcustody.lab.replay.workload.statistics import expected, measure

LARGE = WorkloadSpec(seed=11, conversations=12_000, tenants=16)


@pytest.fixture(scope="module")
def large():
    return generate(LARGE)


def test_a_seed_is_a_workload() -> None:
    spec = WorkloadSpec(seed=5, conversations=50)
    first, other = generate(spec), generate(spec)
    assert first.labels == other.labels
    assert all(
        a.at_us == b.at_us and a.input_tokens == b.input_tokens and (a.blocks == b.blocks).all()
        for a, b in zip(first.requests, other.requests, strict=True)
    )
    assert generate(replace(spec, seed=6)).labels != first.labels


@pytest.mark.system("a generated workload lacks the statistics that it promises")
@pytest.mark.parametrize(
    "spec",
    [LARGE, WorkloadSpec(seed=2, conversations=12_000, branch_share=0.6, turns_mean=5, house_prompt_share=0)],
)
def test_promised_statistics_are_measured_ones(spec: WorkloadSpec) -> None:
    promised, measured = expected(spec), measure(generate(spec))
    assert measured.requests == pytest.approx(promised.requests, rel=0.03)
    assert measured.input_tokens_mean == pytest.approx(promised.input_tokens_mean, rel=0.03)
    assert measured.output_tokens_mean == pytest.approx(promised.output_tokens_mean, rel=0.02)
    assert measured.turns_mean == pytest.approx(promised.turns_mean, rel=0.02)
    assert measured.think_seconds_median == pytest.approx(promised.think_seconds_median, rel=0.03)
    assert measured.tenant_shares == pytest.approx(promised.tenant_shares, abs=0.012)
    assert measured.hit_share_tenant == pytest.approx(promised.hit_share_tenant, abs=0.005)
    assert measured.hit_share_conversation == pytest.approx(promised.hit_share_conversation, abs=0.008)


def test_think_times_and_answers_are_lognormal(large) -> None:
    def distance(sample: np.ndarray, law: Lognormal) -> float:
        """Kolmogorov-Smirnov distance inside the cut, where the law is not a point mass."""
        inside = np.sort(sample[(sample > law.low) & (sample < law.high)])
        z = (np.log(inside) - math.log(law.median)) / law.sigma
        cdf = 0.5 * (1 + np.vectorize(math.erf)(z / math.sqrt(2)))
        empirical = (np.searchsorted(np.sort(sample), inside, side="right")) / len(sample)
        return float(np.abs(cdf - empirical).max())

    answers = np.array([r.output_tokens for r in large.requests], dtype=float) + 0.5  # whole tokens, rounded down
    assert distance(large.think_seconds, LARGE.think_seconds) < 0.015
    assert distance(answers, LARGE.answer) < 0.015


def test_skew_is_zipf(large) -> None:
    first = [label.tenant for r, label in zip(large.requests, large.labels, strict=True) if r.turn == 0]
    shares = np.bincount(first, minlength=16) / len(first)
    slope = np.polyfit(np.log(np.arange(1, 17)), np.log(shares), 1)[0]
    assert slope == pytest.approx(-LARGE.zipf_exponent, abs=0.08)


def test_requests_come_in_time_order_and_grow_within_a_conversation(large) -> None:
    times = [r.at_us for r in large.requests]
    assert times == sorted(times)
    last: dict[object, object] = {}
    for request in large.requests[:4000]:
        before = last.get(request.session)
        if before is not None:
            assert request.at_us > before.at_us
            assert request.input_tokens > before.input_tokens + before.output_tokens
            assert (request.blocks[: len(before.blocks)] == before.blocks).all()
        last[request.session] = request
        assert len(request.blocks) == (request.input_tokens + request.output_tokens) // LARGE.block_tokens


def test_a_branch_shares_its_parents_prefix_to_the_block(large) -> None:
    turns = {(r.session, r.turn): r for r in large.requests}
    first = {}
    for request in large.requests:
        first.setdefault(request.session, request)
    branches = [r for r in first.values() if r.session != r.lineage]
    assert len(branches) > 1000
    for branch in branches:
        parent = turns[branch.lineage, branch.turn - 1]
        shared = (parent.input_tokens + parent.output_tokens) // LARGE.block_tokens
        assert (branch.blocks[:shared] == parent.blocks[:shared]).all()
        assert not set(branch.blocks[shared:].tolist()) & set(parent.blocks.tolist())
        assert branch.at_us > parent.at_us


def test_tenants_share_only_the_house_prompt(large) -> None:
    owners: dict[int, set[int]] = {}
    for request, label in list(zip(large.requests, large.labels, strict=True))[:6000]:
        for block in request.blocks[:300].tolist():
            owners.setdefault(block, set()).add(label.tenant)
    crossing = {block for block, tenants in owners.items() if len(tenants) > 1}
    assert crossing and crossing <= set(large.house_prompt.tolist())
