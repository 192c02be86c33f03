"""The worth of prefixes, compared with a second count made block by block from the bytes of leaves."""

from __future__ import annotations

import json
from collections import defaultdict
from pathlib import Path
from typing import Any

import coverage_oracle as oracle
import pytest
from sqlalchemy import Engine, select
from typer.testing import CliRunner

from kvcustody.audit.evidence.query.prefix_value import PrefixValue, prefix_values
from kvcustody.audit.evidence.query.showback import Cost, showback
from kvcustody.audit.store.schema.ledger import events
from kvcustody.console.main import app
from kvcustody.times import iso

COST = Cost(16, 2e-5, 3e-9)


def leaves(engine: Engine) -> tuple[list[bytes], int, int]:
    with engine.connect() as connection:
        found = connection.execute(select(events.c.leaf, events.c.at_us)).all()
    times = [at_us for _, at_us in found]
    return [bytes(leaf) for leaf, _ in found], min(times), max(times) + 1


def by_hand(written: list[bytes], since_us: int, until_us: int) -> dict[tuple[str, int], PrefixValue]:
    values: dict[tuple[str, int], PrefixValue] = {}
    for life in oracle.History(written).lives.values():
        people = life.people()
        writer: dict[oracle.Key, int] = {}
        for kind, name in (
            ("residency-opened", "written"),
            ("residency-released", "runs"),
            ("blocks-released", "runs"),
        ):
            for key, _, body in life.named(kind, name):
                if kind != "blocks-released" or body["own"]:
                    writer.setdefault(key, int(body["residency"]))
        hits: dict[int, list[tuple[oracle.Key, int, float, int]]] = defaultdict(list)
        for kind in ("residency-opened", "blocks-attached"):
            for body in life.leaves[kind]:
                at_us = life.at(body) + life.offset_us
                if since_us <= at_us < until_us:
                    for place, (key, _) in enumerate(oracle.listed(body.get("runs", ()))):
                        worth = 16 * COST.token_seconds + 256 * COST.pair_seconds * (place + 0.5)
                        hits[writer[key]].append((key, int(body["residency"]), worth, at_us))
        for residency, some in hits.items():
            mine: dict[str, Any] = people[residency]
            readers = {reader for _, reader, _, _ in some}
            values[life.uuid, residency] = PrefixValue(
                life.uuid,
                residency,
                mine["tenant"],
                mine["classification"],
                len({key for key, *_ in some}),
                len(some),
                len(readers),
                sum(people[reader]["tenant"] != mine["tenant"] for reader in readers),
                sum(worth for _, _, worth, _ in some),
                max(at_us for *_, at_us in some),
            )
    return values


@pytest.mark.parametrize(
    "part",
    [
        pytest.param((0, 1), marks=pytest.mark.system("a prefix's worth over a whole replay differs")),
        (0.3, 0.6),
    ],
)
def test_worth_is_what_the_leaves_add_up_to(replayed_ledger: Engine, part: tuple[float, float]) -> None:
    written, first, last = leaves(replayed_ledger)
    since_us, until_us = (first + int((last - first) * share) for share in part)
    hand = by_hand(written, since_us, until_us)
    with replayed_ledger.connect() as connection:
        rows = prefix_values(connection, since_us, until_us, {"replay": COST}, limit=10_000)
        some = prefix_values(connection, since_us, until_us, {"replay": COST}, limit=3)
        bill = showback(connection, since_us, until_us, {"replay": COST})
    assert {(row.incarnation, row.residency) for row in rows} == hand.keys() and len(rows) > 5
    for row in rows:
        mine = hand[row.incarnation, row.residency]
        assert row._replace(saved_seconds=0.0) == mine._replace(saved_seconds=0.0)
        assert row.saved_seconds == pytest.approx(mine.saved_seconds, rel=1e-9)
    worths = [row.saved_seconds or 0.0 for row in rows]
    assert worths == sorted(worths, reverse=True) and some == rows[:3]
    assert any(row.foreign_requests for row in rows), "void: nobody reused another's"
    hits = sum(one.own_hit_blocks + one.taken_hit_blocks for one in bill)
    assert sum(row.attached_blocks for row in rows) == hits, "the bill counts the same hits"


def test_without_a_cost_blocks_decide_and_no_seconds_are_said(replayed_ledger: Engine) -> None:
    _, first, last = leaves(replayed_ledger)
    with replayed_ledger.connect() as connection:
        rows = prefix_values(connection, first, last, {})
    assert rows and all(row.saved_seconds is None for row in rows)
    sizes = [row.attached_blocks for row in rows]
    assert sizes == sorted(sizes, reverse=True)


def test_the_command_shows_a_tenants_own_and_never_content(replayed: Path) -> None:
    ledger = f"sqlite:///{replayed}/kvcustody.db"

    def asked(*words: str) -> str:
        found = CliRunner().invoke(app, ["prefixes", "top", "--ledger", ledger, "--since", "2020-01-01", *words])
        assert found.exit_code == 0, found.output
        return found.stdout

    document = json.loads(asked("--json"))
    every = document["items"]
    assert document["since"] == "2020-01-01T00:00:00Z" and document["until"] == iso(document["until_us"])
    assert all(row["last"] == iso(row["last_us"]) for row in every)
    assert every and set(every[0]) == {*PrefixValue._fields, "last"}, "no key, token, subject or session"
    tenant = every[-1]["tenant"]
    mine = json.loads(asked("--json", "--tenant", tenant))["items"]
    assert mine and {row["tenant"] for row in mine} == {tenant}
    assert every[0]["incarnation"][:12] in asked("--limit", "1")
