"""Route receipts, joined from the two halves that a door and a worker wrote, and what is wrong with each.

    joined = read_routes(connection, RoutePeriod(since_us, until_us), now_us=now_us)
    joined.receipts, joined.findings

1. Halves belong together by the name of their receipt and the log that they are in. A receipt is of the period of its
   door's half; a worker's half without one, of its own.
2. A half that is missing is a finding, never a zero. It may be late by `GRACE_US`: until then the receipt is `awaited`.
   No worker's half is missing where the request was not answered with a status below 300. Where the answer names its
   worker, the half of another stands in for none.
3. A router may present a request again, at another worker too. So a worker's half from elsewhere is a finding where it
   is later than those of the worker that answered, by more than clocks may be apart. There are no more halves than the
   token had uses. When a half was written is its worker's own word.
4. What a half says of itself may be wrong: figures that cannot be are a finding, and measure nothing.
5. What is told to who asks for the record of one tenant is of that tenant's log alone.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Iterator, Sequence
from enum import StrEnum
from typing import Any, Final, NamedTuple

from sqlalchemy import Connection, Select, Table, select

from kvcustody.audit.kinds import log_of, tenant_of
from kvcustody.audit.store.database.snapshot import AsOf, is_in
from kvcustody.audit.store.schema.all_tables import has_leaf
from kvcustody.audit.store.schema.leaf_tables import routes_found, routes_sent
from kvcustody.audit.store.schema.ledger import incarnations, logs, workers
from kvcustody.times import SECOND_US

GRACE_US: Final = 300 * SECOND_US
CLOCKS_APART_US: Final = SECOND_US
_ANSWERED_BELOW: Final = 300
_RECEIPT_DIGITS: Final = 32


class RoutePeriod(NamedTuple):
    """[since, until) in UTC µs, of one tenant or of all; of receipts whose name begins so, or of all."""

    since_us: int
    until_us: int
    tenant: str | None = None
    prefix: str = ""


class SentHalf(NamedTuple):
    """What the door said. Below 0, and empty: nobody said it."""

    door: str
    scope: str
    fleet_epoch: int
    tenant_epoch: int
    scope_epoch: int
    worker: str
    target: str
    status: int
    answer_ms: int
    requests: int
    uses: int
    promised_tokens: int
    score: int
    at_us: int


class FoundHalf(NamedTuple):
    """What a worker said of one request of its engine."""

    worker: str
    asked: bool
    prompt_tokens: int
    found_tokens: int
    queue: int
    free_blocks: int
    crosses: bool
    agrees: bool
    model: str
    at_us: int

    @property
    def is_possible(self) -> bool:
        """Whether its figures can be (rule 4)."""
        return 0 <= self.found_tokens <= self.prompt_tokens and self.queue >= 0 and self.free_blocks >= 0


class Receipt(NamedTuple):
    """Both halves, as far as they are there; `found` in the order of time."""

    receipt: str
    tenant: str
    sent: SentHalf | None
    found: tuple[FoundHalf, ...]

    @property
    def at_us(self) -> int:
        """When it counts."""
        return self.found[0].at_us if self.sent is None else self.sent.at_us

    @property
    def own(self) -> tuple[FoundHalf, ...]:
        """The halves of who answered: of the worker that the answer names, else all."""
        if self.sent is None or not self.sent.worker:
            return self.found
        return tuple(half for half in self.found if half.worker == self.sent.worker)

    @property
    def served(self) -> FoundHalf | None:
        """What who answered found, of all the engine's requests that it stands for; None where nobody says it."""
        requests = 1 if self.sent is None else max(1, self.sent.requests)
        halves = [half for half in self.own if half.is_possible][-requests:]
        if not halves:
            return None
        return halves[-1]._replace(
            prompt_tokens=sum(half.prompt_tokens for half in halves),
            found_tokens=sum(half.found_tokens for half in halves),
            crosses=any(half.crosses for half in halves),
            agrees=all(half.agrees for half in halves),
        )

    @property
    def promised_tokens(self) -> int | None:
        """What the router expected the worker to have; None where it does not say."""
        return None if self.sent is None or self.sent.promised_tokens < 0 else self.sent.promised_tokens


class ReceiptProblem(StrEnum):
    """What may be wrong with a receipt."""

    NO_WORKER = "no-worker-half"
    NO_DOOR = "no-door-half"
    TWO_DOORS = "two-door-halves"
    ELSEWHERE = "sent-elsewhere"
    MORE = "more-than-allowed"
    NOT_FOUND = "promise-not-found"
    IMPOSSIBLE = "impossible-figures"


PROBLEMS: Final = {
    ReceiptProblem.NO_WORKER: "a door's half without that of a worker: the request was answered, and no worker says so",
    ReceiptProblem.NO_DOOR: "a worker's half that a door was to write one for, and did not",
    ReceiptProblem.TWO_DOORS: "two door's halves of one name",
    ReceiptProblem.ELSEWHERE: "a worker claims a request that was sent elsewhere",
    ReceiptProblem.MORE: "more workers' halves than the token had uses",
    ReceiptProblem.NOT_FOUND: "less was found than the router expected there",
    ReceiptProblem.IMPOSSIBLE: "figures that cannot be",
}


class RouteFinding(NamedTuple):
    """Something that is wrong with a receipt."""

    problem: ReceiptProblem
    receipt: str
    tenant: str
    worker: str
    detail: str
    at_us: int


