"""Decisions at their time, residencies by rule, and memory that was actually read back."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
from sqlalchemy import Engine

from kvcustody.audit.evidence.query.showback import dated_reuse
from kvcustody.audit.kinds import HitCounted, HitCounters, ReceiptRecorded
from kvcustody.audit.leaf.batch import read_leaves
from kvcustody.audit.reports.build_report import build_report, newest_checkpoint, period
from kvcustody.audit.reports.model import Report
from kvcustody.audit.reports.parameters import ReportParameters
from kvcustody.audit.store.database.engine import WRITE
from kvcustody.audit.tlog.signed_note import KeyKind
from kvcustody.audit.tlog.signing_key import SigningKey
from kvcustody.audit.write.append_leaves import Appender
from kvcustody.audit.write.event_queue import EventQueue, TenantShares
from kvcustody.clock import SystemClock
from kvcustody.times import MINUTE_US
from standins.audit.falsified import OFFSET_US, leaf_bytes
from standins.audit.ledgers import report_ledger

START = 1_000_000


def counted(at: int, since: int, requests: int, *, reader: str = "tenant-0", owner: str = "tenant-0") -> HitCounters:
    return HitCounters(at, reader, owner, "reuse", "deny", "no-grant", 1, since, requests, 0, 0)


class Reporting:
    def __init__(self, store: Engine, folder: Path) -> None:
        self.store, self.folder = store, folder

    def fill(self, events: list[Any]) -> None:
        with self.store.connect().execution_options(**WRITE) as connection, connection.begin():
            Appender().append(connection, read_leaves(leaf_bytes(events, "c" * 32)))
        key = SigningKey.from_seed(report_ledger.ORIGIN, KeyKind.ED25519, bytes(32))
        report_ledger.sign(self.store, key, self.folder)

    def report(self, since: int | None = None, until: int | None = None, **more: Any) -> Report:
        bounds = [None if each is None else OFFSET_US + each for each in (since, until)]
        with self.store.connect() as connection:
            size = newest_checkpoint(connection)
            asked = ReportParameters("soc2", size, *period(connection, size, *bounds), sample=0)
            return build_report(connection, asked._replace(**more))


@pytest.fixture
def reporting(store: Engine, tmp_path: Path) -> Reporting:
    return Reporting(store, tmp_path)


def denials(report: Report) -> tuple[int, int]:
    mine = [item for item in report["decided"].counts if item.effect == "deny"]
    return sum(item.requests for item in mine), sum(item.straddling for item in mine)


def test_a_period_that_is_split_loses_no_decision(reporting: Reporting, world: Callable[..., Any]) -> None:
    events = world(5).run(30).events
    reporting.fill(
        [
            *events,
            counted(START + 10_000_000, START, 100),
            counted(START + 30_000_000, START + 15_000_000, 206),  # ends behind the bound, counted before and after
            counted(START + 40_000_000, START + 35_000_000, 7),
        ]
    )
    split = START + 20_000_000
    first, second = reporting.report(START - 10, split), reporting.report(split, START + 50_000_000)
    whole = reporting.report(START - 10, START + 50_000_000)
    assert denials(whole) == (313, 0)
    assert denials(first) == (100, 206) and denials(second) == (7, 206)
    assert denials(first)[0] + denials(second)[0] + denials(first)[1] == denials(whole)[0]


def test_a_decision_in_two_logs_is_one_decision(reporting: Reporting, world: Callable[..., Any]) -> None:
    reporting.fill([*world(5).run(30).events, counted(START + 9, START, 40, owner="tenant-1")])
    assert denials(reporting.report()) == (40, 0)
    own = reporting.report(tenant="tenant-0")["decided"].counts
    assert [(item.rule, item.requests) for item in own] == [("no-grant", 40)]


def test_a_counter_ends_at_every_whole_minute_at_its_last_decision() -> None:
    queue = EventQueue(
        SystemClock(), TenantShares(), capacity=100, batch=100, count_seconds=1000.0, offset_us=17_000_000
    )
    bound = 5 * MINUTE_US - 17_000_000
    for at in (bound - 3, bound - 1, bound, bound + 9):
        queue.submit([HitCounted(at, "acme", "acme", "reuse", "deny", "default-deny", 1)])
    queue.flush_counts(now=True)
    taken, _ = queue.take(10)
    made = sorted((event.from_us, event.at_us, event.requests) for _, event in taken)  # type: ignore[attr-defined]
    assert made == [(bound - 3, bound - 1, 2), (bound, bound + 9, 2)]


def test_residencies_by_rule_are_those_that_were_opened(reporting: Reporting, world: Callable[..., Any]) -> None:
    events = world(5).run(60).events
    reporting.fill(events)
    decided = reporting.report()["decided"]
    opened = sum(type(event).__name__ == "ResidencyOpened" for event in events)
    assert [(item.rules, item.residencies) for item in decided.residencies] == [("own-scope", opened)]
    assert 0 < decided.residencies[0].attached < opened
    assert all(item.holds and item.left == opened for item in decided.balances)


def sampled(verified: int) -> Callable[[Any], Any]:
    def make(event: Any) -> Any:
        if isinstance(event, ReceiptRecorded) and event.tenant is not None:
            return event._replace(level="sampled", share=1 / 64, verified=verified)
        return event

    return make


@pytest.mark.parametrize("verified", [0, 1])
def test_a_sampled_receipt_that_read_nothing_verifies_nothing(
    reporting: Reporting, world: Callable[..., Any], verified: int
) -> None:
    reporting.fill([sampled(verified)(event) for event in world(5).run(60).events])
    report = reporting.report()
    rows = {(row.scrub, row.level): row for row in report["read_back"]}
    custody, boot = rows["custody", "sampled"], rows["boot", "full"]
    assert boot.receipts_unread == 0 and boot.blocks_read == boot.blocks == 96
    assert boot.bytes_read == boot.bytes == 96 * 4096
    assert custody.blocks_read == verified * custody.receipts
    assert custody.bytes_read == verified * custody.receipts * 4096 < custody.bytes
    assert (
        custody.receipts_unread,
        report["total"].sampled_bytes > 0,
        report["total"].retired_bytes > 0,
    ) == ((0, True, False) if verified else (custody.receipts, False, True))
    said = [text for text in report["limitations"] if "read none of their blocks" in text]
    assert len(said) == (0 if verified else 1)
    assert report["recount"] is not None and report["recount"].differences == ()


def reused(at: int, reader: str, owner: str, blocks: int, rule: str = "labs-reads-acme") -> HitCounters:
    return HitCounters(at, reader, owner, "reuse", "permit", rule, 1, at - 1, 2, blocks, 16 * blocks)


def test_how_much_one_tenant_reused_of_another_has_one_answer(reporting: Reporting, world: Callable[..., Any]) -> None:
    """The report of all, that of either party, the function behind API and page, and SQL over leaves."""
    events = world(5).run(30).events
    crossed = [
        reused(START + 5, "tenant-1", "tenant-0", 12),
        reused(START + 9, "tenant-1", "tenant-0", 3, "segment-1"),
        reused(START + 9, "tenant-2", "tenant-1", 1),
    ]
    reporting.fill([*events, *crossed, counted(START + 7, START, 100, reader="tenant-1")])
    asked = START - 10, START + 1_000
    whole = reporting.report(*asked)["decided"].crossed
    assert [(row.reader, row.owner, row.rule, row.blocks, row.tokens) for row in whole] == [
        ("tenant-1", "tenant-0", "labs-reads-acme", 12, 192),
        ("tenant-1", "tenant-0", "segment-1", 3, 48),
        ("tenant-2", "tenant-1", "labs-reads-acme", 1, 16),
    ]
    for party, rows in (("tenant-0", whole[:2]), ("tenant-1", whole), ("tenant-2", whole[2:])):
        own = reporting.report(*asked, tenant=party)["decided"].crossed
        assert sorted(row[2:] for row in own) == sorted(row[2:] for row in rows), party
        assert {name for row in own for name in row[:2]} == {party, "another tenant"}, "and names no other"
    leaf_query = (
        "SELECT json_extract(leaf, '$.tenant'), json_extract(leaf, '$.owner'), json_extract(leaf, '$.rule'), "
        "sum(json_extract(leaf, '$.blocks')) FROM events JOIN logs ON logs.id = events.log WHERE kind = "
        "'hit-counters' AND json_extract(leaf, '$.effect') = 'permit' AND name = 'tenant/' || "
        "json_extract(leaf, '$.owner') GROUP BY 1, 2, 3 ORDER BY 1, 2, 3"
    )
    with reporting.store.connect() as connection:
        by_leaves = connection.exec_driver_sql(leaf_query).fetchall()
        told = [row.undated for row in dated_reuse(connection, *(OFFSET_US + at for at in asked))]
    assert [(row.reader, row.owner, row.rule, row.blocks) for row in whole] == [*map(tuple, by_leaves)]
    assert tuple(told) == whole
    assert reporting.report(START + 6, START + 1_000)["decided"].crossed == whole[1:], "and of another period less"
