"""Showback: each tenant's share of the cache in a period, and its savings from reuse, from the ledger.

    rows = showback(connection, since_us, until_us, costs)      # by tenant
    pairs = dated_reuse(connection, since_us, until_us)         # by reader, owner and what opened the blocks

1. Block-seconds belong to whoever the custody is charged to: the owner of a segment that was filled, else the
   requester. They count from when a block was handed out; blocks that a request grew by count from when the request
   opened. They count until custody ends, or until the end of the period or of the process.
2. A hit belongs to the reader. If another tenant owns the blocks, the hit was *taken* from that tenant, who *gave* it.
   Requests count in the period in which they opened. Three kinds of block saved nothing and are no hit:
   - those that a request had before it was preempted;
   - those that it shares with the request it forked from;
   - those that it computed itself before it joined another's copy.
3. Seconds are what those tokens' prefill would have taken by the measured cost of the worker (`Cost`), each block at
   its place in the prompt. Where no cost is known, they are None: nothing is guessed.
4. Every figure is a function of ledger rows and arguments, so a bill can be reproduced. Leaves that retention has
   dropped no longer count. The cost of a query grows with the evidence of the processes that were at work in the
   period.
"""

from __future__ import annotations

from collections import Counter, defaultdict
from collections.abc import Mapping
from typing import NamedTuple

import numpy as np
import orjson
from numpy.typing import NDArray
from sqlalchemy import Connection, and_, select

from kvcustody.audit.evidence.processes.work_periods import ends, life_leaves, work_periods
from kvcustody.audit.evidence.query.evidence_columns import (
    Evidence,
    read,
    read_assignments,
    read_opened,
    unit_keys,
)
from kvcustody.audit.kinds import log_of
from kvcustody.audit.kinds.block_runs import Int64s
from kvcustody.audit.kinds.registry import EARLIER
from kvcustody.audit.project import HIT_COUNTERS, MONITORED
from kvcustody.audit.store.database.snapshot import AsOf, is_in
from kvcustody.audit.store.schema.all_tables import has_leaf
from kvcustody.audit.store.schema.leaf_tables import custody_ends, releases, residencies
from kvcustody.audit.store.schema.ledger import events, incarnations, logs
from kvcustody.times import SECOND_US


class Cost(NamedTuple):
    """The cost of a prefill on a worker: seconds per token, and per pair of a token and an earlier one."""

    block_tokens: int
    token_seconds: float
    pair_seconds: float = 0.0

    def seconds(self, place: Int64s) -> NDArray[np.float64]:
        """Return the seconds to compute one block at each of these places in a prompt, in blocks."""
        size = self.block_tokens
        found = np.full(len(place), size * self.token_seconds)
        found += self.pair_seconds * size * size * (place + 0.5)
        return found


class ShowbackRow(NamedTuple):
    """One tenant's period. `blocks_mean`: block-seconds divided by the length of the period."""

    tenant: str
    block_seconds: float
    blocks_mean: float
    own_hit_blocks: int
    taken_hit_blocks: int
    given_hit_blocks: int
    saved_seconds: float | None
    taken_seconds: float | None
    given_seconds: float | None


def costs_of(statuses: Mapping[str, Mapping[str, float]]) -> dict[str, Cost]:
    """Return the costs that workers measured, from their statuses by name; workers without measurements are omitted."""
    return {
        name: Cost(int(said["block_tokens"]), said["prefill_cost.token"], said.get("prefill_cost.pair", 0.0))
        for name, said in statuses.items()
        if "block_tokens" in said and "prefill_cost.token" in said
    }


class _Sums:
    def __init__(self) -> None:
        self.names: dict[str, int] = {}
        self.held: list[float] = []
        self.hits: list[list[float]] = []  # own, taken, given: blocks, then seconds
        self.unknown: set[int] = set()  # of a worker without a cost

    def code(self, tenant: str) -> int:
        found = self.names.setdefault(tenant, len(self.names))
        if found == len(self.held):
            self.held.append(0.0)
            self.hits.append([0.0] * 6)
        return found


