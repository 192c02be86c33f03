"""Recompute from the leaves everything that the ledger derives from them, and name the first bad leaf.

1. No stored value is trusted: leaf hashes, frontiers, nodes, root leaves, checkpoints and projections are computed
   again and compared. A check that needs a key runs if the reader gives one.
2. A problem names the log and its leaves. A leaf whose columns contradict its bytes is named exactly. Otherwise the
   range is everything that was sealed together, and the problem states that it cannot be narrowed further.
3. The verdict excludes what nothing here proves. It is listed separately (`unproved`; columns in `not_evidence`).
4. Leaves that no checkpoint covers yet must give the frontier of their log, and `unsealed_heads` must name them.
5. The database cannot vouch for its own end: leaves that were cut off together with everything that sealed them leave
   a shorter, sound ledger. Notes kept elsewhere (`kept`) close that window up to the newest of them.
6. Where orders are signed (`signed_orders`), an order that nobody follows is a problem, named by its leaf.
7. Memory is bounded by a batch of leaves and the root leaves. Where coverage was judged by hour, one process's custody
   is judged again and adds to that.
8. Stray rows belong to no leaf: their log or leaf does not exist, their place is in no log, or a table of one row has
   two. The tables come from the schema, so a new table is checked too. Rows of an existing leaf are compared elsewhere
   (`fsck_log`).
9. Every range in `sequence_spans` has leaves, or retention dropped them.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from functools import cache
from typing import Any

from sqlalchemy import (
    ColumnElement,
    Connection,
    Integer,
    Select,
    Table,
    Text,
    and_,
    exists,
    func,
    literal,
    or_,
    select,
    union_all,
)
from sqlalchemy.dialects.sqlite.base import SQLiteDialect

from kvcustody.audit.evidence.processes.sequence_gaps import dropped_spans
from kvcustody.audit.evidence.query.issuers import known_issuers
from kvcustody.audit.kinds import SYSTEM
from kvcustody.audit.leaf.merkle import EMPTY, Grown, TreeError, TreeHead, leaf_hashes
from kvcustody.audit.store.database.append_only_triggers import missing_triggers
from kvcustody.audit.store.database.dialect import dialect_of
from kvcustody.audit.store.database.table_rules import missing_rules
from kvcustody.audit.store.schema.all_tables import every_table, projections, tables_of_one_row
from kvcustody.audit.store.schema.counters import ALL_LOGS, counters, coverage_hours
from kvcustody.audit.store.schema.leaf_tables import residencies, retention_purges
from kvcustody.audit.store.schema.ledger import events, incarnations, logs, subject_unlinkings, tenants
from kvcustody.audit.store.schema.sequences import sequence_spans
from kvcustody.audit.store.schema.trees import (
    ROOT,
    checkpoints,
    root_leaves,
    root_log,
    signed_checkpoints,
    tree_nodes,
    unsealed_heads,
)
from kvcustody.audit.tlog.checkpoint import open_checkpoint, parse_checkpoint
from kvcustody.audit.tlog.database_proofs import LedgerProofs
from kvcustody.audit.tlog.key_rotation import (
    KeyPeriod,
    check_period,
    follow_handovers,
    handover_leaves,
    parse_handover_leaf,
)
from kvcustody.audit.tlog.log_break import parse_break, recorded_breaks
from kvcustody.audit.tlog.signed_note import NoteError, VerifierKey, parse_note
from kvcustody.audit.verify.ledger.figure_rows import wrong_sums_over_logs, wrong_verdicts
from kvcustody.audit.verify.ledger.fsck_log import (
    FsckFinding,
    LogCheck,
    as_bytes,
    check_node_rows,
    check_nodes,
)
from kvcustody.audit.verify.ledger.held_rows import unknown_holdings, wrong_holdings
from kvcustody.audit.verify.ledger.life_rows import silent_processes, unshown_holdings
from kvcustody.audit.verify.ledger.register_rows import check_registers
from kvcustody.audit.verify.ledger.stated_times import AHEAD, EARLY, LATE, LedgerTimes
from kvcustody.plurals import several
from kvcustody.tenants import SEPARATOR
from kvcustody.times import readable

Progress = Callable[[str, int, int], None]

PROBLEMS_MAX = 1000
REGISTERS = "registers"  # in place of a log: rows that are no projection of one leaf
KEYS = "keys"  # in place of a log: rows that nothing can be compared with
TRIGGERS = "triggers"  # the same: what keeps leaves as they are
RULES = "rules"  # the same: what the database refuses by itself
FIGURES = "figures"  # the same: what leaves add up to
_ROOT_NAME = "root"
_AT_ONCE = 4096


_SPANS_SHOWN = 100


_SHOWN = 100  # rows of each table: what one INSERT made, another can have made a million times
_OF_ALL = {tree_nodes: ROOT, counters: ALL_LOGS, coverage_hours: ALL_LOGS}  # in place of a log's id
_COMPARED = {tenants, root_leaves}  # every row of theirs is derived again
Stray = tuple[int | None, int | None, str]  # the ids of log and leaf that the row names, and what is wrong


@dataclass(slots=True)
class FsckReport:
    """What was checked and what is wrong; `ok` if nothing is."""

    logs: int = 0
    leaves: int = 0
    unsealed: int = 0  # leaves that no checkpoint covers yet
    root_leaves: int = 0
    checkpoints: int = 0
    signed: int = 0
    verified: int = 0
    purged: int = 0
    segmented: int = 0  # of those, leaves that stand by the roots of their tiles
    problems: list[FsckFinding] = field(default_factory=list)
    unproved: list[str] = field(default_factory=list)
    remarks: list[str] = field(default_factory=list)  # neither wrong nor unproved, and good to know

    @property
    def ok(self) -> bool:
        """Whether no check failed."""
        return not self.problems

    @property
    def first(self) -> FsckFinding | None:
        """The first bad leaf, or the first other problem if every leaf is sound."""
        of_leaves = [problem for problem in self.problems if problem.idx is not None]
        return next(iter(of_leaves or self.problems), None)


def fsck(
    connection: Connection,
    *,
    keys: Sequence[VerifierKey] = (),
    kept: Sequence[bytes] = (),
    witnesses: Sequence[VerifierKey] = (),
    progress: Progress | None = None,
    overdue_before_us: int = 0,
) -> FsckReport:
    """Check a whole ledger, reading through one connection.

    `keys`: public keys of the log; by them, and those that they handed over to on record, every stored note has to
    verify. `kept`: notes that the reader kept
    elsewhere; each has to be a checkpoint of this ledger. `witnesses`: keys by which stored lines of witnesses have to
    verify. `progress(log, done, total)` counts leaves. `overdue_before_us` (UTC): a leaf that is committed since before
    then should be under a checkpoint by now.
    """
    report = FsckReport()
    dialect_of(connection).sort_in_memory(connection)
    report_progress = progress or (lambda log, done, total: None)
    report.problems += [FsckFinding(KEYS, None, None, "", what) for what in keys_of_no_number(connection)]
    if report.problems:
        report.unproved.append("nothing else was compared, because some rows have keys that are not integers")
        return report
    rows = connection.execute(select(logs).order_by(logs.c.id)).all()
    total = sum(row.size for row in rows)
    sealed_us: dict[tuple[int, int], int | None] = {}
    orders: list[FsckFinding] = []
    for row in rows:
        check = LogCheck(connection, row.id, row.name, _seals(connection, row.id), _unsealed(connection, row.id))
        done = report.leaves
        for count in check.leaves():
            report_progress(row.name, done + count, total)
        check.finish(row.size, as_bytes(row.frontier))
        report.logs += 1
        report.leaves += check.size
        report.unsealed += check.unsealed
        report.purged += check.purged
        report.segmented += check.segmented
        report.problems += check.problems
        orders += check.orders
        report.unproved += check.unproved
        sealed_us |= check.sealed_us
    named = {row.id: row.name for row in rows}
    for log, idx, what in stray_rows(connection):
        report.problems.append(FsckFinding(named.get(log, f"log {log}"), idx, idx, "", what))
    report.problems += [FsckFinding(TRIGGERS, None, None, "", what) for what in missing_triggers(connection)]
    report.problems += [FsckFinding(RULES, None, None, "", what) for what in missing_rules(connection)]
    report.problems += _unassigned(connection, [row.name for row in rows])
    if dialect_of(connection).partitions:
        report.problems += _opened_twice(connection)
    heads = _check_root(connection, report, named, sealed_us)
    _check_notes(connection, report, heads, keys, kept)
    figures = [*wrong_sums_over_logs(connection), *wrong_spans(connection)]
    figures += [] if report.problems else wrong_verdicts(connection)
    figures += [] if report.problems else wrong_holdings(connection, is_purged=bool(report.purged))
    report.unproved += [] if report.problems else unknown_holdings(connection)
    if report.problems:
        report.unproved.append("verdicts by hour were not judged again, because their evidence is wrong")
    report.problems += [FsckFinding(FIGURES, None, None, "", what) for what in figures]
    report.problems += orders  # their leaves are sound, so what is derived from them was compared
    registers = check_registers(connection, witnesses)
    report.problems += [FsckFinding(REGISTERS, None, None, "", what) for what in registers.problems]
    report.unproved += registers.unproved
    report.remarks += registers.remarks
    report.problems += _overdue(connection, overdue_before_us)
    report.remarks += _odd_times(connection, [row.name for row in rows])
    report.unproved += silent_processes(connection)
    report.unproved += unshown_holdings(connection)
    del report.problems[PROBLEMS_MAX:]
    return report


def _overdue(connection: Connection, before_us: int) -> Iterator[FsckFinding]:
    """Leaves from before then that are under no checkpoint."""
    oldest_us = connection.scalar(select(func.min(unsealed_heads.c.grown_us)))
    if oldest_us is not None and oldest_us < before_us:
        what = f"no checkpoint covers leaves since {readable(oldest_us)} UTC: nobody seals (`kvcustody audit sign`)"
        yield FsckFinding(_ROOT_NAME, None, None, "", what)


def _opened_twice(connection: Connection) -> list[FsckFinding]:
    """Residencies of more than one opening, in whatever log and month; elsewhere an index sees to it."""
    column = residencies.c
    name = (column.incarnation, column.residency, column.part)
    twice = select(*name).group_by(*name).having(func.count() > 1).subquery()
    query = (
        select(logs.c.name, column.idx, column.residency)
        .join(logs, logs.c.id == column.log)
        .join(twice, and_(*(each == twice.c[each.name] for each in name)))
        .order_by(logs.c.name, column.idx)
        .limit(PROBLEMS_MAX)
    )
    return [
        FsckFinding(log, idx, idx, "", f"another leaf opens residency `{residency}` too")
        for log, idx, residency in connection.execute(query)
    ]


def _odd_times(connection: Connection, names: Sequence[str]) -> list[str]:
    """What signatures say against the times that leaves state: nothing is wrong with such a leaf but its clock."""
    times, first = LedgerTimes(connection), ""
    counts = {AHEAD: 0, EARLY: 0, LATE: 0}
    for odd in (odd for name in names for odd in times.odd(name)):
        counts[odd.why] += 1
        if odd.why != LATE and not first:
            first = f"the first is leaf {odd.idx} of `{odd.log}`, {odd.why}"
    made = []
    if first:
        made.append(f"{several(counts[AHEAD] + counts[EARLY], 'leaf')} with a time that it cannot have; {first}")
    if counts[LATE]:
        made.append(f"{several(counts[LATE], 'leaf')} came late, from spills")
    return [f"{said} (`kvcustody audit times`)" for said in made]


def _unassigned(connection: Connection, names: Sequence[str]) -> list[FsckFinding]:
    """Logs of tenants whose issuer no leaf assigns: whose they are is said by nobody who was asked."""
    issuers = known_issuers(connection)
    findings = []
    for name in names:
        issuer = name.partition(SEPARATOR)[2]
        if issuer and not issuers.knows(issuer):
            what = f"no leaf of the system log says that issuer `{issuer}` names tenants here"
            findings.append(FsckFinding(name, None, None, "", what))
    return findings


def _seals(connection: Connection, log: int) -> list[TreeHead]:
    table = root_leaves
    query = select(table.c.size, table.c.root).where(table.c.log == log).order_by(table.c.size)
    return [TreeHead(row.size, as_bytes(row.root)) for row in connection.execute(query)]


def _unsealed(connection: Connection, log: int) -> list[tuple[int, int]]:
    table = unsealed_heads
    query = select(table.c.size, table.c.newest_us).where(table.c.log == log).order_by(table.c.size)
    return [(row.size, row.newest_us) for row in connection.execute(query)]


def _check_root(
    connection: Connection,
    report: FsckReport,
    known: Mapping[int, str],
    sealed_us: Mapping[tuple[int, int], int | None],
) -> dict[int, bytes]:
    """Return the root log from its openings, and its roots at the sizes of checkpoints."""
    checkpoint_rows = connection.execute(select(checkpoints).order_by(checkpoints.c.size)).all()
    stated = {row.size: as_bytes(row.root) for row in checkpoint_rows}
    marks = [size for size in stated if size]
    proofs, frontier, heads = LedgerProofs(connection), EMPTY, {0: EMPTY.root()}
    column = root_leaves.c
    seen = connection.execute(select(column.idx, column.log, column.size).order_by(column.idx)).all()
    report.root_leaves, report.checkpoints = len(seen), len(stated)
    for place, row in enumerate(seen):
        if row.idx != place or row.log not in known:
            what = "is missing" if row.idx != place else "is of no log"
            report.problems.append(FsckFinding(_ROOT_NAME, place, place, "", f"the root leaf {what}"))
            return heads
    for first in range(0, len(seen), _AT_ONCE):
        last = min(first + _AT_ONCE, len(seen))
        try:
            hashes = leaf_hashes(opening.commitment() for opening in proofs.openings(first, last))
        except (TypeError, ValueError, OverflowError):
            report.problems.append(FsckFinding(_ROOT_NAME, first, last - 1, "", "a root leaf is malformed"))
            return heads
        start, grown = 0, list[Grown]()
        for mark in [size for size in marks if first < size <= first + len(hashes)] + [first + len(hashes)]:
            frontier, made = frontier.extend(hashes[start : mark - first], halves=True)
            start = mark - first
            grown += made
            heads[mark] = frontier.root()
        report.problems += check_nodes(connection, ROOT, _ROOT_NAME, grown)
    report.problems += check_node_rows(connection, ROOT, _ROOT_NAME, len(seen), broken=False)
    report.problems += _check_commits(checkpoint_rows, seen, known, sealed_us)
    before = 0
    for size, root in stated.items():
        if heads.get(size) != root:
            what = "does not match the root leaves" if size in heads else "is past the root log's end"
            report.problems.append(FsckFinding(_ROOT_NAME, before, size - 1, "", f"the checkpoint of `{size}` {what}"))
            break
        before = size
    if before == max(stated, default=0) and before != len(seen):
        problem = FsckFinding(_ROOT_NAME, before, len(seen) - 1, "", "no checkpoint covers these root leaves")
        report.problems.append(problem)
    stored = connection.execute(select(root_log.c.id, root_log.c.frontier)).all()
    if [(row.id, as_bytes(row.frontier)) for row in stored] != [(1, frontier.to_bytes())]:
        report.problems.append(
            FsckFinding(_ROOT_NAME, None, None, "", "the root log's frontier does not match its leaves")
        )
    return heads


def _check_commits(
    checkpoint_rows: Sequence[Any],
    seen: Sequence[Any],
    known: Mapping[int, str],
    sealed_us: Mapping[tuple[int, int], int | None],
) -> Iterator[FsckFinding]:
    """Yield problems of checkpoints: each seals each log once, in name order, at the time of its newest added leaf."""
    before = 0
    for checkpoint in checkpoint_rows:
        commit = seen[before : checkpoint.size]
        names = [known[leaf.log] for leaf in commit]
        times = [sealed_us.get((leaf.log, leaf.size)) for leaf in commit]
        what = ""
        if names != sorted(set(names)):
            what = f"the root leaves up to `{checkpoint.size}` are of several seals, and `checkpoints` lost a row"
        elif None not in times and checkpoint.at_us != max(filter(None, times), default=checkpoint.at_us):
            what = f"the time of the checkpoint of `{checkpoint.size}` in `checkpoints` is of no leaf"
        if what:
            yield FsckFinding(_ROOT_NAME, before, checkpoint.size - 1, "", what)
        before = checkpoint.size


def _check_notes(
    connection: Connection,
    report: FsckReport,
    heads: dict[int, bytes],
    keys: Sequence[VerifierKey],
    kept: Sequence[bytes],
) -> None:
    periods = _signers(connection, report, heads, keys)
    breaks = _breaks(connection, report, [period.key for period in periods])
    table = signed_checkpoints
    stored = connection.execute(select(table.c.size, table.c.note).order_by(table.c.size)).all()
    report.signed = len(stored)
    notes = [(f"the signed checkpoint of `{row.size}`", as_bytes(row.note), row.size) for row in stored]
    notes += [(f"kept note {number}", note, None) for number, note in enumerate(kept, 1)]
    for what, note, size in notes:
        try:
            head = parse_checkpoint(parse_note(note).text).head
            if keys:
                check_period(open_checkpoint(note, [period.key for period in periods]), periods)
                report.verified += 1
        except NoteError as problem:
            report.problems.append(FsckFinding(_ROOT_NAME, None, None, "", f"{what}: {problem.message}"))
            continue
        if size not in (None, head.size):
            report.problems.append(FsckFinding(_ROOT_NAME, None, None, "", f"{what} is of `{head.size}`"))
        if size is not None and size not in heads:
            report.problems.append(FsckFinding(_ROOT_NAME, None, None, "", f"{what} has no row in `checkpoints`"))
        if heads.get(head.size) == head.root:
            continue
        named = "".join(said for lost, said in breaks if head.size in lost)
        if head.size > report.root_leaves:
            left = report.root_leaves
            missing = f"{what}{named} covers `{head.size}` root leaves, and `{left}` are left: the end was cut off"
            report.problems.append(FsckFinding(_ROOT_NAME, report.root_leaves, head.size - 1, "", missing))
        elif _root_at(connection, head.size) != head.root:
            report.problems.append(
                FsckFinding(
                    _ROOT_NAME,
                    None,
                    None,
                    "",
                    f"{what}{named} is of another ledger, or of one that was rewritten since",
                )
            )


def _breaks(connection: Connection, report: FsckReport, keys: Sequence[VerifierKey]) -> list[tuple[range, str]]:
    """Breaks on record, and the sizes whose notes each lost: they are said, and by the reader's keys verified."""
    breaks = []
    try:
        for one in recorded_breaks(connection):
            what = parse_break(one.note, keys)
            signed = "signed by your keys" if keys else "whose signature was not checked"
            report.remarks.append(
                f"the root log broke: a signed checkpoint of `{what.lost.size}` was lost, and signing went on from "
                f"`{what.base.size}` with {several(what.replayed, 'leaf')} replayed, as `{one.actor}` "
                f"confirmed ({one.reason}) in leaf {one.idx} of `{SYSTEM}`, {signed}"
            )
            lost = range(what.base.size + 1, what.lost.size + 1)
            breaks.append((lost, f" (which is lost by the break in leaf {one.idx} of `{SYSTEM}`)"))
    except NoteError as problem:
        report.problems.append(FsckFinding(SYSTEM, None, None, "", f"a break of the log: {problem.message}"))
    return breaks


