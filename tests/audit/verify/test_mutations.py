"""Every column of every table is edited, and rows of each deleted: `fsck` finds it, or it is declared no evidence.

What is edited comes from the schema: a column that is added is edited too. Each edit is one transaction, rolled back.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Iterator
from itertools import islice, zip_longest
from pathlib import Path
from typing import Any, NamedTuple

import pytest
from sqlalchemy import BigInteger as Big
from sqlalchemy import (
    Boolean,
    Column,
    Connection,
    Engine,
    Integer,
    LargeBinary,
    Row,
    Table,
    delete,
    func,
    insert,
    select,
    tuple_,
    update,
)
from sqlalchemy import column as plain_column
from sqlalchemy import table as plain_table
from sqlalchemy.exc import DBAPIError, IntegrityError

from kvcustody.audit.evidence.counters.judge_hours import judge
from kvcustody.audit.evidence.processes.sequence_gaps import keep_spans
from kvcustody.audit.evidence.query.evidence_columns import read
from kvcustody.audit.evidence.subjects.subject_table import unlink
from kvcustody.audit.kinds import (
    CaseOpened,
    CaseStepped,
    CopiesDestroyed,
    CopiesEnded,
    CopiesStored,
    CustodyOverdue,
    DecisionRecorded,
    EpochRaised,
    EpochsTaken,
    ErasureApplied,
    ErasureCompleted,
    ErasureRemaining,
    ErasureRequested,
    ErasureReread,
    Event,
    GapRecorded,
    HitCounters,
    LegalHoldChanged,
    OrphanFound,
    OrphanScanned,
    PolicyActivated,
    ReleaseStep,
    ResidencyReleased,
    RetentionPurged,
    RouteFound,
    RouteSent,
    SubjectUnlinked,
    TransferDecided,
    WorkerStarted,
    WorkerStopped,
)
from kvcustody.audit.store.schema import schema_changes as change_schema
from kvcustody.audit.store.schema import service as service_schema
from kvcustody.audit.store.schema.all_tables import (
    MONTHLY,
    every_table,
    has_leaf,
    kinds_of,
    projections,
    tables_of_one_row,
)
from kvcustody.audit.store.schema.leaf_tables import custody_ends, event_traces, receipts, releases
from kvcustody.audit.store.schema.ledger import events, subjects
from kvcustody.audit.store.schema.retention import cosignatures, timestamps
from kvcustody.audit.store.schema.trees import signed_checkpoints
from kvcustody.audit.tlog.checkpoint_signer import CheckpointSigner
from kvcustody.audit.tlog.signed_note import KeyKind, parse_note
from kvcustody.audit.tlog.signing_key import SigningKey
from kvcustody.audit.verify.ledger import fsck_ledger, fsck_log, register_rows, row_differences
from kvcustody.audit.verify.ledger.fsck_ledger import FsckReport, fsck
from kvcustody.audit.verify.ledger.life_rows import LifeRows
from kvcustody.audit.verify.ledger.not_evidence import NOT_EVIDENCE, ROWS
from kvcustody.audit.verify.ledger.table_classes import TableClass, table_classes
from kvcustody.audit.write.fold import fold
from kvcustody.clock import SystemClock
from kvcustody.governance.credentials.api_key import KeyHasher
from kvcustody.governance.release.record import ReleaseAction, make_record
from kvcustody.governance.release.signer import FileSigner
from kvcustody.governance.release.store import SqlStore
from kvcustody.governance.service.access.principals import Principals
from kvcustody.governance.service.access.roles import Role
from kvcustody.signed_document import digest

KEY = SigningKey.generate("ledger.test")
WITNESS = SigningKey.generate("witness.test", KeyKind.COSIGNATURE)
TRACE = "ab" * 16
COPIES = (("aa", "bb"), (1, 2), (4, 5), (400, 500))
LISTED = {(entry.table, name) for entry in NOT_EVIDENCE for name in entry.columns}
Make = Callable[..., Any]
Harm = Callable[[Connection], None]


class _Edit(NamedTuple):
    """An edit of a row, or its deletion (`column` None), and whether it may pass."""

    table: Table
    column: Column[Any] | None
    row: Row[Any]
    value: Any
    listed: bool

    def __str__(self) -> str:
        what = "deleted" if self.column is None else f"{self.column.name} = {self.value!r}"
        return f"{self.table.name} {tuple(self.row)[:3]}: {what}"


def lived(world: Any) -> list[Event]:
    """A small life with every kind of leaf that a table is made of."""
    events: list[Event] = list(world.run(60).events)
    at, tenant, other = world.now, world.tenants[0], world.tenants[1]
    more_events: list[Event] = [
        PolicyActivated(at, 1, "base", "shared", "sha256:1", "author"),
        DecisionRecorded(at, "attach", "permit", tenant, other, "internal", ("rule",), 1, "grant", 1, TRACE),
        EpochRaised(at, "erasure-1", tenant, "subject", 3),
        EpochsTaken(at, "door-1", 3, "ab" * 32),
        RouteSent(at, tenant, "1f" * 16, "subject", 0, 1, 3, "gpu-0", "w1", 200, 7, 1, 3, 112, 875_000),
        RouteFound(at, tenant, "1f" * 16, True, 128, 96, 2, 40, False, True, "m" * 16, TRACE),
        HitCounters(at, tenant, tenant, "attach", "permit", "own-scope", 1, at, 3, 2, 1),
        ErasureRequested(at, "e-1", tenant, "subject", "user-1", None, at + 9, "dpo", "", TRACE),
        ErasureApplied(at, "e-1", tenant, 1, 0, 1, ()),
        ErasureRemaining(at, "e-1", tenant, "held", ()),
        ErasureReread(at, "e-1", tenant, 3, 1, 0),
        ErasureCompleted(at, "e-1", tenant, "partial", 1, 2, 1, "held"),
        OrphanScanned(at, 1, "full", at, at, 3, 4, 1),
        OrphanFound(at, 1, 1, "leaked", "test", tenant, 5, (), "none", "left"),
        GapRecorded(at, "test", 5000, 5001),
        CustodyOverdue(at, 0, 1, at),
        LegalHoldChanged(at, "hold-1", tenant, "placed", "case", "counsel", "user-1"),
        CaseOpened(at, "c-1", tenant, "user-1", "erasure", "mail", 5, "UTC", ("2026-12-25",), "dana"),
        CaseStepped(at, "c-1", tenant, "identity", "asked", "", "", "a common name", "", "dana"),
        RetentionPurged(at, f"tenant/{tenant}", 0, 0, 1, "sha256:2", "one", "two", "age"),
        CopiesStored(at, "nvme", tenant, "low", *COPIES, (at + 9, at + 8), (at, at), 5),
        CopiesEnded(at, "nvme", tenant, "low", "erased", *COPIES, (at, at), (at, at), 5, "e-1"),
        CopiesDestroyed(at, "nvme", tenant, "low", "unlinked", *COPIES, (at, at)),
        TransferDecided(at, "restore", "nvme", tenant, 3, 4, 5, 6, 7, "transfer", "done", 8, "faster"),
    ]
    return events + more_events


@pytest.fixture
def filled(any_store: Engine, make_writer: Make, world: Make, tmp_path: Path) -> Engine:
    return fill(any_store, make_writer, world, tmp_path)


@pytest.fixture
def filled_sqlite(store: Engine, make_writer: Make, world: Make, tmp_path: Path) -> Engine:
    return fill(store, make_writer, world, tmp_path)


def fill(engine: Engine, make_writer: Make, world: Make, tmp_path: Path) -> Engine:
    """A signed ledger with rows in every table."""
    clock = SystemClock()
    signer = CheckpointSigner(engine, [KEY], memory=tmp_path / "memory", clock=clock)
    writer = make_writer(engine)
    for part in (lived(world(3, tenants=2)), [WorkerStopped(9_000_000, "worker-1", "closed", 5, (5, 5))]):
        writer.submit(part)
        assert writer.flush() and signer.sign_once()
    idle = make_writer(engine, worker="worker-2", spill_directory=tmp_path / "spill-2")
    idle.submit([WorkerStarted(1, "worker-2", 8, 1, 4096, "cpu", "test")])
    book = Principals(engine, KeyHasher(), clock, writer.submit_durable)
    for name, role in (("ada", Role.AUDITOR), ("ben", Role.AUTHOR), ("cy", Role.AUDITOR)):
        book.enrol(name, [role], by="local:test")
        book.issue_key(name, days=1, by="local:test")
    book.disable("ben", allow_last=True, by="local:test")
    author = FileSigner(SigningKey.generate("author"))
    before, store = "sha256:" + "0" * 64, SqlStore(engine)
    for number in (1, 2):
        record = make_record(
            author,
            ReleaseAction.PROPOSED,
            {"revision": number},
            number=number,
            previous=before,
            audience="x",
            at_us=7,
        )
        before = digest(record.to_bytes())
        writer.submit_durable(ReleaseStep(1, number, "proposed", number, "", before, "author"))
        store.append(number, record.to_bytes())
    while fold(engine):  # what comes after stays in deltas
        pass
    judged = judge(engine, engine, now_us=writer.offset_us + 10_000_000)
    assert judged is not None
    assert keep_spans(engine)
    writer.submit_durable(SubjectUnlinked(1, "tenant-0", 0, "dpo", "asked"))
    writer.submit([ResidencyReleased(9_500_000, 9999, "tenant-0", "finish", (), 0)])
    assert writer.flush() and idle.flush()
    writer.submit_durable(SubjectUnlinked(2, "tenant-1", 0, "dpo", "committed, and under no checkpoint yet"))
    with engine.begin() as connection:
        unlink(connection, "tenant-0", "nobody")
        note = connection.execute(select(signed_checkpoints)).first()
        assert note is not None
        line = WITNESS.sign(parse_note(bytes(note.note)).text, at_seconds=1_800_000_000).line().encode()
        row = {"size": note.size, "witness": WITNESS.name, "line": line, "at_us": 1_800_000_000_000_000}
        connection.execute(insert(cosignatures).values(row))
        connection.execute(insert(timestamps).values(size=note.size, authority="tsa", token=b"token", at_us=1))
        for table in _service_tables(connection):
            connection.execute(insert(table).values({column.name: _sample(column) for column in table.columns}))
    return engine


def _service_tables(connection: Connection) -> list[Table]:
    """Tables of the control plane and of upgrades that nothing has filled: a row of any content does."""
    mine = [
        table for table in every_table() if any(hasattr(room, table.name) for room in (service_schema, change_schema))
    ]
    return [table for table in mine if connection.execute(select(table).limit(1)).first() is None]


def _sample(column: Column[Any]) -> Any:
    return False if isinstance(column.type, Boolean) else _other(column, {}, 0)


def _other(column: Column[Any], row: Any, before: Any) -> Any:
    """Another value for a column, of its own kind."""
    if isinstance(column.type, Boolean):
        return not before
    if isinstance(column.type, (Big, Integer)):
        return int(before or 0) + 1_000_003
    if isinstance(column.type, LargeBinary):
        old = bytes(before or b"\0")
        return old[:-1] + bytes([old[-1] ^ 1])
    old = str(before or "x")
    return old[:-1] + ("y" if old[-1] != "y" else "x")


def _exempt(table: Table, row: Row[Any], name: str) -> bool:
    """Whether a listed entry is about this row: some are about rows of one class alone."""
    if table.name == "incarnations":
        return row.shards is None
    if table.name == "subjects":
        return str(row.secret or "").startswith("s1:")
    if table.name == "tree_nodes":
        return bool(row.level >= 16)
    if table.name == "service_keys" and name == "revoked_us":
        return row.revoked_us is not None  # on record is that it was; the moment is in the leaf
    if table.name == "service_principals" and name == "disabled_us":
        return row.disabled_us is not None
    return True


def _edits(connection: Connection) -> Iterator[_Edit]:
    """The edits of each column in three rows: the first one, a further item of a leaf, and the last one where rows are
    not all of one class. Also the deletion of each of these rows.
    """
    for table in every_table():
        rows = connection.execute(select(table).order_by(*table.primary_key.columns)).all()
        assert rows, f"`{table.name}` has no row: nothing would be tried"
        further = [row for row in rows if "item" in table.columns and row.item > 0][:1]
        for row in (rows[0], *further, rows[-1]):
            is_last = row is rows[-1] and row not in further
            for column in () if is_last and table in projections() else table.columns:
                value = _other(column, row, getattr(row, column.name))
                listed = {(table.name, column.name), (table.name, "*")} & LISTED
                yield _Edit(table, column, row, value, bool(listed) and _exempt(table, row, column.name))
            gone = (table.name, ROWS) in LISTED
            yield _Edit(table, None, row, None, gone and _exempt(table, row, ROWS))


def _do(connection: Connection, edit: _Edit) -> bool:
    """Make the edit; False where the database itself refuses such a row."""
    keys = [column == getattr(edit.row, column.name) for column in edit.table.primary_key.columns]
    try:
        with connection.begin_nested():
            if edit.column is None:
                return connection.execute(delete(edit.table).where(*keys)).rowcount == 1
            values = {edit.column.name: edit.value}
            return connection.execute(update(edit.table).where(*keys).values(values)).rowcount == 1
    except IntegrityError:
        return False


def checked(connection: Connection) -> FsckReport:
    return fsck(connection, keys=[KEY.verifier], witnesses=[WITNESS.verifier])


def _wanted(engine: Engine, of: str = "") -> list[_Edit]:
    """The edits of a sound ledger that are to be found."""
    with engine.connect() as connection:
        report = checked(connection)
        assert report.ok, report.problems
        edits = [edit for edit in _edits(connection) if edit.table.name.startswith(of)]
    return [edit for edit in edits if not edit.listed]


def _missed(engine: Engine, unguarded: Harm, guard: Harm, wanted: list[_Edit]) -> Iterator[str]:
    """Those that are not found."""
    for together in _rounds(wanted):
        with engine.connect() as connection:
            unguarded(connection)
            done = [edit for edit in together if _do(connection, edit)]
            refused = [edit for edit in together if edit not in done]  # another row has this key
            assert all(edit.column is not None and edit.column.primary_key for edit in refused), refused
            guard(connection)
            report = checked(connection)
            for edit in done:
                if report.ok or (edit.table in projections() and not _names(report, edit.table, edit.row.idx)):
                    yield str(edit)
            connection.rollback()


def _rounds(edits: list[_Edit]) -> list[list[_Edit]]:
    """One edit at a time; of projections, whose problems name the table and the leaf, one of each table at a time."""
    by_table: dict[str, list[_Edit]] = {}
    for edit in edits:
        if edit.table in projections():
            by_table.setdefault(edit.table.name, []).append(edit)
    rounds = [[edit for edit in some if edit] for some in zip_longest(*by_table.values())]
    return rounds + [[edit] for edit in edits if edit.table not in projections()]


def _names(report: FsckReport, table: Table, idx: int) -> bool:
    """Whether a problem is of this table and this leaf."""
    return any(f"`{table.name}`" in problem.what and problem.idx == problem.last == idx for problem in report.problems)


@pytest.mark.system
def test_every_edit_is_found_or_declared(filled: Engine, unguarded: Harm, guard: Harm) -> None:
    wanted = _wanted(filled)
    missed = list(_missed(filled, unguarded, guard, wanted))
    assert not missed and len(wanted) > 250, "\n".join(missed)


OFF: dict[str, Callable[[pytest.MonkeyPatch], None]] = {
    "incarnations": lambda patch: patch.setattr(LifeRows, "wrong", lambda _: iter(())),
    "workers": lambda patch: patch.setattr(LifeRows, "wrong", lambda _: iter(())),
    "subjects": lambda patch: patch.setitem(register_rows.REGISTERS, "subjects", lambda *_: None),
    "tenants": lambda patch: patch.setitem(register_rows.REGISTERS, "tenants", lambda *_: None),
    "policy_release": lambda patch: patch.setitem(register_rows.REGISTERS, "policy_release", lambda *_: None),
    "service_keys": lambda patch: patch.setitem(register_rows.REGISTERS, "service_principals", lambda *_: None),
    "service_principals": lambda patch: patch.setitem(register_rows.REGISTERS, "service_principals", lambda *_: None),
    "cosignatures": lambda patch: patch.setattr(register_rows, "_check_cosignatures", lambda *_: None),
    "releases": lambda patch: patch.setattr(
        row_differences, "projections", lambda: [table for table in projections() if table.name != "releases"]
    ),
    "counter": lambda patch: patch.setattr(fsck_log, "wrong_figures", lambda *_: ()),
    "coverage_hours": lambda patch: patch.setattr(fsck_ledger, "wrong_verdicts", lambda *_: ()),
    "coverage_pass": lambda patch: patch.setattr(fsck_ledger, "wrong_verdicts", lambda *_: ()),
    "sequence_spans": lambda patch: patch.setattr(fsck_ledger, "wrong_spans", lambda *_: ()),
    "checkpoints": lambda patch: patch.setattr(fsck_ledger, "_check_commits", lambda *_: ()),
}


@pytest.mark.parametrize("table", OFF)
def test_without_its_derivation_edits_of_a_table_pass(
    table: str,
    monkeypatch: pytest.MonkeyPatch,
    unguarded: Harm,
    guard: Harm,
    filled_sqlite: Engine,
) -> None:
    """Positive control, table by table: some edit is missed."""
    OFF[table](monkeypatch)
    assert any(_missed(filled_sqlite, unguarded, guard, _wanted(filled_sqlite, table)))


def test_the_list_names_what_there_is() -> None:
    tables = {table.name: table for table in every_table()}
    for entry in NOT_EVIDENCE:
        assert set(entry.columns) <= {"*", ROWS, *tables[entry.table].columns.keys()}, entry


def test_names_that_are_swapped_are_found_and_not_told(filled: Engine, unguarded: Make) -> None:
    """Two people of one tenant, their names exchanged: `subject show` would answer with the other's."""
    from kvcustody.audit.evidence.subjects.subject_table import names_of
    from kvcustody.errors import LedgerError

    with filled.connect() as connection:
        first, second, *_ = connection.execute(
            select(subjects).where(subjects.c.tenant == "tenant-1", subjects.c.session == "")
        ).all()
        assert names_of(connection, "tenant-1", first.subject)
        for row, name in ((first, second.subject), (second, first.subject)):
            where = subjects.c.pseudonym == row.pseudonym
            connection.execute(update(subjects).where(where).values(subject=name))
        report = checked(connection)
        assert [problem.what for problem in report.problems if first.pseudonym in problem.what]
        with pytest.raises(LedgerError, match=first.pseudonym):
            names_of(connection, "tenant-1", second.subject)


