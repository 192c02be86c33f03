"""Route receipts against what a recorder saw: every figure equal, and a half that is lost is a finding."""

from __future__ import annotations

from pathlib import Path

import pytest
from sqlalchemy import Engine

from kvcustody.audit.evidence.routes.route_measures import measure
from kvcustody.audit.evidence.routes.route_receipts import (
    GRACE_US,
    JoinedRoutes,
    ReceiptProblem,
    RoutePeriod,
    by_problem,
    read_routes,
)
from kvcustody.audit.kinds.route_events import ANSWER_US_MAX
from kvcustody.audit.verify.ledger.fsck_ledger import fsck
from kvcustody.governance.edge.route_receipt import request_digest
from standins.integrations.door_world import Signers, make_signers
from standins.integrations.routed_fleet import RoutedFleet, figures_of, truth_of
from standins.redteam.two_worlds import model as make_model

EVER = RoutePeriod(0, 1 << 60)
LATER_US = 1 << 60


@pytest.fixture(scope="module")
def signers() -> Signers:
    return make_signers()


def joined(store: Engine, period: RoutePeriod = EVER, now_us: int = LATER_US) -> JoinedRoutes:
    with store.connect() as connection:
        return read_routes(connection, period, now_us=now_us)


def test_every_figure_is_what_the_recorder_saw(store: Engine, tmp_path: Path, signers: Signers) -> None:
    fleet = RoutedFleet(tmp_path, signers, store, make_model())
    fleet.run(150)
    fleet.close()
    found = joined(store)
    measures = measure(found.receipts)
    assert figures_of(measures) == truth_of(fleet.seen)
    assert measures.stale_misses > 0 and measures.scores and measures.promises == 150, "control"
    misses = by_problem(found.findings)
    assert misses.pop(ReceiptProblem.NOT_FOUND) == measures.stale_misses and not any(misses.values())
    of_acme = joined(store, EVER._replace(tenant="acme")).receipts
    assert figures_of(measure(of_acme)) == truth_of([one for one in fleet.seen if one.tenant == "acme"])
    with store.connect() as connection:
        assert fsck(connection).problems == []


def test_a_half_that_is_lost_is_a_finding_and_never_a_zero(store: Engine, tmp_path: Path, signers: Signers) -> None:
    fleet = RoutedFleet(tmp_path, signers, store, make_model())
    key = fleet.edge.clients.acme
    without_door = fleet.ask(key, "ann", "acme", 20, mute="door")
    without_worker = fleet.ask(key, "ann", "acme", 40, mute="worker")
    both = fleet.ask(key, "ann", "acme", 60)
    fleet.ask(key, "ann", "acme", 60, status=503)
    fleet.close()
    assert without_door and without_worker and both
    routes = joined(store)
    wrong = {(one.problem, one.receipt) for one in routes.findings if one.problem != ReceiptProblem.NOT_FOUND}
    assert wrong == {
        (ReceiptProblem.NO_DOOR, without_door.receipt),
        (ReceiptProblem.NO_WORKER, without_worker.receipt),
    }
    assert measure(routes.receipts).requests == 2, "no figure of a half that is not there"
    early = joined(store, now_us=both.at_us + GRACE_US // 2)
    assert early.awaited == 2 and not by_problem(early.findings)[ReceiptProblem.NO_WORKER]
    running = joined(store, now_us=both.at_us + GRACE_US)
    assert running.awaited == 1 and by_problem(running.findings)[ReceiptProblem.NO_WORKER] == 1
    mine = joined(store, EVER._replace(prefix=request_digest(f"{'x'}")))
    assert mine.receipts == ()
    prefix = both.receipt[:16]
    assert [one.receipt for one in joined(store, EVER._replace(prefix=prefix)).receipts] == [both.receipt]


@pytest.mark.parametrize("opens", [True, False])
def test_every_request_of_a_tenant_that_others_reach_has_a_receipt(
    store: Engine, tmp_path: Path, signers: Signers, opens: bool
) -> None:
    grant = "{id: g, owner: acme, reader: initech, at_most: low, until: 2099-01-01, reason: a test}"
    fleet = RoutedFleet(
        tmp_path, signers, store, make_model(), share="none", more=f"grants: [{grant if opens else ''}]\n"
    )
    fleet.run(20)
    fleet.close()
    theirs = {one.receipt for one in fleet.seen if one.tenant == "acme"}
    assert 0 < len(theirs) < 20
    assert {one.receipt for one in joined(store).receipts} == (theirs if opens else set())


def test_an_answer_that_does_not_begin_within_an_hour_has_a_half_without_one(
    store: Engine, tmp_path: Path, signers: Signers
) -> None:
    fleet = RoutedFleet(tmp_path, signers, store, make_model())
    sent = [fleet.edge.send(fleet.edge.clients.acme, {"prompt": "x"}).forwarded.receipt for _ in range(2)]
    fleet.clock.advance(ANSWER_US_MAX - 1)
    fleet.receipts.close_unanswered()
    assert sent[0] is not None and sent[1] is not None
    sent[1].answered(200, ())
    fleet.clock.advance(1)
    fleet.receipts.close_unanswered()
    sent[0].answered(200, ())
    fleet.close()
    halves = [one.sent for one in joined(store).receipts]
    assert {(half.status, half.answer_ms) for half in halves if half} == {(0, 3_600_000), (200, 3_599_999)}


def test_of_requests_that_are_not_drawn_nothing_is_written(store: Engine, tmp_path: Path, signers: Signers) -> None:
    fleet = RoutedFleet(tmp_path, signers, store, make_model(), share="1/2")
    fleet.run(60)
    fleet.close()
    found = joined(store)
    assert 10 < len(found.receipts) < 50
    drawn = {one.receipt for one in found.receipts}
    assert figures_of(measure(found.receipts)) == truth_of([one for one in fleet.seen if one.receipt in drawn])
    assert all(one.problem is ReceiptProblem.NOT_FOUND for one in found.findings)
