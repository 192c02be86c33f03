"""Coverage of copies off the device, by tier: which were due to end, and the evidence that they are gone in time.

1. The unit is a copy: (incarnation, tier, number). `due` is the time in its first leaf, or the one in its end if that
   is sooner. An end that claims a later time is disputed, and covers nothing.
2. It is covered if two things happened by `due` and the tier's `within`: no look-up found it any more, and the first
   evidence of its end came. The evidence is that its bytes are gone (zeroed, unlinked, deleted), or that it cannot be
   opened (its key destroyed). Evidence for another name does not count.
3. If its process died, its end was not seen, and only the evidence counts. For a copy in memory there never is any.
   - The worker's next process finds copies in files by their names. It ends each at once or takes it as its own copy,
     and reports the name's end as that of this copy (number 0).
   - The same holds for copies that an orderly stop left in files. Their due time does not change, and they are in no
     figure before it.
   - A process of another worker may do this too, under two conditions. Its `tier-inherited` leaf must state that it
     opened the tier that the dead process left, and must name the copy. The same holds for a process that inherits from
     that one.
   - Such evidence counts from the recorded death, as the copy's end. No other worker may report on a copy whose process
     may still run, or stopped in order. Without either leaf the copy stays open.
4. Every copy that is due has one verdict. Copies that live and are not due are in no figure.
   - covered;
   - late;
   - open: no end or no evidence recorded yet;
   - unproven: its process died, or no leaf records that it was stored;
   - disputed.
5. Leaves are read through their rows (`read_copies`), or without them (`LeafRecord.copies`); the arithmetic is the
   same.
6. The digest is SHA-256 over each incarnation's id in ASCII and its tier, with a newline after each, followed by its
   copies. Each copy, in the order of numbers, gives four big-endian 64-bit integers: number, due (boot-time
   microseconds), bytes, verdict (its place in `VERDICTS`).
"""

from __future__ import annotations

import hashlib
from collections.abc import Iterable, Mapping, Sequence
from itertools import chain
from typing import Any, NamedTuple

import numpy as np
import orjson
from numpy.typing import NDArray
from sqlalchemy import Connection, and_, or_, select

from kvcustody.audit.evidence.coverage.custody_units import (
    DEVICE_TIER,
    CustodySelection,
    check_tier,
    last_event_us,
    lives_of,
)
from kvcustody.audit.evidence.coverage.leaf_record import COPY_STEPS, INHERITED, LeafRecord
from kvcustody.audit.kinds import END_UNRECORDED, EVIDENCE, ORDERLY_STOP, PROCESS_DEATH
from kvcustody.audit.kinds.block_runs import Int64s
from kvcustody.audit.store.database.snapshot import AsOf, is_in
from kvcustody.audit.store.schema.all_tables import has_leaf, is_leaf_of
from kvcustody.audit.store.schema.leaf_tables import copy_steps
from kvcustody.audit.store.schema.ledger import events

VERDICTS = ("covered", "late", "open", "unproven", "disputed")
UNPROVEN_CAUSES = (PROCESS_DEATH, END_UNRECORDED)
Body = Mapping[str, Any]
Flags = NDArray[np.bool_]
_STORED, _ENDED, _DESTROYED = COPY_STEPS
_NEVER = np.int64(1) << 62


class CopyCoverageRow(NamedTuple):
    """Due copies of one tenant and classification in one tier: the number with each verdict and kind of evidence.

    `waiting` of `open` have ended. A copy may have more than one kind of evidence. `bytes` are sealed ones, of copies
    with evidence. `lag_us_max`: the longest time from due to the first evidence.
    """

    tier: str
    tenant: str
    classification: str
    due: int = 0
    covered: int = 0
    late: int = 0
    open: int = 0
    unproven: int = 0
    disputed: int = 0
    waiting: int = 0
    zeroed: int = 0
    unlinked: int = 0
    key_destroyed: int = 0
    deleted: int = 0
    bytes: int = 0
    lag_us_max: int = 0

    @property
    def coverage(self) -> float:
        """The covered share of the due copies; 1.0 if none was due."""
        return self.covered / self.due if self.due else 1.0


class CopyCoverage(NamedTuple):
    """Rows by tier, tenant and classification, and the digest of the counted copies (rule 6)."""

    rows: tuple[CopyCoverageRow, ...] = ()
    digest: str = hashlib.sha256().hexdigest()

    def by_tier(self) -> tuple[CopyCoverageRow, ...]:
        """Return one row for each tier."""
        tiers = dict.fromkeys(row.tier for row in self.rows)
        return tuple(add_copy_rows(tier, (row for row in self.rows if row.tier == tier)) for tier in tiers)


