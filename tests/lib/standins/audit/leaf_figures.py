"""Every figure that the product shows, once more from leaf bytes, without any code of the product.

1. Leaves are read by SQL over `events`; oracles of `examples/reperform` read their runs, judge custody, and say how an
   erasure stands.
2. A block is one (process, pool, generation). It is held by its owner from the leaf that lists it as handed out to the
   leaf that ends it. So what is held is counted block by block, never as a difference of sums.
"""

from __future__ import annotations

import json
from collections import Counter, defaultdict
from collections.abc import Iterable, Iterator, Mapping
from functools import cached_property
from typing import Any, NamedTuple

import coverage_oracle as oracle
import lives_oracle
import orjson
from sqlalchemy import Connection, create_engine, text

Body = dict[str, Any]
HELD_MEASURES = ("written_blocks", "attached_blocks", "ended_blocks", "assigned_blocks", "given_blocks")


class PrefillCost(NamedTuple):
    """What computing a token takes on a worker, and each pair of a token and one before it."""

    block_tokens: int
    token_seconds: float
    pair_seconds: float = 0.0

    def seconds(self, place: int) -> float:
        """What one block takes at this place of a prompt, in blocks."""
        return self.block_tokens * self.token_seconds + self.block_tokens**2 * self.pair_seconds * (place + 0.5)


class Snapshot(NamedTuple):
    """The sizes of all logs without leaves about access, and what workers say a prefill takes."""

    sizes: tuple[tuple[str, int], ...]
    costs: tuple[tuple[str, PrefillCost], ...]


def snapshot(database_url: str) -> Snapshot:
    """What a ledger has now: equal where nothing was recorded that a figure is made of."""
    with create_engine(database_url).connect() as connection:
        counted = connection.execute(
            text(
                "SELECT logs.name, count(*) FROM events JOIN logs ON logs.id = events.log"
                " WHERE events.kind <> 'access' GROUP BY logs.name ORDER BY logs.name"
            )
        )
        sizes = tuple((str(name), int(size)) for name, size in counted)
        said = connection.execute(text("SELECT worker, status FROM service_workers ORDER BY seen_us"))
        status = {worker: json.loads(line) for worker, line in said if line != "{}"}
    costs = {
        worker: PrefillCost(int(line["block_tokens"]), line["prefill_cost.token"], line.get("prefill_cost.pair", 0.0))
        for worker, line in status.items()
        if "block_tokens" in line and "prefill_cost.token" in line
    }
    return Snapshot(sizes, tuple(sorted(costs.items())))


def read_leaves(database_url: str, tree_size: int | None = None) -> LeafFigures:
    """The leaves that a ledger has now, or those under its first `tree_size` root leaves."""
    with create_engine(database_url).connect() as connection:
        return LeafFigures(_rows(connection, tree_size))


def _rows(connection: Connection, tree_size: int | None) -> list[bytes]:
    query = "SELECT log, idx, leaf FROM events ORDER BY at_us, log, idx"
    if tree_size is None:
        return [bytes(leaf) for _, _, leaf in connection.execute(text(query))]
    of_roots = text("SELECT log, max(size) AS size FROM root_leaves WHERE idx < :size GROUP BY log")
    sizes = {row.log: row.size for row in connection.execute(of_roots, {"size": tree_size})}
    return [bytes(leaf) for log, idx, leaf in connection.execute(text(query)) if idx < sizes.get(log, 0)]