class _Insert(NamedTuple):
    """A row that nobody is to believe: a copy of one that is there, with other values in its key."""

    table: Table
    form: str
    row: dict[str, Any]

    def __str__(self) -> str:
        return f"{self.table.name}: {self.form}"


FAR = 1_000_003
ANOTHER_ITEM, NEXT_ITEM = "another item of a leaf", "one item more of a leaf that lists several"
PLACES = {"negative": -7, "fractional": 3.5, "beyond the end": FAR}


def _forms(table: Table, row: dict[str, Any]) -> Iterator[_Insert]:
    """Every form of a stray row that the table's columns allow."""
    key = table.primary_key.columns
    if "log" in table.columns:
        for form, log in {"log not there": 9999, "negative log": -7, "fractional log": 1.5}.items():
            yield _Insert(table, form, row | {"log": log})
    for column in key:
        if column.name != "log" and isinstance(column.type, (Big, Integer)):
            for form, place in PLACES.items():
                yield _Insert(table, f"{form} {column.name}", row | {column.name: place})
    if [column.name for column in key] == ["id"]:
        yield _Insert(table, "second row", row | {"id": 2})
    if not any(isinstance(column.type, (Big, Integer)) for column in key):
        texts = {column.name: _other(column, row, row[column.name]) for column in key}
        yield _Insert(table, "second row", row | texts)


