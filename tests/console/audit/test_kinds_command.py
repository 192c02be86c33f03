"""`kvcustody audit kinds`: every kind of leaf with an example that is one."""

from __future__ import annotations

import json
from typing import Any

import orjson
import pytest
from typer.testing import CliRunner

from kvcustody.audit.kinds import KINDS, CustodyChanged, Event
from kvcustody.audit.kinds.examples import example_of
from kvcustody.audit.leaf import Context, leaves
from kvcustody.audit.leaf.batch import read_leaves
from kvcustody.audit.leaf.leaf_schema import FOLDED
from kvcustody.console.audit.kinds import kinds_table
from kvcustody.console.main import app
from kvcustody.governance.api.operations.audit import KindName

CONTEXT = Context("ab" * 16, 1_700_000_000_000_000, lambda tenant, subject, session="": "9b8a7c6d5e4f3021")


def asked(*words: str, code: int = 0) -> Any:
    ran = CliRunner().invoke(app, ["audit", "kinds", *words])
    assert ran.exit_code == code, ran.output
    return ran.output if code or "--json" not in words else json.loads(ran.stdout)


@pytest.mark.parametrize("kind", KINDS, ids=lambda kind: KINDS[kind].name)
def test_an_example_becomes_leaves_that_are_read_back(kind: type[Event]) -> None:
    made = leaves(example_of(kind), CONTEXT, 7)
    batch = read_leaves([leaf.data for leaf in made])
    assert batch.data == [leaf.data for leaf in made]
    items = {KINDS[each].name for each in FOLDED.values()} if kind is CustodyChanged else set()
    assert {group.kind for group in batch.groups} == {KINDS[kind].name} | items


def test_every_kind_is_listed_and_an_unknown_one_is_refused() -> None:
    listed = asked("--json")["items"]
    assert {row["kind"]: row["outage"] for row in listed} == {of.name: of.outage for of in KINDS.values()}
    assert all(row["kind"] in asked() for row in listed)
    assert "kvcustody audit kinds" in asked("reciept", code=2)


def test_the_table_of_the_docs_and_the_api_have_every_kind_and_no_other() -> None:
    names = sorted(of.name for of in KINDS.values())
    assert [row.split("`")[1] for row in kinds_table().splitlines()[2:]] == names
    assert sorted(KindName) == names


def test_one_kind_is_shown_with_its_leaf_in_each_log() -> None:
    told = asked("decision", "--json")
    assert [leaf["log"] for leaf in told["leaves"]] == ["tenant/acme", "tenant/labs"]
    assert told["by"] == "worker" and not told["is_order"] and "reader" in told["fields"]
    shown = asked("receipt")
    assert orjson.loads(shown[shown.index("{") :])["kind"] == "receipt"
