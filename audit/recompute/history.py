"""History: what the leaves say of each incarnation, sorted by what it is, with nothing concluded from it yet.

H1 A leaf counts for the incarnation that it is about (`of_incarnation`, else the one that wrote it), and its times are
on that incarnation's boot clock; a successor's release is put on it by way of UTC.
H2 Of two ends of one custody the first counts: an incarnation's own before its successor's, then by (sequence, part).
"""

from __future__ import annotations

from collections.abc import Callable, Iterable
from functools import cached_property
from sys import intern
from typing import Any, NamedTuple

import orjson

from kvcustody.audit.recompute.spans import Segment, Span, segments, spans_of
from kvcustody.errors import LedgerError

OPEN = 1 << 62  # the release of a residency that was never released
DEVICE_TIER = "device"  # the tier of all custody that leaves record today


class Person(NamedTuple):
    """Whose residency it is."""

    tenant: str
    classification: str
    subject: str | None
    session: str | None
    model: str
    opened: int


class Use(NamedTuple):
    """A residency refers to blocks from `begun` on; `released` is None where its own release says when."""

    residency: int
    begun: int
    written: bool
    released: int | None
    hold: int


class LetGo(NamedTuple):
    """A residency that goes on let go of blocks."""

    residency: int
    at: int
    hold: int


class End(NamedTuple):
    """The end of custody, as its leaf states it."""

    order: tuple[bool, int, int]
    tenant: str
    classification: str
    dead: bool
    due: int
    ended: int
    retired: int
    ceiling: int
    within: int


class Proof(NamedTuple):
    """One receipt of one shard."""

    shard: int
    started: int
    ended: int
    level: int  # its place in LEVELS
    good: bool
    bytes_each: int


class Covered(NamedTuple):
    """An erasure covers these blocks here."""

    erasure: str


class Erasure(NamedTuple):
    """Who was erased, and when by UTC."""

    erasure: str
    at_us: int
    selector: str
    tenant: str | None
    subject: str | None
    session: str | None


class Narrowing(NamedTuple):
    """Holds of a tenant were made to end earlier: `standing` is each that was left, and until when it lasts."""

    tenant: str
    at: int
    standing: dict[int, int]


class Life:
    """One incarnation."""

    def __init__(self, uuid: str) -> None:
        self.uuid = uuid
        self.offset_us = 0
        self.founded: tuple[int, int] | None = None
        self.shards = 0
        self.generation = 0  # where its counter started
        self.people: dict[int, Person] = {}
        self.released: dict[int, tuple[int, int]] = {}
        # Of a release: where it stands among its process's leaves, and the tenant.
        self.left: dict[int, tuple[int, str]] = {}
        self.narrowings: dict[int, Narrowing] = {}  # by where they stand
        self.spans: list[Span] = []

    @cached_property
    def segments(self) -> list[Segment]:
        """The spans cut into segments, once everything was read."""
        return list(segments(self.spans))


class History:
    """What was read: incarnations by id, erasures, and when the last leaf was written."""

    def __init__(self) -> None:
        self.lives: dict[str, Life] = {}
        self.erasures: list[Erasure] = []
        self.last_us = 0
        self.leaves = 0

    def life(self, uuid: str) -> Life:
        """The incarnation of this id, made on first mention."""
        found = self.lives.get(uuid)
        if found is None:
            found = self.lives[uuid] = Life(uuid)
        return found


def read_history(leaves: Iterable[bytes]) -> History:
    """Sort the leaves, given in any order of logs; raises `LedgerError` for bytes that are no leaf."""
    history = History()
    later: list[dict[str, Any]] = []
    lives, last_us, count, of_kind = history.lives, 0, 0, _READERS.get
    try:
        for body in map(orjson.loads, leaves):  # millions: what every leaf needs is done here
            uuid, kind, at_us = body["incarnation"], body["kind"], int(body["at_us"])
            life = lives[uuid] if uuid in lives else history.life(uuid)
            life.offset_us = at_us - int(body["boot_us"])  # the same in every leaf of an incarnation
            count += 1
            if at_us > last_us:
                last_us = at_us
            if kind in _FOUNDING:
                _found(history, life, body, at_us)
            if body.get("of_incarnation", uuid) != uuid:
                later.append(body)  # needs the other's clock, which may not have been read yet
            elif reader := of_kind(kind):
                reader(life, body, 0)
    except (ValueError, KeyError, TypeError) as problem:
        raise LedgerError(f"a leaf cannot be read: {problem!r}") from problem
    history.last_us, history.leaves = last_us, count
    for body in later:
        life = history.life(body["of_incarnation"])
        if body["kind"] in _READERS:
            shift = int(body["at_us"]) - int(body["boot_us"]) - life.offset_us
            _READERS[body["kind"]](life, body, shift)
    return history


