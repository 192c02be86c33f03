"""Recount a ledger from its leaves only, in a separate process if the ledger is large.

1. The answer is the same in either process: the request holds everything that it depends on except the leaves, which
   are read as they were written, without any column.
2. The second process reads the ledger itself. If it read another state (retention dropped leaves meanwhile) or died,
   its answer is discarded, and this process recounts from the snapshot of the tables.
3. The arithmetic is that of the tables. Tests check it with independent arithmetic
   (`examples/reperform/coverage_oracle.py`). A difference is a row that no leaf supports; `audit fsck` names it.
4. The number of leaves decides which process recounts, never the machine's load.
"""

from __future__ import annotations

import os
import subprocess
import sys
from collections.abc import Iterator, Mapping
from contextlib import contextmanager, suppress
from itertools import chain
from typing import Any, NamedTuple

import orjson
from sqlalchemy import Connection, Engine, func, select

from kvcustody.audit.evidence.copies.copy_coverage import CopyCoverage, CopyCoverageRow, copies_from_leaves
from kvcustody.audit.evidence.coverage.custody_units import CustodySelection, units_of
from kvcustody.audit.evidence.coverage.leaf_record import LeafRecord, Unaccounted
from kvcustody.audit.evidence.coverage.summary import CoverageRow, CoverageSummary, population_digest, summary
from kvcustody.audit.store.database.database_place import SQLITE, SqliteFile
from kvcustody.audit.store.database.dialect import dialect_of, file_of
from kvcustody.audit.store.database.engine import open_store
from kvcustody.audit.store.database.gc_pause import gc_paused
from kvcustody.audit.store.database.snapshot import AsOf, as_of_sizes, is_in
from kvcustody.audit.store.schema.all_tables import has_leaf
from kvcustody.audit.store.schema.ledger import events, logs
from kvcustody.logger import get_logger

BESIDE_LEAVES = 30_000  # from here on a second process saves more than its start costs


class RecountRequest(NamedTuple):
    """The subject of a recount: a selection, in the state in which the logs have these sizes, by name."""

    chosen: CustodySelection
    as_of_us: int
    sizes: Mapping[str, int]


class RecountResult(NamedTuple):
    """Figures, unaccounted custody, and the digest of what was counted; `leaves` is how many were read."""

    leaves: int
    as_of_us: int
    figures: CoverageSummary
    missing: Unaccounted
    digest: str
    copies: CopyCoverage = CopyCoverage()


class Difference(NamedTuple):
    """A figure that differs between tables and leaves."""

    tenant: str
    classification: str
    figure: str
    tables: int
    leaves: int


def differences(tables: CoverageSummary, leaves: CoverageSummary) -> tuple[Difference, ...]:
    """Return every figure that differs. A row that only one side has differs in each nonzero figure."""
    sides = [{(row.tenant, row.classification): row for row in side.rows} for side in (tables, leaves)]
    names = CoverageRow._fields[2:]
    differing = [
        Difference(*who, name, *values)
        for who in sorted({*sides[0], *sides[1]})
        for name in names
        for values in [[getattr(side.get(who, CoverageRow(*who)), name) for side in sides]]
        if values[0] != values[1]
    ]
    differing += [
        Difference("*", "*", name, one, two)
        for name, one, two in zip(CoverageSummary._fields[1:], tables[1:], leaves[1:], strict=True)
        if one != two
    ]
    return tuple(differing)


def copy_differences(tables: CopyCoverage, leaves: CopyCoverage) -> tuple[Difference, ...]:
    """Return the differing figures of copies off the device, each named with its tier."""
    sides = [{row[:3]: row for row in side.rows} for side in (tables, leaves)]
    differing = []
    for key in sorted({*sides[0], *sides[1]}):
        rows = [side.get(key, CopyCoverageRow(*key)) for side in sides]
        for name in CopyCoverageRow._fields[3:]:
            one, other = (int(getattr(row, name)) for row in rows)
            if one != other:
                differing.append(Difference(key[1], key[2], f"{key[0]}: {name}", one, other))
    if not differing and tables.digest != leaves.digest:
        differing.append(Difference("*", "*", "copies, by digest", 1, 0))
    return tuple(differing)


def recounted(record: LeafRecord, chosen: CustodySelection, as_of_us: int) -> RecountResult:
    """Return coverage computed only from leaves; overdue means due before `as_of_us` (UTC)."""
    lives = list(units_of(record, chosen, now_us=as_of_us))
    copies = copies_from_leaves(record, chosen, as_of_us)
    missing, digest = record.unaccounted(), population_digest(lives)
    return RecountResult(record.leaves, as_of_us, summary(lives), missing, digest, copies)


def _answer(
    connection: Connection, request: RecountRequest, state: AsOf | None, keep: list[object] | None = None
) -> RecountResult:
    with gc_paused():
        record = LeafRecord(leaves_in_database(connection, state))
        if keep is not None:
            keep.append(record)
        return recounted(record, request.chosen, request.as_of_us)


