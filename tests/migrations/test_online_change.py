"""An online change: tables get their new form while others write, read and purge, and whoever is killed goes on."""

from __future__ import annotations

from pathlib import Path
from typing import NamedTuple

import orjson
import pytest
from sqlalchemy import Connection, Engine, func, select

from kvcustody.audit.store.database.dialect import dialect_of
from kvcustody.audit.store.database.engine import check_store
from kvcustody.audit.store.schema.ledger import events, logs
from kvcustody.audit.store.schema.schema_changes import schema_change_logs, schema_changes
from kvcustody.audit.store.schema.trees import signed_checkpoints
from kvcustody.audit.tlog.database_proofs import LedgerProofs
from kvcustody.audit.verify.ledger.fsck_ledger import fsck
from kvcustody.errors import LedgerError
from kvcustody.migrations.online.change import STEPS
from kvcustody.migrations.upgrade import current, undo, upgrade
from standins.migrations.catalog import Catalog, catalog, differences, without_months
from standins.migrations.next_program import (
    BEFORE,
    CHANGED,
    NEXT,
    ChangedRows,
    become_next,
    changed_rows,
    kill_at,
)
from standins.postgres import set_up_roles_in_turn

OPEN = tuple(step for step in STEPS if step not in ("opening", "swapped"))  # the change is open after a kill


class Before(NamedTuple):
    """A ledger of the predecessor under the next program: what it is, and the rows that it will have."""

    engine: Engine
    url: str
    rows: ChangedRows
    catalog: Catalog


@pytest.fixture
def before(
    predecessor: tuple[Engine, str, ChangedRows], monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> Before:
    engine, url, rows = predecessor
    become_next(monkeypatch, tmp_path / "next")
    return Before(engine, url, rows, catalog(engine))


def check_finished(before: Before, empty: Engine, rows: ChangedRows | None = None, leafless: int = 0) -> None:
    """The ledger is what the next program would have made of it from the beginning, and nothing else changed."""
    engine = before.engine
    upgrade(empty)
    if dialect_of(empty).roles:
        set_up_roles_in_turn(empty)
    old, new = (without_months(catalog(each)) for each in (engine, empty))
    assert differences(old, new) == []
    assert changed_rows(engine) == (rows or before.rows)
    with engine.connect() as connection:
        assert current(connection) == NEXT
        for table in (schema_changes, schema_change_logs):
            assert connection.scalar(select(func.count()).select_from(table)) == 0
        assert fsck(connection).problems == []
        query = select(events.c.leaf).where(events.c.kind == "schema-changed")
        bodies = [orjson.loads(bytes(leaf)) for leaf in connection.scalars(query)]
    (body,) = (each for each in bodies if each["revision"] == NEXT)
    assert (body["before"], body["tables"], body["leafless"]) == (BEFORE, [*CHANGED], leafless)
    assert body["rows"] == sum(map(len, before.rows.values())) > 15
    check_store(engine)


def every_proof(connection: Connection, as_of: int) -> dict[tuple[str, int], str]:
    """Proofs of the first, the middle and the last leaf of each log under one root."""
    proofs = LedgerProofs(connection)
    query = select(logs.c.name, func.min(events.c.idx)).join(events, events.c.log == logs.c.id)
    first = {row[0]: row[1] for row in connection.execute(query.group_by(logs.c.name))}
    sizes = proofs.sizes(as_of)
    return {
        (log, idx): repr(proofs.proven(log, idx, as_of=as_of))
        for log, size in sizes.items()
        if log in first  # of another nothing is left
        for idx in {first[log], (first[log] + size - 1) // 2, size - 1}
        if first[log] <= idx < size
    }


def test_the_ledger_is_then_that_of_a_new_one(before: Before, empty: Engine) -> None:
    steps: list[str] = []
    with before.engine.connect() as connection:
        as_of = connection.scalar(select(func.max(signed_checkpoints.c.size)))
        assert as_of is not None
        proofs = every_proof(connection, as_of)
    assert upgrade(before.engine, leaves_max=None, actor="ada", step=steps.append) == NEXT
    assert set(steps) == set(STEPS) and steps[0] == "opening" and steps[-1] == "swapped"
    check_finished(before, empty)
    with before.engine.connect() as connection:
        assert every_proof(connection, as_of) == proofs and len(proofs) > 2


@pytest.mark.parametrize("step", STEPS)
def test_who_is_killed_goes_on(before: Before, empty: Engine, step: str) -> None:
    before.engine.dispose()
    assert kill_at(before.url, step), "control: it came to this step"
    assert upgrade(before.engine, leaves_max=None) == NEXT
    check_finished(before, empty)


@pytest.mark.parametrize("step", ["opening", *OPEN])
def test_what_is_unfinished_can_be_undone(before: Before, step: str) -> None:
    before.engine.dispose()
    assert kill_at(before.url, step)
    if step == "opening":
        with pytest.raises(LedgerError, match="nothing to undo"):
            undo(before.engine)
    else:
        assert undo(before.engine) == BEFORE
    assert differences(before.catalog, catalog(before.engine)) == []
    with before.engine.connect() as connection:
        assert current(connection) == BEFORE