def _is_no_evidence(table: Table) -> bool:
    """Whether nothing rests on any column of a table, so that a row more of it proves nothing."""
    return (table.name, "*") in LISTED or all((table.name, column.name) in LISTED for column in table.columns)


def _inserts(connection: Connection) -> list[_Insert]:
    inserts = []
    for table in every_table():
        row = connection.execute(select(table).order_by(*table.primary_key.columns)).first()
        assert row is not None, table.name
        inserts += [] if _is_no_evidence(table) else _forms(table, row._asdict())
        if table in projections():
            inserts += _of_leaves_that_are_there(connection, table, row._asdict())
    return inserts


LOG_FORMS = {"log not there", "negative log", "fractional log"}


def _wanted_forms(of: TableClass, table: Table) -> set[str]:
    """The stray rows that are to be tried of a table, by its class, its key and its log."""
    if _is_no_evidence(table):
        return set()
    numbers = [column.name for column in table.primary_key if isinstance(column.type, Integer)]
    wanted = {f"{form} {name}" for form in PLACES for name in numbers if name != "log"}
    wanted |= LOG_FORMS if "log" in table.columns else set()
    wanted |= {"second row"} if table in tables_of_one_row() or not numbers else set()
    return wanted | ({"of a leaf that is there: subject-unlinked"} if of is TableClass.LEAF else set())


