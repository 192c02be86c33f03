"""Every action of the policy is checked at run time, and decision tables are asked only by their seams. The API's
operations are called through their gate.
"""

from __future__ import annotations

import ast
from collections.abc import Iterator
from functools import cache
from pathlib import Path

import pytest

from kvcustody.governance.api.declarations import every_operation
from kvcustody.policies.document.model import Action
from standins.architecture.parsed import parsed_text

ROOT = Path(__file__).resolve().parents[2]
ROOMS = ("governance", "integrations", "testkit")
SEAMS = {  # who asks a table itself
    "governance/decisions/authorize.py": "a tenant's own acts",
    "governance/decisions/reuse_decision.py": "what a request reuses",
    "governance/decisions/staged_table.py": "a table made of two",
    "governance/decisions/shadow_policy.py": "a candidate that is obeyed in nothing",
    "governance/decisions/apply_narrowing.py": "whether anybody could be led to a domain",
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
    operations: set[str] = set()
    for function in functions(parsed_text(source)):
        if "authorize" in calls(function):
            operations |= actions(function)
        if "AccessRequest" in calls(function):
            operations |= actions(function) & {"REUSE"}
    return operations


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


OPERATIONS = "kvcustody.governance.api.operations"
GATE_CALLERS = {  # who lets a call through the gate
    "governance/api/http/gate.py": "a request",
    "governance/api/local_calls.py": "a command on the ledger itself",
    "governance/api/page_calls.py": "a page, and the office of `kvcustody up`",
}


@cache
def operation_functions() -> frozenset[tuple[str, str]]:
    """Every function that answers an operation: its module and its name."""
    made = [one.function for one in every_operation().by_name.values()]
    return frozenset((function.__module__, function.__name__) for function in made)


def called_past_the_gate(source: str) -> set[str]:
    """The functions of operations that a module calls itself, instead of handing them to the gate."""
    modules: dict[str, str] = {}
    functions_here: dict[str, tuple[str, str]] = {}
    tree = parsed_text(source)
    for node in ast.walk(tree):
        if isinstance(node, ast.ImportFrom) and node.module is not None and node.module.startswith(OPERATIONS):
            for one in node.names:
                modules[one.asname or one.name] = f"{node.module}.{one.name}"
                functions_here[one.asname or one.name] = (node.module, one.name)
    calls = set()
    for call in (node.func for node in ast.walk(tree) if isinstance(node, ast.Call)):
        if isinstance(call, ast.Name):
            place = functions_here.get(call.id)
        elif isinstance(call, ast.Attribute) and isinstance(call.value, ast.Name):
            place = (modules.get(call.value.id, ""), call.attr)
        else:
            continue
        if place in operation_functions():
            calls.add(f"{place[0]}.{place[1]}")
    return calls


def test_no_command_or_page_calls_an_operation_past_the_gate() -> None:
    calls = {}
    for room in ("console", "governance", "integrations", "lab", "testkit"):
        for path in sorted((ROOT / room).rglob("*.py")):
            name = path.relative_to(ROOT).as_posix()
            if not name.startswith("governance/api/operations/"):
                calls[name] = called_past_the_gate(path.read_text(encoding="utf-8"))
    assert {name: called for name, called in calls.items() if called} == {}
    assert len(operation_functions()) > 100


def test_the_gate_has_three_callers() -> None:
    callers = {name for name, source in runtime() if "OperationGate" in calls(parsed_text(source))}
    assert callers == set(GATE_CALLERS)


def test_a_ledger_is_asked_after_the_permission_of_its_reader() -> None:
    source = (ROOT / "console/api/ledger_asker.py").read_text(encoding="utf-8")
    [ask] = (function for function in functions(parsed_text(source)) if function.name == "ask")
    assert {"check_permission", "read"} <= calls(ask)


def test_control_an_operation_that_is_called_directly_is_found() -> None:
    module = "from kvcustody.governance.api.operations import custody as custody_api"
    assert called_past_the_gate(f"{module}\ncustody_api.covered(caller, service)") == {f"{OPERATIONS}.custody.covered"}
    assert called_past_the_gate(f"{module}\nvisit.ask(custody_api.covered)") == set()
    function = "from kvcustody.governance.api.operations.erasures import request as ask_erasure"
    assert called_past_the_gate(f"{function}\nask_erasure(who, service, what)") == {f"{OPERATIONS}.erasures.request"}
    assert called_past_the_gate(f"{function}\nask(service, who, ask_erasure, what)") == set()
    question = f"from {OPERATIONS}.tiers import tiers"
    assert called_past_the_gate(f"{question}\ntiers(desk, who)") == {f"{OPERATIONS}.tiers.tiers"}
    assert called_past_the_gate(f"{question}\nvisit.ask(tiers, tenant=None)") == set()
