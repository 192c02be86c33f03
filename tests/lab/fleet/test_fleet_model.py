"""The modelled fleet against small truths: who finds what, what an oracle finds, what erasures and doors do to it."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path

import numpy as np
import pytest

from kvcustody.lab.fleet.fleet_model import ComputeCost, FleetShape, Placing, PrefixRouter, scaled, simulate
from kvcustody.lab.fleet.fleet_study import FleetWorkload, problems_of, study, write_page
from kvcustody.lab.replay.traces.model import TraceRequest
from kvcustody.lab.replay.workload.generator import WorkloadSpec, generate
from kvcustody.times import DAY_US, SECOND_US

BLOCK = 16


def asked(at_seconds: float, session: str, blocks: Sequence[int], turn: int = 0) -> TraceRequest:
    size = len(blocks) * BLOCK
    ids = np.array(blocks, dtype=np.int64)
    return TraceRequest(round(at_seconds * SECOND_US), size, 10, ids, session, session, 0, turn)


def test_a_tenant_finds_its_own_and_nobody_elses() -> None:
    """Control: where nobody is kept apart, the other tenant finds it."""
    requests = [asked(0, "a", [1, 2, 3]), asked(10, "b", [1, 2, 3]), asked(20, "a", [1, 2, 3], 1)]
    apart = simulate(requests, [0, 1, 0], FleetShape(2, 2), block_tokens=BLOCK)
    alone = simulate(requests, [0, 1, 0], FleetShape(2, 0), block_tokens=BLOCK)
    assert apart.found_tokens == apart.oracle_tokens == 3 * BLOCK
    assert alone.found_tokens == alone.oracle_tokens == 6 * BLOCK
    assert alone.prompt_tokens == apart.prompt_tokens == 9 * BLOCK


def test_a_router_that_forgets_finds_less_than_the_oracle() -> None:
    class InTurns(Placing):
        def __init__(self) -> None:
            self.next = -1

        def place(self, name: str, blocks: Sequence[int], loads: Sequence[int]) -> int:
            self.next = (self.next + 1) % len(loads)
            return self.next

    requests = [asked(second, "a", [1, 2], second) for second in range(4)]
    shape = FleetShape(4, 1)
    assert simulate(requests, [0] * 4, shape, block_tokens=BLOCK, router=InTurns()).to_oracle == 0
    assert simulate(requests, [0] * 4, shape, block_tokens=BLOCK).to_oracle == 1


def test_an_erasure_ends_its_subjects_blocks_everywhere() -> None:
    """Control: without one, the second half finds all of the first."""
    requests = [asked(0, "a", [1, 2])] + [asked(3600 * hour, "a", [1, 2], hour) for hour in range(1, 48)]
    shape = FleetShape(2, 1, doors=2, by_subject=True)
    kept = simulate(requests, [0] * 48, shape, block_tokens=BLOCK)
    erased = simulate(requests, [0] * 48, shape._replace(erasures_per_day=4), block_tokens=BLOCK)
    assert kept.erasures == 0 and kept.found_tokens == 47 * 2 * BLOCK
    assert erased.erasures == round(4 * 47 * 3600 * SECOND_US / DAY_US)
    assert 0 < kept.found_tokens - erased.found_tokens <= erased.erasures * 2 * BLOCK
    assert erased.to_oracle == 1


def test_the_first_token_waits_for_what_is_computed_before_it() -> None:
    cost = ComputeCost(prefill_tokens_per_second=BLOCK)
    requests = [asked(0, "a", [1]), asked(0, "b", [2]), asked(10, "a", [1], 1)]
    found = simulate(requests, [0, 0, 0], FleetShape(1, 1), block_tokens=BLOCK, cost=cost)
    assert (found.ttft_p50_ms, found.ttft_p99_ms) == (1000, 2000)


def test_a_router_sends_nothing_more_to_a_worker_that_is_overloaded() -> None:
    router = PrefixRouter(load_gap=4)
    assert router.place("n", [1, 2], [0, 0]) == 0
    assert router.place("n", [1, 2], [3, 0]) == 0
    assert router.place("n", [1, 2], [9, 0]) == 1
    assert router.place("other", [1, 2], [1, 0]) == 1


def test_copies_share_nothing_and_come_at_the_same_rate() -> None:
    requests = [asked(second, str(second), [second, second + 1]) for second in range(0, 100, 2)]
    made = scaled(requests, 3)
    assert len(made) == 150 and len({one.session for one in made}) == 150
    blocks = [set(one.blocks.tolist()) for one in made]
    assert len(set.union(*blocks)) == 3 * 51 * 2 - 3 * 2 == 300
    assert [one.at_us for one in made] == sorted(one.at_us for one in made)


def test_a_study_of_a_generated_workload_holds_and_its_page_has_every_row(tmp_path: Path) -> None:
    spec = WorkloadSpec(conversations=40)
    workload = FleetWorkload("small", generate(spec).requests, spec.block_tokens)
    rows = study(workload, [2, 4], per_copy=2)
    assert problems_of(rows) == []
    of = {(row.part, row.name): row.outcome for row in rows}
    shares = [of["isolation", name].found_share for name in ("nobody apart", "8 tenants", "128 tenants")]
    assert shares == sorted(shares, reverse=True) and shares[0] > shares[2] > 0
    assert of["isolation", "1 tenant"].found_tokens == of["isolation", "nobody apart"].found_tokens
    assert of["erasures", "1000 a day"].erasures > of["erasures", "100 a day"].erasures
    write_page(tmp_path / "page.html", workload, rows)
    page = (tmp_path / "page.html").read_text()
    assert page.count("<svg") == 12 and all(f"<td>{row.name}</td>" in page for row in rows)
    broken = [row._replace(outcome=row.outcome._replace(found_tokens=1)) for row in rows[1:4]]
    assert len(problems_of([rows[0], *broken, *rows[4:]])) == 3


@pytest.mark.parametrize("words", [["--trace-format", "mooncake"], ["x.jsonl"]])
def test_words_that_are_wrong_say_so(words: list[str]) -> None:
    from typer.testing import CliRunner

    from kvcustody.console.main import app

    result = CliRunner().invoke(app, ["simulate", "fleet", *words])
    assert result.exit_code == 2 and "trace" in result.output