class CopyLife(NamedTuple):
    """Facts about an incarnation: the offset from its boot time to UTC, and its worker's name if recorded."""

    offset_us: int
    worker: str


def add_copy_rows(tier: str, rows: Iterable[CopyCoverageRow]) -> CopyCoverageRow:
    """Return one row that adds up rows of a tier; it keeps the longest lag."""
    total = [0] * (len(CopyCoverageRow._fields) - 3)
    for row in rows:
        *counts, lag = row[3:]
        total = [*(one + more for one, more in zip(total, counts, strict=False)), max(total[-1], lag)]
    return CopyCoverageRow(tier, "*", "*", *total)


def copy_coverage(
    connection: Connection,
    chosen: CustodySelection = CustodySelection(),  # noqa: B008 - all of it, and never changed
    *,
    as_of: AsOf | None = None,
    as_of_us: int | None = None,
    with_system: bool = True,
    keep: list[JudgedCopies] | None = None,
) -> CopyCoverage:
    """Return the coverage of copies. Open copies count if they were due before `as_of_us` (UTC; default: the last
    event).

    `keep` gets every copy that was counted.
    `with_system`: with what stands in the system log (rule 3), which a tenant that reads its own log does not see.

    Nothing says which model a copy is of: selected by model there is none. Raises `LedgerError` for an unknown tier.
    """
    now_us = last_event_us(connection, as_of) if as_of_us is None else as_of_us
    if not _may_have_copies(chosen):
        return CopyCoverage()
    lives = {life.uuid: CopyLife(life.offset_us, "") for life in lives_of(connection)}
    kind = events.c.kind == ("worker-started" if with_system else "")
    for leaf in connection.scalars(select(events.c.leaf).where(kind, is_in(as_of, events), has_leaf(events))):
        body = orjson.loads(leaf)
        if body["incarnation"] in lives:
            lives[body["incarnation"]] = lives[body["incarnation"]]._replace(worker=body["worker"])
    return judge_copies(_read(connection, chosen, as_of, with_system), lives, chosen, now_us, keep)


def copies_from_leaves(record: LeafRecord, chosen: CustodySelection, now_us: int) -> CopyCoverage:
    """Return the same, computed only from leaves."""
    if not _may_have_copies(chosen):
        return CopyCoverage()
    lives = {life.uuid: CopyLife(life.offset_us, record.worker(life.uuid)) for life in record.lives()}
    return judge_copies(record.copies, lives, chosen, now_us)


def _may_have_copies(chosen: CustodySelection) -> bool:
    check_tier(chosen.tier)
    return chosen.model is None and chosen.tier != DEVICE_TIER


def _read(connection: Connection, chosen: CustodySelection, as_of: AsOf | None, with_system: bool) -> list[Body]:
    """Return the leaves of the chosen copies, and of found copies whose owner nobody could name."""
    column, where = copy_steps.c, [is_in(as_of, copy_steps)]
    if not with_system:
        where.append(column.tenant.is_not(None))
    if chosen.tier is not None:
        where.append(column.tier == chosen.tier)
    for each, wanted in ((column.tenant, chosen.tenant), (column.classification, chosen.classification)):
        if wanted is not None:
            where.append(or_(each == wanted, column.tenant.is_(None)))
    query = select(events.c.leaf).select_from(copy_steps.join(events, is_leaf_of(copy_steps)))
    inherited = select(events.c.leaf).where(events.c.kind == INHERITED, is_in(as_of, events), has_leaf(events))
    found = [orjson.loads(leaf) for leaf in connection.scalars(query.where(and_(*where)))]
    said = (orjson.loads(leaf) for leaf in connection.scalars(inherited))
    return found + [body for body in said if with_system or body["tenant"]]


# -- arithmetic -------------------------------------------------------------------------------------------------------


class _Listed(NamedTuple):
    """Copies that leaves of one kind list, laid flat, each number once: the first leaf that lists it counts."""

    leaf: Int64s
    numbers: Int64s
    names: NDArray[np.bytes_]
    due: Int64s
    at: Int64s
    bytes: Int64s
    leaves: Sequence[Body]

    def said(self, key: str) -> list[Any]:
        """What the leaf of each copy says."""
        return [self.leaves[place][key] for place in self.leaf.tolist()]