def _signers(
    connection: Connection, report: FsckReport, heads: dict[int, bytes], keys: Sequence[VerifierKey]
) -> tuple[KeyPeriod, ...]:
    """Return the reader's keys and their recorded successors; each handover must be over a tree of this ledger."""
    try:
        leaves = handover_leaves(connection)
        for idx, leaf in leaves:
            head = parse_handover_leaf(leaf).head
            if (heads.get(head.size) or _root_at(connection, head.size)) != head.root:
                what = f"the signing key was handed over at a tree of `{head.size}` that is not this ledger's"
                report.problems.append(FsckFinding(SYSTEM, idx, idx, "", what))
        return follow_handovers(keys, [leaf for _, leaf in leaves])
    except NoteError as problem:
        report.problems.append(FsckFinding(SYSTEM, None, None, "", problem.message))
        return follow_handovers(keys, ())


def _root_at(connection: Connection, size: int) -> bytes | None:
    """Return the root of the first `size` root leaves, computed from them."""
    proofs, frontier = LedgerProofs(connection), EMPTY
    try:
        for first in range(0, size, _AT_ONCE):
            openings = proofs.openings(first, min(size, first + _AT_ONCE))
            frontier = frontier.extend(leaf_hashes(opening.commitment() for opening in openings)).frontier
    except (TreeError, TypeError, ValueError, OverflowError):
        return None
    return frontier.root() if frontier.size == size else None