class JoinedRoutes(NamedTuple):
    """The receipts of a period in the order of time, what is wrong with them, and how many wait for a half."""

    receipts: tuple[Receipt, ...]
    findings: tuple[RouteFinding, ...]
    awaited: int


def read_routes(
    connection: Connection,
    period: RoutePeriod,
    *,
    now_us: int,
    grace_us: int = GRACE_US,
    as_of: AsOf | None = None,
) -> JoinedRoutes:
    """The receipts of a period; `now_us` is the ledger's time, in UTC, `as_of` the state that is read."""
    wider = period._replace(since_us=period.since_us - grace_us, until_us=period.until_us + grace_us)
    found: dict[tuple[str, str], list[FoundHalf]] = defaultdict(list)
    for row in connection.execute(_halves(routes_found, wider, as_of)):
        half = FoundHalf(row.worker_name, *(getattr(row, name) for name in FoundHalf._fields[1:]))
        found[tenant_of(row.log_name), row.receipt].append(half)
    sent: dict[tuple[str, str], list[SentHalf]] = defaultdict(list)
    for row in connection.execute(_halves(routes_sent, wider, as_of)):
        said = SentHalf(row.worker_name, *(getattr(row, name) for name in SentHalf._fields[1:]))
        sent[tenant_of(row.log_name), row.receipt].append(said)
    receipts: list[Receipt] = []
    findings: list[RouteFinding] = []
    awaited = 0
    for tenant, name in sorted({*found, *sent}):
        doors = sent.get((tenant, name), [])
        halves = tuple(sorted(found.get((tenant, name), ()), key=lambda half: half.at_us))
        receipt = Receipt(name, tenant, doors[0] if doors else None, halves)
        if not period.since_us <= receipt.at_us < period.until_us:
            continue
        receipts.append(receipt)
        if len(doors) > 1:
            findings.append(_finding(ReceiptProblem.TWO_DOORS, receipt, "", f"{len(doors)} halves"))
        if _lacks(receipt) and now_us - receipt.at_us < grace_us:
            awaited += 1
        elif problem := _lacks(receipt):
            findings.append(problem)
        findings += _wrong(receipt)
    receipts.sort(key=lambda one: (one.at_us, one.receipt))
    findings.sort(key=lambda one: (one.at_us, one.receipt, f"{one.problem} {one.worker}"))
    return JoinedRoutes(tuple(receipts), tuple(findings), awaited)


def _halves(of: Table, period: RoutePeriod, as_of: AsOf | None) -> Select[Any]:
    """The rows of a table, with the names of their process and log."""
    joined = of.join(incarnations, incarnations.c.id == of.c.incarnation)
    joined = joined.join(workers, workers.c.id == incarnations.c.worker).join(logs, logs.c.id == of.c.log)
    query = (
        select(of, workers.c.name.label("worker_name"), logs.c.name.label("log_name"))
        .select_from(joined)
        .where(of.c.at_us >= period.since_us, of.c.at_us < period.until_us, has_leaf(of), is_in(as_of, of))
        .order_by(of.c.at_us, of.c.log, of.c.idx)
    )
    if period.tenant is not None:
        query = query.where(logs.c.name == log_of(period.tenant))
    if period.prefix:
        last = period.prefix.ljust(_RECEIPT_DIGITS, "f")
        query = query.where(of.c.receipt >= period.prefix, of.c.receipt <= last)
    return query


def _lacks(receipt: Receipt) -> RouteFinding | None:
    """The half that it lacks (rule 2)."""
    sent = receipt.sent
    if sent is None:
        if not any(half.asked for half in receipt.found):
            return None
        return _finding(ReceiptProblem.NO_DOOR, receipt, receipt.found[0].worker, "")
    if not 0 < sent.status < _ANSWERED_BELOW or len(receipt.own) >= sent.requests:
        return None
    where = sent.worker or sent.target
    return _finding(
        ReceiptProblem.NO_WORKER, receipt, where, f"{len(receipt.own)} of {sent.requests} halves are there"
    )


def _wrong(receipt: Receipt) -> Iterator[RouteFinding]:
    """What the halves that are there say against each other."""
    sent, found = receipt.sent, receipt.found
    for half in found:
        if not half.is_possible:
            yield _finding(ReceiptProblem.IMPOSSIBLE, receipt, half.worker, "")
    if sent is None:
        return
    if len(found) > sent.uses:
        yield _finding(ReceiptProblem.MORE, receipt, "", f"{len(found)} halves, {sent.uses} uses")
    if receipt.own:
        last_us = max(half.at_us for half in receipt.own)
        for half in found:
            if half not in receipt.own and half.at_us > last_us + CLOCKS_APART_US:
                detail = f"it was sent to {sent.worker}"
                yield _finding(ReceiptProblem.ELSEWHERE, receipt, half.worker, detail)
    served, promised = receipt.served, receipt.promised_tokens
    if served is not None and promised is not None and served.found_tokens < promised:
        detail = f"{served.found_tokens} of {promised} tokens"
        yield _finding(ReceiptProblem.NOT_FOUND, receipt, served.worker, detail)


def _finding(problem: ReceiptProblem, receipt: Receipt, worker: str, detail: str) -> RouteFinding:
    return RouteFinding(problem, receipt.receipt, receipt.tenant, worker, detail, receipt.at_us)


def by_problem(findings: Sequence[RouteFinding]) -> dict[str, int]:
    """How many findings there are of each kind; every kind is there."""
    return {problem.value: sum(one.problem is problem for one in findings) for problem in ReceiptProblem}
