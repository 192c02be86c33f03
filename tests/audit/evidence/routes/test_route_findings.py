"""Every possible problem of a route receipt is found, and its counterpart without the fault is not."""

from __future__ import annotations

import gc
from pathlib import Path
from typing import Any, NamedTuple

import orjson
import pytest
import routes_oracle
from sqlalchemy import Engine, select

from kvcustody.audit.evidence.routes import route_receipts
from kvcustody.audit.evidence.routes.route_measures import measure
from kvcustody.audit.evidence.routes.route_receipts import (
    Receipt,
    RoutePeriod,
    read_routes,
    receipts_in_order,
)
from kvcustody.audit.kinds import RouteFound, RouteSent
from kvcustody.audit.reports.framework import load_framework
from kvcustody.audit.reports.parameters import ReportParameters
from kvcustody.audit.reports.section import ReportReading
from kvcustody.audit.reports.sections import routes as route_section
from kvcustody.audit.reports.sections.routes import read_route_facts
from kvcustody.audit.store.database.snapshot import AsOf
from kvcustody.audit.store.schema.ledger import events, incarnations, workers
from kvcustody.clock import MICROSECONDS, VirtualClock
from standins import builders

SECOND = MICROSECONDS


class Half(NamedTuple):
    """A worker's half, so many seconds after the first."""

    worker: str
    after: float = 0.0
    found: int = 96
    prompt: int = 128


class Case(NamedTuple):
    """The door's halves (worker that answered, requests, uses), workers' halves, and what is found."""

    doors: tuple[tuple[str, int, int], ...]
    found: tuple[Half, ...]
    problems: tuple[str, ...] = ()


W1, W2 = Half("w1"), Half("w2", 3)
CASES = {
    "as it should be": Case((("w1", 1, 3),), (W1,)),
    "a retry elsewhere first": Case((("w2", 1, 3),), (W1, W2)),
    "a retry under clocks that are apart": Case((("w2", 1, 3),), (Half("w1", 3.5), W2)),
    "elsewhere after it was answered": Case((("w1", 1, 3),), (W1, W2), ("sent-elsewhere",)),
    "the one that answered says nothing": Case((("w2", 1, 3),), (W1,), ("no-worker-half",)),
    "nobody is named, somebody says so": Case((("", 1, 3),), (W1,)),
    "nobody is named, nobody says so": Case((("", 1, 3),), (), ("no-worker-half",)),
    "as many as the token had uses": Case((("w1", 1, 2),), (W1, W1)),
    "one more": Case((("w1", 1, 1),), (W1, W1), ("more-than-allowed",)),
    "two of a name": Case((("w1", 1, 3), ("w1", 1, 3)), (W1,), ("two-door-halves",)),
    "more found than asked for": Case((("w1", 1, 3),), (Half("w1", found=129),), ("impossible-figures",)),
    "without its door's": Case((), (W1,), ("no-door-half",)),
}


@pytest.fixture
def halves(store: Engine, tmp_path: Path) -> dict[str, str]:
    """The receipt of each case."""
    clock = VirtualClock()
    names = {name: f"{number:032x}" for number, name in enumerate(CASES)}
    written: dict[str, list[Any]] = {"door": [], "w1": [], "w2": []}
    for name, case in CASES.items():
        clock.advance(1)
        at = clock.now_us()
        for worker, requests, uses in case.doors:
            written["door"].append(
                RouteSent(at, "acme", names[name], "subject", 0, 0, 0, worker, "", 200, 4, requests, uses, -1, -1)
            )
        for half in case.found:
            when = at + int(half.after * SECOND)
            written[half.worker].append(
                RouteFound(when, "acme", names[name], True, half.prompt, half.found, 2, 40, False, True)
            )
    for process, events_of_it in written.items():
        writer = builders.writer(store, tmp_path / process, worker=process, clock=clock)
        writer.submit(events_of_it)
        assert writer.flush(60)
        writer.close(60)
    return names


def from_leaves(store: Engine) -> dict[str, Any]:
    """The chapter of a report, made from leaves by who has none of our code."""
    with store.connect() as connection:
        leaves = [orjson.loads(bytes(leaf)) for leaf in connection.scalars(select(events.c.leaf))]
        join = incarnations.join(workers, workers.c.id == incarnations.c.worker)
        query = select(incarnations.c.uuid, workers.c.name).select_from(join)
        names = {uuid: name for uuid, name in connection.execute(query)}  # noqa: C416 - rows are no pairs
    return routes_oracle.routes(leaves, names, 1 << 60, 0, 1 << 60)


def in_report(store: Engine) -> dict[str, Any]:
    """The chapter as a report of the whole ledger has it."""
    asked = ReportParameters("nist-800-53", 0, 0, 1 << 60)
    with store.connect() as connection:
        reading = ReportReading(
            connection, asked, load_framework(asked.framework), state=AsOf({}, whole=True), now_us=1 << 60
        )
        made = read_route_facts(reading)._asdict()
    rows = {name: [row._asdict() for row in made[name]] for name in ("workers", "tenants", "problems")}
    return made | rows


