"""Every query of evidence requires each row's leaf, or is listed here with the reason why nothing depends on it.

Questions are found in the source: a function, or a value of a module, that selects from a table of evidence. A new one
without the condition fails the test until it has it, or an entry below.
"""

from __future__ import annotations

import ast
from collections.abc import Iterator
from pathlib import Path
from typing import NamedTuple

import pytest

from kvcustody.audit.store.schema.all_tables import projections

ROOT = Path(__file__).resolve().parents[3]
ROOMS = ("audit", "governance", "console", "lab", "integrations", "testkit")
EVIDENCE = {table.name for table in projections()} | {"events"}
JOINED = {"read", "read_opened"}  # of `evidence_columns`: each row with its leaf
OF_ITS_TABLE = {"has_leaf", "of_own_log", "within"}  # the latter two are a report's reading's
CONDITIONS = {*OF_ITS_TABLE, "is_leaf_of", *JOINED}
QUESTIONS = {"select", "exists", *JOINED}

COMPARED = "`fsck` itself, which looks for such rows and compares the others with their leaves"
CONDITION = "a condition, not a question: the query that takes it asks for the leaf"
PLACES = "leaves at places that it takes from the log's own size: it hands their bytes on and draws no verdict"
EXEMPT = {
    (
        "audit/evidence/coverage/recount_process.py",
        "begin",
    ): "a size: whether a process of its own is worth its start",
    ("audit/evidence/copies/transfers.py", "_in_own_log"): CONDITION,
    ("audit/evidence/copies/transfers.py", "has_tiers"): "whether a page shows the section",
    ("audit/evidence/counters/fine_figures.py", "_inside"): CONDITION,
    ("audit/evidence/counters/fine_figures.py", "read"): "a size: whether a slice is counted anew",
    ("audit/evidence/query/live_residencies.py", "_requests_of"): "which requests a page looks through",
    ("audit/exports/ledger_source.py", "leaves"): PLACES,
    ("audit/exports/ledger_source.py", "span"): PLACES,
    ("audit/exports/ledger_source.py", "_purged_below"): PLACES,
    ("audit/evidence/query/events.py", "_statement"): PLACES,
    ("audit/evidence/query/events.py", "logs_of"): "which logs a page looks into",
    (
        "audit/evidence/query/evidence_size.py",
        "evidence_size",
    ): "what evidence takes on disk, strays included",
    ("audit/evidence/erasure/requests_and_answers.py", "_ANSWERED"): CONDITION,
    ("audit/keep/purge_and_legal_hold.py", "_dropped_tiles"): PLACES,
    ("audit/keep/purge_and_legal_hold.py", "_next_there"): PLACES,
    (
        "audit/keep/sqlite_to_postgres.py",
        "_firsts",
    ): "moves a ledger as it is: `fsck` of the copy finds them",
    ("audit/keep/sqlite_to_postgres.py", "_project"): "counts the leaves of a ledger that `fsck` found whole",
    (
        "audit/write/rebuild.py",
        "rebuild_rows",
    ): "makes rows of the leaves of a ledger that `fsck` found whole",
    ("audit/siem/commit_order_reader.py", "_between"): PLACES,
    ("audit/siem/cursor_reader.py", "_between"): PLACES,
    ("audit/siem/cursor_reader.py", "_foreign"): PLACES,
    ("audit/siem/cursor_reader.py", "newest_positions"): PLACES,
    ("audit/evidence/subjects/subject_filter.py", "of_tenant"): CONDITION,
    ("audit/evidence/subjects/subject_filter.py", "of_subjects"): CONDITION,
    ("audit/evidence/subjects/subject_filter.py", "_each_span"): CONDITION,
    ("audit/verify/ledger/fsck_ledger.py", "_opened_twice"): COMPARED,
    ("audit/verify/ledger/fsck_log.py", "__init__"): COMPARED,
    ("audit/verify/ledger/fsck_log.py", "finish"): COMPARED,
    ("audit/verify/ledger/fsck_log.py", "_check_names"): COMPARED,
    ("audit/verify/ledger/fsck_log.py", "_read"): COMPARED,
    ("audit/verify/ledger/fsck_log.py", "_standing"): COMPARED,
    ("audit/verify/ledger/life_rows.py", "silent_processes"): COMPARED,
    ("audit/verify/ledger/register_rows.py", "_nobody"): COMPARED,
    ("audit/verify/documents/made_again.py", "_seal"): COMPARED,
    ("audit/verify/ledger/fsck_ledger.py", "wrong_spans"): COMPARED,
    ("audit/verify/ledger/stated_times.py", "_rows"): PLACES,
    ("audit/verify/ledger/fsck_ledger.py", "stray_rows"): COMPARED,
    ("audit/verify/ledger/fsck_ledger.py", "_off_their_places"): COMPARED,
    ("audit/verify/ledger/fsck_ledger.py", "_rows_without_leaf"): COMPARED,
}


class Reader(NamedTuple):
    """A function or value that selects from evidence, and its tables that no condition names."""

    module: str
    unit: str
    bare: frozenset[str]