def _left_out(inserts: list[_Insert]) -> set[str]:
    """Tables of a class, and forms of each, that no insert tries."""
    tried = {(entry.table, entry.form) for entry in inserts}
    return {
        f"{of.name} {table.name}: {form}"
        for table, of in table_classes().items()
        for form in _wanted_forms(of, table)
        if (table, form) not in tried
    }


def test_each_class_of_tables_has_every_form_of_stray_rows(filled: Engine) -> None:
    """Of each table that is evidence; the control leaves one table out, and one form."""
    with filled.connect() as connection:
        inserts = _inserts(connection)
    assert _left_out(inserts) == set()
    assert {table_classes()[entry.table] for entry in inserts} == {*TableClass}
    for table in {entry.table for entry in inserts}:
        found = _left_out([entry for entry in inserts if entry.table is not table])
        assert found and all(f" {table.name}: " in what for what in found)
    for form in {what.split(": ", 1)[1] for what in _left_out([])}:
        found = _left_out([entry for entry in inserts if entry.form != form])
        assert found and all(what.endswith(f": {form}") for what in found)


def _of_leaves_that_are_there(connection: Connection, table: Table, row: dict[str, Any]) -> Iterator[_Insert]:
    """A row of a leaf that gives no such row: one of another kind or log, another item, the same in another month."""
    own = select(table.c.log, table.c.idx)
    at_us = MONTHLY.get(table.name, "at_us")
    free = select(events).where(tuple_(events.c.log, events.c.idx).not_in(own)).order_by(events.c.log, events.c.idx)
    leaves = connection.execute(free).all()
    kinds = {leaf.kind: leaf for leaf in reversed(leaves)}
    for kind in [kind for kind in kinds if kind in kinds_of(table)] + list(kinds)[:1]:
        place = {"log": kinds[kind].log, "idx": kinds[kind].idx, at_us: kinds[kind].at_us}
        yield _Insert(table, f"of a leaf that is there: {kind}", row | place | ({"item": 0} if "item" in row else {}))
    if "item" in row:
        yield _Insert(table, ANOTHER_ITEM, row | {"item": row["item"] + 77})
        last = select(table).where(table.c.item > 0).order_by(table.c.log, table.c.idx, table.c.item.desc())
        of_several = connection.execute(last.limit(1)).first()
        if of_several is not None:
            yield _Insert(table, NEXT_ITEM, of_several._asdict() | {"item": of_several.item + 1})
    if connection.dialect.name == "postgresql" and table.name in MONTHLY:
        yield _Insert(table, "in another month", row | {at_us: row[at_us] + 40 * 86_400_000_000})