def showback(connection: Connection, since_us: int, until_us: int, costs: Mapping[str, Cost]) -> list[ShowbackRow]:
    """Return every tenant with a share in [since, until), UTC microseconds; `costs` by worker's name."""
    sums = _Sums()
    for life in lives_at_work(connection, since_us):
        ended_us = until_us if life.ended_us is None else min(until_us, life.ended_us)
        _count_life(connection, life.id, life.offset_us, (since_us, until_us, ended_us), costs.get(life.name), sums)
    rows = [_row(name, code, sums, until_us - since_us) for name, code in sums.names.items()]
    return sorted((row for row in rows if any(row[1:6])), key=lambda row: (-row.block_seconds, row.tenant))


class WorkingLife(NamedTuple):
    """One process and its worker's name (empty: no announced memory); `offset_us` turns its boot time into UTC."""

    id: int
    uuid: str
    name: str
    offset_us: int
    ended_us: int | None


def lives_at_work(connection: Connection, since_us: int) -> list[WorkingLife]:
    """Return every process that had not ended before a moment; owner and end come from leaves only."""
    table, bodies = incarnations.c, [leaf.body for leaf in life_leaves(connection)]
    periods, over = work_periods(bodies), ends(bodies)
    lives = [
        WorkingLife(life, uuid, periods[uuid].worker if uuid in periods else "", offset_us, over.get(uuid, (None,))[0])
        for life, uuid, offset_us in connection.execute(
            select(table.id, table.uuid, table.offset_us).order_by(table.id)
        )
    ]
    return [life for life in lives if life.ended_us is None or life.ended_us >= since_us]


class LifeEvidence(NamedTuple):
    """The blocks that one process's residencies attached at opening, were handed then, and grew by."""

    attached: Evidence
    handed: Evidence
    grown: Evidence


def read_life(connection: Connection, life: int, until_us: int) -> LifeEvidence:
    """Return the evidence of residencies that opened before a UTC moment."""
    column = residencies.c
    attached, handed = read_opened(
        connection,
        (column.residency, column.part, column.opened_boot_us, column.tenant, column.classification),
        and_(column.incarnation == life, column.opened_us < until_us),
        ordered=False,
        with_earlier=True,
    )
    grown = read(
        connection,
        releases,
        (releases.c.residency, releases.c.released_boot_us, releases.c.tenant),
        and_(releases.c.incarnation == life, releases.c.written),
        ordered=False,
    )
    return LifeEvidence(attached, handed, grown)


def _row(name: str, code: int, sums: _Sums, length_us: int) -> ShowbackRow:
    own, taken, given, *seconds = sums.hits[code]
    known = [None if code in sums.unknown else value for value in seconds]
    held = sums.held[code]
    return ShowbackRow(name, held, held * SECOND_US / max(1, length_us), int(own), int(taken), int(given), *known)


def _count_life(
    connection: Connection,
    life: int,
    offset_us: int,
    period: tuple[int, int, int],
    cost: Cost | None,
    sums: _Sums,
) -> None:
    since, until, stopped = (at - offset_us for at in period)
    attached, handed, grown = read_life(connection, life, until + offset_us)
    if not attached.size:
        return
    ends = read(
        connection,
        custody_ends,
        (custody_ends.c.ended_boot_us, custody_ends.c.tenant),
        custody_ends.c.incarnation == life,
        ordered=False,
    )
    keys, begun, owner = _written(attached, handed, grown, sums)
    order = np.argsort(keys, kind="stable")
    keys, begun, owner = keys[order], begun[order], owner[order]
    keys, first = np.unique(keys, return_index=True)
    begun, owner = begun[first], owner[first]
    assigned = read_assignments(connection, life)
    place = assigned.of(keys)
    if (place >= 0).any():
        parties = np.array([sums.code(name) for name, _ in assigned.parties], np.int64)
        owner = np.where(place >= 0, parties[place], owner)
    ended = np.full(len(keys), min(until, stopped), dtype=np.int64)
    end_keys = keys_of(ends)
    at, is_known = places_in(keys, end_keys)
    ended[at] = ends.column("ended_boot_us")[ends.owner[is_known]]
    owner[at] = _tenants(ends, sums)[ends.owner[is_known]]
    held_us = np.minimum(ended, until) - np.maximum(begun, since)
    held = np.bincount(owner, np.maximum(held_us, 0) / SECOND_US, minlength=len(sums.held))
    for code, seconds in enumerate(held.tolist()):
        sums.held[code] += seconds
    watched = monitored_residencies(connection, life)
    _count_hits(attached, (since, until), (keys, owner), watched, cost, sums)


