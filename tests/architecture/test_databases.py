"""Which suites run on both databases is made from what suites enter, and a suite that enters more fails."""

from __future__ import annotations

import sys

import pytest
from sqlalchemy import Engine

from kvcustody.audit.store.database.dialect import dialect_of
from kvcustody.governance.service.row_level_security import has_row_level_security
from standins import PLACE
from standins.database_branches import TESTS, Table, check, read_table, recorded

sys.path.insert(0, str(TESTS))

from databases import cheapest_cover


def test_the_table_names_suites_that_are_there() -> None:
    table = read_table()
    assert table.suites and table.branches
    assert [suite for suite in table.suites if "any_store" not in (TESTS / suite).read_text()] == []


def test_a_branch_is_named_by_who_asks_and_what(store: Engine) -> None:
    with recorded() as entered:
        assert not has_row_level_security(store)
        assert dialect_of(store).name == "sqlite"  # asked by a test, which is no branch of the product
    assert entered == {"governance/service/row_level_security.py:has_row_level_security:roles"}


def test_a_suite_outside_the_table_that_enters_another_branch_fails() -> None:
    table = Table(frozenset({"in.py"}), frozenset({"audit/a.py:f:arrays"}))
    check("out.py", {"audit/a.py:f:arrays"}, table)
    check("in.py", {"audit/b.py:g:roles"}, table)  # it runs on both
    with pytest.raises(AssertionError, match="audit/b"):
        check("out.py", {"audit/b.py:g:roles"}, table)


def test_the_cheapest_suites_enter_every_branch() -> None:
    branches = {"a": {"1", "2"}, "b": {"2", "3"}, "c": {"1", "2", "3"}}
    assert cheapest_cover(branches, {"a": 1.0, "b": 1.0, "c": 50.0}) == ["a", "b"]
    assert cheapest_cover(branches, {"a": 1.0, "b": 1.0, "c": 0.5}) == ["c"]


def test_the_stand_ins_lie_where_the_table_looks() -> None:
    assert PLACE.parents[1] == TESTS
