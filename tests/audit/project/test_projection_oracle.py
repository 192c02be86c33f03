"""Rows compared with a second implementation that only reads leaf bytes: every table of one leaf, every fold, every
sum.
"""

from __future__ import annotations

import sys
from collections import Counter, defaultdict
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import orjson
import pytest
from sqlalchemy import Connection, Engine, select

from kvcustody.audit import project as projecting
from kvcustody.audit.keep import purge_and_legal_hold
from kvcustody.audit.kinds import Event, WorkerDied, WorkerReturned
from kvcustody.audit.leaf import leaves
from kvcustody.audit.leaf.batch import UNKNOWN_WORKER, read_leaves
from kvcustody.audit.project import CARRIED, IncarnationRow, life_changes, project, rows_of
from kvcustody.audit.store.schema.all_tables import projections
from kvcustody.audit.store.schema.counters import ALL_HOURS, ALL_LOGS, counter_deltas, counters
from kvcustody.audit.store.schema.ledger import events, incarnations, logs, tenants, workers
from kvcustody.audit.tlog.proofs import TILE_WIDTH
from kvcustody.audit.verify.ledger.fsck_ledger import fsck
from kvcustody.audit.write.rebuild import LogLeaves, rebuild_ledger
from kvcustody.migrations.upgrade import upgrade
from standins.audit.ledgers import report_ledger, tiered_ledger, whole_ledger
from standins.audit.projection_oracle import TABLES, Opinion, Row, Stored
from standins.audit.recorded_events import CONTEXT, OLDER, WRITTEN, event_of
from standins.migrations import first_schema

Rows = dict[str, dict[tuple[Any, ...], Row]]
LEAVES = [
    *(leaf.data for recorded in WRITTEN for leaf in leaves(event_of(recorded), CONTEXT, recorded["sequence"])),
    *(recorded["leaf"].encode() for recorded in OLDER),
]
"""Leaves of every kind with every field and without, and as earlier versions wrote them."""


def stored_leaves() -> list[Stored]:
    bodies = map(orjson.loads, LEAVES)
    return [Stored(body["log"], idx, leaf) for idx, (body, leaf) in enumerate(zip(bodies, LEAVES, strict=True))]


def projected(opinion: Opinion) -> Rows:
    """What `project` makes of the same leaves; a process stands in them by its uuid, a log by its name."""
    batch, rows_by_table = read_leaves(LEAVES), defaultdict[str, dict[tuple[Any, ...], Row]](dict)
    logs: Any = batch.logs

    def life_of(uuid: str) -> IncarnationRow:
        return IncarnationRow(uuid, opinion.offsets.get(uuid, 0))  # type: ignore[arg-type] # by name

    for table, columns in project(batch, logs, range(len(LEAVES)), life_of).items():
        names = [column.name for column in table.columns]
        for values in (row for some in columns for row in rows_of(some)):
            row = dict(zip(names, values, strict=True))
            rows_by_table[table.name][tuple(row.pop(column.name) for column in table.primary_key)] = row
    return rows_by_table


def differing(made: Rows, opinion: Opinion) -> list[str]:
    """Every table whose rows are not those of the second opinion, with the first that differs."""
    problems = []
    for name in sorted({table.name for table in projections()} | (opinion.rows.keys() - {"events"})):
        ours, theirs = made.get(name, {}), opinion.rows.get(name, {})
        for key in sorted(ours.keys() | theirs.keys(), key=repr):
            if ours.get(key) != theirs.get(key):
                problems.append(f"{name} {key}: {ours.get(key)} is {theirs.get(key)} by its leaf")
                break
    return problems


@pytest.fixture(scope="module")
def opinion() -> Opinion:
    return Opinion(stored_leaves())


def test_every_table_of_leaves_is_in_the_second_opinion() -> None:
    assert {table.name for table in projections()} == {*TABLES, "event_traces"}


def test_every_kind_is_projected_as_the_second_opinion_has_it(opinion: Opinion) -> None:
    assert differing(projected(opinion), opinion) == []
    assert opinion.rows.keys() == {*TABLES, "event_traces", "events"}, "void: a table without a row"