def test_each_fault_is_found_and_nothing_else(store: Engine, halves: dict[str, str]) -> None:
    with store.connect() as connection:
        joined = read_routes(connection, RoutePeriod(0, 1 << 60), now_us=1 << 60)
    found = {
        name: tuple(sorted(one.problem for one in joined.findings if one.receipt == halves[name])) for name in CASES
    }
    assert found == {name: case.problems for name, case in CASES.items()}
    again = from_leaves(store)
    assert {row["problem"]: row["findings"] for row in again["problems"]} == {
        problem: sum(problem in case.problems for case in CASES.values())
        for problem in sorted({problem for case in CASES.values() for problem in case.problems})
    }


def test_a_request_with_several_prompts_is_measured_as_a_whole(store: Engine, halves: dict[str, str]) -> None:
    with store.connect() as connection:
        joined = read_routes(connection, RoutePeriod(0, 1 << 60), now_us=1 << 60)
    whole = next(one for one in joined.receipts if one.receipt == halves["as many as the token had uses"])
    assert whole.sent is not None

    def tokens(requests: int) -> tuple[int, int]:
        made = measure([Receipt(*whole[:2], whole.sent._replace(requests=requests), whole.found)])  # type: ignore[union-attr]
        return made.prompt_tokens, made.found_tokens

    assert tokens(2) == (256, 192)
    assert tokens(1) == (128, 96), "the control: two presentations of one request"


LONG_US = 50 * 60 * SECOND


def test_a_request_that_lasts_long_has_both_halves(store: Engine, tmp_path: Path) -> None:
    """Its worker's half is written when it is admitted, its door's when the answer begins."""
    clock = VirtualClock()
    began = clock.now_us()
    for process, event in (
        ("w1", RouteFound(began, "acme", "ab" * 16, True, 128, 96, 2, 40, False, True)),
        ("door", RouteSent(
            began + LONG_US, "acme", "ab" * 16, "subject", 0, 0, 0, "w1", "", 200, 3_000_000, 1, 3, -1, -1
        )),
    ):  # fmt: skip
        writer = builders.writer(store, tmp_path / process, worker=process, clock=clock)
        writer.submit([event])
        assert writer.flush(60)
        writer.close(60)
    with store.connect() as connection:
        at_us = read_routes(connection, RoutePeriod(0, 1 << 60), now_us=1 << 60).receipts[0].at_us
        while_it_ran = RoutePeriod(0, at_us - 600 * SECOND)
        assert read_routes(connection, while_it_ran, now_us=1 << 60)[:2] == ((), ()), "it is not of this period"
        later = read_routes(connection, RoutePeriod(at_us, at_us + 1), now_us=1 << 60)
    assert later.findings == () and later.receipts[0].found[0].at_us == at_us - LONG_US


def test_receipts_come_in_slices_and_pages_without_a_gap(
    store: Engine, halves: dict[str, str], monkeypatch: pytest.MonkeyPatch
) -> None:
    ever = RoutePeriod(0, 1 << 60)
    with store.connect() as connection:
        whole = read_routes(connection, ever, now_us=1 << 60).receipts
        assert len(whole) == len({one.place for one in whole}) == len(CASES)
        for rows in (1, 2, 5):
            monkeypatch.setattr(route_receipts, "_SLICE_ROWS", rows)
            assert tuple(receipts_in_order(connection, ever)) == whole
            rest = [tuple(receipts_in_order(connection, ever, after=one.place)) for one in whole]
            assert rest == [whole[number:] for number in range(1, len(whole) + 1)]
        newest = read_routes(connection, ever, now_us=1 << 60, halves_max=5)
    assert newest.since_us > 0 and newest.receipts == tuple(one for one in whole if one.at_us >= newest.since_us)
    assert 0 < len(newest.receipts) < len(whole)


def test_a_report_counts_what_leaves_say_and_keeps_no_receipt(
    store: Engine, halves: dict[str, str], monkeypatch: pytest.MonkeyPatch
) -> None:
    most, judged = [0], route_section.judge

    def counted(receipt: Receipt, *, now_us: int) -> Any:
        most[0] = max(most[0], sum(isinstance(one, Receipt) for one in gc.get_objects()))
        return judged(receipt, now_us=now_us)

    monkeypatch.setattr(route_section, "judge", counted)
    gc.freeze()  # what other tests left is not looked through
    gc.disable()
    try:
        assert in_report(store) == from_leaves(store) and most[0] >= len(CASES), "one slice has them all"
        most[0] = 0
        gc.freeze()
        monkeypatch.setattr(route_receipts, "_SLICE_ROWS", 1)
        assert in_report(store) == from_leaves(store) and 0 < most[0] < 5
    finally:
        gc.enable()


def test_a_report_counts_the_newest_and_says_from_when_on(
    store: Engine, halves: dict[str, str], monkeypatch: pytest.MonkeyPatch
) -> None:
    for module in (route_section, routes_oracle):
        monkeypatch.setattr(module, "HALVES_MAX", 5)
    made = in_report(store)
    assert made == from_leaves(store)
    assert made["since_us"] > 0 and 0 < made["receipts"] < len(CASES)
