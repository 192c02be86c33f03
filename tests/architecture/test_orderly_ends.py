"""Whoever opens a writer of a ledger ends it in order: what it leaves open comes back as `worker-died`."""

from __future__ import annotations

import ast
from collections.abc import Iterator
from pathlib import Path

from standins.architecture.parsed import parsed_if_named

ROOT = Path(__file__).resolve().parents[2]
ROOMS = ("audit", "governance", "integrations", "console", "lab", "testkit")
WRITERS = {"EventWriter", "TracedWriter", "RemoteLedger", "recorder"}
# Opened by their `with`, or by a stack's `enter_context`: the end is recorded by the writer itself.
MANAGED = {
    "audit/write/record_operator_act.py": "acts of operators: `audit`, `db`, `erasure`, `subject`, `clock`",
    "console/audit/signing.py": "`audit rotate-key`",
    "console/report/keys.py": "`report enrol-key` and `report rotate-key`",
    "lab/replay/run/environment.py": "what a replay that was killed left behind",
    "governance/keys/checkpoint_signing_key.py": "`audit sign`",
    "console/policy/release_options.py": "`policy propose` and the other steps",
    "console/scan/command.py": "`scan close-dead`",
    "governance/service/access/local_administration.py": "`principal`, `apikey`, `serve --init`",
    "governance/service/service.py": "`serve`, and operations on the ledger itself",
    "integrations/events/observer.py": "`observe`",
    "integrations/identity/from_settings.py": "the door before an engine",
    "testkit/lmcache/deployment.py": "an erasure that the kit orders",
}
# They hold memory: the end is recorded once custody has ended, by the module named.
WITH_MEMORY = {
    "governance/worker/open_foundation.py": "governance/worker/worker.py",
    "governance/control_plane/opening.py": "governance/worker/engine_worker.py",
    "lab/replay/run/environment.py": "lab/replay/run/job.py",
    "testkit/conformance/cases/evidence.py": "",  # a ledger of the kit's own, thrown away
}


def opened(tree: ast.AST) -> Iterator[tuple[str, bool]]:
    """Each call that opens a writer, and whether a `with` or an `enter_context` closes it."""
    managed: set[int] = set()
    for node in ast.walk(tree):
        if isinstance(node, ast.With):
            managed |= {id(item.context_expr) for item in node.items}
        elif isinstance(node, ast.Call) and getattr(node.func, "attr", "") == "enter_context":
            managed |= {id(argument) for argument in node.args}
    for node in ast.walk(tree):
        if isinstance(node, ast.Call):
            name = node.func.attr if isinstance(node.func, ast.Attribute) else getattr(node.func, "id", "")
            if name in WRITERS:
                yield name, id(node) in managed


def subclasses(tree: ast.AST) -> set[str]:
    """Classes that are writers by inheritance."""
    classes = (node for node in ast.walk(tree) if isinstance(node, ast.ClassDef))
    return {one.name for one in classes if {getattr(base, "id", "") for base in one.bases} & WRITERS}


def sources() -> Iterator[tuple[str, ast.AST]]:
    for room in ROOMS:
        for path in sorted((ROOT / room).rglob("*.py")):
            yield path.relative_to(ROOT).as_posix(), parsed_if_named(path, WRITERS)


def test_whoever_opens_a_writer_ends_it_in_order() -> None:
    bare, managed = set(), set()
    for name, tree in sources():
        assert subclasses(tree) <= WRITERS, f"{name} has a writer of its own: name it here"
        for writer, closes in opened(tree):
            (managed if closes else bare).add(name)
            assert closes or name in WITH_MEMORY, (
                f"{name} opens `{writer}` without `with` or `enter_context`: its end would come back as `worker-died`"
            )
    assert bare == set(WITH_MEMORY)
    assert managed == set(MANAGED)


def test_what_holds_memory_records_its_end_by_itself() -> None:
    for where in filter(None, WITH_MEMORY.values()):
        assert "worker_stopped(" in (ROOT / where).read_text(encoding="utf-8"), where


def test_control_a_writer_that_nothing_ends_is_found() -> None:
    def ways(source: str) -> list[bool]:
        return [closes for _, closes in opened(ast.parse(source))]

    assert ways("writer = EventWriter(engine)\nstack.callback(writer.close)") == [False]
    assert ways("with EventWriter(engine) as writer: pass") == [True]
    assert ways("stack.enter_context(TracedWriter(engine))") == [True]
    assert ways("stack.enter_context(opening(EventWriter(engine)))") == [False]
    assert subclasses(ast.parse("class Mine(EventWriter): pass")) == {"Mine"}
