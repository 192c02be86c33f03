"""Processes of a ledger without production traffic: replays, generators, and workers that serve simulated requests.

1. The one answer, from signed leaves alone: the `origin` of a process's `worker-started` leaf. Whoever shows what a
   process recorded asks here, and says what `history` says. Leaves of earlier versions have none: they are not marked.
2. A mark leaves nothing out and counts nothing differently: what a marked process recorded is evidence of what it did.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from functools import lru_cache
from typing import NamedTuple

from sqlalchemy import Connection

from kvcustody.audit.evidence.processes.work_periods import LIVES, STARTED, Body, about, ends, life_leaves
from kvcustody.audit.kinds import ORIGINS
from kvcustody.times import SECOND_US, iso

_NAMED = 4


class MarkedProcess(NamedTuple):
    """One process that replayed or generated its records; times are UTC microseconds, None: it has not ended."""

    incarnation: str
    worker: str
    origin: str
    started_us: int
    ended_us: int | None


Marked = tuple[MarkedProcess, ...]


def marked_processes(bodies: Iterable[Body]) -> Marked:
    """Return the marked processes among these leaves, in the order of their starts; other leaves are ignored."""
    every = [body for body in bodies if body["kind"] in LIVES]
    starts = {about(body): body for body in reversed(every) if is_marked_start(body)}
    return marked_of(starts, ends(every))


def is_marked_start(body: Body) -> bool:
    """Return whether a leaf records the start of a process without production traffic."""
    return body["kind"] == STARTED and bool(body.get("origin"))


def marked_of(starts: Mapping[str, Body], over: Mapping[str, tuple[int, str]]) -> Marked:
    """Return the processes that started marked, by incarnation, and when and how those that ended did."""
    marked = [
        MarkedProcess(
            life,
            str(body["worker"]),
            str(body["origin"]) if str(body["origin"]) in ORIGINS else "of unknown origin",
            int(body["at_us"]),
            over[life][0] if life in over else None,
        )
        for life, body in starts.items()
    ]
    return tuple(sorted(marked, key=lambda one: (one.started_us, one.incarnation)))


def read_marked(connection: Connection) -> Marked:
    """Return the marked processes of a ledger; raises like `life_leaves` for a connection of a single tenant."""
    return marked_processes(leaf.body for leaf in life_leaves(connection))


@lru_cache(maxsize=8)
def history(marked: Marked) -> str:
    """Return the notice for pages that show their records; empty if there are none."""
    if not marked:
        return ""
    named = "; ".join(
        f"{one.worker} {one.incarnation[:12]} ({one.origin}, {_second(one.started_us)} to {_second(one.ended_us)})"
        for one in marked[:_NAMED]
    )
    more = f"; and {len(marked) - _NAMED:,} more" if len(marked) > _NAMED else ""
    text = f"Demo data: this ledger holds traffic that was replayed, generated or simulated: {named}{more}."
    return "".join(char if char.isprintable() else "\N{REPLACEMENT CHARACTER}" for char in text)


def _second(at_us: int | None) -> str:
    if at_us is None:
        return "no end on record"
    return iso(at_us // SECOND_US * SECOND_US)