# -- rows of sequence_spans --------------------------------------------------------------------------------------------


def wrong_spans(connection: Connection) -> Iterator[str]:
    """Yield ranges without leaves. For processes that ended in a purged ledger this is no longer knowable."""
    is_purged = bool(connection.scalar(select(func.count()).select_from(retention_purges)))
    column, known = incarnations.c, set()
    having = set(connection.scalars(select(sequence_spans.c.incarnation).distinct()))
    for row in connection.execute(select(column.id, column.uuid, column.end).order_by(column.id)).all():
        known.add(row.id)
        if row.id not in having or (is_purged and row.end is not None):
            continue
        for first, last in dropped_spans(connection, row.id):
            yield f"`sequence_spans` has sequences `{first}` to `{last}` of `{row.uuid}`, and no leaf has them"
    span = sequence_spans.c
    impossible = or_(span.first_sequence < 0, span.last_sequence < span.first_sequence)
    query = select(span.first_sequence, span.last_sequence).where(impossible).limit(_SPANS_SHOWN)
    for begin, end in connection.execute(query):
        yield f"`sequence_spans` has sequences `{begin}` to `{end}`, which is impossible"
    for life in sorted(having - known):
        yield f"`sequence_spans` has sequences of process `{life}`, which has no row"


# -- stray rows --------------------------------------------------------------------------------------------------------