class RecountProcess:
    """A recount under way; `answer` waits for it."""

    def __init__(self, connection: Connection, question: RecountRequest, state: AsOf | None) -> None:
        self._connection = connection
        self._question = question
        self._state = state
        self._leaves = 0
        self._process: subprocess.Popen[bytes] | None = None

    def begin(self) -> None:
        """Start a separate process if there are enough leaves for one (rule 4)."""
        query = select(func.count()).select_from(events).where(is_in(self._state, events))
        self._leaves = self._connection.scalar(query) or 0
        target = _target(self._connection.engine)
        if self._leaves < BESIDE_LEAVES or target is None:
            return
        command = [sys.executable, "-P", "-m", "kvcustody.audit.evidence.coverage.recount_process"]
        pipe = subprocess.PIPE
        try:
            self._process = subprocess.Popen(command, stdin=pipe, stdout=pipe, stderr=pipe)  # noqa: S603 - ours
        except OSError as problem:
            _warn(str(problem))
            return
        assert self._process.stdin is not None
        chosen, as_of_us, sizes = self._question
        with suppress(BrokenPipeError), self._process.stdin as question:  # who died says so by its status
            question.write(orjson.dumps([target, list(chosen), as_of_us, dict(sizes)]))
        self._process.stdin = None  # `communicate` closes no pipe twice

    def answer(self) -> RecountResult:
        """Return the separate process's answer or, if it cannot be used, compute it here (rule 2)."""
        if self._process is not None:
            output, errors = self._process.communicate()
            status, self._process = self._process.returncode, None
            if status == 0:
                recounted = _from_bytes(output)
                if recounted.leaves == self._leaves:
                    return recounted
                errors = b"it read another state of the ledger"
            reason = errors.decode(errors="replace").strip().splitlines()[-1:] or ["it ended without a word"]
            _warn(reason[0][:200])
        return _answer(self._connection, self._question, self._state)

    def end(self) -> None:
        """End the separate process."""
        if self._process is not None:
            self._process.kill()
            self._process.communicate()
            self._process = None


@contextmanager
def open_recount(
    connection: Connection, chosen: CustodySelection, as_of_us: int, state: AsOf | None
) -> Iterator[RecountProcess]:
    """Begin a recount of a state (None: everything that the connection sees); it ends with the block."""
    made = RecountProcess(connection, RecountRequest(chosen, as_of_us, _sizes(connection, state)), state)
    made.begin()
    try:
        yield made
    finally:
        made.end()


def _sizes(connection: Connection, state: AsOf | None) -> dict[str, int]:
    """Return the sizes of a state's logs by name, or else the sizes that the connection sees."""
    rows = connection.execute(select(logs.c.id, logs.c.name, logs.c.size)).all()
    held = None if state is None else state.sizes
    return {row.name: row.size if held is None else held.get(row.id, 0) for row in rows}


def _target(engine: Engine) -> str | None:
    """What `open_store` opens again in another process; None for a database that only this one has."""
    path = file_of(engine)
    if path is None:
        return engine.url.render_as_string(hide_password=False)
    return None if SqliteFile(path).in_memory else f"{SQLITE}{path}"


def _warn(reason: str) -> None:
    get_logger(__name__).warning("recounted in this process", reason=reason)


def _to_bytes(made: RecountResult) -> bytes:
    rows, *lags = made.figures
    copies = [list(map(list, made.copies.rows)), made.copies.digest]
    counted = [list(map(list, rows)), lags, list(made.missing), made.digest]
    return orjson.dumps([made.leaves, made.as_of_us, *counted, copies])


def _from_bytes(data: bytes) -> RecountResult:
    leaves, as_of_us, rows, lags, missing, digest, copies = orjson.loads(data)
    figures = CoverageSummary(tuple(CoverageRow(*row) for row in rows), *lags)
    of_tiers = CopyCoverage(tuple(CopyCoverageRow(*row) for row in copies[0]), copies[1])
    return RecountResult(leaves, as_of_us, figures, Unaccounted(*missing), digest, of_tiers)


def leaves_in_database(connection: Connection, as_of: AsOf | None = None) -> Iterator[bytes]:
    """Return every leaf of the ledger or of a state; leaves of one log are in their order."""
    query = select(events.c.leaf).where(is_in(as_of, events), has_leaf(events))
    if not dialect_of(connection).in_file:
        query = query.order_by(events.c.log, events.c.idx)
        return map(bytes, connection.execute(query, execution_options={"yield_per": 10_000}).scalars())
    # From the driver itself, which reads row by row: a row object for each of a million leaves costs more than they do.
    # And as the file has them, which is as they were written: in any other order pages are read many times over.
    text = str(query.compile(dialect=connection.dialect, compile_kwargs={"literal_binds": True}))
    driver: Any = connection.connection.driver_connection
    return chain.from_iterable(driver.execute(text))


def main() -> None:
    """Answer the request on standard input: the ledger's place, and a `RecountRequest`."""
    asked: list[Any] = orjson.loads(sys.stdin.buffer.read())
    target, chosen, as_of_us, sizes = asked
    engine = open_store(target, read_only=True, timeout_seconds=30, mapped=True)
    with engine.connect() as connection:
        dialect_of(connection).one_snapshot(connection)
        question = RecountRequest(CustodySelection(*chosen), as_of_us, sizes)
        kept: list[object] = []
        made = _answer(connection, question, as_of_sizes(connection, sizes), kept)
        sys.stdout.buffer.write(_to_bytes(made))
        sys.stdout.buffer.flush()
        os._exit(0)  # to take a million leaves' objects apart one by one is no use to anybody


if __name__ == "__main__":
    main()
