"""Requests through a door: reuse by erase epochs, and none past the custody lease, on both kinds of pools."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest

from kvcustody.audit.kinds import RouteFound
from kvcustody.clock import MICROSECONDS, VirtualClock
from kvcustody.governance.admission_outcome import Admission, AdmissionRefused
from kvcustody.governance.decisions import access_plan
from kvcustody.governance.decisions.access_plan import label_of, plan_of
from kvcustody.governance.edge.custody_lease import (
    CUSTODY_LEASE,
    ERASURES,
    CustodyLease,
    lease_seconds,
    spread,
)
from kvcustody.governance.edge.erase_epochs import (
    NO_EPOCHS,
    Epochs,
    EpochScope,
    EpochTags,
    EraseEpochs,
    KnownEpochs,
    RaisedEpoch,
)
from kvcustody.governance.edge.route_receipt import RouteReceipt
from kvcustody.governance.edge.worker_epochs import OTHER_EPOCH
from kvcustody.governance.erasure.selector import Selector
from kvcustody.governance.external.engine_port import EnginePort
from kvcustody.governance.governor.governor import Governor
from kvcustody.governance.identity.principal import Principal
from kvcustody.governance.observability.metrics import worker_status
from kvcustody.governance.request import NO_HINTS, Hints
from kvcustody.ids import SubjectId, TenantId
from standins.builders import governor, policy, port, table
from standins.redteam.two_worlds import KeepingLedger
from standins.robust.custody_world import MODEL

BLOCK = 16
PROMPT = list(range(100, 100 + 3 * BLOCK + 1))
FOREVER = 1 << 61
TAGS = EpochTags(bytes(32))
ANN = Principal("idp", TenantId("holder"), SubjectId("ann"))
BOB = Principal("idp", TenantId("holder"), SubjectId("bob"))
WHOLE_TENANT = EpochScope("idp", "holder")


def raised(*scopes: EpochScope, tags: EpochTags = TAGS) -> KnownEpochs:
    """A snapshot where these were raised, one after the other."""
    given = [RaisedEpoch(number, tags.of(scope)) for number, scope in enumerate(scopes, 1)]
    return KnownEpochs(EraseEpochs(given, version=len(given)), tags)


OF_ANN = raised(EpochScope("idp", "holder", "ann"))


class Engine:
    """One of our facades; `hits` runs a request to its end and says how many blocks it reused."""

    def __init__(self, kind: str, scope: str, *, erasure: str = "{within: 1h}") -> None:
        self.clock = VirtualClock()
        self.index: dict[bytes, int] = {}
        self.number, self.next = 0, 1
        self.ledger = KeepingLedger()
        self.receipt: RouteReceipt | None = None  # of the requests to come
        decisions = table(policy(("holder", "reader"), scope=scope, more=f"erasure: {erasure}\n"))
        self.facade: Any = (
            governor(decisions, self.clock, ledger=self.ledger)
            if kind == "governor"
            else port(decisions, self.clock, pool=512, engine=self, ledger=self.ledger)
        )

    def evict(self, blocks: Any) -> None:
        gone = set(map(int, blocks))
        self.index = {key: block for key, block in self.index.items() if block not in gone}

    def abort(self, request_ids: Any, cause: str) -> None: ...

    def wake(self) -> None: ...

    def hits(
        self,
        who: Principal = ANN,
        epochs: Epochs | None = None,
        *,
        between: Callable[[], object] = lambda: None,
        running: Callable[[], object] = lambda: None,
    ) -> int:
        """`between`: what happens after the look-up, where the engine attaches in a second step; `running`: later."""
        self.number += 1
        hints = NO_HINTS if epochs is None else Hints(epochs=epochs, receipt=self.receipt)
        if isinstance(self.facade, Governor):
            between()
            outcome = self.facade.admit(who, MODEL, PROMPT, request_id=self.number, hints=hints)
            assert isinstance(outcome, Admission)
            running()
            self.facade.commit([outcome.request_id], [len(PROMPT)])
            self.facade.release(outcome.request_id)
            return outcome.hit_tokens // BLOCK
        assert isinstance(self.facade, EnginePort)
        residency = self.facade.admit(who, MODEL, PROMPT, request_id=self.number, hints=hints)
        assert not isinstance(residency, AdmissionRefused)
        keys = self.facade.look_up(residency, lambda key: self.index.get(key, -1))
        reused = [self.index[key] for key in list(keys.keys)[: keys.readable] if key in self.index]
        between()
        reused = reused[: self.facade.attachable(residency, reused)]
        self.facade.attached(residency, reused)
        new = list(range(self.next, self.next + 4 - len(reused)))
        self.next += len(new)
        self.facade.handed_out(residency, new)
        blocks = reused + new
        running()
        if self.facade.may_publish(residency):
            for place, key in enumerate(list(keys.keys)):
                if key not in self.index:
                    self.index[key] = blocks[place]
                    self.facade.published(residency, [blocks[place]], blocks[place - 1] if place else -1)
        self.facade.release(residency)
        return len(reused)

    def denied(self, rule: str) -> int:
        return int(self.facade.stats().tenants["holder"].denials.get(rule, 0))


@pytest.fixture(params=["governor", "port"])
def engine(request: pytest.FixtureRequest) -> Engine:
    return Engine(request.param, "subject")


@pytest.fixture(params=["governor", "port"])
def wide(request: pytest.FixtureRequest) -> Engine:
    return Engine(request.param, "tenant")


def test_where_door_and_worker_agree_a_subject_finds_its_own(engine: Engine) -> None:
    engine.facade.take_epochs(OF_ANN, FOREVER)
    epochs = OF_ANN.of("idp", "holder", "ann")
    assert epochs == (0, 0, 1)
    assert [engine.hits(epochs=epochs), engine.hits(epochs=epochs)] == [0, 3]
    assert engine.hits(BOB, NO_EPOCHS) == 0


@pytest.mark.parametrize("token", [NO_EPOCHS, Epochs(0, 0, 2), Epochs(0, 1, 1), Epochs(1, 0, 1)])
def test_where_they_do_not_a_request_finds_nothing_and_leaves_nothing(engine: Engine, token: Epochs) -> None:
    engine.facade.take_epochs(OF_ANN, FOREVER)
    mine = OF_ANN.of("idp", "holder", "ann")
    engine.hits(epochs=mine)
    assert [engine.hits(epochs=token), engine.hits(epochs=token), engine.hits()] == [0, 0, 0]
    assert engine.hits(epochs=mine) == 3
    assert engine.denied(OTHER_EPOCH) == 2


def test_what_was_written_before_a_raise_is_out_of_reach_before_its_erasure_arrives(engine: Engine) -> None:
    engine.hits(epochs=NO_EPOCHS)
    assert engine.hits(epochs=NO_EPOCHS) == 3
    engine.facade.take_epochs(OF_ANN, FOREVER)
    assert engine.hits(epochs=OF_ANN.of("idp", "holder", "ann")) == 0


def test_without_the_epoch_in_its_domain_it_is_found(engine: Engine, monkeypatch: pytest.MonkeyPatch) -> None:
    """The control of the one above."""
    monkeypatch.setattr(access_plan, "epoch_salt", lambda salt, *_, **__: salt)
    engine.hits(epochs=NO_EPOCHS)
    engine.facade.take_epochs(OF_ANN, FOREVER)
    assert engine.hits(epochs=OF_ANN.of("idp", "holder", "ann")) == 3


def test_a_raise_between_look_up_and_attach_counts() -> None:
    engine = Engine("port", "subject")
    engine.hits(epochs=NO_EPOCHS)
    assert engine.hits(epochs=NO_EPOCHS, between=lambda: engine.facade.take_epochs(OF_ANN, FOREVER)) == 0


def test_a_request_that_waited_through_a_raise_leaves_nothing(engine: Engine) -> None:
    """Its prompt is from before; the control is the request after it, which finds its own."""
    engine.hits(epochs=NO_EPOCHS, between=lambda: engine.facade.take_epochs(OF_ANN, FOREVER))
    mine = OF_ANN.of("idp", "holder", "ann")
    assert [engine.hits(epochs=mine), engine.hits(epochs=mine)] == [0, 3]


def test_a_raise_is_of_its_own_scope(engine: Engine) -> None:
    engine.hits(BOB, NO_EPOCHS)
    engine.facade.take_epochs(OF_ANN, FOREVER)
    assert engine.hits(BOB, NO_EPOCHS) == 3, "another subject's"
    engine.hits()
    assert engine.hits() == 3, "without a door as before"


def test_a_tenant_wide_domain_outlives_a_subjects_raise_and_ends_with_its_tenants(wide: Engine) -> None:
    wide.hits(BOB, NO_EPOCHS)
    wide.facade.take_epochs(OF_ANN, FOREVER)
    assert wide.hits(ANN, OF_ANN.of("idp", "holder", "ann")) == 3, "what Ann wrote in it the erasure itself ends"
    known = raised(EpochScope("idp", "holder", "ann"), WHOLE_TENANT)
    wide.facade.take_epochs(known, FOREVER)
    assert wide.hits(BOB, known.of("idp", "holder", "bob")) == 0
    assert wide.hits(ANN, known.of("idp", "holder", "ann")) == 3, "the tenant's new one is shared again"


@pytest.mark.parametrize("scope", ["subject", "tenant"])
@pytest.mark.parametrize("kind", ["governor", "port"])
@pytest.mark.parametrize("is_erased", [True, False])
def test_what_runs_while_its_subject_is_erased_leaves_nothing(kind: str, scope: str, *, is_erased: bool) -> None:
    """The control: where nothing is erased, what it leaves is found."""
    engine = Engine(kind, scope, erasure="{within: 1h, running: finish}")
    selector = Selector("holder", "ann")
    engine.hits(running=lambda: engine.facade.erase(selector) if is_erased else None)
    assert engine.hits() == (0 if is_erased else 3)


@pytest.mark.parametrize("is_raised", [True, False])
def test_what_runs_while_its_scope_is_raised_leaves_nothing(engine: Engine, *, is_raised: bool) -> None:
    """The control as above."""
    known = OF_ANN if is_raised else raised()
    engine.hits(epochs=NO_EPOCHS, running=lambda: engine.facade.take_epochs(known, FOREVER))
    assert engine.hits(epochs=known.of("idp", "holder", "ann")) == (0 if is_raised else 3)


def test_an_older_snapshot_changes_nothing_and_another_key_everything(engine: Engine) -> None:
    engine.facade.take_epochs(OF_ANN, FOREVER)
    mine = OF_ANN.of("idp", "holder", "ann")
    engine.hits(epochs=mine)
    engine.facade.take_epochs(KnownEpochs(EraseEpochs(), TAGS), FOREVER)
    assert engine.hits(epochs=mine) == 3
    engine.facade.take_epochs(raised(tags=EpochTags(bytes([1]) * 32)), FOREVER)
    assert engine.hits(epochs=mine) == 0


def test_before_a_control_plane_is_heard_requests_through_a_door_share_nothing(engine: Engine) -> None:
    engine.facade.epochs.are_awaited = True
    engine.hits(epochs=NO_EPOCHS)
    assert engine.hits(epochs=NO_EPOCHS) == 0
    engine.facade.take_epochs(raised(), FOREVER)
    engine.hits(epochs=NO_EPOCHS)
    assert engine.hits(epochs=NO_EPOCHS) == 3


# -- the custody lease ------------------------------------------------------------------------------------------------


def test_past_the_lease_nothing_is_reused_and_what_was_written_is_found_again(engine: Engine) -> None:
    engine.facade.renew_custody(ERASURES, engine.clock.now_us() + MICROSECONDS)
    engine.hits()
    assert engine.hits() == 3
    engine.clock.advance(MICROSECONDS)
    assert engine.hits() == 0
    assert engine.denied(CUSTODY_LEASE) == 1
    assert engine.facade.stats().leases["custody"] <= 0
    engine.facade.renew_custody(ERASURES, engine.clock.now_us() + MICROSECONDS)
    assert engine.hits() == 3


def test_what_is_left_of_it_and_whom_it_denied_is_told(engine: Engine) -> None:
    status = worker_status(engine.facade.stats(), BLOCK)
    assert not any(name.startswith("lease") for name in status), "none is needed, and nobody was denied"
    engine.facade.take_epochs(OF_ANN, FOREVER)
    engine.facade.renew_custody(ERASURES, engine.clock.now_us() + 3 * MICROSECONDS)
    engine.facade.renew_lease(engine.clock.now_us() + 2 * MICROSECONDS)
    engine.hits(epochs=NO_EPOCHS)
    engine.clock.advance(4 * MICROSECONDS)
    engine.hits()
    engine.hits()
    status = worker_status(engine.facade.stats(), BLOCK)
    assert {name: value for name, value in status.items() if name.startswith("lease")} == {
        "lease.policy": -2,
        "lease.custody": -1,
        "lease_denied.custody-lease": 2,
        "lease_denied.erase-epoch": 1,
    }


def test_the_lease_is_read_again_at_the_attach() -> None:
    engine = Engine("port", "subject")
    engine.facade.renew_custody(ERASURES, engine.clock.now_us() + MICROSECONDS)
    engine.hits()
    assert engine.hits(between=lambda: engine.clock.advance(MICROSECONDS)) == 0


def test_a_fork_is_an_attach() -> None:
    engine = Engine("governor", "subject")
    facade = engine.facade
    facade.take_epochs(raised(), FOREVER)
    facade.renew_custody(ERASURES, engine.clock.now_us() + MICROSECONDS)
    parent = facade.admit(ANN, MODEL, PROMPT, request_id="parent", hints=Hints(epochs=NO_EPOCHS))
    assert isinstance(parent, Admission)
    assert isinstance(facade.fork(parent.request_id, "child"), Admission)
    facade.take_epochs(OF_ANN, FOREVER)
    assert isinstance(facade.fork(parent.request_id, "raised"), AdmissionRefused)
    alone = facade.admit(ANN, MODEL, PROMPT, request_id="no door")
    assert isinstance(facade.fork(alone.request_id, "its child"), Admission)
    engine.clock.advance(MICROSECONDS)
    assert isinstance(facade.fork(alone.request_id, "past the lease"), AdmissionRefused)


def test_tiers_bring_nothing_back_past_the_lease() -> None:
    engine = Engine("port", "subject")
    facade = engine.facade
    facade.renew_custody(ERASURES, engine.clock.now_us() + MICROSECONDS)
    residency = facade.admit(ANN, MODEL, PROMPT, request_id="r")
    facade.look_up(residency, lambda key: -1)
    assert facade.may_restore(residency, residency.domain)
    engine.clock.advance(MICROSECONDS)
    assert not facade.may_restore(residency, residency.domain)


def test_the_erasure_that_was_waiting_applies_before_what_ran_is_found(engine: Engine) -> None:
    """It wrote while the lease was over; the worker then hears of the erasure, and of nothing else after it."""
    facade, clock = engine.facade, engine.clock
    facade.renew_custody(ERASURES, clock.now_us() + MICROSECONDS)
    engine.hits()
    clock.advance(MICROSECONDS)
    erased_us = clock.now_us()
    engine.hits()
    facade.call(lambda owner: owner.erase(Selector("holder", "ann"), before_us=erased_us, erasure="e", on_record=True))
    facade.call(lambda owner: owner.renew_custody(ERASURES, FOREVER))
    facade.step()
    assert engine.hits() == 0
    assert engine.hits() == 3, "the control: what is written from now on is found"


def test_each_source_has_a_lease_and_a_worker_that_is_the_source_needs_none() -> None:
    lease = CustodyLease()
    assert not lease.is_over(FOREVER)
    lease.require("a")
    assert lease.is_over(0)
    lease.renew("a", 10)
    lease.renew("b", 5)
    lease.renew("a", 7)
    assert [lease.is_over(now) for now in (4, 5)] == [False, True]
    lease.renew("b", 20)
    assert [lease.is_over(now) for now in (9, 10)] == [False, True]


def test_its_length_is_the_setting_or_what_the_policy_gives_an_erasure() -> None:
    assert lease_seconds(7, 3600 * MICROSECONDS) == 7
    assert lease_seconds(0, 3600 * MICROSECONDS) == 3600
    assert lease_seconds(0, MICROSECONDS) == 300
    lengths = {spread(300) for _ in range(100)}
    assert len(lengths) > 90
    assert 240 <= min(lengths) <= max(lengths) <= 360


def test_no_name_of_a_person_is_in_a_salt() -> None:
    engine = Engine("governor", "subject")
    engine.facade.take_epochs(OF_ANN, FOREVER)
    admitted = engine.facade.admit(
        ANN, MODEL, PROMPT, request_id="r", hints=Hints(epochs=OF_ANN.of("idp", "holder", "ann"))
    )
    running = engine.facade.running[admitted.request_id]
    spec = label_of(running.residency.domain).spec
    assert spec is not None and spec.salt is not None
    assert spec.salt.startswith("epoch-") and "ann" not in spec.salt
    assert plan_of(running.residency).principal == ANN


@pytest.mark.parametrize("kind", ["governor", "port"])
def test_a_worker_writes_its_half_of_a_route_receipt(kind: str) -> None:
    """Once for each request that the door asks it for; whether door and worker knew the same erasures is in it."""
    engine = Engine(kind, "subject")
    engine.hits(ANN, NO_EPOCHS)
    engine.receipt = RouteReceipt("1f" * 16, is_asked=True)
    hits = engine.hits(ANN, NO_EPOCHS)
    engine.hits(ANN, Epochs(0, 0, 9))
    engine.receipt = RouteReceipt("2f" * 16, is_asked=False)
    engine.hits(ANN, NO_EPOCHS)
    engine.facade.step()
    halves = [event for event in engine.ledger.events if isinstance(event, RouteFound)]
    assert [(one.receipt, one.found_tokens, one.agrees) for one in halves] == [
        ("1f" * 16, hits * BLOCK, True),
        ("1f" * 16, 0, False),
    ]
    assert hits == 3 and {(one.tenant, one.prompt_tokens, one.crosses) for one in halves} == {
        ("holder", len(PROMPT), False)
    }
    assert all(one.free_blocks > 0 and one.queue == 0 for one in halves)