class JudgedCopies(NamedTuple):
    """Due copies of one tier of one incarnation, by number."""

    tier: str
    uuid: str
    who: list[tuple[str, str]]
    causes: list[str]  # of their ends; empty where none is on record
    numbers: Int64s
    due: Int64s
    verdict: Int64s
    waiting: Flags
    proof: dict[str, Flags]
    bytes: Int64s
    lag: Int64s

    def at(self, places: Int64s) -> JudgedCopies:
        """Return the copies at these places, in this order."""
        return self._replace(
            who=[self.who[place] for place in places.tolist()],
            causes=[self.causes[place] for place in places.tolist()],
            numbers=self.numbers[places],
            due=self.due[places],
            verdict=self.verdict[places],
            waiting=self.waiting[places],
            proof={kind: flags[places] for kind, flags in self.proof.items()},
            bytes=self.bytes[places],
            lag=self.lag[places],
        )


def judge_copies(
    leaves: Iterable[Body],
    lives: Mapping[str, CopyLife],
    chosen: CustodySelection,
    now_us: int,
    keep: list[JudgedCopies] | None = None,
) -> CopyCoverage:
    """Return verdicts of the chosen copies from their leaves, in any order; `keep` receives the counted ones."""
    by_tier: dict[tuple[str, str], dict[str, list[Body]]] = {}
    left_behind: dict[tuple[str, str], list[_Left]] = {}
    heirs: dict[tuple[str, str], list[Body]] = {}
    for body in leaves:
        if body["kind"] == _DESTROYED and not any(body["numbers"]):
            _take_left(left_behind, body, lives)
            continue
        if body["kind"] == INHERITED:
            heirs.setdefault((body["left_by_process"], body["tier"]), []).append(body)
            continue
        about = body.get("of_incarnation") or body["incarnation"]
        by_tier.setdefault((about, body["tier"]), {}).setdefault(body["kind"], []).append(body)
    digest, rows = hashlib.sha256(), dict[tuple[str, str, str], list[CopyCoverageRow]]()
    for uuid, tier in sorted(by_tier):
        life = lives.get(uuid, CopyLife(0, ""))
        own = left_behind.get((life.worker, tier), ()) if life.worker else ()
        later = [one for one in own if one.process != uuid]
        for process, names in _inherited(heirs, uuid, tier).items():
            others = (one for one in left_behind.get((process, tier), ()) if one.name in names)
            later += (one._replace(is_heirs=True) for one in others if not (life.worker and one.worker == life.worker))
        judged = _judge(by_tier[uuid, tier], uuid, tier, life, later, now_us)
        judged = _selected(judged, life, chosen)
        if not len(judged.numbers):
            continue
        if keep is not None:
            keep.append(judged)
        digest.update(f"{uuid}\n{tier}\n".encode())
        columns = (judged.numbers, judged.due, judged.bytes, judged.verdict)
        digest.update(np.stack(columns, axis=1).astype(">i8").tobytes())
        for row in _rows(judged):
            rows.setdefault(row[:3], []).append(row)
    made = (add_copy_rows(key[0], rows[key])._replace(tenant=key[1], classification=key[2]) for key in sorted(rows))
    return CopyCoverage(tuple(made), digest.hexdigest())


class _Left(NamedTuple):
    """What a process found that one before it had left, and destroyed: when (UTC), and by which evidence.

    `is_heirs`: of another worker, which says that it is the heir.
    """

    name: str
    process: str
    worker: str
    at_us: int
    cause: str
    is_heirs: bool = False


def _take_left(left_behind: dict[tuple[str, str], list[_Left]], body: Body, lives: Mapping[str, CopyLife]) -> None:
    """By tier and worker, and by tier and process."""
    uuid = body["incarnation"]
    life = lives.get(uuid, CopyLife(0, ""))
    made = [
        _Left(name, uuid, life.worker, int(at) + life.offset_us, body["cause"])
        for name, at in zip(body["names"], body["destroyed_boot_us"], strict=True)
    ]
    for who in {life.worker, uuid}:
        left_behind.setdefault((who, body["tier"]), []).extend(made)


def _inherited(heirs: Mapping[tuple[str, str], list[Body]], uuid: str, tier: str) -> dict[str, set[str]]:
    """Return the names that later processes recorded as left behind, by process that opened the tier or an heir's (rule
    3).
    """
    inherited: dict[str, set[str]] = {}
    waiting: list[tuple[str, set[str] | None]] = [(uuid, None)]
    while waiting:
        process, of = waiting.pop()
        for body in heirs.get((process, tier), ()):
            names = {*body["copies"]} if of is None else of & {*body["copies"]}
            known = inherited.setdefault(body["incarnation"], set())
            if names - known:
                known |= names
                waiting.append((body["incarnation"], names))
    return inherited


