"""Histories and their falsifications: one thing that was recorded is missing or is not as it was.

A target is custody that the untouched history covers; what is done to it must show.
"""

from __future__ import annotations

import random
from collections.abc import Callable
from typing import Any

import numpy as np
from coverage_oracle import History, judge

from kvcustody.audit.kinds import (
    BlocksAttached,
    CustodyEnded,
    Event,
    HoldsNarrowed,
    ReceiptRecorded,
    ResidencyOpened,
    ResidencyReleased,
)
from kvcustody.audit.kinds.block_runs import Run, Runs, flatten, gather
from kvcustody.audit.leaf import Context
from kvcustody.audit.leaf.batch_encoder import BatchEncoder

OFFSET_US = 1_700_000_000_000_000
Unit = tuple[int, int]  # block, generation
Forge = Callable[[list[Event], Unit, random.Random], list[Event]]


def leaf_bytes(events: list[Event], uuid: str, first: int = 1) -> list[bytes]:
    def pseudonym(tenant: str, subject: str, session: str = "") -> str:
        return f"{tenant}.{subject}.{session}"

    context = Context(uuid, OFFSET_US, pseudonym)
    return [*BatchEncoder(context).encode([*enumerate(events, first)]).batch.data]


def history_of(events: list[Event], uuid: str = "ab" * 16) -> History:
    return History(leaf_bytes(events, uuid))


def pairs(runs: Runs) -> list[Unit]:
    flat = flatten(runs)
    return list(zip(flat.blocks.tolist(), flat.generations.tolist(), strict=True))


def covered_units(events: list[Event]) -> list[Unit]:
    """Units that the history covers, each in at least one receipt and one end."""
    covered = {item.generation for item in judge(history_of(events)) if item.covered}
    return sorted(unit for e in events if isinstance(e, CustodyEnded) for unit in pairs(e.runs) if unit[1] in covered)


def without(runs: Runs, unit: Unit) -> Runs:
    kept = [pair for pair in pairs(runs) if pair != unit]
    return gather(np.array([b for b, _ in kept], np.int64), np.array([g for _, g in kept], np.int64))


def swapped(runs: Runs, unit: Unit, block: int, generation: int) -> Runs:
    return (*without(runs, unit), Run(np.array([block], np.int64), generation))


def _list(event: Any) -> Runs:
    return event.written if isinstance(event, ResidencyReleased) else event.runs


def changed(events: list[Event], unit: Unit, kind: type, field: str, make: Callable[[Any], Any]) -> list[Event]:
    """Every event of a kind that names the unit, with one field made anew."""
    return [e._replace(**{field: make(e)}) if isinstance(e, kind) and unit in pairs(_list(e)) else e for e in events]


def receipts_of(events: list[Event], unit: Unit) -> list[ReceiptRecorded]:
    return [e for e in events if isinstance(e, ReceiptRecorded) and unit in pairs(e.runs)]


def end_of(events: list[Event], unit: Unit) -> CustodyEnded:
    return next(e for e in events if isinstance(e, CustodyEnded) and unit in pairs(e.runs))


def dropped_receipt(events: list[Event], unit: Unit, chance: random.Random) -> list[Event]:
    gone = receipts_of(events, unit)
    return [e for e in events if e not in gone]


def dropped_shard_receipt(events: list[Event], unit: Unit, chance: random.Random) -> list[Event]:
    gone = chance.choice(receipts_of(events, unit))
    return [e for e in events if e is not gone]


def wrong_generation(events: list[Event], unit: Unit, chance: random.Random) -> list[Event]:
    other = unit[1] + 1_000_000 + chance.randrange(1000)
    return changed(events, unit, ReceiptRecorded, "runs", lambda e: swapped(e.runs, unit, unit[0], other))


def altered_time(events: list[Event], unit: Unit, chance: random.Random) -> list[Event]:
    """Of a receipt (too late, or before it began), of the release (after the receipt), or of the end."""
    proof = receipts_of(events, unit)[0]
    end = end_of(events, unit)
    later = proof.ended_us + end.scrub_within_us + 1 + chance.randrange(10**6)
    which = chance.randrange(4)
    if which == 0:
        return changed(events, unit, ReceiptRecorded, "ended_us", lambda e: later)
    if which == 1:
        return changed(events, unit, ReceiptRecorded, "started_us", lambda e: e.ended_us + 1)
    if which == 2:
        return changed(events, unit, CustodyEnded, "retired_us", lambda e: proof.started_us + 1)
    users = {e.residency for e in events if isinstance(e, ResidencyOpened) and unit in pairs((*e.attached, *e.written))}
    users |= {e.residency for e in events if isinstance(e, ResidencyReleased) and unit in pairs(e.written)}
    who = chance.choice(sorted(users))
    return [
        e._replace(at_us=later, hold_us=0) if isinstance(e, ResidencyReleased) and e.residency == who else e
        for e in events
    ]


def another_block(events: list[Event], unit: Unit, chance: random.Random) -> list[Event]:
    other = unit[0] + 1000 + chance.randrange(1000)
    return changed(events, unit, ReceiptRecorded, "runs", lambda e: swapped(e.runs, unit, other, unit[1]))


