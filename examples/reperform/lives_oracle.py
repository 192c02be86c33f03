"""Processes, erasures, losses and cases a second time, from leaves in plain Python: what a report says of them.

`Record` holds every leaf of an export, in order of time.
"""

from __future__ import annotations

from collections import Counter, defaultdict
from collections.abc import Iterable, Iterator
from datetime import UTC, datetime, timedelta
from typing import Any, NamedTuple

Body = dict[str, Any]
LISTED_MAX = 200
STARTED, RETURNED = "worker-started", "worker-returned"
ENDS = ("worker-stopped", "worker-died")
PREFIX = "tenant/"
ORDERS = (
    *("case-opened", "case-step", "enforcement-ordered", "erasure-requested", "issuer-assigned"),
    *("keys-ordered", "legal-hold", "retention-purged", "subject-unlinked"),
)
ORIGINS = ("replayed", "generated", "simulated")
NAMED = 4  # processes that a sentence names
SECOND_US = 1_000_000
EPOCH = datetime(1970, 1, 1, tzinfo=UTC)


class Period(NamedTuple):
    """The period of a report."""

    since_us: int
    until_us: int

    def has(self, body: Body) -> bool:
        """Whether a leaf was written in it."""
        return self.since_us <= int(body["at_us"]) < self.until_us


class AtWork(NamedTuple):
    """A process of a worker from its start to its end (UTC; None: no end on record)."""

    worker: str
    started_us: int
    ended_us: int | None

    def at(self, moment: int) -> bool:
        """Whether it was at work at a moment."""
        return self.started_us <= moment and (self.ended_us is None or self.ended_us >= moment)

    def within(self, period: Period) -> bool:
        """Whether it was at work in a part of a period."""
        begun = self.started_us < period.until_us
        return begun and (self.ended_us is None or self.ended_us >= period.since_us)


def about(body: Body) -> str:
    """The process that a leaf is about."""
    return str(body.get("of_incarnation") or body["incarnation"])


def in_order(bodies: Iterable[Body]) -> list[Body]:
    """Leaves by time, then by who wrote them."""
    names = ("at_us", "incarnation", "sequence", "part")
    return sorted(bodies, key=lambda body: tuple(str(body[name]).zfill(20) for name in names))


def lives(bodies: Iterable[Body]) -> list[Body]:
    """The leaves about the lives of processes, in order."""
    return in_order(body for body in bodies if body["kind"] in (STARTED, RETURNED, *ENDS))


def work_periods(told: list[Body]) -> dict[str, AtWork]:
    """When each process that announced memory was at work, from the leaves of `lives`."""
    starts: dict[str, Body] = {}
    ended: dict[str, int] = {}
    for body in told:
        uuid, at_us = about(body), int(body["at_us"])
        if body["kind"] == STARTED:
            starts.setdefault(uuid, body)
        elif body["kind"] in ENDS:
            ended[uuid] = max(at_us, ended.get(uuid, at_us))
        else:
            ended.pop(uuid, None)
    return {uuid: AtWork(body["worker"], int(body["at_us"]), ended.get(uuid)) for uuid, body in starts.items()}


def reported_workers(told: list[Body]) -> list[Body]:
    """Every process as its own leaves describe it, with the counters that it left when it stopped."""
    workers: dict[str, Body] = {}
    for body in told:
        uuid, kind = about(body), body["kind"]
        if kind == STARTED:
            workers[uuid] = {
                "name": body["worker"],
                "incarnation": uuid,
                "started_us": int(body["at_us"]),
                **{name: body[name] for name in ("software", "device")},
                **{name: int(body[name] or 0) for name in ("shards", "blocks", "bytes_per_block")},
                "generation": int(body.get("generation") or 0),
                "origin": str(body.get("origin", "")),
                **_unended(),
            }
        elif uuid in workers and kind == RETURNED:
            workers[uuid] |= _unended()
        elif uuid in workers and kind == "worker-died":
            workers[uuid]["end"] = f"died{_closed_by(body)}: {body['teardown']}"
        elif uuid in workers:
            columns = [body.get(f"copies_{step}", ()) for step in ("stored", "ended", "destroyed")]
            workers[uuid] |= {
                "end": body["cause"],
                "allocated": int(body["allocated"]),
                "scrubbed": [int(number) for number in body["scrubbed"]],
                "tiers": [
                    {"tier": tier, "stored": int(one), "ended": int(two), "destroyed": int(three)}
                    for tier, one, two, three in zip(body.get("tiers", ()), *columns, strict=True)
                ],
            }
    return list(workers.values())


