"""The figures of an erasure, from leaves only: covered, destroyed at which level, kept, and unproven.

1. A unit is (process, pool, generation). It is destroyed when every shard that its process announced has a receipt
   without failure for it; its level is the weakest of them.
2. A unit that a process names as remaining is kept; one that is neither is unproven.
3. A copy off the device is (process, tier, number). It is waiting from its end by the erasure until its first evidence:
   its bytes zeroed, unlinked or deleted, or a key of it destroyed, without which nobody can open it.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from itertools import chain
from typing import Any, NamedTuple

from kvcustody.audit.kinds import DELETED, EVIDENCE
from kvcustody.audit.kinds.block_runs import decode_flat
from kvcustody.audit.leaf.change_items import plain_bodies

LEVELS = ("unread", "launched", "retired", "sampled", "full")
Unit = tuple[str, int, int]
_DELETED_AT = EVIDENCE.index(DELETED)
_OF_REMOTE = ("deleted", "locked", "locked_until_us")


class ErasedCopies(NamedTuple):
    """Copies of one tier that an erasure ended, with counts by kind of evidence; `bytes` are sealed bytes.

    `deleted`: the store's own listing shows none of their versions and markers any more. `locked`: the store keeps
    their bytes, the longest until `locked_until_us` (UTC), by a lock of its own.
    """

    ended: int
    bytes: int
    zeroed: int
    unlinked: int
    key_destroyed: int
    waiting: int
    deleted: int = 0
    locked: int = 0
    locked_until_us: int = 0

    def as_dict(self) -> dict[str, int]:
        """Return the copies as JSON data; fields that only remote stores have appear if nonzero."""
        found = self._asdict()
        return {name: value for name, value in found.items() if value or name not in _OF_REMOTE}


class ErasureFigures(NamedTuple):
    """Counts of units, and of the processes and tier objects behind them."""

    units: int
    destroyed: int
    by_level: tuple[tuple[str, int], ...]
    bytes: int
    kept: tuple[tuple[str, int], ...]
    unproven: int
    receipts: int
    reread_blocks: int
    reread_nonzero: int
    tiers: tuple[tuple[str, int], ...]
    copies: tuple[tuple[str, ErasedCopies], ...] = ()

    def as_dict(self) -> dict[str, Any]:
        """Return the figures as JSON data; copies only if there are any."""
        made = self._asdict()
        copies = {tier: each.as_dict() for tier, each in made.pop("copies")}
        said = {name: dict(value) if isinstance(value, tuple) else value for name, value in made.items()}
        return said | ({"copies": copies} if copies else {})


def waiting_copies(figures: Mapping[str, Any]) -> int:
    """Return copies without evidence of their end, and copies that a process counted but no leaf ends.

    `figures` as JSON has them.
    """
    counted = figures["tiers"]
    return sum(
        copies["waiting"] + max(0, counted.get(tier, 0) - copies["ended"])
        for tier, copies in figures.get("copies", {}).items()
    )


def figures_of(bodies: Iterable[Mapping[str, Any]], erasure: str) -> ErasureFigures:
    """Return the figures of one erasure from the bodies of its leaves."""
    shards: dict[str, int] = {}
    covered: set[Unit] = set()
    reasons: dict[Unit, str] = {}
    proven: dict[Unit, dict[int, int]] = {}
    tiers: dict[str, int] = {}
    read = nonzero = count = size = 0
    every = list(bodies)
    for body in every:
        kind, life = body["kind"], body["incarnation"]
        if kind == "worker-started":
            shards[life] = body["shards"]
        if body.get("erasure") != erasure:
            continue
        if kind == "erasure-applied":
            covered |= _units(body)
            if body["part"] == 1:
                for name, objects in zip(body["tiers"], body["objects"], strict=True):
                    tiers[name] = tiers.get(name, 0) + objects
        elif kind == "erasure-remaining":
            reasons.update(dict.fromkeys(_units(body), body["reason"]))
        elif kind == "erasure-reread":
            read, nonzero = read + body["checked"], nonzero + body["nonzero"]
    for body in chain.from_iterable(map(plain_bodies, every)):
        if body["kind"] != "receipt" or body["result"] != "ok" or body["level"] not in LEVELS:
            continue
        named = _units(body)
        mine = named & covered
        count += bool(mine)
        size += body["bytes"] * len(mine) // max(1, body["blocks"]) if mine else 0
        level = LEVELS.index(body["level"])
        for unit in mine:
            by_shard = proven.setdefault(unit, {})
            by_shard[body["shard"]] = max(level, by_shard.get(body["shard"], 0))
    destroyed = {
        unit: min(levels.values()) for unit, levels in proven.items() if len(levels) >= shards.get(unit[0], 1 << 30)
    }
    still = {unit: reason for unit, reason in reasons.items() if unit in covered and unit not in destroyed}
    return ErasureFigures(
        len(covered),
        len(destroyed),
        _counted(LEVELS[level] for level in destroyed.values()),
        size,
        _counted(still.values()),
        len(covered - destroyed.keys() - still.keys()),
        count,
        read,
        nonzero,
        tuple(sorted(tiers.items())),
        _copies(every, erasure),
    )


def _copies(bodies: Iterable[Mapping[str, Any]], erasure: str) -> tuple[tuple[str, ErasedCopies], ...]:
    """By tier: what the erasure ended, and what leaves of the same processes prove of it."""
    ended: dict[str, dict[tuple[str, int, str], int]] = {}
    proofs: dict[str, dict[str, set[tuple[str, int, str]]]] = {}
    locks: dict[str, dict[tuple[str, int, str], int]] = {}
    for body in bodies:
        if body["kind"] == "copies-ended" and body["erasure"] == erasure:
            ended.setdefault(body["tier"], {}).update(zip(_named(body), body["bytes_each"], strict=True))
        elif body["kind"] == "copies-locked" and body.get("erasure") == erasure:
            offset_us = int(body["at_us"]) - int(body["boot_us"])
            until = (int(each) + offset_us for each in body["until_boot_us"])
            locks.setdefault(body["tier"], {}).update(zip(_named(body), until, strict=True))
        elif body["kind"] == "copies-destroyed":
            proofs.setdefault(body["tier"], {}).setdefault(body["cause"], set()).update(_named(body))
    by_tier = []
    for tier, sizes in sorted(ended.items()):
        of_tier = [proofs.get(tier, {}).get(kind, set()) & sizes.keys() for kind in EVIDENCE]
        zeroed, unlinked, key_destroyed, deleted = map(len, of_tier)
        waiting = len(sizes.keys() - set().union(*of_tier))
        size = sum(sizes.values())
        locked = [until for one, until in locks.get(tier, {}).items() if one not in of_tier[_DELETED_AT]]
        copies = ErasedCopies(
            *(len(sizes), size, zeroed, unlinked, key_destroyed, waiting, deleted),
            locked=len(locked),
            locked_until_us=max(locked, default=0),
        )
        by_tier.append((tier, copies))
    return tuple(by_tier)


def _named(body: Mapping[str, Any]) -> list[tuple[str, int, str]]:
    life = body["incarnation"]
    return [(life, number, name) for number, name in zip(body["numbers"], body["names"], strict=True)]


def _units(body: Mapping[str, Any]) -> set[Unit]:
    pairs, _ = decode_flat(body["runs"])
    life = body["incarnation"]
    return {
        (life, pool, generation)
        for pool, generation in zip(pairs.pools.tolist(), pairs.generations.tolist(), strict=True)
    }


def _counted(values: Iterable[str]) -> tuple[tuple[str, int], ...]:
    counts: dict[str, int] = {}
    for value in values:
        counts[value] = counts.get(value, 0) + 1
    return tuple(sorted(counts.items()))