class LeafFigures:
    """Figures of some leaves. Periods are [since, until) in UTC microseconds."""

    def __init__(self, leaves: list[bytes]) -> None:
        self.leaves = leaves
        self.bodies: list[Body] = [orjson.loads(leaf) for leaf in leaves]
        self.last_us = max((int(body["at_us"]) for body in self.bodies), default=0)
        self._judged: dict[tuple[int | None, ...], list[oracle.Custody]] = {}

    @cached_property
    def history(self) -> oracle.History:
        """The leaves by the process that they are about."""
        return oracle.History(self.leaves)

    @cached_property
    def items(self) -> list[Body]:
        """Every event: leaves, or what they list."""
        return [item for body in self.bodies for item in oracle.items_of(body)]

    def _of(self, *kinds: str) -> Iterator[Body]:
        return (body for body in self.items if body["kind"] in kinds)

    # -- custody --------------------------------------------------------------------------------------------------

    @cached_property
    def owners(self) -> dict[tuple[str, oracle.Key], str]:
        """Whose custody every block is that was handed out."""
        owners: dict[tuple[str, oracle.Key], str] = {}
        for uuid, life in self.history.lives.items():
            for key, tenant in _handed_out(life):
                owners.setdefault((uuid, key), tenant)
            for key, _, body in life.named("blocks-assigned"):
                owners[uuid, key] = body["owner"]
        return owners

    @cached_property
    def held(self) -> Counter[str]:
        """Blocks in each tenant's custody."""
        ended = {(uuid, key) for uuid, life in self.history.lives.items() for key, _, _ in life.named("custody-ended")}
        return Counter(owner for block, owner in self.owners.items() if block not in ended)

    @cached_property
    def totals(self) -> dict[str, Counter[str]]:
        """What each tenant's log has: requests, and blocks by what became of them."""
        by_tenant: dict[str, Counter[str]] = defaultdict(Counter)
        for body in self.bodies:
            if body["log"].startswith("tenant/"):
                by_tenant[body["log"].removeprefix("tenant/")]["leaves"] += 1
        for body in self.items:
            if not body["log"].startswith("tenant/"):
                continue
            tenant, kind = body["log"].removeprefix("tenant/"), body["kind"]
            sums, runs = by_tenant[tenant], body.get("runs", ())
            if kind == "residency-opened":
                sums["residencies"] += body["part"] == 1
                sums["attached_blocks"] += _size(runs)
                sums["written_blocks"] += _size(body.get("written", ()))
            elif kind == "residency-released":
                sums["released"] += body["part"] == 1
                sums["written_blocks"] += _size(runs)
            elif kind == "blocks-attached":
                sums["attached_blocks"] += _size(runs)
            elif kind == "blocks-released" and body["own"]:
                sums["written_blocks"] += _size(runs)
            elif kind == "custody-ended":
                sums["ended_blocks"] += _size(runs)
            elif kind == "blocks-assigned":
                sums["assigned_blocks"] += _size(runs) * (tenant == body["owner"])
                sums["given_blocks"] += _size(runs) * (tenant == body["tenant"])
        return by_tenant

    def coverage(
        self, since_us: int | None, until_us: int | None, *, as_of_us: int | None = None
    ) -> list[oracle.Custody]:
        """Every custody that was due in a period, judged."""
        asked = (since_us, until_us, as_of_us)
        if asked not in self._judged:
            chosen = oracle.Chosen(since_us, until_us)
            self._judged[asked] = list(oracle.judge(self.history, chosen, as_of_us=as_of_us))
        return self._judged[asked]

    # -- reuse ----------------------------------------------------------------------------------------------------

    def crossed(self, since_us: int, until_us: int) -> dict[tuple[str, str, str], tuple[int, int, int]]:
        """Requests, blocks and tokens that one tenant reused of another's, by reader, owner and rule."""
        sums: dict[tuple[str, str, str], list[int]] = defaultdict(lambda: [0, 0, 0])
        for body in self._of("hit-counters"):
            reader, owner = body["tenant"], body["owner"]
            of_reader = body["log"] == f"tenant/{reader}" and reader != owner and body["effect"] == "permit"
            if of_reader and since_us <= int(body["at_us"]) < until_us:
                for place, name in enumerate(("requests", "blocks", "tokens")):
                    sums[reader, owner, body["rule"]][place] += int(body[name])
        return {who: (row[0], row[1], row[2]) for who, row in sums.items() if row[1]}

    @cached_property
    def denials(self) -> Counter[tuple[str, str, str, int]]:
        """Denied requests by reader, owner, rule and revision."""
        denied: Counter[tuple[str, str, str, int]] = Counter()
        for body in self._of("hit-counters", "decision"):
            reader = body["tenant"] if body["kind"] == "hit-counters" else body["reader"]
            if body["effect"] != "deny" or body["log"] != f"tenant/{reader}":
                continue
            rule = body["rule"] if body["kind"] == "hit-counters" else (*body["reasons"], "default-deny")[0]
            denied[reader, body["owner"], rule, int(body["revision"])] += int(body.get("requests", 1))
        return +denied

    def showback(self, since_us: int, until_us: int, costs: Mapping[str, PrefillCost]) -> dict[str, list[float]]:
        """Tenant: block-seconds; own, taken and given hits; seconds of each."""
        shares: dict[str, list[float]] = defaultdict(lambda: [0.0] * 7)
        for uuid, life in self.history.lives.items():
            cost = costs.get(life.start.get("worker", ""), PrefillCost(0, 0.0))
            ended = {key: int(body["ended_boot_us"]) + life.offset_us for key, _, body in life.named("custody-ended")}
            stopped = min(until_us, self._end_of(uuid) or until_us)
            for key, begun_us in _begun(life).items():
                span = min(ended.get(key, stopped), until_us) - max(begun_us + life.offset_us, since_us)
                shares[self.owners[uuid, key]][0] += max(0, span) / 1e6
            for reader, key, place in _hits(life, since_us, until_us):
                owner, worth = self.owners[uuid, key], cost.seconds(place)
                for party, which in [(reader, 0)] if reader == owner else [(reader, 1), (owner, 2)]:
                    shares[party][1 + which] += 1
                    shares[party][4 + which] += worth
        return {tenant: row for tenant, row in shares.items() if any(row)}

    def _end_of(self, uuid: str) -> int | None:
        period = self._periods.get(uuid)
        return None if period is None else period.ended_us

    @cached_property
    def _periods(self) -> dict[str, lives_oracle.AtWork]:
        return lives_oracle.work_periods(lives_oracle.lives(self.bodies))

    # -- erasures and events ----------------------------------------------------------------------------------------

    def erasures(self, now_us: int, since_us: int = 0, until_us: int = 1 << 62) -> dict[str, str]:
        """How each erasure stands at a moment that was asked for in a period."""
        made = {}
        for row in lives_oracle.erasures(self.bodies, self._periods, lives_oracle.Period(since_us, until_us)):
            overdue = row["due_us"] and now_us > row["due_us"]
            made[row["erasure"]] = row["state"] if not row["unanswered"] else "missed" if overdue else "open"
        return made

    @cached_property
    def events(self) -> Counter[tuple[str, str, str]]:
        """How many events each log has, by kind and by how they came out; of kinds without an outcome it is empty."""
        return Counter(
            (body["log"], body["kind"], body[OUTCOMES[body["kind"]]] if body["kind"] in OUTCOMES else "")
            for body in self.items
            if body["part"] == 1
        )


