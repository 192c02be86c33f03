"""A restriction of processing (GDPR 18) in every seam: what is kept stays and is used by nobody, until it is lifted."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

import pytest

from kvcustody.audit.kinds import HitCounted, ProcessingRestricted, ResidencyOpened
from kvcustody.clock import VirtualClock
from kvcustody.errors import ConfigError
from kvcustody.governance.admission_outcome import Admission, AdmissionRefused
from kvcustody.governance.erasure.selector import Selector
from kvcustody.governance.identity.domain_spec import ScopeKind
from kvcustody.governance.identity.principal import identify
from kvcustody.governance.monitoring.enforcement import MONITOR, Enforcement
from kvcustody.governance.restriction.restricted_subjects import (
    BESIDE_RESTRICTED,
    NOBODY_RESTRICTED,
    RESTRICTED,
    RestrictedSubject,
    RestrictedSubjects,
)
from kvcustody.testkit.conformance.engine_protocol import RequestSpec, Setup
from kvcustody.testkit.conformance.engines.reference_engine import _MODEL, ReferenceEngine
from kvcustody.testkit.conformance.policy import policy
from standins.governance.monitored_workload import POLICY as SUBJECTS
from standins.governance.monitored_workload import reader, serve
from standins.governance.offload_world import MODEL, World, prompt, who
from standins.integrations.paged_engine import PagedEngine

WORDS = tuple(range(10, 42))


def of(*people: tuple[str, str]) -> RestrictedSubjects:
    return RestrictedSubjects(
        RestrictedSubject(f"case-{tenant}-{subject}", tenant, subject) for tenant, subject in people
    )


# -- our own pool, with a tier ----------------------------------------------------------------------------------------


@pytest.fixture(params=["subject", "tenant"])
def world(request: pytest.FixtureRequest, tmp_path: Path) -> Iterator[World]:
    world = World(tmp_path, "host")
    world.worker.close()
    world.set["tier_transfers"] = "always"
    world.policy = world.policy.replace("scope: tenant", f"scope: {request.param}")
    world.open()
    yield world
    world.worker.close()


def crowd(world: World, seed: int = 0) -> None:
    """Another's prompts, until nothing of before is on the device."""
    for number in range(3):
        world.serve("beta", prompt(1000 + 10 * seed + number, 16), subject="eve")


def live(world: World) -> int:
    return sum(manager.live_blocks() for manager in world.worker.governor.managers)


def acmes(world: World) -> set[bytes]:
    return {name for tier in world.tiers for name, entry in tier.objects().items() if entry.tenant == "acme"}


def test_what_is_on_the_device_is_not_reused_stays_and_is_reused_again(world: World) -> None:
    governor, mine, bobs = world.worker.governor, prompt(1, 4), prompt(2, 4)
    world.serve("acme", mine, subject="ada")
    world.serve("acme", bobs, subject="bob")
    assert world.serve("acme", mine, subject="ada") == 64, "control: it is reused"
    kept = live(world)
    governor.restrict(of(("acme", "ada")))
    assert live(world) == kept, "nothing ended"
    assert world.serve("acme", mine, subject="ada") == 0
    assert world.serve("acme", mine, subject="bob") == 0, "nor by somebody else of the tenant"
    assert governor.tenant_counters["acme"].denials[RESTRICTED] == 1
    assert live(world) >= kept, "and it is still there"
    governor.restrict(NOBODY_RESTRICTED)
    assert world.serve("acme", mine, subject="ada") == 64, "lifted, it is reused again"
    assert world.serve("acme", bobs, subject="bob") == 64
    assert governor.check() == [] and governor.scan() == []


def test_without_these_defences_it_would_be_reused(world: World, monkeypatch: pytest.MonkeyPatch) -> None:
    """The control: what the tests above see is these three answers, and nothing else that an order changes."""
    governor, mine = world.worker.governor, prompt(1, 4)
    world.serve("acme", mine, subject="ada")
    monkeypatch.setattr(RestrictedSubjects, "covers", lambda *_: False)
    monkeypatch.setattr(RestrictedSubjects, "withholds", lambda *_, **__: False)
    monkeypatch.setattr(RestrictedSubjects, "salt", lambda _self, _tenant, _scope, salt: salt)
    governor.restrict(of(("acme", "ada")))
    assert world.serve("acme", mine, subject="ada") == 64


def test_others_of_the_tenant_reuse_what_came_since(world: World) -> None:
    governor, bobs = world.worker.governor, prompt(2, 4)
    governor.restrict(of(("acme", "ada")))
    assert world.serve("acme", bobs, subject="bob") == 0
    assert world.serve("acme", bobs, subject="bob") == 64
    assert world.serve("beta", bobs, subject="ada") == 0
    assert world.serve("beta", bobs, subject="ada") == 64, "another tenant's subject of the same name"