def keys_of_no_number(connection: Connection) -> Iterator[str]:
    """Yield keys that are not integers, which SQLite accepts: a row with one (3.5, a text) cannot be compared."""
    if not dialect_of(connection).in_file:
        return
    for table, name, value in connection.exec_driver_sql(_odd_keys()):
        yield f"`{table}` has a row whose `{name}` is `{value}`"


@cache
def _odd_keys() -> str:
    """One such row of each key of each table: its table, its column, its value as SQL writes it.

    A text, as to compile a statement of so many parts takes longer than to ask a small ledger.
    """
    keys = [(table, key) for table in every_table() for key in table.primary_key.columns]
    query = union_all(
        *(
            select(literal(table.name, Text), literal(key.name, Text), func.quote(key))
            .where(func.typeof(key) != "integer")
            .limit(1)
            .subquery()
            .select()
            for table, key in keys
            if isinstance(key.type, Integer)
        )
    )
    return str(query.compile(dialect=SQLiteDialect(), compile_kwargs={"literal_binds": True}))


def stray_rows(connection: Connection) -> Iterator[Stray]:
    """Yield every stray row, or the first of each table if there are many."""
    for table in every_table():
        if table is events:
            yield from _off_their_places(connection)
        elif table in projections():
            yield from _without_leaf(connection, table)
        elif "log" in table.columns and table not in _COMPARED:
            yield from _without_log(connection, table)
        if table in tables_of_one_row() and table is not subject_unlinkings:  # which is no evidence
            others = connection.scalars(select(table.c.id).where(table.c.id != 1).limit(_SHOWN)).all()
            yield from (
                (None, None, f"`{table.name}` must have one row, 1, and has another: `{other}`") for other in others
            )