OUTCOMES = {
    "residency-released": "cause",
    "blocks-released": "cause",
    "custody-ended": "cause",
    "receipt": "result",
    "decision": "effect",
    "hit-counters": "effect",
    "erasure-requested": "selector",
    "erasure-completed": "outcome",
    "request-monitored": "effect",
    "case-opened": "subject_right",
    "case-step": "step",
    "processing-restricted": "change",
    "copies-ended": "cause",
    "copies-destroyed": "cause",
    "transfer-decided": "choice",
    "orphan-found": "orphan",
}
_HANDING_OUT = (("residency-opened", "written"), ("residency-released", "runs"), ("blocks-released", "runs"))


def _size(runs: Iterable[list[Any]]) -> int:
    return sum(1 for _ in oracle.listed(runs))


def _listed(life: oracle.Life) -> Iterator[tuple[oracle.Key, Body]]:
    for kind, name in _HANDING_OUT:
        for key, _, body in life.named(kind, name):
            if kind != "blocks-released" or body["own"]:
                yield key, body


def _handed_out(life: oracle.Life) -> Iterator[tuple[oracle.Key, str]]:
    return ((key, body["tenant"]) for key, body in _listed(life))


def _begun(life: oracle.Life) -> dict[oracle.Key, int]:
    """When each block was handed out: what a request grew by counts from its opening."""
    opened = {int(body["residency"]): life.at(body) for body in life.leaves["residency-opened"]}
    begun: dict[oracle.Key, int] = {}
    for key, body in _listed(life):
        begun.setdefault(key, opened.get(int(body["residency"]), life.at(body)))
    return begun


def _hits(life: oracle.Life, since_us: int, until_us: int) -> Iterator[tuple[str, oracle.Key, int]]:
    """Reader, block and place of each hit; a long list continues in the leaf's next part."""
    places: Counter[int] = Counter()
    for body in sorted(life.leaves["residency-opened"], key=lambda one: (int(one["residency"]), one["part"])):
        residency = int(body["residency"])
        for key, _ in oracle.listed(body.get("runs", ())):
            place, places[residency] = places[residency], places[residency] + 1
            if place >= int(body.get("earlier_blocks", 0)) and (since_us <= life.at(body) + life.offset_us < until_us):
                yield body["tenant"], key, place
