"""A column added to an event is declared in one file: table, months, projection, figures and check follow."""

import subprocess
import sys
from pathlib import Path

import pytest

from kvcustody.audit.kinds import custody_events

FIELD = ("    nonzero: int\n", "    nonzero: int\n    skipped: int = 0\n")
COLUMN = ('"nonzero", "at_us",', '"nonzero", "at_us", "skipped",')
FIGURE = ('''        indexes={"erasure": ("erasure",)},
    )  # fmt: skip


class CustodyOverdue''', '''        indexes={"erasure": ("erasure",)},
    )  # fmt: skip
    figures = LeafFigures(sums={"skipped": "skipped"})


class CustodyOverdue''')  # fmt: skip
PROGRAM = """
import importlib.abc, importlib.util, sys
from pathlib import Path

NAME = "kvcustody.audit.kinds.custody_events"

class Wider(importlib.abc.MetaPathFinder, importlib.abc.SourceLoader):
    def find_spec(self, name, path=None, target=None):
        return importlib.util.spec_from_loader(name, self) if name == NAME else None
    def get_filename(self, name):
        return sys.argv[1]
    def get_data(self, path):
        return Path(path).read_bytes()

sys.meta_path.insert(0, Wider())
from sqlalchemy import select
from kvcustody.audit.project import count_events
from kvcustody.audit.kinds import ErasureReread
from kvcustody.audit.leaf import Context, leaves
from kvcustody.audit.leaf.batch import read_leaves
from kvcustody.audit.store.database.create_schema import create_schema
from kvcustody.audit.store.database.engine import open_store
from kvcustody.audit.store.schema.leaf_tables import erasure_rereads
from kvcustody.audit.verify.ledger.fsck_log import LogCheck
from kvcustody.audit.write.rebuild import LogLeaves, rebuild_ledger

context = Context("ab" * 16, 0, lambda *_: "p" * 24)
[leaf] = leaves(ErasureReread(7, "erasure-1", "acme", 4, 1, 0, skipped=3), context, 5)
engine = open_store(Path(sys.argv[2]))
with engine.begin() as connection:
    create_schema(connection)
    rebuild_ledger(connection, [LogLeaves("tenant/acme", 0, 1, [leaf.data])])
with engine.connect() as connection:
    assert connection.execute(select(erasure_rereads.c.skipped)).scalar_one() == 3
    check = LogCheck(connection, 1, "tenant/acme", [], [])
    assert [*check.leaves()] == [1] and not check.problems, check.problems
with engine.begin() as connection:
    for [name] in connection.exec_driver_sql("SELECT name FROM sqlite_schema WHERE type = 'trigger'").all():
        connection.exec_driver_sql(f"DROP TRIGGER {name}")
    connection.exec_driver_sql("UPDATE erasure_rereads SET skipped = 2")
with engine.connect() as connection:
    check = LogCheck(connection, 1, "tenant/acme", [], [])
    assert [*check.leaves()] == [1] and "erasure_rereads" in check.problems[0].what
[figures] = count_events(read_leaves([leaf.data]), [1]).values()
assert figures["erasure-reread", "skipped", "", "", ""] == 3
print("followed")
"""


def _run(source: str, folder: Path) -> subprocess.CompletedProcess[str]:
    wider = folder / "custody_events.py"
    wider.write_text(source, encoding="utf-8")
    return subprocess.run(
        [sys.executable, "-c", PROGRAM, wider, folder / "ledger.db"],
        capture_output=True,
        text=True,
        check=False,
        timeout=120,
    )


def test_a_column_that_is_added_in_one_file_is_stored_checked_and_counted(tmp_path: Path) -> None:
    source = Path(str(custody_events.__file__)).read_text(encoding="utf-8")
    for before, after in (FIELD, COLUMN, FIGURE):
        assert source.count(before) == 1, before
        source = source.replace(before, after)
    done = _run(source, tmp_path)
    assert done.stdout == "followed\n", done.stderr


@pytest.mark.parametrize("left_out", [COLUMN, FIGURE], ids=["column", "figure"])
def test_without_its_declaration_nothing_follows(tmp_path: Path, left_out: tuple[str, str]) -> None:
    """The control."""
    source = Path(str(custody_events.__file__)).read_text(encoding="utf-8")
    for before, after in {FIELD, COLUMN, FIGURE} - {left_out}:
        source = source.replace(before, after)
    assert "skipped" in _run(source, tmp_path).stderr