@pytest.mark.parametrize("kind", projecting._SOURCES)
def test_a_column_made_of_anything_else_is_found(opinion: Opinion, kind: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """Mutants of `project`, one for each column of the kind: it takes another value of the leaf, or a changed one."""
    table = projecting._TABLES[kind]
    right = projecting._of_kind
    for place, column in enumerate([column.name for column in table.columns][2:]):

        def wrong(of: Any, group: Any, *others: Any, place: int = place) -> Any:
            _, places, made = right(of, group, *others)
            columns = list(made)
            if group.kind == kind:
                columns[place] = list(map(_another, columns[place]))
            return of, places, columns

        with monkeypatch.context() as patch:
            patch.setattr(projecting, "_of_kind", wrong)
            found = differing(projected(opinion), opinion)
        assert [problem.split()[0] for problem in found] == [table.name], column


def _another(value: Any) -> Any:
    if isinstance(value, bool):
        return not value
    return "another" if value is None else f"{value}x" if isinstance(value, str) else value + 1


# -- ledgers as they are stored -----------------------------------------------------------------------------------


class Held:
    """What a ledger has stored; a process stands in it by its uuid, a log by its name."""

    def __init__(self, connection: Connection) -> None:
        self._connection = connection
        self.logs = {row.id: row.name for row in connection.execute(select(logs.c.id, logs.c.name))}
        lives = select(incarnations.c.id, incarnations.c.uuid)
        self.lives = {row.id: row.uuid for row in connection.execute(lives)}

    def opinion(self) -> Opinion:
        rows = connection_rows(self._connection, events)
        rows.sort(key=lambda row: (row["log"], row["idx"]))  # PostgreSQL gives them month by month
        return Opinion(Stored(self.logs[row["log"]], row["idx"], bytes(row["leaf"])) for row in rows)

    def rows(self) -> Rows:
        rows_by_table: Rows = {}
        for table in (events, *projections()):
            keys = [column.name for column in table.primary_key]
            for row in connection_rows(self._connection, table):
                row["log"] = self.logs[row["log"]]
                if "incarnation" in row:
                    row["incarnation"] = self.lives[row["incarnation"]]
                rows_by_table.setdefault(table.name, {})[tuple(row.pop(key) for key in keys)] = row
        return rows_by_table

    def folds(self) -> dict[str, dict[str, Row]]:
        names = {row["id"]: row["name"] for row in connection_rows(self._connection, workers)}
        lives = {row.pop("uuid"): row for row in connection_rows(self._connection, incarnations)}
        for row in lives.values():
            row["worker"] = names[row["worker"]]
            del row["id"], row["started_us"]
        if not any(row["worker"] == UNKNOWN_WORKER for row in lives.values()):
            names = {number: name for number, name in names.items() if name != UNKNOWN_WORKER}
        rows = connection_rows(self._connection, tenants)
        of_tenants = {row["tenant"]: {"log": self.logs[row["log"]]} for row in rows}
        return {
            "incarnations": lives,
            "workers": {name: {} for name in names.values()},
            "tenants": of_tenants,
        }

    def sums(self) -> Counter[tuple[Any, ...]]:
        """But for what dropped leaves left in custody, which no leaf says any more."""
        sums: Counter[tuple[Any, ...]] = Counter()
        for table in (counters, counter_deltas):
            for row in connection_rows(self._connection, table):
                if row["hour_us"] == ALL_HOURS or row["log"] == ALL_LOGS:
                    continue
                for *name, value in orjson.loads(row["figures"]):
                    sums[self.logs[row["log"]], row["hour_us"], *name] += value
        return Counter({name: value for name, value in sums.items() if value and name[3] != CARRIED[1]})


def connection_rows(connection: Connection, table: Any) -> list[Row]:
    return [dict(row) for row in connection.execute(select(table)).mappings()]


def problems_of(connection: Connection) -> list[str]:
    """Where rows, folds and sums are not what the leaves give."""
    held = Held(connection)
    opinion = held.opinion()
    problems = differing(held.rows(), opinion)
    for name, rows in held.folds().items():
        others = opinion.folds[name]
        problems += [
            f"{name} {key}: {rows.get(key)} is {others.get(key)} by its leaves"
            for key in sorted(rows.keys() | others.keys())
            if rows.get(key) != others.get(key)
        ]
    sums = held.sums()
    return problems + [
        f"sums {name}: {sums[name]} is {opinion.sums[name]} by the leaves"
        for name in sorted(sums.keys() | opinion.sums.keys())
        if sums[name] != opinion.sums[name]
    ]


@pytest.mark.parametrize("fill", [report_ledger.fill, tiered_ledger.fill], ids=["reports", "tiers"])
def test_a_ledger_holds_what_its_leaves_give(
    any_store: Engine, world: Callable[..., Any], tmp_path: Path, fill: Callable[..., Any]
) -> None:
    fill(any_store, world, tmp_path)
    with any_store.connect() as connection:
        problems = problems_of(connection)
        assert not problems, "\n".join(problems)


EDITS = [
    ("incarnations", "software", "another"),
    ("incarnations", "end", "died"),
    ("workers", "name", "another"),
    ("tenants", "tenant", "another"),
    ("counter_deltas", "figures", orjson.dumps([["receipt", "bytes", "full", "", "", 1]]).decode()),
]


@pytest.mark.parametrize(("table", "column", "value"), EDITS, ids=lambda edit: str(edit)[:14])
def test_an_edited_row_of_a_fold_or_a_sum_is_found(
    store: Engine,
    world: Callable[..., Any],
    tmp_path: Path,
    table: str,
    column: str,
    value: str,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    report_ledger.fill(store, world, tmp_path)

    def edited(connection: Connection, of: Any) -> list[Row]:
        rows = [dict(row) for row in connection.execute(select(of)).mappings()]
        if of.name == table:
            rows[0][column] = value
        return rows

    monkeypatch.setattr(sys.modules[__name__], "connection_rows", edited)
    with store.connect() as connection:
        assert problems_of(connection)


@pytest.fixture
def purged(tmp_path: Path) -> Iterator[Engine]:
    """The ledger of commit f6818e1f: a purge, a process that died, months of traffic, figures by hour."""
    from kvcustody.audit.store.database.engine import open_store

    engine = open_store(first_schema.restore_sqlite(tmp_path / "ledger.db"))
    upgrade(engine)
    yield engine
    engine.dispose()


def test_what_a_purge_left_is_what_the_leaves_that_are_left_give(purged: Engine) -> None:
    with purged.connect() as connection:
        problems = problems_of(connection)
        assert not problems, "\n".join(problems)


# -- a ledger that has everything -----------------------------------------------------------------------------------


def test_a_ledger_that_has_everything_holds_what_its_leaves_give(
    store: Engine, lock: whole_ledger.Lock, tmp_path: Path
) -> None:
    check_whole(store, lock, tmp_path)


def test_a_ledger_that_has_everything_holds_what_its_leaves_give_on_postgresql(
    postgres_store: Engine, lock: whole_ledger.Lock, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    purge_months, emptied = purge_and_legal_hold.purge_months, list[int]()

    def counted(*how: Any) -> int:
        emptied.append(purge_months(*how))
        return emptied[-1]

    monkeypatch.setattr(purge_and_legal_hold, "purge_months", counted)
    written = check_whole(postgres_store, lock, tmp_path)
    dropped = sum(plan.leaves for plan in written.purged)
    assert 0 < emptied[0] < dropped, "void: no month was emptied at once, or nothing went row by row"


def check_whole(store: Engine, lock: whole_ledger.Lock, folder: Path) -> whole_ledger.WholeLedger:
    """Rows, folds and sums by the second opinion, by `fsck`, and by a ledger that is rebuilt from the leaves."""
    written = whole_ledger.fill(store, folder, lock)
    with store.connect() as connection, rebuilt(connection, folder).connect() as again:
        held = Held(connection)
        rows = held.rows()
        check_has_everything(rows, written)
        problems = problems_of(connection)
        assert not problems, "\n".join(problems)
        report = fsck(connection, keys=[whole_ledger.KEY.verifier])
        assert report.ok, report.problems
        assert Held(again).rows() == rows
        assert Held(again).folds() == held.folds()
        problems = problems_of(again)
        assert not problems, "\n".join(problems)
    return written


def check_has_everything(rows: Rows, written: whole_ledger.WholeLedger) -> None:
    """The control: each thing that makes rows hard to get right is there."""
    leaves = {(log, idx): row for (log, idx), row in sorted(rows["events"].items())}
    assert {row["kind"] for row in leaves.values()} == {each["kind"] for each in WRITTEN}, "every kind"
    assert any(row["parts"] > 2 for row in leaves.values()), "an event of several parts"
    names = Counter((row["incarnation"], row["sequence"], row["part"]) for row in leaves.values())
    assert 2 in names.values(), "an event in two logs"
    log, first = written.purged[0].log, written.purged[0].below
    of_log = {idx: row for (name, idx), row in leaves.items() if name == log}
    assert min(of_log) == first > TILE_WIDTH and first % TILE_WIDTH, "a purge inside a tile"
    assert not any(name == written.purged[1].log for name, _ in leaves), "a log that has no leaf any more"
    writers = [row["incarnation"] for row in of_log.values() if row["incarnation"] in written.turns]
    assert writers[:6] == [*written.turns] * 3, "two writers in turns"
    newest_us = max(row["at_us"] for idx, row in of_log.items() if row["incarnation"] in written.turns)
    late = [idx for idx, row in of_log.items() if row["incarnation"] == written.late]
    assert min(late) > first and max(of_log[idx]["at_us"] for idx in late) < newest_us, "a late spill"
    lives = [orjson.loads(row["leaf"]) for row in leaves.values() if row["kind"].startswith("worker-")]
    ends = [body["kind"] for body in lives if body.get("of_incarnation") == written.returned]
    assert ends == ["worker-died", "worker-returned", "worker-died"]
    kinds = Counter(row["kind"] for row in rows["outages"].values())
    assert kinds["withdrawn"] > 1, "a withdrawn event, beside the one of every kind"


# -- rows made anew -------------------------------------------------------------------------------------------------


def rebuilt(source: Connection, folder: Path) -> Engine:
    """An empty ledger filled from the leaves of another."""
    from kvcustody.audit.store.database.engine import open_store

    engine = open_store(folder / "rebuilt.db")
    every: dict[int, list[bytes]] = defaultdict(list)
    for row in source.execute(select(events).order_by(events.c.log, events.c.idx)):
        every[row.log].append(bytes(row.leaf))
    with engine.begin() as connection:
        projections()[0].metadata.create_all(connection)
        rebuild_ledger(
            connection,
            [
                LogLeaves(log.name, log.size - len(every[log.id]), log.size, every[log.id])
                for log in source.execute(select(logs).order_by(logs.c.name))
            ],
        )
    return engine


@pytest.mark.parametrize("fill", [report_ledger.fill, tiered_ledger.fill], ids=["reports", "tiers"])
def test_a_ledger_rebuilt_from_its_leaves_has_its_rows(
    store: Engine, world: Callable[..., Any], tmp_path: Path, fill: Callable[..., Any]
) -> None:
    fill(store, world, tmp_path)
    with store.connect() as connection, rebuilt(connection, tmp_path).connect() as again:
        assert Held(again).rows() == Held(connection).rows()
        assert Held(again).folds() == Held(connection).folds()
        problems = problems_of(again)
        assert not problems, "\n".join(problems)


def test_a_log_whose_first_leaves_were_purged_begins_at_the_first_that_is_left(purged: Engine, tmp_path: Path) -> None:
    with purged.connect() as connection, rebuilt(connection, tmp_path).connect() as again:
        rows = Held(again).rows()
        assert rows == Held(connection).rows()
        assert ("tenant/tenant-0", 0) not in rows["events"], "void: nothing was purged"
        problems = problems_of(again)
        assert not problems, "\n".join(problems)


def _life(kind: type[Event], at_us: int, *values: Any) -> bytes:
    [leaf] = leaves(kind(at_us, "gpu-0", CONTEXT.incarnation, *values), CONTEXT, at_us)
    return leaf.data


def test_a_process_that_died_came_back_and_died_is_dead() -> None:
    """What changes a row in place follows the order of leaves, not of kinds."""
    lives = [_life(WorkerDied, 1, "", 0, 0), _life(WorkerReturned, 2), _life(WorkerDied, 3, "", 0, 0)]
    batch = read_leaves(lives)
    changes = life_changes(batch, lambda uuid: IncarnationRow(1, 0))
    assert [change.values["end"] for change in changes] == ["died", None, "died"]
    assert [group.kind for group in batch.groups] == ["worker-died", "worker-returned"], "void: one kind"