def before_the_last_write(events: list[Event], unit: Unit, chance: random.Random) -> list[Event]:
    early = end_of(events, unit).retired_us - 1 - chance.randrange(1000)
    return changed(events, unit, ReceiptRecorded, "started_us", lambda e: early)


def attach_after_receipt(events: list[Event], unit: Unit, chance: random.Random) -> list[Event]:
    proof, end = receipts_of(events, unit)[-1], end_of(events, unit)
    at = proof.ended_us + 1 + chance.randrange(1000)
    run = (Run(np.array([unit[0]], np.int64), unit[1]),)
    opened = ResidencyOpened(at, 900_000, end.tenant, None, None, False, "internal", (1,), run, (), 1, at + 10**6)
    if chance.random() < 0.5:
        opened = opened._replace(attached=())
        more = [opened, BlocksAttached(at, 900_000, end.tenant, run)]
    else:
        more = [opened]
    return [*events, *more, ResidencyReleased(at + 5, 900_000, end.tenant, "finish", (), 0)]


def extended_deadline(events: list[Event], unit: Unit, chance: random.Random) -> list[Event]:
    """Wiped late, with the due time and the ceiling in its end moved so that it looks in time."""
    end = end_of(events, unit)
    late = end.ended_us + end.scrub_within_us + 1 + chance.randrange(10**6)
    made = changed(events, unit, ReceiptRecorded, "ended_us", lambda e: late)
    made = changed(made, unit, ReceiptRecorded, "started_us", lambda e: late - 1)
    made = changed(made, unit, CustodyEnded, "ceiling_us", lambda e: late + 10**9)
    return changed(made, unit, CustodyEnded, "due_us", lambda e: late)


def dropped_residency(events: list[Event], unit: Unit, chance: random.Random) -> list[Event]:
    """The opening of a residency that used the unit."""
    users = [e for e in events if isinstance(e, ResidencyOpened) and unit in pairs((*e.attached, *e.written))]
    users += [
        opened
        for e in events
        if isinstance(e, ResidencyReleased) and unit in pairs(e.written)
        for opened in events
        if isinstance(opened, ResidencyOpened) and opened.residency == e.residency
    ]
    gone = chance.choice(users)
    return [e for e in events if e is not gone]


def dropped_allocation(events: list[Event], unit: Unit, chance: random.Random) -> list[Event]:
    made = changed(events, unit, ResidencyReleased, "written", lambda e: without(e.written, unit))
    return [e._replace(written=without(e.written, unit)) if isinstance(e, ResidencyOpened) else e for e in made]


def _binding(events: list[Event], chance: random.Random) -> tuple[HoldsNarrowed, int] | None:
    """A narrowing that alone says when some covered custody was due, and the place of that hold in it."""
    covered = set(covered_units(events))
    due: dict[int, set[Unit]] = {}
    for e in events:
        if isinstance(e, CustodyEnded) and e.due_us < e.ended_us:
            due.setdefault(e.due_us, set()).update(covered.intersection(pairs(e.runs)))
    acts = [e for e in events if isinstance(e, HoldsNarrowed)]
    choices = []
    for at, act in enumerate(acts):
        later = {one for other in acts[at + 1 :] if other.tenant == act.tenant for one in other.holds}
        for place, (residency, until) in enumerate(zip(act.holds, act.until_us, strict=True)):
            units = due.get(until)
            if units and residency not in later and until > act.at_us and _uses(events, residency) & units:
                choices.append((act, place))
    return chance.choice(choices) if choices else None


def _uses(events: list[Event], residency: int) -> set[Unit]:
    kinds = (ResidencyOpened, BlocksAttached, ResidencyReleased)
    mine: list[Any] = [e for e in events if isinstance(e, kinds) and e.residency == residency]
    lists = [getattr(e, key, ()) for e in mine for key in ("attached", "written", "runs")]
    return {unit for runs in lists for unit in pairs(runs)}


def dropped_narrowing(events: list[Event], unit: Unit, chance: random.Random) -> list[Event]:
    bound = _binding(events, chance)
    return events if bound is None else [e for e in events if e is not bound[0]]


def altered_narrowing(events: list[Event], unit: Unit, chance: random.Random) -> list[Event]:
    """The hold is said to last longer, or is left out, as if it had been over."""
    bound = _binding(events, chance)
    if bound is None:
        return events
    act, place = bound
    longer = chance.randrange(1, 1000)
    until = (*act.until_us[:place], act.until_us[place] + longer, *act.until_us[place + 1 :])
    altered = act._replace(until_us=until)
    if chance.random() < 0.5:
        altered = act._replace(
            holds=(*act.holds[:place], *act.holds[place + 1 :]),
            until_us=(*act.until_us[:place], *act.until_us[place + 1 :]),
        )
    return [altered if e is act else e for e in events]


FORGERIES: dict[str, Forge] = {
    "dropped receipt": dropped_receipt,
    "dropped shard receipt": dropped_shard_receipt,
    "wrong generation": wrong_generation,
    "altered time": altered_time,
    "receipt for another block": another_block,
    "receipt before the last write": before_the_last_write,
    "attach after receipt": attach_after_receipt,
    "extended deadline": extended_deadline,
    "dropped residency": dropped_residency,
    "dropped allocation": dropped_allocation,
    "dropped narrowing": dropped_narrowing,
    "altered narrowing": altered_narrowing,
}
