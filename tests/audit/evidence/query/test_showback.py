"""A bill against a second one, made block by block from the bytes of leaves (`coverage_oracle` reads their runs)."""

from __future__ import annotations

import csv
import io
import json
from pathlib import Path

import pytest
from sqlalchemy import Engine, select
from typer.testing import CliRunner

from kvcustody.audit.evidence.query.showback import Cost, costs_of, showback
from kvcustody.audit.store.schema.ledger import events
from kvcustody.console.main import app
from kvcustody.times import iso
from standins.audit.leaf_figures import LeafFigures, PrefillCost

COST = Cost(16, 2e-5, 3e-9)


def by_hand(engine: Engine, since_us: int, until_us: int) -> dict[str, list[float]]:
    """Tenant: block-seconds; own, taken and given hits; seconds of each."""
    with engine.connect() as connection:
        leaves = [bytes(leaf) for leaf in connection.scalars(select(events.c.leaf))]
    return LeafFigures(leaves).showback(since_us, until_us, {"replay": PrefillCost(*COST)})


def period(engine: Engine) -> tuple[int, int]:
    with engine.connect() as connection:
        times = sorted(connection.scalars(select(events.c.at_us)))
    return times[0], times[-1] + 1


@pytest.mark.parametrize(
    "part",
    [pytest.param((0, 1), marks=pytest.mark.system("a bill of a whole replay differs")), (0.2, 0.7)],
)
def test_a_bill_is_what_the_leaves_add_up_to(replayed_ledger: Engine, part: tuple[float, float]) -> None:
    first, last = period(replayed_ledger)
    since_us, until_us = (first + int((last - first) * share) for share in part)
    hand = by_hand(replayed_ledger, since_us, until_us)
    with replayed_ledger.connect() as connection:
        rows = showback(connection, since_us, until_us, {"replay": COST})
    assert {row.tenant for row in rows} == hand.keys() and len(rows) > 3
    for row in rows:
        said = (row.block_seconds, *row[3:])
        assert said == pytest.approx(hand[row.tenant], rel=1e-9, abs=1e-6), row.tenant
        assert row.blocks_mean == pytest.approx(row.block_seconds * 1e6 / (until_us - since_us))
    assert sum(row.taken_hit_blocks for row in rows) == sum(row.given_hit_blocks for row in rows) > 0
    assert sum(row.own_hit_blocks for row in rows) > 0, "void: nothing was reused"


def test_parts_of_a_period_add_up(replayed_ledger: Engine) -> None:
    first, last = period(replayed_ledger)
    middle = (first + last) // 2
    with replayed_ledger.connect() as connection:
        parts = [
            {row.tenant: row for row in showback(connection, *span, {"replay": COST})}
            for span in ((first, last), (first, middle), (middle, last))
        ]
    whole, *halves = parts
    for tenant, row in whole.items():
        for name in ("block_seconds", "own_hit_blocks", "taken_hit_blocks", "given_hit_blocks"):
            both = sum(getattr(half[tenant], name) for half in halves if tenant in half)
            assert getattr(row, name) == pytest.approx(both, rel=1e-9, abs=1e-6)


def test_nothing_is_guessed_of_a_cost_that_nobody_told(replayed_ledger: Engine) -> None:
    first, last = period(replayed_ledger)
    with replayed_ledger.connect() as connection:
        rows = showback(connection, first, last, {})
    reused = [row for row in rows if row.own_hit_blocks or row.taken_hit_blocks or row.given_hit_blocks]
    assert reused and all(row.saved_seconds is None is row.given_seconds for row in reused)
    said = {"gpu-0": {"block_tokens": 16.0, "prefill_cost.token": 1e-5}, "gpu-1": {"block_tokens": 16.0}}
    assert costs_of(said) == {"gpu-0": Cost(16, 1e-5)}


def test_the_command_prints_the_same_as_a_table_csv_and_json(replayed: Path) -> None:
    url = f"sqlite:///{replayed}/kvcustody.db"

    def asked(*words: str, code: int = 0) -> str:
        found = CliRunner().invoke(app, ["showback", "--ledger", url, "--since", "2020-01-01", *words])
        assert found.exit_code == code, found.output
        return found.stdout if not code else found.stderr

    document = json.loads(asked("--json"))
    items = document["items"]
    assert document["since"] == "2020-01-01T00:00:00Z" and document["until"] == iso(document["until_us"])
    rows = list(csv.DictReader(io.StringIO(asked("--csv"))))
    assert [row["tenant"] for row in rows] == [row["tenant"] for row in items]
    assert [float(row["block_seconds"]) for row in rows] == [row["block_seconds"] for row in items]
    assert items[0]["tenant"] in asked()
    only = json.loads(asked("--json", "--tenant", items[1]["tenant"]))["items"]
    assert [row["tenant"] for row in only] == [items[1]["tenant"]]
    assert "is not after" in asked("--until", "2019-01-01", code=2)