def test_nothing_of_it_goes_to_a_tier_or_comes_back(world: World) -> None:
    governor, mine, later = world.worker.governor, prompt(1, 10), prompt(3, 10)
    world.serve("acme", mine, subject="ada")
    crowd(world)
    assert acmes(world), "control: what was evicted is in the tier"
    world.serve("acme", later, subject="ada")
    governor.restrict(of(("acme", "ada")))
    before = acmes(world)
    crowd(world, 1)
    assert acmes(world) == before, "evicted, and not copied; and what there was stays"
    assert world.serve("acme", mine, subject="ada") == 0, "it does not come back"
    governor.restrict(NOBODY_RESTRICTED)
    crowd(world, 2)
    assert world.serve("acme", mine, subject="ada") == 160, "lifted, it comes back"
    assert world.serve("acme", later, subject="ada") == 0, "what was evicted meanwhile is gone"
    crowd(world, 3)
    assert len(acmes(world)) > len(before), "control: what is evicted is copied again"


def test_what_runs_goes_on_and_is_not_forked_from(world: World) -> None:
    governor, mine = world.worker.governor, prompt(1, 4)
    running = governor.admit(who("acme", "ada"), MODEL, mine)
    assert isinstance(running, Admission)
    governor.commit([running.request_id], [len(mine)])
    assert governor.may_fork(running.request_id), "control"
    governor.restrict(of(("acme", "ada")))
    assert not governor.may_fork(running.request_id)
    assert isinstance(governor.fork(running.request_id, "child"), AdmissionRefused)
    governor.release(running.request_id)
    governor.step()
    assert world.serve("acme", mine, subject="ada") == 0, "what it left is withheld too"


def test_a_deadline_goes_on_and_an_erasure_is_refused(world: World) -> None:
    governor, mine = world.worker.governor, prompt(1, 4)
    world.serve("acme", mine, subject="ada")
    governor.restrict(of(("acme", "ada")))
    for covers in (
        Selector("acme"),
        Selector("acme", "ada"),
        Selector("acme", session="s"),
        Selector(classification="internal"),
    ):
        with pytest.raises(ConfigError, match="restricts the processing"):
            governor.erase(covers)
    assert live(world) > 0
    governor.erase(Selector("acme", "bob"))
    governor.erase(Selector("beta"))
    world.clock.advance(601_000_000)
    governor.step()
    assert live(world) == 0, "its deadline ends it"


def test_a_leaf_of_another_subjects_request_says_why_it_found_less(world: World) -> None:
    governor = world.worker.governor
    governor.restrict(of(("acme", "ada")))
    sent: list[object] = []
    submit = world.worker.governor._ledger.submit
    governor._ledger.submit = lambda events: (sent.extend(events), submit(events))[1]  # type: ignore[method-assign]
    world.serve("acme", prompt(2, 4), subject="bob")
    opened = [event for event in sent if isinstance(event, ResidencyOpened)]
    wide = "scope: tenant" in world.policy
    assert [event.reasons for event in opened] == [("own", BESIDE_RESTRICTED) if wide else ("own",)]


def test_it_is_on_record_once_with_the_subject_and_explained(tmp_path: Path) -> None:
    reference_engine = ReferenceEngine(Setup(SUBJECTS, VirtualClock(), blocks=200))
    ask(reference_engine, "alpha", "ann")
    reference_engine.port.restrict(of(("alpha", "ann")))
    reference_engine.port.restrict(of(("alpha", "ann")))
    assert ask(reference_engine, "alpha", "ann") == 0
    reference_engine.port.restrict(NOBODY_RESTRICTED)
    reference_engine.port.counts()
    said = [event for event in reference_engine.ledger() if isinstance(event, ProcessingRestricted)]
    assert [(event.case_id, event.tenant, event.subject, event.change) for event in said] == [
        ("case-alpha-ann", "alpha", "ann", "restricted"),
        ("case-alpha-ann", "alpha", "ann", "lifted"),
    ]
    opened = [event for event in reference_engine.ledger() if isinstance(event, ResidencyOpened)]
    assert [event.reasons for event in opened] == [("own",), (RESTRICTED,)]
    denied = [event for event in reference_engine.ledger() if isinstance(event, HitCounted) and event.effect == "deny"]
    assert {(event.rule, event.action) for event in denied} == {(RESTRICTED, "reuse")}
    reference_engine.close()


# -- an engine's own pool ---------------------------------------------------------------------------------------------


def ask(one: ReferenceEngine, tenant: str, subject: str) -> int:
    return serve(one, [RequestSpec(reader(tenant, subject), WORDS)])[0]


def test_an_engine_on_the_port_reuses_nothing_and_all_again() -> None:
    reference_engine = ReferenceEngine(Setup(SUBJECTS, VirtualClock(), blocks=200))
    ask(reference_engine, "alpha", "ann")
    hit = ask(reference_engine, "alpha", "ann")
    assert hit > 0, "control"
    reference_engine.port.restrict(of(("alpha", "ann")))
    assert [ask(reference_engine, "alpha", who_) for who_ in ("ann", "bob", "bob")] == [0, 0, hit]
    reference_engine.port.restrict(NOBODY_RESTRICTED)
    assert ask(reference_engine, "alpha", "ann") == hit
    assert reference_engine.check() == reference_engine.scan() == []
    reference_engine.close()