def _listed(leaves: list[Body], uuid: str, moment: str) -> _Listed:
    """Copies that these leaves list; of two of one number the incarnation's own comes first, then by sequence."""
    leaves = sorted(leaves, key=lambda body: (body["incarnation"] != uuid, int(body["sequence"]), body["part"]))

    def flat(key: str) -> Int64s:
        return np.array(list(chain.from_iterable(body[key] for body in leaves)), np.int64)

    numbers = flat("numbers")
    _, first = np.unique(numbers, return_index=True)
    owner = np.repeat(np.arange(len(leaves)), [len(body["numbers"]) for body in leaves])
    names = np.array(list(chain.from_iterable(body["names"] for body in leaves)), np.bytes_)
    due = flat("due_boot_us") if leaves and "due_boot_us" in leaves[0] else np.zeros_like(numbers)
    at, sizes = flat(moment), flat("bytes_each")
    return _Listed(owner[first], numbers[first], names[first], due[first], at[first], sizes[first], leaves)


def _place(known: _Listed, wanted: _Listed) -> tuple[Int64s, Flags]:
    """Where each wanted copy is among the known ones, and whether it is there, under the same name."""
    if not len(known.numbers):
        return np.zeros(len(wanted.numbers), np.int64), np.zeros(len(wanted.numbers), np.bool_)
    place = np.minimum(np.searchsorted(known.numbers, wanted.numbers), len(known.numbers) - 1)
    same: Flags = (known.numbers[place] == wanted.numbers) & (known.names[place] == wanted.names)
    return place, same


def _judge(
    steps: dict[str, list[Body]],
    uuid: str,
    tier: str,
    life: CopyLife,
    left_behind: list[_Left],
    now_us: int,
) -> JudgedCopies:
    stored = _listed(steps.get(_STORED, []), uuid, "stored_boot_us")
    ended = _listed(steps.get(_ENDED, []), uuid, "ended_boot_us")
    place, is_stored = _place(stored, ended)
    _, has_end = _place(ended, stored)
    overdue = np.flatnonzero(~has_end & (stored.due < now_us - life.offset_us))
    # Copies whose end is on record come first, then those that are due and have none; then all by number.
    causes = ended.said("cause")
    died = np.array([cause in UNPROVEN_CAUSES for cause in causes], np.bool_)
    promised = np.array(stored.said("within_us"), np.int64)
    within = np.array(ended.said("within_us"), np.int64)
    if died.any():
        within = np.where(died & is_stored, promised[place] if len(promised) else within, within)
    promised_due = np.where(is_stored, stored.due[place] if len(stored.due) else ended.due, ended.due)
    numbers = np.concatenate((ended.numbers, stored.numbers[overdue]))
    names = np.concatenate((ended.names, stored.names[overdue])) if len(numbers) else np.array([], np.bytes_)
    is_ended = np.arange(len(numbers)) < len(ended.numbers)
    nothing = np.zeros(len(overdue), np.bool_)
    died = np.concatenate((died, nothing))
    known = np.concatenate((is_stored, ~nothing))
    proof, first = _evidence(steps.get(_DESTROYED, []), uuid, numbers, names)
    stopped = np.array([cause == ORDERLY_STOP for cause in causes], np.bool_)
    stayed = stopped & (first[: len(stopped)] == _NEVER)
    due = np.concatenate((np.where(stayed, promised_due, np.minimum(promised_due, ended.due)), stored.due[overdue]))
    if left_behind:
        since = np.concatenate((stored.at[place] if len(stored.at) else ended.at, stored.at[overdue]))
        is_dead = np.array([cause == PROCESS_DEATH for cause in causes], np.bool_)
        is_dead = np.concatenate((is_dead, nothing))
        _found_later(left_behind, life, names, np.where(known, since, _NEVER), is_dead, proof, first)
        is_left = ~is_ended & (first < _NEVER)
        is_ended, died = is_ended | is_left, died | is_left
    by = due + np.concatenate((within, promised[overdue]))
    ended_by = np.concatenate((ended.at, np.full(len(overdue), _NEVER)))
    in_time = (first <= by) & (died | (ended_by <= by))
    proved = first < _NEVER
    disputed = known & is_ended & np.concatenate((ended.due > promised_due, nothing))
    verdict = np.select(
        [disputed, ~known, ~is_ended, proved & in_time, proved, died],
        [4, 3, 2, 0, 1, 3],
        2,
    ).astype(np.int64)
    who = [(body["tenant"], body["classification"]) for body in _leaves_of(ended, stored, overdue)]
    sizes = np.concatenate((ended.bytes, stored.bytes[overdue]))
    lag = np.where(proved, np.maximum(0, first - due), 0)
    waiting = (verdict == VERDICTS.index("open")) & is_ended
    judged = JudgedCopies(
        tier, uuid, who, [*causes, *[""] * len(overdue)], numbers, due, verdict, waiting, proof, sizes, lag
    )
    later = np.concatenate((stayed, nothing)) & ~proved & (due >= now_us - life.offset_us)
    order = np.argsort(numbers, kind="stable")
    return judged.at(order[~later[order]])


