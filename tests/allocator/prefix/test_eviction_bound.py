"""The eviction benchmark's own parts: its simulator is the product under LRU, and nothing exceeds its bounds."""

from __future__ import annotations

import json
import subprocess
import sys
from functools import cache
from itertools import product as choices
from pathlib import Path

import numpy as np
import pytest

sys.path.insert(0, str(Path(__file__).resolve().parents[3] / "benchmarks" / "eviction_sim"))

from bound import seconds_bound
from prefill import block_seconds
from product import replay
from published import PUBLISHED
from simulator import LeafHeap, guesses_next_use, knows_dead, lru, offline_optimum, simulate
from streams import Stream, make_stream
from workloads import workloads

from kvcustody.allocator.prefix.block_priority import END, BlockPriority
from kvcustody.allocator.prefix.eviction_policy import POLICIES, Lru, Priority
from kvcustody.lab.replay.traces.model import TraceRequest

BENCHMARKS = Path(__file__).resolve().parents[3] / "benchmarks"


def stream_of(chains: list[list[int]], seconds: float = 1.0) -> Stream:
    """Requests at equal distances; a block is told from others by all that stand before it."""
    ids: dict[tuple[int, ...], int] = {}
    requests = []
    for number, chain in enumerate(chains):
        blocks = [ids.setdefault(tuple(chain[: at + 1]), len(ids)) for at in range(len(chain))]
        at_us = int(number * seconds * 1_000_000)
        requests.append(
            TraceRequest(at_us, 16 * len(chain), 1, np.array(blocks, dtype=np.int64), number, number, number, 0)
        )
    return make_stream("test", requests, 16, [0] * len(requests))


def random_stream(seed: int, requests: int, longest: int, branching: int) -> Stream:
    """Chains over a small alphabet, so that they meet, part and come back."""
    random = np.random.default_rng(seed)
    chains = [random.integers(0, branching, int(random.integers(1, longest + 1))).tolist() for _ in range(requests)]
    return stream_of(chains)


def best_by_trying(stream: Stream, capacity: int) -> int:
    """Return the most blocks that any choice of leaves can find, by trying every subset closed towards the root."""
    chains = [tuple(chain.tolist()) for chain in stream.chains]
    parents = {block: before for chain in chains for before, block in zip((None, *chain), chain, strict=False)}

    def closed_subsets(blocks: frozenset[int], size: int) -> set[frozenset[int]]:
        subsets = set()
        listed = sorted(blocks)
        for picks in choices((False, True), repeat=len(listed)):
            kept = frozenset(b for b, keep in zip(listed, picks, strict=True) if keep)
            if len(kept) <= size and all(parents[b] is None or parents[b] in kept for b in kept):
                subsets.add(kept)
        return subsets

    @cache
    def best(number: int, cached: frozenset[int]) -> int:
        if number == len(chains):
            return 0
        chain = chains[number]
        hit = next((at for at, block in enumerate(chain) if block not in cached), len(chain))
        after = cached | frozenset(chain)
        keeps = closed_subsets(after, len(after))
        room = capacity - (len(chains[number + 1]) if number + 1 < len(chains) else 0)
        coming = frozenset(chains[number + 1]) if number + 1 < len(chains) else frozenset()
        return hit + max(best(number + 1, kept) for kept in keeps if len(kept - coming) <= room)

    return best(0, frozenset())


@pytest.mark.parametrize("seed", range(12))
def test_the_optimum_is_what_trying_every_choice_finds(seed):
    stream = random_stream(seed, requests=7, longest=3, branching=2 + seed % 2)
    capacity = max(stream.longest, 3 + seed % 2)
    assert sum(simulate(stream, capacity, offline_optimum(stream))) == best_by_trying(stream, capacity)


def test_trying_every_choice_sees_what_lru_misses():
    stream = stream_of([[1], [2], [3], [1], [2], [3]])
    assert sum(simulate(stream, 2, LeafHeap(stream, lru))) == 0
    assert best_by_trying(stream, 2) == sum(simulate(stream, 2, offline_optimum(stream))) == 2


@pytest.mark.parametrize("seed", range(6))
@pytest.mark.parametrize("capacity", [7, 12, 30])
def test_the_simulators_lru_is_the_products(seed, capacity):
    stream = random_stream(seed, requests=150, longest=7, branching=3)
    assert simulate(stream, capacity, LeafHeap(stream, lru)) == replay(stream, capacity, Lru)


@pytest.mark.parametrize("seed", range(4))
@pytest.mark.parametrize("capacity", [7, 12, 30])
def test_no_policy_exceeds_the_bounds(seed, capacity):
    stream = random_stream(seed, requests=150, longest=7, branching=3)
    cost = block_seconds(stream)
    hits_by_policy = {name: replay(stream, capacity, policy) for name, policy in POLICIES.items()}
    hits_by_policy |= {name: simulate(stream, capacity, make(stream)) for name, make in PUBLISHED.items()}
    hits_by_policy["dead"] = simulate(stream, capacity, knows_dead(stream))
    hits_by_policy["guess"] = simulate(stream, capacity, guesses_next_use(stream, 2.0))
    best = simulate(stream, capacity, offline_optimum(stream))
    most = max(sum(hits) for hits in hits_by_policy.values())
    seconds = [float(cost[hits].sum()) for hits in (*hits_by_policy.values(), best)]
    assert 0 < most <= sum(best)
    assert max(seconds) <= seconds_bound(stream, capacity, max(seconds)) * (1 + 1e-9)