def _unended() -> Body:
    return {"end": "", "allocated": None, "scrubbed": [], "tiers": []}


def _closed_by(body: Body) -> str:
    if body.get("closed_by") == "silence":
        return f" (closed for a silence of {int(body['bound_seconds']) / 86_400:g} days by {body['actor']})"
    if body.get("closed_by") == "declared":
        return f" (declared dead by {body['actor']} and {body['approver']}: {body['reason']})"
    return ""


def history(told: list[Body], periods: dict[str, AtWork]) -> str:
    """What is said of processes that replayed or generated what they recorded; empty where there are none."""
    marked: dict[str, Body] = {}
    for body in told:
        if body["kind"] == STARTED and body.get("origin"):
            marked.setdefault(about(body), body)
    order = sorted(marked, key=lambda uuid: (int(marked[uuid]["at_us"]), uuid))
    named = []
    for uuid in order[:NAMED]:
        body, ended_us = marked[uuid], periods[uuid].ended_us
        origin = body["origin"] if body["origin"] in ORIGINS else "of unknown origin"
        until = "no end on record" if ended_us is None else moment(ended_us // SECOND_US * SECOND_US)
        since = moment(int(body["at_us"]) // SECOND_US * SECOND_US)
        named.append(f"{body['worker']} {uuid[:12]} ({origin}, {since} to {until})")
    return _said(
        "Demo data: this ledger holds traffic that was replayed, generated or simulated: ",
        named,
        len(order),
        "",
    )


def orders(bodies: list[Body]) -> str:
    """What is said of who checks who gave workers their orders, and of how many orders are signed."""
    return " ".join(filter(None, (_followed(bodies), _signed(bodies))))


def _signed(bodies: list[Body]) -> str:
    given = [body for body in bodies if body["kind"] in ORDERS]
    if not given:
        return ""
    signed = sum(1 for body in given if body.get("signature"))
    later = sum(1 for body in bodies if body["kind"] == "order-signed")
    number = "1 order" if len(given) == 1 else f"{len(given)} orders"
    return (
        f"Of {number} on record {signed} carry a signature, and {later} more leaves sign one. Verdicts on erasures, "
        "restrictions, cases and legal holds rest on orders: `report verify --trust` says which count."
    )


def _followed(bodies: list[Body]) -> str:
    """What each worker states at its start."""
    stated = [body.get("orders") for body in bodies if body["kind"] == STARTED]
    if stated and all(stated):
        return (
            "Orders are authenticated: every worker states that it follows those of its control plane, or those alone "
            "whose leaf a trusted key signed."
        )
    return (
        "Orders are not authenticated: nobody checks a signature of who asked for an erasure, a restriction, later "
        "keys or monitoring. Workers behind a control plane write no orders. A worker with a ledger of its own follows "
        "every order that was written there."
    )


def monitored(bodies: list[Body], periods: dict[str, AtWork], period: Period) -> str:
    """What is said of times in which a process did not enforce the policy for everybody; empty where there are none."""
    changes = [body for body in bodies if body["kind"] == "enforcement-changed"]
    changes.sort(key=lambda body: (int(body["at_us"]), int(body["sequence"])))
    rows = []
    for place, body in enumerate(changes):
        uuid = body["incarnation"]
        if body["mode"] != "enforce" and uuid in periods:
            later = (int(one["at_us"]) for one in changes[place + 1 :] if one["incarnation"] == uuid)
            since_us, until_us = int(body["at_us"]), next(later, periods[uuid].ended_us)
            if since_us < period.until_us and (until_us is None or until_us > period.since_us):
                until = "now" if until_us is None else moment(until_us)
                told = f"{body['mode']}, {_enforced_for(body)}, {moment(since_us)} to {until}"
                told += f", ordered by {body['actor']}"
                rows.append((since_us, periods[uuid].worker, f"{periods[uuid].worker} {uuid[:12]} ({told})"))
    names = [text for _, _, text in sorted(rows)]
    return _said(
        "The policy was not enforced for everybody in this period: ",
        names[:NAMED],
        len(names),
        " What was monitored then was reused under the engine's own keys, across domains too, and is no reuse that "
        "the policy permitted.",
    )


def _enforced_for(body: Body) -> str:
    parts = list(body["tenants"][:NAMED])
    if len(body["tenants"]) > NAMED:
        parts.append(f"{len(body['tenants']) - NAMED:,} more")
    share = int(body["share_millionths"])
    if share:
        parts.append(f"{share / 10_000:g} % of the sessions of the others")
    return f"enforced for {', '.join(parts) or 'nobody'}"


def _said(begins: str, named: list[str], whole: int, ends: str) -> str:
    if not named:
        return ""
    more = f"; and {whole - NAMED:,} more" if whole > NAMED else ""
    text = f"{begins}{'; '.join(named)}{more}.{ends}"
    return "".join(char if char.isprintable() else "\N{REPLACEMENT CHARACTER}" for char in text)


def moment(at_us: int) -> str:
    """A moment in UTC, ISO 8601."""
    return (EPOCH + timedelta(microseconds=at_us)).isoformat().replace("+00:00", "Z")


def policies(bodies: Iterable[Body]) -> list[Body]:
    """Policy revisions that took effect, and whether a release put them into effect."""
    bodies = list(bodies)
    steps = [body for body in bodies if body["kind"] == "release-step" and body["action"] == "activated"]
    released = {(body["revision"], body["digest"]) for body in steps}
    names = ("name", "profile", "digest", "actor")
    return [
        {"revision": int(body["revision"]), "at_us": int(body["at_us"])}
        | {name: body[name] for name in names}
        | {"released": (body["revision"], body["digest"]) in released}
        for body in in_order(one for one in bodies if one["kind"] == "policy-activated")
    ]


def issuers(bodies: Iterable[Body]) -> list[Body]:
    """Issuers of tenants."""
    return [
        {"issuer": body["issuer"], "tenants": body["tenants"], "at_us": int(body["at_us"])}
        for body in in_order(one for one in bodies if one["kind"] == "issuer-assigned")
    ]


def short(uuid: str, uuids: Iterable[str]) -> str:
    """An id as texts have it: the shortest beginning from 8 to 15 letters that tells all apart, else its last 8."""
    every = set(uuids)
    apart = (size for size in range(8, 16) if len({one[:size] for one in every}) == len(every))
    size = next(apart, 0)
    return uuid[:size] if size else uuid[-8:]


def unscanned(bodies: Iterable[Body], periods: dict[str, AtWork], period: Period) -> list[str]:
    """Workers that were at work in a period and whose pools no scan for orphans looked at."""
    scanned = {body["incarnation"] for body in bodies if body["kind"] == "orphan-scanned" and period.has(body)}
    return sorted(
        f"{one.worker} {short(uuid, periods)}"
        for uuid, one in periods.items()
        if uuid not in scanned and one.within(period)
    )


# -- erasures ------------------------------------------------------------------------------------------------------


def erasures(bodies: list[Body], periods: dict[str, AtWork], period: Period) -> list[Body]:
    """Erasures that were asked for in a period, and how they were answered."""
    answers: dict[str, list[Body]] = defaultdict(list)
    now_us = max((int(body["at_us"]) for body in bodies), default=0)
    for body in bodies:
        if body["kind"] == "erasure-completed":
            answers[body["erasure"]].append(body)
    made = []
    for body in bodies:
        if body["kind"] == "erasure-requested" and period.has(body):
            said = sorted(answers[body["erasure"]], key=lambda one: int(one["at_us"]))
            made.append(_erasure(body, said, periods, now_us))
    return sorted(made, key=lambda one: (one["at_us"], one["erasure"]))


def _erasure(body: Body, leaves: list[Body], periods: dict[str, AtWork], now_us: int) -> Body:
    at_us = int(body["at_us"])
    done: dict[str, int] = {}
    for one in leaves:
        if one["incarnation"] not in periods:
            continue
        worker = periods[one["incarnation"]].worker
        if one["outcome"] == "complete":
            done.setdefault(worker, int(one["at_us"]))
        else:
            done.pop(worker, None)
    owed = sorted({one.worker for one in periods.values() if one.at(at_us)})
    silent = [worker for worker in owed if worker not in done]
    deadline = int(body["deadline_boot_us"] or 0)
    newest = leaves[-1] if leaves else {}
    due_us = at_us + deadline - int(body["boot_us"]) if deadline else 0
    completed_us = 0 if silent else max((done[worker] for worker in owed), default=0)
    return {
        **{name: body[name] for name in ("erasure", "tenant", "selector", "actor")},
        "pseudonym": body["session"] or body["subject"],
        "at_us": at_us,
        "outcome": newest.get("outcome", "nothing recorded"),
        "blocks": int(newest.get("blocks", 0)),
        "remaining": int(newest.get("remaining", 0)),
        "reason": newest.get("reason", ""),
        "unanswered": silent,
        "due_us": due_us,
        "completed_us": completed_us,
        "state": state_of(due_us, completed_us if owed else at_us, is_open=bool(silent), now_us=now_us),
    }


def state_of(due_us: int, answered_us: int, *, is_open: bool, now_us: int) -> str:
    """How an erasure stands, in one word."""
    if is_open:
        return "missed" if due_us and now_us > due_us else "open"
    return "late" if due_us and answered_us > due_us else "complete"


def is_on_time(erasure: Body) -> bool:
    """Everybody answered that all is gone, before it was due."""
    return bool(erasure["state"] == "complete")


def findings(bodies: Iterable[Body], period: Period) -> list[Body]:
    """Orphan findings of a period by class and outcome."""
    found = Counter(
        (body["orphan"], body["outcome"]) for body in bodies if body["kind"] == "orphan-found" and period.has(body)
    )
    return [
        {"orphan": orphan, "outcome": outcome, "findings": number}
        for (orphan, outcome), number in sorted(found.items())
    ]


# -- losses --------------------------------------------------------------------------------------------------------


def losses(bodies: list[Body]) -> Body:
    """Sequences below a process's highest that no leaf has, gaps that it recorded, and what went round by a spill."""
    known = [_gap(body) for body in bodies if body["kind"] in ("gap", "withdrawn")]
    gaps = [gap for gap in known if gap[3] != "refused"]
    gaps += _torn(bodies)
    held: dict[str, set[int]] = defaultdict(set)
    for body in bodies:
        held[body["incarnation"]].add(int(body["sequence"]))
    for uuid, numbers in held.items():
        spans = [(number, number) for number in numbers]
        spans += [(first, last) for of, first, last, _ in known if of == uuid and first <= max(numbers)]
        gaps += [(uuid, *hole, "no leaf under the checkpoint has these sequences") for hole in _holes(spans)]
    outages = in_order(one for one in bodies if one["kind"] in ("spill-started", "replay-completed"))
    spills = [
        {
            "incarnation": body["incarnation"],
            "at_us": int(body["at_us"]),
            "kind": body["kind"],
            "detail": _spill(body),
            "ended_us": _ended(body, outages),
        }
        for body in outages
    ]
    names = ("incarnation", "first_sequence", "last_sequence", "cause")
    listed = [dict(zip(names, gap, strict=True)) for gap in sorted(gaps)]
    return {
        "gaps": len(gaps),
        "spills": len(spills),
        "listed_gaps": listed[:LISTED_MAX],
        "listed_spills": spills[:LISTED_MAX],
    }


def _gap(body: Body) -> tuple[str, int, int, str]:
    first = int(body.get("first_sequence") or body.get("of_sequence") or 0)
    cause = "refused" if body["kind"] == "withdrawn" else body["cause"]
    return body["incarnation"], first, int(body.get("last_sequence") or first), cause


def _torn(bodies: list[Body]) -> Iterator[tuple[str, int, int, str]]:
    """Events of several leaves of which one is not there."""
    parts = Counter(
        (body["incarnation"], int(body["sequence"]), body["log"], int(body["parts"]))
        for body in bodies
        if int(body["parts"]) > 1
    )
    for (uuid, sequence, _, whole), have in parts.items():
        if have != whole:
            yield uuid, sequence, sequence, "a continuation leaf is missing"


def _holes(spans: list[tuple[int, int]]) -> Iterator[tuple[int, int]]:
    reached = 0
    for first, last in sorted(spans):
        if first > reached + 1:
            yield reached + 1, first - 1
        reached = max(reached, last)


def _ended(body: Body, outages: Iterable[Body]) -> int:
    """When the process of a spill read it back; 0: that is not on record, or the event is no beginning of a spill."""
    if body["kind"] != "spill-started":
        return 0
    later = {
        int(one["sequence"]): int(one["at_us"])
        for one in outages
        if one["kind"] == "replay-completed"
        and one["incarnation"] == body["incarnation"]
        and int(one["sequence"]) > int(body["sequence"])
    }
    return later[min(later)] if later else 0


def _spill(body: Body) -> str:
    if body["kind"] == "spill-started":
        return f"{body['cause']}, from sequence {body['first_sequence']} on"
    added, torn = int(body["added"]), int(body["torn_bytes"])
    leaves, ends = "leaf" if added == 1 else "leaves", "byte" if torn == 1 else "bytes"
    return f"{added:,} {leaves} added, {body['duplicates']} there already, {torn:,} torn {ends}"