def _leaves_of(ended: _Listed, stored: _Listed, overdue: Int64s) -> Iterable[Body]:
    """Yield the leaf that names each copy's owner."""
    yield from (ended.leaves[place] for place in ended.leaf.tolist())
    yield from (stored.leaves[place] for place in stored.leaf[overdue].tolist())


def _evidence(
    leaves: list[Body], uuid: str, numbers: Int64s, names: NDArray[np.bytes_]
) -> tuple[dict[str, Flags], Int64s]:
    """Of each copy which kinds of evidence there are, and when the first came."""
    proof, first = (
        {kind: np.zeros(len(numbers), np.bool_) for kind in EVIDENCE},
        np.full(len(numbers), _NEVER),
    )
    order = np.argsort(numbers, kind="stable")
    for kind in EVIDENCE:
        listed = _listed([body for body in leaves if body["cause"] == kind], uuid, "destroyed_boot_us")
        if not len(listed.numbers):
            continue
        place = np.minimum(np.searchsorted(listed.numbers, numbers[order]), len(listed.numbers) - 1)
        same = (listed.numbers[place] == numbers[order]) & (listed.names[place] == names[order])
        proof[kind][order] = same
        first[order] = np.where(same, np.minimum(first[order], listed.at[place]), first[order])
    return proof, first


def _found_later(
    left_behind: list[_Left],
    life: CopyLife,
    names: NDArray[np.bytes_],
    since: Int64s,
    is_dead: Flags,
    proof: dict[str, Flags],
    first: Int64s,
) -> None:
    """What a later process destroyed under the name of a copy whose own process did not (rule 3).

    `since`: when the copy was stored; never for one that is not asked about. `is_dead`: it ended with its process.
    """
    known: dict[str, list[tuple[int, str, bool]]] = {}
    for one in left_behind:
        known.setdefault(one.name, []).append((one.at_us - life.offset_us, one.cause, one.is_heirs))
    for place in np.flatnonzero((since < _NEVER) & (first == _NEVER)).tolist():
        later = sorted(each for each in known.get(names[place].decode(), ()) if each[0] >= since[place])
        for at, cause, is_heirs in later:
            if is_heirs and not is_dead[place]:
                continue
            if cause in proof:
                proof[cause][place] = True
                first[place] = min(at, first[place])


def _selected(judged: JudgedCopies, life: CopyLife, chosen: CustodySelection) -> JudgedCopies:
    """Return the copies of the chosen tenant and classification that were due in the period."""
    at_us = judged.due + life.offset_us
    is_selected = np.ones(len(at_us), np.bool_)
    if chosen.since_us is not None:
        is_selected &= at_us >= chosen.since_us
    if chosen.until_us is not None:
        is_selected &= at_us < chosen.until_us
    wanted = (chosen.tenant, chosen.classification)
    if wanted != (None, None) or chosen.tier not in (None, judged.tier):
        fits = [all(want in (None, has) for want, has in zip(wanted, who, strict=True)) for who in judged.who]
        is_selected &= np.array(fits, np.bool_) & (chosen.tier in (None, judged.tier))
    return judged if is_selected.all() else judged.at(np.flatnonzero(is_selected))


def _rows(judged: JudgedCopies) -> Iterable[CopyCoverageRow]:
    codes = {who: code for code, who in enumerate(dict.fromkeys(judged.who))}
    code = np.array([codes[who] for who in judged.who], np.int64)
    is_proved = np.logical_or.reduce([judged.proof[kind] for kind in EVIDENCE])
    for (tenant, classification), number in codes.items():
        mine = code == number
        verdicts = {name: int((mine & (judged.verdict == place)).sum()) for place, name in enumerate(VERDICTS)}
        proofs = {kind.replace("-", "_"): int((mine & flags).sum()) for kind, flags in judged.proof.items()}
        yield CopyCoverageRow(
            judged.tier,
            tenant,
            classification,
            due=int(mine.sum()),
            waiting=int((mine & judged.waiting).sum()),
            bytes=int(judged.bytes[mine & is_proved].sum()),
            lag_us_max=int(judged.lag[mine].max()),
            **verdicts,
            **proofs,
        )