def test_the_bound_on_seconds_is_met_where_everything_fits():
    stream = random_stream(1, requests=60, longest=5, branching=2)
    capacity = stream.unique_blocks
    saved = float(block_seconds(stream)[simulate(stream, capacity, LeafHeap(stream, lru))].sum())
    assert seconds_bound(stream, capacity, saved) == pytest.approx(saved)


def test_a_guess_that_is_never_off_is_the_optimum():
    stream = random_stream(3, requests=150, longest=7, branching=3)
    exact = sum(simulate(stream, 12, guesses_next_use(stream, 1.0)))
    assert exact == sum(simulate(stream, 12, offline_optimum(stream)))
    assert sum(simulate(stream, 12, guesses_next_use(stream, 100.0))) < exact


def test_generated_workloads_need_no_traces_and_repeat():
    first, second = ([w.make() for w in workloads(None, quick=True)] for _ in range(2))
    assert [s.name for s in first] == ["agents, seed 1", "agents, seed 2", "chat"]
    for one, other in zip(first, second, strict=True):
        assert one.paths == other.paths
        assert one.at_us == other.at_us
        assert sorted(one.at_us) == one.at_us


@pytest.mark.system
def test_the_command_keeps_its_figures_and_rewrites_its_page(tmp_path):
    page = tmp_path / "docs" / "reference" / "measurements" / "eviction.md"
    page.parent.mkdir(parents=True)
    (tmp_path / "docs" / "images").mkdir()
    marks = ("<!-- measured: benchmarks/eviction.py --page -->", "<!-- end of what is measured -->")
    page.write_text(f"before\n\n{marks[0]}\nold\n{marks[1]}\n\nafter\n")
    figures = tmp_path / "eviction.json"
    command = [sys.executable, BENCHMARKS / "eviction.py", "--quick", "--only", "chat"]
    subprocess.run([*command, "--json", figures, "--page", page], check=True, capture_output=True, timeout=300)
    found = json.loads(figures.read_text())
    pools = found["results"]["chat"]["pools"]
    assert len(pools) == 4
    for pool in pools:
        rows = pool["policies"]
        assert all(row["blocks"] <= rows["offline optimum"]["blocks"] for row in rows.values())
        assert all(row["seconds"] <= pool["seconds_bound"] * (1 + 1e-9) for row in rows.values())
        assert all(0 < row["jain"] <= 1 and row["tenant_min"] <= row["tenant_median"] for row in rows.values())
    text = page.read_text()
    assert text.startswith("before") and text.endswith("after\n") and "old" not in text
    assert f"{pools[0]['policies']['lru']['hit_share']:.3f}" in text
    assert (tmp_path / "docs" / "images" / "eviction-chat.svg").read_text().startswith("<svg")


def test_agents_declare_what_they_send_and_the_pool_is_told() -> None:
    """What a failed call gave is in one request alone, other ends come again; declaring it changes what is found."""
    stream = next(iter(workloads(None, quick=True))).make()
    uses = np.bincount(np.concatenate(stream.chains))
    ends = {True: [], False: []}
    for chain, at in zip(stream.chains, stream.failed_from, strict=True):
        ends[at is not None].append(int(uses[chain[-1]]))
        assert at is None or (uses[chain[at:]] == 1).all()
    assert len(ends[True]) > 20 and set(ends[True]) == {1} and np.mean(ends[False]) > 2
    for chain, blocks in zip(stream.chains, stream.system_blocks, strict=True):
        assert 40 <= blocks < len(chain)
    failed = [() if at is None else (BlockPriority(at, END, 0, 0),) for at in stream.failed_from]
    capacity = max(stream.longest + 1, stream.unique_blocks // 10)
    told, control = (sum(replay(stream, capacity, Priority, said)) for said in (failed, ()))
    assert told > control == sum(replay(stream, capacity, Lru))


@pytest.mark.system
def test_the_command_measures_declared_kinds(tmp_path: Path) -> None:
    figures = tmp_path / "kinds.json"
    command = [sys.executable, str(BENCHMARKS / "eviction.py"), "--kinds", "--quick", "--json", str(figures)]
    ran = subprocess.run(command, check=False, capture_output=True, text=True)
    assert ran.returncode == 0, ran.stderr
    found = json.loads(figures.read_text())["results"]
    assert set(found) == {"agents, seed 1", "agents, seed 2"}
    for one in found.values():
        assert one["against_lru"]["priority, nothing"] == [0.0] * len(one["pools"])
        assert any(one["against_lru"]["priority, system prompts"])
