"""Where a test enters code that differs between the two databases, and which suites run on both.

1. Product code asks a `store.database.dialect.Dialect` what its database can do. Each such question is a branch, named
   by the file and function that ask and by what they ask: `audit/write/append_leaves.py:append:arrays`. A method of a
   dialect, and `file_of`, ask for their callers.
2. `tests/databases.json` lists suites that together enter every branch which any suite on `any_store` enters. They run
   on both databases in `make test`; the others run on SQLite there, and on both in `make test-system`.
3. A suite outside the table that enters a branch which the table does not list fails. `python tests/databases.py`
   writes the table anew.
"""

from __future__ import annotations

import json
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from types import CodeType
from typing import Any, NamedTuple

from kvcustody.audit.store.database import dialect
from kvcustody.audit.store.database.dialect import Dialect

TESTS = Path(__file__).resolve().parents[2]
TABLE = TESTS / "databases.json"
_SOURCES = str(TESTS.parent / "src" / "kvcustody")


class Table(NamedTuple):
    """`tests/databases.json`."""

    suites: frozenset[str]  # files below tests/
    branches: frozenset[str]


def read_table(path: Path = TABLE) -> Table:
    """The table; an empty one where there is none."""
    if not path.exists():
        return Table(frozenset(), frozenset())
    found = json.loads(path.read_text(encoding="utf-8"))
    return Table(frozenset(found["suites"]), frozenset(found["branches"]))


@contextmanager
def recorded() -> Iterator[set[str]]:
    """The branches that any thread enters meanwhile."""
    entered: set[str] = set()

    def asked(self: Dialect, name: str) -> Any:
        frame = sys._getframe(1)
        while _asks_for_caller(frame.f_code) and frame.f_back is not None:
            frame = frame.f_back
        file = frame.f_code.co_filename
        if file.startswith(_SOURCES) and not name.startswith("__"):
            entered.add(f"{file.removeprefix(_SOURCES).lstrip('/')}:{frame.f_code.co_qualname}:{name}")
        return object.__getattribute__(self, name)

    Dialect.__getattribute__ = asked  # type: ignore[assignment, method-assign]
    try:
        yield entered
    finally:
        del Dialect.__getattribute__


def _asks_for_caller(code: CodeType) -> bool:
    name = code.co_qualname
    return code.co_filename == dialect.__file__ and ("." in name or name == dialect.file_of.__name__)


def check(suite: str, entered: set[str], table: Table) -> None:
    """Raise where a suite outside the table enters a branch that none of the table is known to enter."""
    unlisted = sorted(entered - table.branches) if suite not in table.suites else []
    assert not unlisted, (
        f"`{suite}` enters branches between the databases that tests/databases.json does not list:"
        f" {', '.join(unlisted)}. Write it anew: python tests/databases.py"
    )