def _insert(connection: Connection, entry: _Insert) -> bool:
    """Insert the row past the schema's types; False where the database itself refuses it.

    PostgreSQL would round 3.5 to an integer before it stores it; as text it says that it keeps no such number.
    """
    raw = insert(plain_table(entry.table.name, *map(plain_column, entry.row)))
    rounds = connection.dialect.name == "postgresql"
    row = {name: str(value) if rounds and isinstance(value, float) else value for name, value in entry.row.items()}
    try:
        with connection.begin_nested():
            connection.execute(raw, row)
    except DBAPIError:
        return False
    return True


def _outcomes(engine: Engine, unguarded: Harm, guard: Harm) -> Iterator[tuple[str, str]]:
    """Each insert that is tried, and what becomes of it: the database refused it, `fsck` found it, nobody did.

    `fsck` finds a row of a leaf where it names its table and that leaf, unless its key is no number.
    """
    with engine.connect() as connection:
        inserts = _inserts(connection)
    for entry in inserts:
        with engine.connect() as connection:
            unguarded(connection)
            outcome = "refused"
            if _insert(connection, entry):
                guard(connection)
                report, row = checked(connection), entry.row
                at_a_place = entry.table in (*projections(), events) and "fractional" not in entry.form
                found = _names(report, entry.table, row["idx"]) if at_a_place else not report.ok
                outcome = "found" if found else "missed"
            connection.rollback()
        yield str(entry), outcome