def _off_their_places(connection: Connection) -> Iterator[Stray]:
    """Leaves in no log, or where no log has a place; those beyond its end are found from its own size."""
    off = or_(events.c.idx < 0, _has_no_log(events))
    for log, idx in connection.execute(select(events.c.log, events.c.idx).where(off).limit(_SHOWN)):
        yield log, idx, "`events` has a leaf here, outside every existing log"


def _without_leaf(connection: Connection, table: Table) -> Iterator[Stray]:
    for log, idx in connection.execute(_rows_without_leaf(table)):
        yield log, idx, f"`{table.name}` has a row for this leaf, which does not exist"


@cache
def _rows_without_leaf(table: Table) -> Select[Any]:
    its = and_(events.c.log == table.c.log, events.c.idx == table.c.idx)
    return select(table.c.log, table.c.idx).where(~exists().where(its)).distinct().limit(_SHOWN)


def _without_log(connection: Connection, table: Table) -> Iterator[Stray]:
    query = select(table.c.log).where(_has_no_log(table)).distinct().limit(_SHOWN)
    if table in _OF_ALL:
        query = query.where(table.c.log != _OF_ALL[table])
    for log in connection.scalars(query):
        yield log, None, f"`{table.name}` has a row for a log that does not exist"


def _has_no_log(table: Table) -> ColumnElement[bool]:
    return ~exists().where(logs.c.id == table.c.log)