def test_a_grant_opens_nothing_of_it() -> None:
    reference_engine = ReferenceEngine(
        Setup(SUBJECTS.replace("scope: subject", "scope: tenant"), VirtualClock(), blocks=200)
    )

    def through() -> int:
        ask(reference_engine, "beta", "eve")  # the first use is put on record
        reference_engine.port.settle()
        return ask(reference_engine, "beta", "eve")

    ask(reference_engine, "alpha", "ann")
    reference_engine.port.restrict(of(("alpha", "ann")))
    assert through() > 0, "its own by now"
    reference_engine.close()
    two = ReferenceEngine(Setup(SUBJECTS.replace("scope: subject", "scope: tenant"), VirtualClock(), blocks=200))
    ask(two, "alpha", "ann")
    residency = two.port.admit(
        identify(issuer="idp", tenant="beta", verified={"subject": "eve"}),
        _MODEL,
        list(WORDS),
        request_id="r",
    )
    grants = residency.facts.grants
    assert [entry.chain.domain.is_withheld for entry in grants] == [False], "control"
    two.port.restrict(of(("alpha", "ann")))
    assert [entry.chain.domain.is_withheld for entry in grants] == [True]
    fresh = two.port.admit(
        identify(issuer="idp", tenant="beta", verified={"subject": "eve"}),
        _MODEL,
        list(WORDS),
        request_id="q",
    )
    assert [entry.chain.domain.is_withheld for entry in fresh.facts.grants] == [False]
    assert fresh.facts.grants[0].chain.domain is not grants[0].chain.domain
    two.close()


def test_an_order_to_monitor_does_not_open_it() -> None:
    reference_engine = ReferenceEngine(Setup(SUBJECTS, VirtualClock(), blocks=200))
    reference_engine.port.may_monitor = True
    until_us = reference_engine.clock.utc_us() + 3_600_000_000
    reference_engine.port.order_enforcement(
        Enforcement(MONITOR, seed="5eed" * 8, until_utc_us=until_us, actor="olga", order=1)
    )
    ask(reference_engine, "alpha", "ann")
    assert ask(reference_engine, "beta", "bob") > 0, "control: the engine's own keys know no tenant"
    reference_engine.port.restrict(of(("alpha", "ann")))
    assert ask(reference_engine, "alpha", "ann") == 0
    assert ask(reference_engine, "beta", "cid") == 0, "nor does anybody whom the engine's own keys lead to it"
    other = RequestSpec(reader("beta", "cid"), tuple(range(50, 82)))
    assert serve(reference_engine, [other])[0] == 0 < serve(reference_engine, [other])[0], "others are monitored still"
    reference_engine.close()


def test_beside_a_connector_that_copies_whatever_is_computed_they_are_refused_by_name() -> None:
    reference_engine = ReferenceEngine(
        Setup(SUBJECTS.replace("low: never", "low: {tiers: [host], encrypt: required}"), VirtualClock())
    )
    reference_engine.port.tiers.copies_leave, reference_engine.port.tiers.are_copies_sealed = True, lambda: True
    ann = identify(issuer="idp", tenant="alpha", verified={"subject": "ann"})

    def answer(request_id: str) -> object:
        return reference_engine.port.admit(ann, _MODEL, list(WORDS), request_id=request_id)

    assert not isinstance(answer("a"), AdmissionRefused), "control"
    reference_engine.port.restrict(of(("alpha", "ann")))
    refused = answer("b")
    assert isinstance(refused, AdmissionRefused) and RESTRICTED in str(refused.reason)
    reference_engine.port.tiers.copies_leave = False
    residency = answer("c")
    assert not isinstance(residency, AdmissionRefused) and not reference_engine.port.may_offload(residency)
    reference_engine.close()


@pytest.mark.parametrize("size", [1, 4])
def test_a_tree_of_tokens_finds_nothing_of_it(size: int) -> None:
    engine = PagedEngine(policy(), VirtualClock(), 128, size)
    words = list(range(1, 14))
    whole = (len(words) - 1) // size
    assert [engine.run("alpha", "s", words), engine.run("alpha", "s", words)] == [0, whole]
    engine.port.restrict(of(("alpha", "s")))
    assert [engine.run("alpha", "s", words), engine.run("alpha", "s", words)] == [0, 0]
    engine.port.restrict(NOBODY_RESTRICTED)
    assert engine.run("alpha", "s", words) == whole
    assert engine.problems() == []


def test_tenants_wide_domains_differ_by_the_cases_in_force_and_are_the_same_on_each_worker() -> None:
    def salt(restricted: RestrictedSubjects, given: str | None = None) -> str | None:
        return restricted.salt("acme", ScopeKind.TENANT, given)

    one, both = of(("acme", "ada")), of(("acme", "ada"), ("acme", "bob"))
    assert len({salt(one), salt(both), salt(one, "mine"), salt(NOBODY_RESTRICTED)}) == 4
    assert salt(both) == salt(of(("acme", "bob"), ("acme", "ada"))) and salt(NOBODY_RESTRICTED, "x") == "x"
    assert both.salt("acme", ScopeKind.SUBJECT, None) is None