def monitored_residencies(connection: Connection, life: int) -> Int64s:
    """Return residencies for which the policy was not enforced; their attached blocks are not permitted reuse."""
    query = select(events.c.leaf).where(events.c.incarnation == life, events.c.kind == MONITORED, has_leaf(events))
    found = [orjson.loads(bytes(leaf))["residency"] for leaf in connection.scalars(query)]
    return np.array(found, dtype=np.int64)


def _written(attached: Evidence, handed: Evidence, grown: Evidence, sums: _Sums) -> tuple[Int64s, Int64s, Int64s]:
    """Return the keys of all handed-out blocks, when, and to whom."""
    opened = attached.column("opened_boot_us")
    residency = attached.column("residency")
    order = np.argsort(residency, kind="stable")
    place = np.searchsorted(residency[order], grown.column("residency"))
    place = np.minimum(place, len(order) - 1)
    found = residency[order][place] == grown.column("residency")
    since = np.where(found, opened[order][place], grown.column("released_boot_us"))
    tenants = _tenants(attached, sums)
    return (
        np.concatenate((keys_of(handed), keys_of(grown))),
        np.concatenate((opened[handed.owner], since[grown.owner])),
        np.concatenate((tenants[handed.owner], _tenants(grown, sums)[grown.owner])),
    )


def _count_hits(
    attached: Evidence,
    period: tuple[int, int],
    owners: tuple[Int64s, Int64s],
    monitored: Int64s,
    cost: Cost | None,
    sums: _Sums,
) -> None:
    hits = hits_in(attached, period, monitored)
    rows, keys, place = attached.owner[hits.which], keys_of(attached)[hits.which], hits.place
    if not len(rows):
        return
    known, owner = owners
    at = np.minimum(np.searchsorted(known, keys), max(0, len(known) - 1))
    reader = _tenants(attached, sums)[rows]
    whose = np.where(known[at] == keys, owner[at], reader) if len(known) else reader
    crosses = whose != reader
    seconds = cost.seconds(place) if cost is not None else np.zeros(len(rows))
    if cost is None:
        sums.unknown.update(np.unique(np.concatenate((reader, whose))).tolist())
    for kind, who, which in ((0, reader, ~crosses), (1, reader, crosses), (2, whose, crosses)):
        blocks = np.bincount(who[which], minlength=len(sums.held)).tolist()
        worth = np.bincount(who[which], seconds[which], minlength=len(sums.held)).tolist()
        for code in range(len(sums.held)):
            sums.hits[code][kind] += blocks[code]
            sums.hits[code][3 + kind] += worth[code]


def keys_of(part: Evidence) -> Int64s:
    """Return the (pool, generation) key of every flat entry."""
    return unit_keys(part.pairs.pools, part.pairs.generations)


class Hits(NamedTuple):
    """The entries of `attached` that saved a prefill, and the place of each in its prompt."""

    which: NDArray[np.bool_]
    place: Int64s


