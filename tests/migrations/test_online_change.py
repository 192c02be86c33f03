"""An online change: tables get their new form while others write, read and purge, and whoever is killed goes on."""

from __future__ import annotations

import time
from collections.abc import Callable, Iterable
from pathlib import Path
from typing import Any, NamedTuple

import orjson
import pytest
from sqlalchemy import Connection, Engine, delete, func, insert, select, update
from typer.testing import CliRunner

from kvcustody.audit.keep.counted_months import ExpiredLeaves
from kvcustody.audit.keep.purge_and_legal_hold import drop_leaves
from kvcustody.audit.keep.sqlite_to_postgres import move_ledger
from kvcustody.audit.kinds import ResidencyOpened
from kvcustody.audit.store.database.dialect import dialect_of
from kvcustody.audit.store.database.engine import WRITE, check_store, open_store
from kvcustody.audit.store.database.monthly_partitions import create_partitions, months_from
from kvcustody.audit.store.database.open_changes import forms_of
from kvcustody.audit.store.database.postgres_roles import READER, WRITER
from kvcustody.audit.store.schema.leaf_tables import decisions, residencies
from kvcustody.audit.store.schema.ledger import events, logs
from kvcustody.audit.store.schema.schema_changes import schema_change_logs, schema_changes
from kvcustody.audit.store.schema.trees import signed_checkpoints
from kvcustody.audit.tlog.database_proofs import LedgerProofs
from kvcustody.audit.verify.ledger.fsck_ledger import fsck
from kvcustody.console.main import app
from kvcustody.errors import LedgerError
from kvcustody.migrations.online import change, row_windows
from kvcustody.migrations.online.change import STEPS
from kvcustody.migrations.online.row_windows import SECONDS_WANTED, next_window
from kvcustody.migrations.upgrade import current, undo, upgrade
from standins import builders
from standins.audit.ledgers import whole_ledger
from standins.migrations.catalog import Catalog, catalog, differences, without_months
from standins.migrations.next_program import (
    BEFORE,
    CHANGED,
    NEXT,
    ChangedRows,
    become_next,
    changed_rows,
    kill_at,
    state_revision,
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
def before(predecessor: tuple[Engine, str, ChangedRows], monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> Before:
    engine, url, rows = predecessor
    become_next(monkeypatch, tmp_path / "next")
    return Before(engine, url, rows, catalog(engine))


_OF_NEXT: dict[str, Catalog] = {}  # by database; it is the same in each test


def catalog_of_next(empty: Engine) -> Catalog:
    """The catalog of a ledger that the next program made from the beginning."""
    if empty.dialect.name not in _OF_NEXT:
        upgrade(empty)
        if dialect_of(empty).roles:
            set_up_roles_in_turn(empty)
        _OF_NEXT[empty.dialect.name] = without_months(catalog(empty))
    return _OF_NEXT[empty.dialect.name]


def check_finished(before: Before, empty: Engine, rows: ChangedRows | None = None, copied: int | None = None) -> None:
    """The ledger is what the next program would have made of it from the beginning, and nothing else changed."""
    engine = before.engine
    assert differences(without_months(catalog(engine)), catalog_of_next(empty)) == []
    assert changed_rows(engine) == (rows or before.rows)
    with engine.connect() as connection:
        assert current(connection) == NEXT
        for table in (schema_changes, schema_change_logs):
            assert connection.scalar(select(func.count()).select_from(table)) == 0
        assert fsck(connection).problems == []
        query = select(events.c.leaf).where(events.c.kind == "schema-changed")
        bodies = [orjson.loads(bytes(leaf)) for leaf in connection.scalars(query)]
    (body,) = (each for each in bodies if each["revision"] == NEXT)
    assert (body["before"], body["tables"], body["leafless"]) == (BEFORE, [*CHANGED], 0)
    assert body["rows"] == (copied or sum(map(len, before.rows.values()))) > 15
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


def some(steps: Iterable[str]) -> list[Any]:
    """Steps, of which two are in `make test`."""
    return [
        step if step in ("window copied", "swapping") else pytest.param(step, marks=pytest.mark.system)
        for step in steps
    ]


@pytest.mark.parametrize("step", some(STEPS))
def test_who_is_killed_goes_on(before: Before, empty: Engine, step: str) -> None:
    before.engine.dispose()
    assert kill_at(before.url, step), "control: it came to this step"
    assert upgrade(before.engine, leaves_max=None) == NEXT
    check_finished(before, empty)


@pytest.mark.parametrize("step", some(["opening", *OPEN]))
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


def while_open(before: Before, step: str, act: Callable[[], object]) -> None:
    """Upgrade, with `act` at the first time that a step is reached."""
    waiting = [act]

    def reached(name: str) -> None:
        if name == step and waiting:
            waiting.pop()()

    upgrade(before.engine, leaves_max=None, step=reached)
    assert not waiting, "void: the step was not reached"


@pytest.mark.parametrize("step", ["opened", "copied"])
def test_fsck_finds_nothing_meanwhile(before: Before, step: str) -> None:
    problems: list[Any] = []

    def check() -> None:
        with before.engine.connect() as connection:
            problems.append(fsck(connection).problems)

    while_open(before, step, check)
    assert problems == [[]]


def opening(at_us: int, residency: int) -> ResidencyOpened:
    return ResidencyOpened(at_us, residency, whole_ledger.TENANT, "user-1", None, False, "low", (1,), (), (), 1, 9)


@pytest.mark.parametrize("step", ["opened", "window copied", "copied", "compared"])
def test_writers_write_both_forms(before: Before, empty: Engine, tmp_path: Path, step: str) -> None:
    def write() -> None:
        builders.record(before.engine, tmp_path / "spill", [opening(1, 1), opening(2, 2)], worker="during")
        with before.engine.connect() as connection:
            form = forms_of(connection)[residencies]
            newest = select(func.max(residencies.c.idx)).scalar_subquery()
            both = (select(func.count()).where(each.c.idx == newest) for each in (residencies, form))
            assert [connection.scalar(each) for each in both] == [1, 1]

    while_open(before, step, write)
    rows = changed_rows(before.engine)
    assert len(rows["residencies"]) == len(before.rows["residencies"]) + 2
    check_finished(before, empty, rows)


def test_an_older_writer_spills_and_loses_nothing(
    before: Before, empty: Engine, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """From the opening on: it would write the old form alone."""
    state_revision(monkeypatch, BEFORE)
    older = builders.writer(before.engine, tmp_path / "older", worker="older", clear_names=True)
    older.submit([opening(1, 1)])
    assert older.flush(20)
    state_revision(monkeypatch, NEXT)

    def write() -> None:
        state_revision(monkeypatch, BEFORE)
        older.submit([opening(2, 2)])
        assert not older.flush(0.5) or older.status().spilled_bytes
        assert "is newer than this program's" in older.status().cause
        older.close(5)
        assert list((tmp_path / "older").iterdir()), "control: it is in the spill"
        state_revision(monkeypatch, NEXT)

    while_open(before, "window copied", write)
    newer = builders.writer(before.engine, tmp_path / "older", worker="older", clear_names=True)
    assert newer.flush(20)
    newer.close(20)
    rows = changed_rows(before.engine)
    assert len(rows["residencies"]) == len(before.rows["residencies"]) + 2
    check_finished(before, empty, rows, copied=sum(map(len, before.rows.values())) + 1)


def test_a_purge_takes_rows_from_both_forms(before: Before, empty: Engine) -> None:
    """Some of leaves that are copied already, and some that are not yet."""
    with before.engine.connect() as connection:
        log = select(logs.c.id).where(logs.c.name == f"tenant/{whole_ledger.TENANT}").scalar_subquery()
        query = select(events.c.log, func.min(events.c.idx), func.max(events.c.idx)).where(events.c.log == log)
        run = ExpiredLeaves(*connection.execute(query.group_by(events.c.log)).one())

    def purge() -> None:
        with before.engine.connect().execution_options(**WRITE) as connection, connection.begin():
            drop_leaves(connection, [run])
            form = forms_of(connection)[residencies]
            assert connection.scalar(select(func.count()).where(form.c.log == run.log, form.c.idx < run.below)) == 0

    while_open(before, "window copied", purge)
    rows = changed_rows(before.engine)
    assert 0 < len(rows["residencies"]) < len(before.rows["residencies"])


LEAFLESS = {"idx": 0, "residency": 77, "opened_us": 1_767_225_600_000_000}


def test_rows_whose_leaf_is_gone_are_copied_and_counted(before: Before) -> None:
    """A row at a place whose leaf a purge dropped: nothing makes it again."""
    engine = before.engine
    with engine.begin() as connection:
        of = select(logs.c.id).where(logs.c.name == f"tenant/{whole_ledger.TENANT}").scalar_subquery()
        row = connection.execute(select(residencies).where(residencies.c.log == of)).first()
        assert row is not None
        connection.execute(insert(residencies), row._asdict() | LEAFLESS)
    upgrade(engine, leaves_max=None)
    with engine.connect() as connection:
        kept = select(residencies).where(residencies.c.log == row.log, residencies.c.idx == 0)
        assert connection.execute(kept).one()._asdict() == row._asdict() | LEAFLESS
        leaf = connection.scalars(
            select(events.c.leaf).where(events.c.kind == "schema-changed").order_by(events.c.at_us.desc())
        ).first()
    assert leaf is not None and orjson.loads(bytes(leaf))["leafless"] == 1


def test_a_row_without_leaf_that_lacks_a_needed_column_ends_the_change(before: Before) -> None:
    engine = before.engine
    with engine.begin() as connection:
        row = connection.execute(select(*(each for each in decisions.c if each.name != "via"))).first()
        assert row is not None
        of = select(logs.c.id).where(logs.c.name == f"tenant/{whole_ledger.TENANT}").scalar_subquery()
        connection.execute(insert(decisions), row._asdict() | {"log": connection.scalar(select(of)), "idx": 1})
    with pytest.raises(LedgerError, match="have no leaf, and its new form has no default"):
        upgrade(engine, leaves_max=None)
    assert undo(engine) == BEFORE


@pytest.mark.parametrize("where", ["old form", "new form"])
def test_a_row_that_its_leaf_does_not_give_ends_the_change(before: Before, where: str) -> None:
    engine = before.engine

    def harm() -> None:
        with engine.begin() as connection:
            table = forms_of(connection)[residencies] if where == "new form" else residencies
            place = connection.execute(select(table.c.log, table.c.idx).order_by(table.c.log).limit(1)).one()
            connection.execute(
                update(table).where(table.c.log == place.log, table.c.idx == place.idx).values(classification="other")
            )

    with pytest.raises(LedgerError, match="differs from the leaf in column `classification`") as caught:
        while_open(before, "copied" if where == "new form" else "opened", harm)
    found = caught.value.operands
    assert (found["table"], found["column"]) == ("residencies", "classification")
    assert found["log"].startswith("tenant/") and found["idx"] >= 0
    with engine.connect() as connection:
        assert current(connection) == NEXT, "control: it is still open"
    assert undo(engine) == BEFORE
    assert differences(before.catalog, catalog(engine)) == []


@pytest.mark.parametrize("place", ["a leaf of another kind", "after the log"])
def test_a_row_of_no_leaf_in_the_copy_ends_the_change(before: Before, place: str) -> None:
    engine = before.engine

    def add() -> None:
        with engine.begin() as connection:
            form = forms_of(connection)[residencies]
            row = connection.execute(select(form)).first()
            assert row is not None
            log, size = connection.execute(select(logs.c.id, logs.c.size).where(logs.c.name == "system")).one()
            idx = 0 if place == "a leaf of another kind" else size
            connection.execute(insert(form), row._asdict() | {"log": log, "idx": idx, "residency": 99})

    with pytest.raises(LedgerError, match="differs from the leaf: run"):
        while_open(before, "copied", add)
    assert undo(engine) == BEFORE


@pytest.mark.parametrize("database", ["sqlite"], indirect=True)
def test_a_ledger_under_change_is_not_moved(before: Before, empty_server: Engine) -> None:
    """Its copy would have a change that no table is there for. Control: it is moved once the change is done."""

    def move() -> None:
        with pytest.raises(LedgerError, match="a change of the source's schema is open"):
            move_ledger(before.engine, empty_server)

    upgrade(empty_server)
    while_open(before, "copied", move)
    move_ledger(before.engine, empty_server)
    assert changed_rows(empty_server) == changed_rows(before.engine)


def test_a_start_leaves_a_large_ledger_to_the_command(before: Before) -> None:
    with pytest.raises(LedgerError, match="run `kvcustody db upgrade` first"):
        upgrade(before.engine, leaves_max=10)
    with before.engine.connect() as connection:
        assert current(connection) == BEFORE
    before.engine.dispose()
    assert kill_at(before.url, "opened")
    assert upgrade(before.engine, leaves_max=10) == NEXT, "it is open: writers may start"
    with before.engine.connect() as connection:
        assert forms_of(connection)
    assert upgrade(before.engine) == NEXT
    with before.engine.connect() as connection:
        assert not forms_of(connection), "control: a small one is done at a start"


@pytest.mark.parametrize("database", ["postgresql"], indirect=True)
def test_roles_keep_their_rights_and_walls_meanwhile(before: Before, tmp_path: Path) -> None:
    def writer_and_reader() -> None:
        as_writer = open_store(f"{before.url}%20-c%20role%3D{WRITER}", timeout_seconds=20)
        builders.record(as_writer, tmp_path / "spill", [opening(1, 1)], worker="during")
        as_writer.dispose()
        with before.engine.connect() as connection:
            form = forms_of(connection)[residencies]
            everything = {
                table.fullname: connection.scalars(select(table.c.log).distinct()).all()
                for table in (form, residencies)
            }
            connection.exec_driver_sql(f"SET ROLE {READER}")
            for table in (form, residencies):
                assert connection.scalars(select(table.c.log).distinct()).all() == []
            connection.exec_driver_sql(f"SET kvcustody.tenant = '{whole_ledger.TENANT}'")
            seen = connection.scalars(select(form.c.log).distinct()).all()
            assert len(seen) == 1 < len(everything[form.fullname])

    while_open(before, "copied", writer_and_reader)


@pytest.mark.parametrize("database", ["postgresql"], indirect=True)
def test_a_reader_in_the_way_holds_up_the_swap_and_nobody_for_long(before: Before) -> None:
    """The swap gives up, and another reader has waited no longer than that; it is done once the first has ended."""
    reader = before.engine.connect()
    others: list[float] = []
    tries: list[float] = []

    def read() -> None:
        reader.execute(select(residencies)).first()

    def ask(_seconds: float) -> None:
        tries.append(_seconds)
        began = time.monotonic()
        with before.engine.connect() as connection:
            connection.execute(select(residencies)).first()
        others.append(time.monotonic() - began)
        if len(tries) == 2:
            reader.close()

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(change, "_rest", ask)
        while_open(before, "compared", read)
    assert len(tries) == 2 and len(others) == 2
    with before.engine.connect() as connection:
        assert not forms_of(connection)


@pytest.mark.parametrize("database", ["postgresql"], indirect=True)
def test_roles_are_set_up_before_a_change_or_after_it(before: Before, tmp_path: Path) -> None:
    """Roles may be brought up to date meanwhile; the first time would leave the new forms to nobody who writes."""

    def set_up_again() -> None:
        set_up_roles_in_turn(before.engine)
        as_writer = open_store(f"{before.url}%20-c%20role%3D{WRITER}", timeout_seconds=20)
        builders.record(as_writer, tmp_path / "spill", [opening(1, 1)], worker="during")
        as_writer.dispose()
        with before.engine.begin() as connection:
            connection.exec_driver_sql("DROP POLICY of_tenant ON decisions")
        with pytest.raises(LedgerError, match="then set up roles"):
            set_up_roles_in_turn(before.engine)

    while_open(before, "copied", set_up_again)
    set_up_roles_in_turn(before.engine)


@pytest.mark.parametrize("database", ["postgresql"], indirect=True)
@pytest.mark.parametrize("begins", ["begin_reading", "one_snapshot"])
def test_a_reader_of_a_moment_before_the_copy_misses_no_row(before: Before, begins: str) -> None:
    """It has not touched the tables when the swap comes, and its moment has none of the copy's rows: the swap waits."""
    reader = before.engine.connect()
    row_counts: list[int] = []

    def read() -> None:
        getattr(dialect_of(reader), begins)(reader)
        reader.execute(select(events.c.idx).limit(1)).all()

    def ask(_seconds: float) -> None:
        if not reader.closed:
            row_counts.append(len(reader.execute(select(decisions)).all()))
            reader.close()

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(change, "_rest", ask)
        while_open(before, "opened", read)
    assert row_counts == [len(before.rows["decisions"])] and row_counts[0]
    with before.engine.connect() as connection:
        assert not forms_of(connection), "control: the swap came then"


@pytest.mark.parametrize("database", ["postgresql"], indirect=True)
def test_months_that_are_made_meanwhile_are_in_the_new_form(before: Before, empty: Engine) -> None:
    """What lies in its rest by then goes into them."""
    later = months_from(1_900_000_000_000_000, 2)

    def make() -> None:
        with before.engine.begin() as connection:
            assert set(create_partitions(connection, 1_900_000_000_000_000, 1)) == {each.name for each in later}

    while_open(before, "copied", make)
    with before.engine.connect() as connection:
        for month in later:
            for table in ("residencies", "decisions", "attachments"):
                assert connection.exec_driver_sql("SELECT to_regclass(%s)", (month.of(table),)).scalar()
    check_finished(before, empty)


def test_windows_follow_the_time_that_the_last_one_took() -> None:
    assert next_window(1000, SECONDS_WANTED) == 1000
    assert next_window(1000, SECONDS_WANTED / 8) == 2000
    assert next_window(1000, SECONDS_WANTED * 2) == 500
    assert next_window(1000, SECONDS_WANTED * 100) == 250
    assert next_window(64, 100.0) == 16 and next_window(1, 100.0) == 1 and next_window(50_000, 0.0) == 50_000


@pytest.mark.parametrize("where", ["in the database", "between statements"])
def test_a_window_that_lasts_too_long_is_ended_and_taken_again_smaller(
    before: Before, empty: Engine, where: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Of more than four leaves none would end by itself."""
    endless = (
        "SELECT pg_sleep(3600)"
        if dialect_of(before.engine).roles
        else ("WITH RECURSIVE number (n) AS (SELECT 1 UNION ALL SELECT n + 1 FROM number) SELECT max(n) FROM number")
    )
    original, asked = row_windows._made_and_left, list[int]()

    def slowly(connection: Connection, forms: Any, log: int, places: range, lives: Any) -> Any:
        asked.append(len(places))
        if len(places) > 4 and where == "in the database":
            connection.exec_driver_sql(endless)
        elif len(places) > 4:
            time.sleep(row_windows.SECONDS_MAX)
        return original(connection, forms, log, places, lives)

    monkeypatch.setattr(row_windows, "_made_and_left", slowly)
    monkeypatch.setattr(row_windows, "SECONDS_MAX", 0.1)
    monkeypatch.setattr(row_windows, "next_window", lambda leaves, _: leaves)  # what was ended does not come back
    upgrade(before.engine, leaves_max=None, actor="ada")
    assert max(asked) > 4 >= asked[-1], "control: one was ended"
    monkeypatch.undo()
    with before.engine.connect() as connection:
        assert connection.scalar(select(func.count()).select_from(schema_changes)) == 0
    assert changed_rows(before.engine) == before.rows


@pytest.mark.parametrize("forged", ["edited", "deleted", "added"])
def test_fsck_names_a_row_forged_between_comparison_and_swap(before: Before, forged: str) -> None:
    """The comparison is over, so the change ends; what somebody did to the new form is in the table, and named."""
    engine = before.engine
    places: list[tuple[int, int]] = []

    def forge(step: str) -> None:
        if step != "compared":
            return
        with engine.begin() as connection:
            form = forms_of(connection)[residencies]
            row = connection.execute(select(form).order_by(form.c.log, form.c.idx).limit(1)).one()
            here = (form.c.log == row.log, form.c.idx == row.idx)
            places.append((row.log, row.idx))
            if forged == "edited":
                connection.execute(update(form).where(*here).values(classification="other"))
            elif forged == "deleted":
                connection.execute(delete(form).where(*here))
            else:
                system = connection.scalar(select(logs.c.id).where(logs.c.name == "system"))
                connection.execute(insert(form), row._asdict() | {"log": system, "idx": 0, "residency": 99})

    assert upgrade(engine, leaves_max=None, actor="ada", step=forge) == NEXT
    with engine.connect() as connection:
        found = [problem for problem in fsck(connection).problems if "residencies" in problem.what]
        name = connection.scalar(select(logs.c.name).where(logs.c.id == places[0][0]))
    assert found, "it is named"
    if forged != "added":
        assert (found[0].log, found[0].idx) == (name, places[0][1])


def test_the_command_upgrades_and_undoes(before: Before) -> None:
    before.engine.dispose()
    assert kill_at(before.url, "window copied")
    run = CliRunner().invoke(app, ["db", "upgrade", "--undo", "--ledger", before.url, "--json"])
    assert (run.exit_code, orjson.loads(run.stdout)) == (0, {"revision": BEFORE}), run.output
    again = CliRunner().invoke(app, ["db", "upgrade", "--undo", "--ledger", before.url])
    assert again.exit_code != 0 and "nothing to undo" in again.output
    run = CliRunner().invoke(app, ["db", "upgrade", "--ledger", before.url, "--json"])
    assert (run.exit_code, orjson.loads(run.stdout)) == (0, {"revision": NEXT}), run.output