@pytest.mark.system
def test_every_stray_row_is_refused_or_found(filled: Engine, unguarded: Harm, guard: Harm) -> None:
    outcomes = dict(_outcomes(filled, unguarded, guard))
    counts = Counter(outcomes.values())
    print(f"{filled.dialect.name}: {len(outcomes)} forms of stray rows, {counts['refused']} refused by the database")
    assert not counts["missed"] and len(outcomes) >= 200, outcomes


def test_no_condition_believes_a_stray_row(filled: Engine, unguarded: Harm) -> None:
    """But for another item of a leaf, which those see who read the leaf (`evidence_columns`), and `fsck`.

    A row of `event_traces` may be of any leaf: it finds leaves, and says nothing of them.
    """
    with filled.connect() as connection:
        inserts = [each for each in _inserts(connection) if each.table in (*projections(), events)]
    tried = 0
    for entry in inserts:
        of_any_leaf = entry.table is event_traces and entry.form.startswith("of a leaf")
        if of_any_leaf or entry.form in (ANOTHER_ITEM, NEXT_ITEM, "beyond the end item", "fractional item"):
            continue
        every = select(func.count()).select_from(entry.table)
        believed = every.where(has_leaf(entry.table))
        with filled.connect() as connection:
            before = [connection.scalar(query) or 0 for query in (every, believed)]
            assert before[0] == before[1], entry.table.name
            unguarded(connection)
            if connection.dialect.name == "postgresql":
                rule = f"ck_{entry.table.name}_place"
                connection.exec_driver_sql(f"ALTER TABLE {entry.table.name} DROP CONSTRAINT {rule}")
            if _insert(connection, entry):
                assert connection.scalar(every) == before[0] + 1, "control: the row is there"
                assert connection.scalar(believed) == before[1], entry
                tried += 1
            connection.rollback()
    assert tried > 100