def hits_in(attached: Evidence, period: tuple[int, int], monitored: Int64s) -> Hits:
    """Return what openings in [since, until), boot time, reused under the policy, without earlier own work (rule 2).

    Leaves list blocks in the order of the prompt, and a long list goes on in the leaf's next part.
    """
    at_us, residency, part = map(attached.column, ("opened_boot_us", "residency", "part"))
    counts = np.bincount(attached.owner, minlength=attached.size)
    before = np.zeros(attached.size, np.int64)
    if (part > 1).any():
        order = np.lexsort((part, residency))
        total = np.cumsum(counts[order]) - counts[order]
        first = np.searchsorted(residency[order], residency[order])
        before[order] = total - total[first]
    place = np.arange(len(attached.owner)) - np.searchsorted(attached.owner, attached.owner)
    place += before[attached.owner]
    chosen = (at_us >= period[0]) & (at_us < period[1]) & ~np.isin(residency, monitored)
    which = chosen[attached.owner] & (place >= attached.column(EARLIER)[attached.owner])
    return Hits(which, place[which])


def _tenants(part: Evidence, sums: _Sums) -> NDArray[np.int64]:
    return np.array([sums.code(name) for name in part.texts("tenant")], dtype=np.int64)


def places_in(known: Int64s, keys: Int64s) -> tuple[Int64s, NDArray[np.bool_]]:
    """Return the position of each of `keys` in `known`, and which of them it contains."""
    if not len(known):
        return np.empty(0, np.int64), np.zeros(len(keys), np.bool_)
    at = np.minimum(np.searchsorted(known, keys), len(known) - 1)
    found = known[at] == keys
    return at[found], found


class CrossedReuse(NamedTuple):
    """One tenant's reuse of another's blocks through one grant or segment."""

    reader: str
    owner: str
    rule: str
    requests: int
    blocks: int
    tokens: int


class DatedReuse(NamedTuple):
    """One tenant's reuse of another's blocks through one grant or segment, and when: UTC microseconds.

    `first_us` is the beginning of the first counter that has some, `last_us` the end of the last: a minute at most.
    """

    reader: str
    owner: str
    rule: str
    requests: int
    blocks: int
    tokens: int
    first_us: int
    last_us: int

    @property
    def undated(self) -> CrossedReuse:
        """The same without its times."""
        return CrossedReuse(self.reader, self.owner, self.rule, self.requests, self.blocks, self.tokens)


def dated_reuse(
    connection: Connection,
    since_us: int,
    until_us: int,
    *,
    party: str | None = None,
    state: AsOf | None = None,
) -> list[DatedReuse]:
    """Return counted reuse across tenants in [since, until) and its times, of one party or of all.

    Both parties' logs have it: of one party its own log is read, of all those of the readers. A counter counts where
    it ends. Writers end one at every whole minute (UTC).
    """
    column = events.c
    query = (
        select(column.leaf, logs.c.name)
        .join(logs, logs.c.id == column.log)
        .where(is_in(state, events), has_leaf(events), column.kind == HIT_COUNTERS)
        .where(column.at_us >= since_us, column.at_us < until_us)
    )
    if party is not None:
        query = query.where(logs.c.name == log_of(party))
    sums: defaultdict[tuple[str, str, str], Counter[str]] = defaultdict(Counter)
    times: dict[tuple[str, str, str], tuple[int, int]] = {}
    for leaf, log in connection.execute(query):
        body = orjson.loads(bytes(leaf))
        reader, owner = body["tenant"], body["owner"]
        if body["effect"] == "permit" and reader != owner and log == log_of(party or reader) and int(body["blocks"]):
            who, ended_us = (reader, owner, body["rule"]), int(body["at_us"])
            sums[who].update({name: int(body[name]) for name in _SIZES})
            began_us = ended_us - int(body["boot_us"]) + int(body["from_boot_us"])
            first_us, last_us = times.get(who, (began_us, ended_us))
            times[who] = min(first_us, began_us), max(last_us, ended_us)
    dated = (DatedReuse(*who, row["requests"], row["blocks"], row["tokens"], *times[who]) for who, row in sums.items())
    return sorted(row for row in dated if row.blocks)


_SIZES = ("requests", "blocks", "tokens")
