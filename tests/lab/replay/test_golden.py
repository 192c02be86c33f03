"""Recorded traces through the Governor reproduce the reference figures to the digit."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest

from kvcustody.lab.replay.run import golden_check as golden
from kvcustody.lab.replay.run.golden_check import Replay, Row
from kvcustody.lab.replay.traces.model import TraceRequest
from kvcustody.lab.replay.workload.labels import Label
from kvcustody.policies.reading.load_policy import load_policy

pytestmark = pytest.mark.system

MOONCAKE, AGENTIC = golden.TRACES


@pytest.fixture(scope="module")
def traces() -> Path:
    folder = golden.find_traces()
    if folder is None:
        pytest.skip("the recorded traces are not here; KVCUSTODY_TRACES names their folder")
    return folder


def disagreements(rows) -> list[Row]:
    return [row for row in rows if not row.agrees]


@pytest.mark.traces
def test_mooncake_hits_and_session_losses(traces: Path) -> None:
    rows = list(golden.golden_rows(traces, MOONCAKE, units=("session",), tenants=(32,)))
    assert len(rows) == 8
    assert not disagreements(rows)


@pytest.mark.soak  # a minute: the sessions above and the lineages below go the same ways
@pytest.mark.traces
def test_mooncake_lineage_losses(traces: Path) -> None:
    assert not disagreements(golden.golden_rows(traces, MOONCAKE, units=("lineage",), lru=False))


@pytest.mark.traces
def test_agentic_hit(traces: Path) -> None:
    rows = list(golden.golden_rows(traces, AGENTIC, units=(), lru=False))
    assert len(rows) == 3
    assert not disagreements(rows)


@pytest.mark.soak
@pytest.mark.traces
@pytest.mark.parametrize("trace", golden.TRACES, ids=lambda trace: trace.name)
def test_every_reference_figure(traces: Path, trace: golden.GoldenTrace) -> None:
    assert not disagreements(golden.golden_rows(traces, trace))


def dict_model(requests, owners, block_tokens: int, capacity: int | None = None) -> int:
    """Hit tokens by the plainest rule: an ordered set of (owner, block), least recently used out first."""
    kept: dict[tuple[object, int], None] = {}
    hits = 0
    for request, owner in zip(requests, owners, strict=True):
        keys = [(owner, block) for block in request.blocks.tolist()]
        found = next((i for i, key in enumerate(keys) if key not in kept), len(keys))
        hits += min(found * block_tokens, request.input_tokens)
        for key in reversed(keys):
            kept.pop(key, None)
            kept[key] = None
        while capacity is not None and len(kept) > capacity:
            del kept[next(iter(kept))]
    return hits


def random_trace(seed: int, count: int = 150, block_tokens: int = 8) -> list[TraceRequest]:
    """Branching chains: each request keeps a prefix of an earlier one and goes on with new blocks."""
    rng = np.random.default_rng(seed)
    chains = [np.empty(0, dtype=np.int64)]
    requests, fresh = [], 0
    for number in range(count):
        base = chains[rng.integers(len(chains))]
        new = int(rng.integers(1, 9))
        blocks = np.concatenate((base[: rng.integers(0, len(base) + 1)], np.arange(fresh, fresh + new)))
        fresh += new
        chains.append(blocks)
        tokens = len(blocks) * block_tokens - int(rng.integers(0, block_tokens))
        requests.append(TraceRequest(number * 1000, tokens, 1, blocks, int(rng.integers(6)), 0, 0, 0))
    return requests


@pytest.mark.parametrize("seed", range(4))
def test_the_governor_agrees_with_a_dict(seed: int) -> None:
    requests = random_trace(seed)
    replay = Replay(requests, 8)
    owners = [request.session % 3 for request in requests]
    labels = [Label(owner, "x", 0, "data") for owner in owners]
    assert replay.hits("all") == dict_model(requests, [0] * len(requests), 8)
    assert replay.hits("tenants", labels=labels) == dict_model(requests, owners, 8)
    capacity = 120
    assert replay.hits("lru", capacity_blocks=capacity) == pytest.approx(
        dict_model(requests, [0] * len(requests), 8, capacity), rel=0.02
    )


def test_the_comparison_sees_a_wider_scope_than_the_labels() -> None:
    """Positive control: with the tenant boundary taken away by policy, the loss to isolation is gone."""
    requests = random_trace(9)
    labels = [Label(request.session % 3, "x", 0, "data") for request in requests]
    replay = Replay(requests, 8)
    together = replay.hits("together", labels=[label._replace(tenant=0) for label in labels])
    apart = replay.hits("apart", labels=labels)
    alone = load_policy(golden.POLICY.replace("scope: tenant", "scope: session"), name="p")
    by_session = replay.hits(
        "sessions",
        labels=[label._replace(session=n) for n, label in enumerate(labels)],
        policy=alone,
    )
    assert together == dict_model(requests, [0] * len(requests), 8) > apart > by_session == 0


def test_a_row_agrees_to_the_digits_of_its_reference() -> None:
    row = Row("t", "f", 0.364014, 0.3640144999, 6)
    assert row.agrees and not row._replace(measured=0.3640160).agrees
    assert row._replace(measured=0.3659, tolerance=0.002).agrees
    assert row._replace(expected=None, measured=1.0).agrees


def test_traces_are_found_where_the_variable_says(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    monkeypatch.setenv("KVCUSTODY_TRACES", str(tmp_path))
    assert golden.find_traces() == tmp_path
    with pytest.raises(golden.ConfigError, match="cannot read reference figures"):
        golden.load_expected(tmp_path)
    missing = replace(MOONCAKE, file="absent.gz")
    with pytest.raises(golden.ConfigError, match="cannot read trace"):
        missing.requests(tmp_path)