def _found(history: History, life: Life, body: dict[str, Any], at_us: int) -> None:
    """What is of no block: an erasure that was asked for, and the start of an incarnation."""
    if body["kind"] == "erasure-requested":
        history.erasures.append(
            Erasure(
                body["erasure"], at_us, body["selector"], body["tenant"], body["subject"], body["session"]
            )
        )
        return
    order = _order(body)
    if life.founded is None or order > life.founded:
        life.founded, life.shards = order, int(body["shards"] or 0)
        life.generation = int(body.get("generation") or 0)


def _order(body: dict[str, Any]) -> tuple[int, int]:
    return int(body["sequence"]), int(body["part"])


def _opened(life: Life, body: dict[str, Any], shift: int) -> None:
    residency, begun = int(body["residency"]), int(body["boot_us"]) + shift
    if body["part"] == 1:
        life.people[residency] = Person(
            intern(body["tenant"]),
            intern(body["classification"]),
            body["subject"],
            body["session"],
            intern(body.get("model", "")),
            begun,
        )
    if body["runs"]:
        life.spans += spans_of(body["runs"], Use(residency, begun, False, None, 0))
    if body.get("written"):
        life.spans += spans_of(body["written"], Use(residency, begun, True, None, 0))


def _attached(life: Life, body: dict[str, Any], shift: int) -> None:
    use = Use(int(body["residency"]), int(body["boot_us"]) + shift, False, None, 0)
    life.spans += spans_of(body["runs"], use)


def _released(life: Life, body: dict[str, Any], shift: int) -> None:
    residency, at, hold = int(body["residency"]), int(body["boot_us"]) + shift, int(body["hold_boot_us"])
    if body["part"] == 1:
        before = life.released.get(residency, (0, 0))
        life.released[residency] = (max(before[0], at), max(before[1], hold))
        if body["incarnation"] == life.uuid:
            was = life.left.get(residency, (0, ""))
            life.left[residency] = max(was, (int(body["sequence"]), intern(body["tenant"])))
    if body["runs"]:
        life.spans += spans_of(body["runs"], Use(residency, 0, True, at, hold))


def _let_go(life: Life, body: dict[str, Any], shift: int) -> None:
    residency, at, hold = int(body["residency"]), int(body["boot_us"]) + shift, int(body["hold_boot_us"])
    life.spans += spans_of(body["runs"], Use(residency, 0, bool(body["own"]), at, hold))
    if not body["own"]:
        life.spans += spans_of(body["runs"], LetGo(residency, at, hold))


def _narrowed(life: Life, body: dict[str, Any], shift: int) -> None:
    act = Narrowing(body["tenant"], int(body["boot_us"]) + shift, {})
    act = life.narrowings.setdefault(int(body["sequence"]), act)
    for residency, until in zip(body["holds"], body["until_boot_us"], strict=True):
        act.standing[int(residency)] = int(until) + shift


def _ended(life: Life, body: dict[str, Any], shift: int) -> None:
    end = End(
        (body["of_incarnation"] != body["incarnation"], *_order(body)),
        intern(body["tenant"]),  # one text for a million leaves
        intern(body["classification"]),
        body["cause"].startswith("unproven"),
        int(body["due_boot_us"]),
        int(body["ended_boot_us"]),
        int(body["retired_boot_us"]),
        int(body["ceiling_boot_us"]) or OPEN,
        int(body["scrub_within_us"]),
    )
    life.spans += spans_of(body["runs"], end)


def _covered(life: Life, body: dict[str, Any], shift: int) -> None:
    life.spans += spans_of(body["runs"], Covered(body["erasure"]))


def _receipt(life: Life, body: dict[str, Any], shift: int) -> None:
    blocks = int(body["blocks"])
    here = 0
    for item in body["runs"]:
        here += sum(item[2]) if item[2] else len(item[1])
    bytes_here = int(body["bytes"]) * here // blocks if blocks else 0
    level = _RANK.get(body["level"], -1)
    proof = Proof(
        int(body["shard"]),
        int(body["started_boot_us"]),
        int(body["ended_boot_us"]),
        level,
        body["result"] == "ok" and level >= 0,
        bytes_here // max(1, here),
    )
    life.spans += spans_of(body["runs"], proof)


_FOUNDING = frozenset({"erasure-requested", "worker-started"})
LEVELS = ("launched", "retired", "sampled", "full")  # weakest first
_RANK = {name: rank for rank, name in enumerate(LEVELS)}
_READERS: dict[str, Callable[[Life, dict[str, Any], int], None]] = {
    "residency-opened": _opened,
    "blocks-attached": _attached,
    "residency-released": _released,
    "blocks-released": _let_go,
    "holds-narrowed": _narrowed,
    "custody-ended": _ended,
    "erasure-applied": _covered,
    "receipt": _receipt,
}
