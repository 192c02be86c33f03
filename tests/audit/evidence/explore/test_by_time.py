"""Leaves of all logs by time equal a sort of every leaf, page by page, on both databases; and so do the counts."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterator
from typing import Any

import pytest
from sqlalchemy import Connection, Engine

from kvcustody.audit.evidence.counters.read_figures import hour_span
from kvcustody.audit.evidence.explore import by_time, summary
from kvcustody.audit.evidence.explore.by_time import find_by_time
from kvcustody.audit.evidence.explore.summary import summarize
from kvcustody.audit.evidence.query.events import Cursor, EventFilter, EventRow, every_event
from kvcustody.audit.kinds import Event, HitCounters, KeyEvent, ResidencyOpened, ResidencyReleased
from kvcustody.audit.leaf.change_items import plain_bodies
from kvcustody.audit.write.fold import fold
from kvcustody.times import HOUR_US, MINUTE_US

TENANTS = 7
REQUESTS = 60


def history() -> Iterator[Event]:
    """A request of each tenant in turn over nine hours, two at the same moment, and a key of every ninth."""
    for number in range(REQUESTS):
        tenant, at = f"tenant-{number % TENANTS}", number // 2 * 1_100_000_000 + 1
        rest = (False, "internal", (), (), ("own",), 1, at + 10**9)
        yield ResidencyOpened(at, number + 1, tenant, None, None, *rest)
        yield ResidencyReleased(at + 5, number + 1, tenant, "finish", (), 0)
        if number % 9 == 0:
            yield KeyEvent(at + 9, tenant, "made", 1, "test")


def every_by_time(
    connection: Connection, wanted: EventFilter, *, newest: bool = True, page: int = 1000
) -> Iterator[EventRow]:
    """All leaves of a filter in this order, page by page, with bounded memory."""
    after: Cursor | None = None
    while True:
        found = find_by_time(connection, wanted, newest=newest, after=after, limit=page)
        yield from found.rows
        if found.next is None:
            return
        after = found.next


@pytest.fixture
def filled(any_store: Engine, make_writer: Any) -> Engine:
    writer = make_writer(any_store)
    every = list(history())
    writer.submit(every[: len(every) // 2])
    assert writer.flush()
    writer.submit(every[len(every) // 2 :])
    assert writer.flush()
    return any_store


WANTED = (
    EventFilter(),
    EventFilter(kinds=("key-event",)),
    EventFilter(kinds=("residency-released", "key-event")),
    EventFilter(rule="own"),
    EventFilter(tenant="tenant-3"),
    EventFilter(logs=("tenant/tenant-2",), kinds=("residency-opened",)),
    EventFilter(kinds=("orphan-found",)),
)


def places(rows: Any) -> list[tuple[int, str, int]]:
    return [(row.at_us, row.log, row.idx) for row in rows]


def sorted_plainly(engine: Engine, wanted: EventFilter, newest: bool) -> list[tuple[int, str, int]]:
    with engine.connect() as connection:
        order = {
            name: place
            for place, name in enumerate(dict.fromkeys(row.log for row in every_event(connection, EventFilter())))
        }
        rows: list[EventRow] = list(every_event(connection, wanted))
    rows.sort(key=lambda row: (row.at_us, order[row.log], row.idx), reverse=newest)
    return places(rows)


@pytest.mark.system
@pytest.mark.parametrize("together", [0, 30, 10_000])
@pytest.mark.parametrize("newest", [True, False])
def test_pages_are_what_sorting_every_leaf_gives(
    filled: Engine, newest: bool, together: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(by_time, "_TOGETHER", together)
    for number in range(len(WANTED)):
        check_pages(filled, number, newest)


def check_pages(filled: Engine, number: int, newest: bool) -> None:
    wanted = WANTED[number]
    plain = sorted_plainly(filled, wanted, newest)
    assert plain or number == len(WANTED) - 1
    with filled.connect() as connection:
        for page in (1, 7, 1000):
            assert places(every_by_time(connection, wanted, newest=newest, page=page)) == plain


@pytest.mark.parametrize("newest", [True, False])
def test_a_search_that_ends_early_goes_on_where_it_ended(filled: Engine, newest: bool) -> None:
    wanted = EventFilter(kinds=("key-event",))
    events, after, calls = list[Any](), None, 0
    with filled.connect() as connection:
        while True:
            page = find_by_time(connection, wanted, newest=newest, after=after, limit=50, scan_max=3)
            events += page.rows
            calls += 1
            if page.next is None:
                break
            after = page.next
    assert places(events) == sorted_plainly(filled, wanted, newest)
    assert calls > 3


def test_a_period_is_kept_to(filled: Engine) -> None:
    with filled.connect() as connection:
        every = list(every_event(connection, EventFilter()))
        middle = sorted(row.at_us for row in every)[len(every) // 2]
        for wanted in (EventFilter(since_us=middle), EventFilter(until_us=middle)):
            assert sorted(places(every_by_time(connection, wanted, page=9))) == sorted(
                places(row for row in every_event(connection, wanted))
            )


def test_an_hour_without_the_kind_is_not_looked_into(filled: Engine, monkeypatch: pytest.MonkeyPatch) -> None:
    looked: list[int] = []
    plain = by_time._of_slice

    def counted(connection: Any, part: Any, *rest: Any) -> Any:
        looked.append(part.since_us)
        return plain(connection, part, *rest)

    monkeypatch.setattr(by_time, "_of_slice", counted)
    monkeypatch.setattr(by_time, "_TOGETHER", 0)  # each hour alone
    with filled.connect() as connection:
        hours = {row.at_us // HOUR_US for row in every_event(connection, EventFilter(kinds=("key-event",)))}
        find_by_time(connection, EventFilter(kinds=("key-event",)))
        assert {at // HOUR_US for at in looked} == hours
        looked.clear()
        find_by_time(connection, EventFilter())
        assert len(looked) > len(hours)


@pytest.mark.parametrize("folded", [False, True])
def test_facets_and_histogram_are_a_count_of_the_leaves(filled: Engine, folded: bool) -> None:
    if folded:
        fold(filled)
    for wanted in WANTED[:3] + WANTED[4:6]:
        with filled.connect() as connection:
            rows = [
                (row.log, body)
                for row in every_event(connection, wanted)
                for body in plain_bodies(row.body)
                if not wanted.kinds or body["kind"] in wanted.kinds
            ]
            summary = summarize(connection, wanted)
        facets = {name: {value.value: value.events for value in values} for name, values in summary.facets.items()}
        assert summary.exact and summary.total == len(rows) > 0
        if not wanted.kinds:
            assert facets["kind"] == Counter(body["kind"] for _, body in rows)
        if wanted.tenant is None:
            assert facets["tenant"] == Counter(log.removeprefix("tenant/") for log, _ in rows if log != "system")
        assert sum(column.events for column in summary.columns) == len(rows)
        hours = Counter(int(body["at_us"]) // summary.column_us * summary.column_us for _, body in rows)
        assert {column.at_us: column.events for column in summary.columns if column.events} == hours


@pytest.mark.parametrize("folded", [False, True])
def test_a_short_period_is_counted_by_the_minute(filled: Engine, folded: bool, monkeypatch: pytest.MonkeyPatch) -> None:
    """With controls: a longer period, and one with more leaves than are read, are counted in whole hours."""
    if folded:
        fold(filled)
    with filled.connect() as connection:
        span = hour_span(connection)
    assert span is not None
    begin = span[0] + 2 * HOUR_US + 7 * MINUTE_US
    short = EventFilter(since_us=begin, until_us=begin + 2 * HOUR_US)
    wanted = (
        short,
        short._replace(kinds=("residency-released",)),
        short._replace(outcome="finish"),
        short._replace(tenant="tenant-3"),
        short._replace(logs=("tenant/tenant-2",)),
    )
    with filled.connect() as connection:
        for each in wanted:
            rows = [
                (row.log, body)
                for row in every_event(connection, each._replace(outcome=None))
                for body in plain_bodies(row.body)
                if body["at_us"] >= begin  # an item of a list may be older than its leaf
                and each.outcome in (None, body.get("cause"))
            ]
            found = summarize(connection, each)
            assert found.column_us <= 2 * MINUTE_US and found.exact and found.total == len(rows) > 0
            width = found.column_us  # no more than sixty columns
            minutes = Counter(int(body["at_us"]) // width * width for _, body in rows)
            assert {column.at_us: column.events for column in found.columns if column.events} == minutes
            tenants = {value.value: value.events for value in found.facets["tenant"]}
            assert tenants == Counter(log.removeprefix("tenant/") for log, _ in rows if log != "system")
        assert {value.value for value in summarize(connection, wanted[1]).facets["kind"]} > {"residency-released"}, (
            "what else could be chosen"
        )
        assert summarize(connection, EventFilter(since_us=span[0], until_us=span[1])).column_us == HOUR_US
        monkeypatch.setattr(summary, "FINE_LEAVES_MAX", 5)
        asked: list[int] = []
        plain = summary.find_by_time
        monkeypatch.setattr(summary, "find_by_time", lambda *of, **how: asked.append(how["limit"]) or plain(*of, **how))
        busy = summarize(connection, short)
        assert busy.column_us == HOUR_US and busy.exact
        assert asked == [summary.SAMPLE_MAX], "the leaves of a period with too many are not read"


def test_what_is_refused_stands_apart_by_the_minute(any_store: Engine, make_writer: Any) -> None:
    at = 5 * HOUR_US
    hits = [
        HitCounters(at + number * MINUTE_US, "one", "one", "reuse", effect, "own", 1, at, 1, 1, 16)
        for number, effect in enumerate(("permit", "deny", "permit", "deny", "deny"))
    ]
    writer = make_writer(any_store)
    writer.submit(hits)
    assert writer.flush()
    with any_store.connect() as connection:
        first = next(every_event(connection, EventFilter())).at_us
        found = summarize(connection, EventFilter(since_us=first))
    assert [(column.events, column.refused) for column in found.columns] == [
        (1, 0),
        (1, 1),
        (1, 0),
        (1, 1),
        (1, 1),
    ]


def test_a_rule_has_the_requests_that_it_denied(
    any_store: Engine, make_writer: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The same of few leaves, which are read, and of many, which have figures; what a rule permits is no denial."""
    at = 5 * HOUR_US
    parties = [("one", "one", "own"), ("one", "two", "apart"), ("two", "one", "apart")]
    writer = make_writer(any_store)
    for reader, owner, rule in parties:
        for effect, requests in (("permit", 5), ("deny", 3)):
            writer.submit([HitCounters(at, reader, owner, "reuse", effect, rule, 1, at, requests, 1, 16)])
    assert writer.flush()
    with any_store.connect() as connection:
        read = summarize(connection, EventFilter())
        monkeypatch.setattr(summary, "FINE_LEAVES_MAX", 1)
        counted = summarize(connection, EventFilter())
    assert (read.column_us, counted.column_us) == (MINUTE_US, HOUR_US), "void: counted in one way"
    for found in (read, counted):
        assert {value.value: value.events for value in found.facets["rule"]} == {"own": 3, "apart": 6}


def test_what_has_no_figures_is_counted_in_the_newest_leaves(filled: Engine) -> None:
    with filled.connect() as connection:
        rows = list(every_event(connection, EventFilter(rule="own")))
        summary = summarize(connection, EventFilter(rule="own"))
    assert (summary.total, summary.exact, summary.sampled, summary.counted) == (
        len(rows),
        True,
        len(rows),
        frozenset(),
    )
    assert summary.facets["kind"][0].events == len(rows)
