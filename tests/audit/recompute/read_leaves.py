"""Reads leaves into a `History`, a few hundred at once: the fields that matter, kind by kind, field by field.

Earlier leaves lack fields that were added since; anything else that a leaf lacks is an error.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping, Sequence
from itertools import islice
from operator import itemgetter
from typing import Any

import numpy as np
import orjson

from kvcustody.errors import LedgerError
from recompute.columns import Numbers, numbers
from recompute.facts import LEVELS, ErasureFact, Narrowing
from recompute.history import History, RecomputedLife

Said = Mapping[str, Sequence[Any]]  # what some leaves of one kind say, field by field
_AT_ONCE = 1_000  # leaves, whose fields a processor's cache holds
Rows = dict[str, list[tuple[Any, ...]]]  # by kind of leaf, the fields of `_FIELDS`


def read_history(leaves: Iterable[bytes]) -> History:
    """Sort the leaves, given in any order of logs; raises `LedgerError` for bytes that are no leaf."""
    history, later, source = History(), list[tuple[str, str, Said]](), iter(leaves)
    try:
        while some := _sorted(history, islice(source, _AT_ONCE)):
            for (uuid, about), kinds in some.items():
                for kind, rows in kinds.items():
                    said: Said = dict(zip(_FIELDS.get(kind, _EVERY), zip(*rows, strict=True), strict=True))
                    if _read(history.life(uuid), kind, said, about, history):
                        later.append((about, kind, said))
        for about, kind, said in later:
            life, boot = history.life(about), numbers(said["boot_us"])
            _READERS[kind](life, said, boot, numbers(said["at_us"]) - boot - life.offset_us)
    except (ValueError, LookupError, TypeError, OverflowError) as problem:
        raise LedgerError(f"a leaf cannot be read: {problem!r}") from problem
    for life in history.lives.values():
        life.lay_out()
    return history


def _sorted(history: History, leaves: Iterable[bytes]) -> dict[tuple[str, str], Rows]:
    """The fields of leaves that matter here, by who wrote them and about whom, and by kind."""
    found: dict[tuple[str, str], Rows] = {}
    writer = subject = ""
    kinds: Rows = {}
    for body in map(orjson.loads, leaves):  # millions: what every leaf needs is done here
        uuid, kind = body["incarnation"], body["kind"]
        about = body.get("of_incarnation", uuid)
        if uuid != writer or about != subject:
            writer, subject = uuid, about
            kinds = found.setdefault((uuid, about), {})
        if kind in _FOUNDING:
            _found(history, history.life(uuid), body)
        row = _PICK[kind](body) if kind in _PICK else (body["at_us"], body["boot_us"])
        if kind in kinds:
            kinds[kind].append(row)
        else:
            kinds[kind] = [row]
    return found


def _read(life: RecomputedLife, kind: str, said: Said, about: str, history: History) -> bool:
    """Enter what some leaves say; True where it needs the clock of another, which may not have been read yet."""
    at, boot = numbers(said["at_us"]), numbers(said["boot_us"])
    life.offset_us = int(at[-1] - boot[-1])  # the same in every leaf of an incarnation
    history.last_us = max(history.last_us, int(at.max()))
    history.leaves += len(at)
    if kind in _READERS and about == life.uuid:
        _READERS[kind](life, said, boot, np.zeros(len(at), np.int64))
    return kind in _READERS and about != life.uuid


def _found(history: History, life: RecomputedLife, body: dict[str, Any]) -> None:
    """What is of no block: an erasure that was asked for, and the start of an incarnation."""
    if body["kind"] == "erasure-requested":
        names = ("selector", "tenant", "subject", "session")
        made = ErasureFact(body["erasure"], int(body["at_us"]), *(body[name] for name in names))
        history.erasures.append(made)
        return
    order = int(body["sequence"]), int(body["part"])
    if life.founded is None or order > life.founded:
        life.founded, life.shards = order, int(body["shards"] or 0)
        life.generation = int(body.get("generation") or 0)


# Readers: of leaves of one kind, all about one incarnation. `boot + shift` is when each was written, on its clock.


def _opened(life: RecomputedLife, said: Said, boot: Numbers, shift: Numbers) -> None:
    residency, begun, first = numbers(said["residency"]), boot + shift, numbers(said["part"]) == 1
    names = ("tenant", "classification", "subject", "session", "model")
    texts = {name: _texts(life, said[name])[first] for name in names}
    life.people.add(int(first.sum()), residency=residency[first], opened=begun[first], **texts)
    for name, written in (("runs", 0), ("written", 1)):
        lists = said[name]
        life.uses.say(lists, residency=residency, begun=begun, written=written, over=0, until=0, hold=0)


def _attached(life: RecomputedLife, said: Said, boot: Numbers, shift: Numbers) -> None:
    who, begun = numbers(said["residency"]), boot + shift
    life.uses.say(said["runs"], residency=who, begun=begun, written=0, over=0, until=0, hold=0)


def _released(life: RecomputedLife, said: Said, boot: Numbers, shift: Numbers) -> None:
    residency, at, hold = numbers(said["residency"]), boot + shift, numbers(said["hold_boot_us"])
    first = numbers(said["part"]) == 1
    life.released.add(
        int(first.sum()),
        residency=residency[first],
        at=at[first],
        hold=hold[first],
        tenant=_texts(life, said["tenant"])[first],
        sequence=numbers(said["sequence"])[first],
        own=said["incarnation"][0] == life.uuid,
    )
    life.uses.say(said["runs"], residency=residency, begun=0, written=1, over=1, until=at, hold=hold)


def _early_releases(life: RecomputedLife, said: Said, boot: Numbers, shift: Numbers) -> None:
    residency, at, hold = numbers(said["residency"]), boot + shift, numbers(said["hold_boot_us"])
    own = numbers(said["own"]) != 0
    life.uses.say(said["runs"], residency=residency, begun=0, written=own, over=1, until=at, hold=hold)
    lists = [() if is_own else runs for runs, is_own in zip(said["runs"], own, strict=True)]
    life.gone.say(lists, residency=residency, at=at, hold=hold)


def _narrowed(life: RecomputedLife, said: Said, boot: Numbers, shift: Numbers) -> None:
    fields = (said[name] for name in ("sequence", "tenant", "holds", "until_boot_us"))
    for sequence, tenant, holds, untils, at, moved in zip(
        *fields, (boot + shift).tolist(), shift.tolist(), strict=True
    ):
        act = life.narrowings.setdefault(int(sequence), Narrowing(tenant, at, {}))
        for residency, until in zip(holds, untils, strict=True):
            act.standing[int(residency)] = int(until) + moved


def _ended(life: RecomputedLife, said: Said, boot: Numbers, shift: Numbers) -> None:
    life.ends.say(
        said["runs"],
        foreign=said["incarnation"][0] != life.uuid,
        sequence=said["sequence"],
        part=said["part"],
        tenant=_texts(life, said["tenant"]),
        classification=_texts(life, said["classification"]),
        dead=[cause.startswith("unproven") for cause in said["cause"]],
        within=said["scrub_within_us"],
        **{name: said[f"{name}_boot_us"] for name in ("due", "ended", "retired", "ceiling")},
    )


def _covered(life: RecomputedLife, said: Said, boot: Numbers, shift: Numbers) -> None:
    life.covered.say(said["runs"], erasure=_texts(life, said["erasure"]))


def _receipt(life: RecomputedLife, said: Said, boot: Numbers, shift: Numbers) -> None:
    level = numbers([_RANK.get(level, -1) for level in said["level"]])
    life.proofs.say(
        said["runs"],
        shard=said["shard"],
        started=said["started_boot_us"],
        ended=said["ended_boot_us"],
        level=level,
        good=numbers([result == "ok" for result in said["result"]]) & (level >= 0),
        bytes=said["bytes"],
        blocks=said["blocks"],
    )


def _texts(life: RecomputedLife, column: Iterable[Any]) -> Numbers:
    return numbers(list(map(life.names.__getitem__, column)))


_FOUNDING = frozenset({"erasure-requested", "worker-started"})
_RANK = {name: rank for rank, name in enumerate(LEVELS)}
_EVERY = ("at_us", "boot_us")
_PLACE = (*_EVERY, "incarnation", "sequence", "part", "tenant", "runs")
_FIELDS = {
    "residency-opened": (*_PLACE, "residency", "classification", "subject", "session", "model", "written"),
    "blocks-attached": (*_EVERY, "residency", "runs"),
    "residency-released": (*_PLACE, "residency", "hold_boot_us"),
    "blocks-released": (*_EVERY, "residency", "hold_boot_us", "own", "runs"),
    "holds-narrowed": (*_EVERY, "sequence", "tenant", "holds", "until_boot_us"),
    "custody-ended": (
        *(*_PLACE, "classification", "cause", "due_boot_us", "ended_boot_us", "retired_boot_us"),
        *("ceiling_boot_us", "scrub_within_us"),
    ),
    "erasure-applied": (*_EVERY, "erasure", "runs"),
    "receipt": (
        *(*_EVERY, "shard", "started_boot_us", "ended_boot_us", "level", "result", "bytes", "blocks", "runs"),
    ),
}


def _opening(body: dict[str, Any]) -> tuple[Any, ...]:
    """The fields of an opening; earlier leaves know neither a model nor what was handed out at once."""
    body.setdefault("model", "")
    body.setdefault("written", ())
    found: tuple[Any, ...] = _OPENING(body)
    return found


_OPENING = itemgetter(*_FIELDS["residency-opened"])
_PICK: dict[str, Callable[[dict[str, Any]], tuple[Any, ...]]] = {
    **{kind: itemgetter(*fields) for kind, fields in _FIELDS.items()},
    "residency-opened": _opening,
}
_READERS: dict[str, Callable[[RecomputedLife, Said, Numbers, Numbers], None]] = {
    "residency-opened": _opened,
    "blocks-attached": _attached,
    "residency-released": _released,
    "blocks-released": _early_releases,
    "holds-narrowed": _narrowed,
    "custody-ended": _ended,
    "erasure-applied": _covered,
    "receipt": _receipt,
}