@pytest.mark.parametrize("table", [releases, receipts, custody_ends], ids=str)
def test_an_item_that_a_leaf_does_not_have_is_not_read(filled: Engine, table: Table) -> None:
    def listed(connection: Connection) -> int:
        return read(connection, table, (table.c.idx,), table.c.item >= 0).size

    with filled.connect() as connection:
        before = listed(connection)
        row = connection.execute(select(table).where(table.c.item > 0)).first()
        assert row is not None and before > 0
        connection.execute(insert(table), row._asdict() | {"item": 77})
        assert listed(connection) == before
        connection.rollback()


def test_without_the_search_for_strays_they_pass(
    filled_sqlite: Engine, unguarded: Harm, guard: Harm, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Positive control, with as many as show that it is not one table's."""
    monkeypatch.setattr(fsck_ledger, "stray_rows", lambda _: ())
    missed = (entry for entry, outcome in _outcomes(filled_sqlite, unguarded, guard) if outcome == "missed")
    assert len(list(islice(missed, 20))) == 20


def test_rules_that_are_gone_are_found(filled: Engine) -> None:
    in_file = filled.dialect.name == "sqlite"
    changed = (
        ("events", "idx >= 0", "idx >= -1"),
        ("receipts", "typeof(item)", "typeof(1)"),
        ("erasures", "REFERENCES logs", "REFERENCES workers"),
    )
    harms = [
        "ALTER TABLE events DROP CONSTRAINT ck_events_place",
        "ALTER TABLE receipts DROP CONSTRAINT ck_receipts_place, ADD CONSTRAINT ck_receipts_place CHECK (true)",
        "ALTER TABLE erasures DROP CONSTRAINT fk_erasures_log",
    ]
    if in_file:
        update = "UPDATE sqlite_schema SET sql = replace(sql, '{1}', '{2}') WHERE name = '{0}'"
        harms = [update.format(*change) for change in changed]
    for harm in harms:
        with filled.connect() as connection:
            assert checked(connection).ok
            connection.rollback()
            if in_file:
                connection.detach()
                connection.exec_driver_sql("PRAGMA writable_schema = ON")
            connection.exec_driver_sql(harm)
            assert {problem.log for problem in checked(connection).problems} == {fsck_ledger.RULES}, harm
            connection.rollback()


def test_triggers_that_are_gone_are_found(filled: Engine) -> None:
    with filled.connect() as connection:
        assert checked(connection).ok
        if connection.dialect.name == "postgresql":
            harms = [
                "DROP TRIGGER append_only ON events",
                "DROP TRIGGER no_truncate ON events_rest",
                "ALTER TABLE events DISABLE TRIGGER places",
                "CREATE OR REPLACE FUNCTION kvcustody_append_only() RETURNS trigger LANGUAGE plpgsql AS "
                "'BEGIN RETURN OLD; END'",
            ]
        else:
            names = connection.exec_driver_sql("SELECT name FROM sqlite_master WHERE type = 'trigger'")
            harms = [f"DROP TRIGGER {name}" for name in names.scalars()]
    for harm in harms:
        with filled.connect() as connection:
            connection.exec_driver_sql(harm)
            assert {problem.log for problem in checked(connection).problems} == {fsck_ledger.TRIGGERS}, harm
            connection.rollback()