class _Unit:
    """A function or value of a module: what it calls, the tables that it names, and those that it asks leaves of."""

    def __init__(self, node: ast.stmt, tables: dict[str, str], schemas: set[str]) -> None:
        self.name = node.name if isinstance(node, ast.FunctionDef) else _target(node)
        self.calls = [(_called(call.func), call) for call in ast.walk(node) if isinstance(call, ast.Call)]
        self.uses = {name.id for name in ast.walk(node) if isinstance(name, ast.Name)}
        self._tables, self._schemas = tables, schemas
        self.named = {table for part in ast.walk(node) if (table := self._table(part))}
        self.asked: set[str] = set()
        self.asks_of_any = False  # it asks for the leaf of a table that it is handed
        for called, call in self.calls:
            if called not in CONDITIONS:
                continue
            of = self.tables_of(call)
            self.asked |= of
            self.asks_of_any |= not of
            if called == "read_opened":
                self.asked.add("residencies")
            if called not in OF_ITS_TABLE:
                self.asked.add("events")  # the leaf itself
        if self.asks_of_any:
            self.asked |= self.named

    @property
    def is_question(self) -> bool:
        return bool(self.named) and bool(QUESTIONS & {called for called, _ in self.calls})

    def tables_of(self, call: ast.Call) -> set[str]:
        return {table for value in call.args if (table := self._table(value))}

    def _table(self, node: ast.AST) -> str | None:
        if isinstance(node, ast.Name):
            return self._tables.get(node.id)
        if isinstance(node, ast.Attribute) and isinstance(node.value, ast.Name):
            return node.attr if node.value.id in self._schemas and node.attr in EVIDENCE else None
        return None


def _called(function: ast.expr) -> str:
    """The name of a function, or of a method of the same object, or of what a report reads."""
    if isinstance(function, ast.Attribute) and isinstance(function.value, ast.Name):
        return function.attr if function.value.id in ("self", "reading") else ""
    return function.id if isinstance(function, ast.Name) else ""


def _target(node: ast.stmt) -> str:
    targets = node.targets if isinstance(node, ast.Assign) else [getattr(node, "target", None)]
    return " ".join(target.id for target in targets if isinstance(target, ast.Name))


def readers(module: str, source: str) -> Iterator[Reader]:
    """Every reader of a module."""
    if "audit.store.schema" not in source:
        return
    tree = ast.parse(source)
    tables: dict[str, str] = {}
    schemas: set[str] = set()
    for node in ast.walk(tree):
        if isinstance(node, ast.ImportFrom) and (node.module or "").startswith("kvcustody.audit.store.schema"):
            for alias in node.names:
                if node.module == "kvcustody.audit.store.schema":
                    schemas.add(alias.asname or alias.name)
                elif alias.name in EVIDENCE:
                    tables[alias.asname or alias.name] = alias.name
    if not tables and not schemas:
        return
    units = [_Unit(node, tables, schemas) for node in _statements(tree)]
    by_name = {unit.name: unit for unit in units}
    for _ in range(3):  # helpers of helpers
        for unit in units:
            for name in unit.uses & by_name.keys() - {unit.name}:
                unit.asked |= by_name[name].asked
            for called, call in unit.calls:
                if called in by_name and by_name[called].asks_of_any:
                    unit.asked |= unit.tables_of(call)
    yield from (Reader(module, unit.name, frozenset(unit.named - unit.asked)) for unit in units if unit.is_question)


def _statements(tree: ast.Module) -> Iterator[ast.stmt]:
    for node in tree.body:
        if isinstance(node, ast.ClassDef):
            yield from (part for part in node.body if isinstance(part, ast.FunctionDef))
        elif not isinstance(node, ast.Import | ast.ImportFrom):
            yield node


def every_reader() -> list[Reader]:
    every: list[Reader] = []
    for room in ROOMS:
        for path in sorted((ROOT / room).rglob("*.py")):
            module = path.relative_to(ROOT).as_posix()
            if module != "audit/store/schema/all_tables.py":
                every += readers(module, path.read_text(encoding="utf-8"))
    return every


def test_every_reader_asks_for_the_leaf_or_says_why_not() -> None:
    every = every_reader()
    bare = {(reader.module, reader.unit): sorted(reader.bare) for reader in every if reader.bare}
    assert len(every) > 120, "the search finds what there is"
    missing = [f"{module}: {unit} {bare[module, unit]}" for module, unit in bare.keys() - EXEMPT.keys()]
    assert not missing, "\n".join(sorted(missing))
    gone = sorted(EXEMPT.keys() - bare.keys())
    assert not gone, "these ask for the leaf, or are gone"


HEAD = "from kvcustody.audit.store.schema.ledger import receipts, releases\n"


@pytest.mark.parametrize(
    "source",
    [
        "def ask(c):\n    return c.scalars(select(receipts.c.idx).where(has_leaf({})))\n",
        "QUERY = select(func.count()).select_from(receipts).where(has_leaf({}))\n",
        "class Reader:\n    def ask(self):\n        return exists().where(receipts.c.idx == 1, has_leaf({}))\n",
        "def ask(reading):\n    return select(receipts.c.idx).where(reading.within({}))\n",
        "def ask(c):\n    return read(c, {}, (receipts.c.idx,), receipts.c.idx > 1)\n",
        "def of(t):\n    return select(t.c.idx).where(has_leaf(t))\nQUERY = exists(of({}), receipts.c.idx)\n",
    ],
)
def test_a_reader_that_asks_for_another_leaf_is_seen(source: str) -> None:
    """The control of the search."""
    for table, bare in (("receipts", set()), ("releases", {"receipts"})):
        found = [reader.bare for reader in readers("x", HEAD + source.format(table))]
        assert found == [bare]
