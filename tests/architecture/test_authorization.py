"""Every action of the policy is asked about at run time, and decision tables are asked by their seams alone."""

from __future__ import annotations

import ast
from collections.abc import Iterator
from functools import cache
from pathlib import Path

import pytest

from kvcustody.policies.document.model import Action
from standins.architecture.parsed import parsed_text

ROOT = Path(__file__).resolve().parents[2]
ROOMS = ("governance", "integrations", "testkit")
SEAMS = {  # who asks a table itself
    "governance/decisions/authorize.py": "a tenant's own acts",
    "governance/decisions/reuse_decision.py": "what a request reuses",
    "governance/decisions/staged_table.py": "a table made of two",
    "governance/decisions/shadow_policy.py": "a candidate that is obeyed in nothing",
    "governance/decisions/reachable_domains.py": "whether anybody could be led to a domain",
}


def functions(tree: ast.AST) -> Iterator[ast.AST]:
    yield from (node for node in ast.walk(tree) if isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef))


def calls(node: ast.AST) -> set[str]:
    """The names of what is called in it, without what they belong to."""
    called = [one.func for one in ast.walk(node) if isinstance(one, ast.Call)]
    return {one.attr if isinstance(one, ast.Attribute) else getattr(one, "id", "") for one in called}


def actions(node: ast.AST) -> set[str]:
    """The actions that are named in it."""
    named = (one for one in ast.walk(node) if isinstance(one, ast.Attribute))
    return {one.attr for one in named if isinstance(one.value, ast.Name) and one.value.id == "Action"}


@cache
def asked(source: str) -> set[str]:
    """The actions that some function has authorized, or makes the request of that a reuse is decided by."""
    found: set[str] = set()
    for function in functions(parsed_text(source)):
        if "authorize" in calls(function):
            found |= actions(function)
        if "AccessRequest" in calls(function):
            found |= actions(function) & {"REUSE"}
    return found


def runtime() -> Iterator[tuple[str, str]]:
    for room in ROOMS:
        for path in sorted((ROOT / room).rglob("*.py")):
            yield path.relative_to(ROOT).as_posix(), path.read_text(encoding="utf-8")


@pytest.mark.parametrize("action", Action, ids=lambda action: action.name.lower())
def test_every_action_has_a_caller_at_run_time(action: Action) -> None:
    callers = [name for name, source in runtime() if action.name in asked(source)]
    assert callers, f"nothing asks whether `{action.name.lower()}` is permitted: a rule about it does nothing"


def test_a_table_is_asked_by_the_seams_alone() -> None:
    direct = {name for name, source in runtime() if calls(parsed_text(source)) & {"decide", "decide_many"}}
    assert direct == set(SEAMS)


def test_control_an_action_that_is_only_named_is_nobodys() -> None:
    assert asked("def f(): return Action.EXPORT") == set()
    assert asked("def f(t): return authorize(t, Action.EXPORT, 'a', 0)") == {"EXPORT"}
    assert asked("def f(s): s.authorize(Action.ADMINISTER, 'a')") == {"ADMINISTER"}
    assert asked("def f(): AccessRequest(Action.OFFLOAD)") == set()
