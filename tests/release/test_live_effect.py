"""A released policy in a running worker: what it narrows at once, what a lost lease costs, what becomes of blocks."""

from __future__ import annotations

from dataclasses import replace
from fractions import Fraction
from itertools import product
from pathlib import Path
from random import Random

import msgspec
import pytest

from kvcustody.audit.kinds import CustodyEnded, PolicyActivated, PolicyStaged, ReceiptRecorded
from kvcustody.audit.tlog.signing_key import SigningKey
from kvcustody.clock import MICROSECONDS
from kvcustody.governance.admission_outcome import Admission, AdmissionRefused
from kvcustody.governance.decisions.segment_matcher import declare
from kvcustody.governance.decisions.staged_table import Stage, StagedTable
from kvcustody.governance.identity.domain_spec import tenant_owner
from kvcustody.governance.identity.principal import identify
from kvcustody.governance.release import activation_gates as gates
from kvcustody.governance.release.record import ReleaseError
from kvcustody.governance.release.release_desk import ReleaseWorkflow
from kvcustody.governance.release.rollback_guard import RevisionMark
from kvcustody.governance.release.signer import FileSigner
from kvcustody.policies.bundle.trust import KeyRole, TrustedKey
from kvcustody.policies.document.model import Action, OnWorkerDeath, Scope, Via
from kvcustody.policies.reading.load_policy import load_policy
from kvcustody.policies.table.compile import compile_policy
from kvcustody.policies.table.model import AccessRequest
from kvcustody.signed_document import digest
from standins.release.release_world import FORBID, MODEL, PROMPT, READS, THIRD, Follower, Release, policy

HIT = 64
NOW_UTC = 1_767_225_600 * MICROSECONDS


@pytest.fixture
def release(tmp_path: Path) -> Release:
    return Release(tmp_path)


def opened(release: Release, **options: float) -> Follower:
    """A worker in which the reader hits the owner's blocks through the grant."""
    release.release_reads()
    worker = Follower(release, **options)  # type: ignore[arg-type]
    worker.ask("holder")
    assert worker.glance("reader") == HIT
    return worker


def test_a_revoked_grant_stops_within_one_step_and_stays_stopped(release: Release) -> None:
    worker = opened(release)
    release.desk.revoke(["reads"], release.people.holger, reason="over")
    assert worker.feed.poll()
    worker.governor.step()
    assert worker.glance("reader") == 0 and worker.glance("holder") == HIT
    assert worker.ledger.counts["GrantsRevoked"] == 1
    assert "PolicyText" not in worker.ledger.counts
    release.desk.rollback(1, release.people.ada, note="back")
    release.approve(2)
    release.desk.activate(2, release.people.grace)
    worker.follow()
    assert worker.governor.table.revision == 2 and worker.glance("reader") == 0
    assert worker.ledger.counts["PolicyText"] >= 1, "the document that took effect is on record beside its activation"
    assert worker.ledger.counts["GrantsRevoked"] == 1, "what was revoked before is not recorded again"


def test_a_revocation_holds_under_a_table_that_does_not_know_it(release: Release) -> None:
    """Tombstones are the Governor's own; its control is a Governor that forgets them."""
    worker = opened(release)
    worker.governor.revoke(["reads"], actor="brock")
    again = compile_policy(load_policy(policy(READS), name="x"), revision=9)
    worker.governor.activate(again, actor="grace")
    assert worker.glance("reader") == 0
    worker.governor.revoked = frozenset()
    worker.governor.activate(compile_policy(load_policy(policy(READS), name="x"), revision=10), actor="grace")
    assert worker.glance("reader") == HIT


def test_revoking_does_not_wait_for_the_ledger(release: Release) -> None:
    worker = opened(release)
    worker.ledger.failing = True
    worker.governor.revoke(["reads"], actor="brock")
    assert worker.glance("reader") == 0


def test_a_revocation_waits_for_no_gate(release: Release) -> None:
    """Behind a revision that does not pass, and before a record that does not verify, it is heard all the same."""
    worker = opened(release)
    release.desk._gate = gates.review  # a desk that skips its gates
    release.desk.break_glass(release.people.brock, reason="x", seconds=60, document=policy(READS, THIRD))
    release.desk.revoke(["reads"], release.people.holger, reason="over")
    (release.folder / "release" / "000007.json").write_bytes(b"{}")
    assert not worker.feed.poll()
    worker.governor.step()
    assert worker.governor.table.revision == 1 and worker.glance("reader") == 0


# -- the lease ----------------------------------------------------------------------------------------------------


class Away:
    """A store that cannot be reached while told so."""

    def __init__(self, store: object) -> None:
        self.store = store
        self.is_away = False

    def read(self, after: int = 0) -> list[bytes]:
        if self.is_away:
            raise ReleaseError("the control plane is away")
        return self.store.read(after)  # type: ignore[no-any-return,attr-defined]

    def append(self, number: int, data: bytes) -> None:
        self.store.append(number, data)  # type: ignore[attr-defined]


def test_without_the_control_plane_only_the_own_scope_is_reused(release: Release) -> None:
    store = Away(release.store)
    release.store = store
    worker = opened(release, lease_seconds=60)
    worker.follow()
    store.is_away = True
    for _ in range(59):
        worker.clock.advance(MICROSECONDS)
        assert not worker.feed.poll()
        worker.governor.step()
    assert worker.glance("reader") == HIT and worker.glance("holder") == HIT
    worker.clock.advance(MICROSECONDS)
    worker.clock.step_utc(-3600 * MICROSECONDS)  # deadlines run on boot time
    assert worker.glance("reader") == 0 and worker.glance("holder") == HIT
    assert worker.governor.tenant_counters["reader"].denials["policy-lease"] == 2
    store.is_away = False
    worker.follow()
    assert worker.glance("reader") == HIT, "void: heard again, the grant must serve again"


def test_a_store_that_cannot_be_verified_is_as_good_as_none(release: Release) -> None:
    worker = opened(release)
    release.release(policy(READS, rules=FORBID), consents=())
    record = release.folder / "release" / "000007.json"
    record.write_bytes(record.read_bytes().replace(b'"revision":2', b'"revision":1', 1))
    assert not worker.feed.poll() and worker.feed.problem
    worker.governor.step()
    assert worker.governor.table.revision == 1
    worker.clock.advance(60 * MICROSECONDS)
    assert worker.glance("reader") == 0


def test_a_key_that_the_trust_configuration_names_later_counts_without_a_restart(release: Release) -> None:
    """Control: as long as it does not name the key, the step that it signed is not followed."""
    worker, before = opened(release), release.people.trust
    hans = SigningKey.generate("hans")
    named = TrustedKey("hans", hans.verifier.public, frozenset({KeyRole.OWNER}), "holder")
    after = replace(before, keys={**before.keys, "hans": named})
    desk = ReleaseWorkflow(release.store, after, clock=release.clock, ledger=release.ledger)
    desk.revoke(["reads"], FileSigner(hans), reason="over")
    assert not worker.feed.poll() and worker.feed.problem
    worker.governor.step()
    assert worker.glance("reader") == HIT
    release.people.trust = after
    assert worker.feed.poll(), worker.feed.problem
    worker.governor.step()
    assert worker.glance("reader") == 0


def test_a_lease_counts_from_before_the_question(release: Release) -> None:
    """An answer that took long renews nothing beyond the moment at which it was asked for."""
    worker = opened(release, lease_seconds=60)
    slow = worker.reader.verified

    def read() -> object:
        worker.clock.advance(50 * MICROSECONDS)
        return slow()

    worker.reader.verified = read  # type: ignore[method-assign,assignment]
    worker.follow()
    worker.clock.advance(9 * MICROSECONDS)
    assert worker.glance("reader") == HIT
    worker.clock.advance(MICROSECONDS)
    assert worker.glance("reader") == 0


def test_an_expired_revision_reuses_nothing(release: Release) -> None:
    revision = release.desk.propose(policy(READS), release.people.ada, note="x", seconds=600).revision
    release.desk.consent(revision, "reads", release.people.holger)
    release.approve(revision)
    release.desk.activate(revision, release.people.grace)
    worker = Follower(release, lease_seconds=10_000)
    worker.ask("holder")
    assert worker.glance("reader") == HIT
    worker.clock.advance(600 * MICROSECONDS - 1)
    assert worker.glance("holder") == HIT, "control: enforced until the stated expiry"
    worker.clock.advance(1)
    assert worker.glance("reader") == 0 and worker.glance("holder") == 0
    assert worker.governor.tenant_counters["holder"].denials == {"policy-expired": 2}
    worker.clock.step_utc(-300 * MICROSECONDS)
    assert worker.glance("reader") == 0 and worker.glance("holder") == 0  # no step of a clock reopens it
    release.release(policy(READS, rules=FORBID))  # narrower: nothing to consent to
    worker.follow()
    assert worker.glance("reader") == HIT and worker.glance("holder") == HIT


def test_a_broken_glass_ends_with_its_time_box(release: Release) -> None:
    release.release_reads()
    release.release(policy(rules=FORBID))
    worker = Follower(release, lease_seconds=100_000)
    release.desk.break_glass(release.people.brock, reason="wrong revision", seconds=900, restores=1)
    worker.follow()
    worker.ask("holder")
    assert worker.glance("reader") == HIT
    worker.clock.advance(900 * MICROSECONDS)
    assert worker.glance("reader") == 0 and worker.glance("holder") == 0


# -- restarts -----------------------------------------------------------------------------------------------------


def test_a_release_that_was_cut_or_swapped_is_refused_after_a_restart(release: Release) -> None:
    worker = opened(release)
    release.release(policy())
    worker.follow()
    last = release.folder / "release" / f"{len(release.store.read()):06}.json"
    kept = last.read_bytes()
    last.unlink()
    with pytest.raises(ReleaseError, match="was truncated, or replaced by an old copy"):
        Follower(release)
    assert Follower(release, mark="another").governor.table.revision == 1, "void: without the mark it is believed"
    last.write_bytes(kept)
    assert Follower(release).governor.table.revision == 2
    mark = RevisionMark(release.folder / "mark")
    with pytest.raises(ReleaseError, match="lower than `2`"):
        mark.check_revision(release.desk.state().proposal(1).manifest)
    with pytest.raises(ReleaseError, match="differs from the one that was in effect"):
        mark.check_revision(msgspec.structs.replace(release.desk.state().proposal(2).manifest, name="other"))
    assert digest(kept) == mark.mark.head


# -- stages -------------------------------------------------------------------------------------------------------


def table(revision: int, *grants: str, rules: str = "", idle: str = "1h"):
    return compile_policy(load_policy(policy(*grants, rules=rules, idle=idle), name="x"), revision=revision)


@pytest.mark.parametrize("in_base", [False, True])
@pytest.mark.parametrize("in_candidate", [False, True])
@pytest.mark.parametrize("staged", ["reader", "holder", "reader+holder", "third"])
def test_a_staged_crossing_needs_both_revisions(in_base: bool, in_candidate: bool, staged: str) -> None:
    grants = [READS] if in_base else [], [READS] if in_candidate else []
    both = StagedTable(table(1, *grants[0]), table(2, *grants[1]), Stage(frozenset(staged.split("+"))))
    asked = AccessRequest(Action.REUSE, "reader", "holder", 0, Scope.TENANT, Via.GRANT, "reads")
    decision = both.decide(asked, NOW_UTC)
    assert decision.permitted == (in_base and in_candidate)
    assert bool(both.grants_for("reader", 0, NOW_UTC)) == (in_base and in_candidate)


def test_a_tenant_in_the_stage_has_the_new_revision_for_itself(release: Release) -> None:
    both = StagedTable(table(1), table(2, rules=FORBID, idle="1m"), Stage(frozenset({"third"})))

    def own(name: str) -> bool:
        return both.decide(AccessRequest(Action.REUSE, name, name, 1, Scope.TENANT, Via.OWN), NOW_UTC).permitted

    assert (own("third"), own("holder")) == (False, True)
    assert both.obligations("third", 0).idle_us == 60 * MICROSECONDS
    assert both.obligations("holder", 0).idle_us == 3600 * MICROSECONDS


def test_a_stage_places_by_both_revisions_and_ends_copies_by_the_tenants_own(release: Release) -> None:
    ruled = "placement: [{id: holders-own, groups: [east], tenants: [holder], dedicated: true}]\n"
    both = StagedTable(
        table(1, rules=f"{ruled}on_worker_death: {{default: recompute}}\n"),
        table(2),
        Stage(frozenset({"third"})),
    )

    def groups(name: str) -> list[str]:
        return both.demand(name, None, None, None).among(("east", "west"))

    assert (groups("holder"), groups("reader")) == (["east"], ["west"])
    assert both.candidate.demand("holder", None, None, None).among(("east", "west")) == ["east", "west"], "control"
    deaths = {name: both.after_death(name, 0) for name in ("holder", "third")}
    assert deaths == {"holder": OnWorkerDeath.RECOMPUTE, "third": OnWorkerDeath.RESTORE}


def test_random_staged_tables_permit_across_only_what_both_do() -> None:
    random = Random(5)
    levels = {"low": READS, "high": READS.replace("at_most: low", "at_most: high"), "none": ""}
    crossings = 0
    for first, second, names in product(levels, levels, range(8)):
        stage = Stage(frozenset(n for bit, n in enumerate(("holder", "reader", "third")) if names >> bit & 1))
        base, candidate = (
            table(at, *filter(None, [levels[kind], THIRD if random.random() < 0.5 else ""]))
            for at, kind in ((1, first), (2, second))
        )
        both = StagedTable(base, candidate, stage)
        for reader, owner, level, scope, via in product(
            ("holder", "reader", "third"), ("holder", "reader", "third"), (0, 1), Scope, Via
        ):
            asked = AccessRequest(Action.REUSE, reader, owner, level, scope, via)
            permitted = both.decide(asked, NOW_UTC).permitted
            if reader != owner:
                assert permitted == (
                    base.decide(asked, NOW_UTC).permitted and candidate.decide(asked, NOW_UTC).permitted
                )
                crossings += permitted
            else:
                assert permitted == both.of(reader).decide(asked, NOW_UTC).permitted
    assert crossings > 50, "void: nothing crossed"


def test_a_share_grows_and_is_near_what_it_says() -> None:
    names = [f"tenant-{number}" for number in range(2000)]
    covered = [
        {name for name in names if Stage(share=Fraction(share, 100)).covers(name, "sha256:x")}
        for share in (0, 10, 50, 100)
    ]
    assert covered[0] == set() and covered[3] == set(names)
    assert covered[0] <= covered[1] <= covered[2] <= covered[3]
    assert 140 <= len(covered[1]) <= 260 and 900 <= len(covered[2]) <= 1100


def test_a_stage_in_a_running_worker_opens_nothing_until_it_is_whole(release: Release) -> None:
    release.release(policy())
    worker = Follower(release)
    worker.ask("holder")
    revision = release.desk.propose(policy(READS), release.people.ada, note="x").revision
    release.desk.consent(revision, "reads", release.people.holger)
    release.approve(revision)
    for stage in (Stage(frozenset({"reader"})), Stage(share=Fraction(1))):
        release.desk.activate(revision, release.people.olive, stage=stage)
        worker.follow()
        assert isinstance(worker.governor.table, StagedTable) and worker.glance("reader") == 0
    release.desk.activate(revision, release.people.grace)
    worker.follow()
    assert worker.glance("reader") == HIT
    kinds = [type(event) for event in worker.ledger.durable if isinstance(event, PolicyActivated | PolicyStaged)]
    assert kinds == [PolicyStaged, PolicyStaged, PolicyActivated]
    assert worker.governor.check() == []


def test_while_staged_quotas_are_those_of_the_revision_beside(release: Release) -> None:
    """Two sets of guarantees need not add up; and unlisted tenants are counted against one limit."""
    shares = ("holder: {quota: {guaranteed: 0%", "holder: {quota: {guaranteed: 60%")
    open_to_one = "tenants:\n  default: {quota: {guaranteed: 10%, cap: 100%}, tenants_max: 1}\n"
    before = policy().replace("reader: {quota: {guaranteed: 0%", "reader: {quota: {guaranteed: 60%")
    before, after = (text.replace("tenants:\n", open_to_one, 1) for text in (before, policy().replace(*shares)))
    release.release(before)
    worker = Follower(release)
    revision = release.desk.propose(after, release.people.ada, note="x").revision
    release.approve(revision)
    for tenants in (frozenset({"holder"}), frozenset({"holder", "reader", "first", "second"})):
        release.desk.activate(revision, release.people.grace, stage=Stage(tenants))
        worker.follow()
        accounts = worker.governor.managers[0].accounts
        assert accounts["holder"].guaranteed_blocks == 0 and accounts["reader"].guaranteed_blocks == 307
        first = worker.governor.admit(identify(issuer="idp", tenant="first"), MODEL, PROMPT)
        second = worker.governor.admit(identify(issuer="idp", tenant="second"), MODEL, PROMPT)
        assert isinstance(second, AdmissionRefused), "one unlisted tenant is there already, and runs"
        worker.governor.release(first.request_id)  # type: ignore[union-attr]
    release.desk.activate(revision, release.people.grace)
    worker.follow()
    assert accounts["holder"].guaranteed_blocks == 307 and accounts["reader"].guaranteed_blocks == 0
    assert worker.governor.check() == []


# -- blocks -------------------------------------------------------------------------------------------------------


def _segment(worker: Follower, tenants: str) -> str:
    declared = declare(
        worker.governor._keyring, tenant_owner("idp", "holder"), PROMPT, model=MODEL.digest, block_tokens=16
    )
    return (
        f"segments:\n  - {{id: shared-prompt, owner: holder, tenants: {tenants}, digest: hmac:{declared.digest}, "
        f"tokens: {declared.tokens}, classification: low, expires: 2027-01-01}}\n"
    )


UNREACHABLE = ("segment gone", "segment revoked", "labels", "scope", "forbidden", "key")


@pytest.mark.parametrize("how", UNREACHABLE)
def test_what_nobody_can_reach_is_scrubbed_within_its_deadline(release: Release, how: str) -> None:
    """Swept, scrubbed and receipted within `scrub.within` of the change, though nobody comes for it any more."""
    assert _left_behind(release, how) == (0, 0)


@pytest.mark.parametrize("how", ["segment gone", "labels", "scope", "forbidden"])
def test_unswept_it_stays(release: Release, how: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """The control: where every domain counts as reachable, it is CACHED until its idle time."""
    monkeypatch.setattr("kvcustody.governance.decisions.apply_narrowing.is_reachable", lambda *facts: True)
    assert _left_behind(release, how)[0] > 0


def _left_behind(release: Release, how: str) -> tuple[int, int]:
    """Blocks still CACHED, and ended blocks without a timely receipt, one second after the change."""
    release.release(policy())
    worker = Follower(release, lease_seconds=10_000)
    governor, events = worker.governor, []
    plain = worker.ledger.submit
    worker.ledger.submit = lambda some: (events.extend(some), plain(some))[1]  # type: ignore[method-assign]
    worker.ask("holder", [1, 2, 3])
    sharing = _segment(worker, '["holder", "reader"]') if how.startswith("segment") else ""
    governor.activate(_revised(2, sharing), actor="grace")
    worker.glance("holder")
    worker.ask("holder")
    assert governor.stats().pools[0].by_state["cached"] > 0
    if how == "segment revoked":
        governor.revoke(["shared-prompt"], actor="brock")
    elif how == "key":
        governor._keyring.rotate(tenant_owner("idp", "holder"))
        governor.reload_keys()
    elif how == "segment gone":
        governor.activate(_revised(3, ""), actor="grace")
    else:
        governor.activate(_revised(3, "", how), actor="grace")
    changed_us = worker.clock.now_us()
    for _ in range(10):
        worker.clock.advance(100_000)
        governor.step()
    ended = sum(sum(len(run.blocks) for run in e.runs) for e in events if isinstance(e, CustodyEnded))
    assert all(e.due_us >= changed_us for e in events if isinstance(e, CustodyEnded)), "what was lawful is not late"
    scrubbed = sum(
        sum(len(run.blocks) for run in e.runs)
        for e in events
        if isinstance(e, ReceiptRecorded) and e.ended_us <= changed_us + MICROSECONDS
    )
    assert ended > 0 or governor.stats().pools[0].by_state["cached"]
    assert governor.check() == [] and governor.scan() == []
    return governor.stats().pools[0].by_state["cached"], max(0, ended - scrubbed)


def _revised(revision: int, sharing: str, how: str = ""):
    text = policy(
        rules="  - {id: nothing, effect: forbid, action: reuse, when: {owner: holder}}" if how == "forbidden" else ""
    )
    text = text.replace("rules:\n", sharing + "rules:\n", 1)
    if how == "labels":
        text = text.replace("classify:\n", "labels: {region: [eu]}\nclassify:\n").replace(
            "holder: {quota", "holder: {labels: {region: eu}, quota"
        )
    if how == "scope":
        text = text.replace("scope: tenant", "scope: subject")
    return compile_policy(load_policy(text, name="x"), revision=revision)


@pytest.mark.parametrize(("idle", "wait_seconds", "hit"), [("10m", 601, 0), ("10m", 599, HIT), ("4h", 3601, 0)])
def test_retention_that_shortens_binds_what_is_there_and_retention_that_lengthens_does_not(
    release: Release, idle: str, wait_seconds: int, hit: int
) -> None:
    release.release(policy(idle="1h"))
    worker = Follower(release, lease_seconds=100_000)
    worker.ask("holder")
    release.release(policy(idle=idle))
    worker.follow()
    worker.clock.advance(wait_seconds * MICROSECONDS)
    answer = worker.admit("holder", PROMPT)
    assert answer.hit_tokens == hit


# -- under load ---------------------------------------------------------------------------------------------------


def _served(release: Release, requests: int, documents: list[str]) -> tuple[int, int, int]:
    """Requests that failed, hits, and revisions taken over, while the policy changes under load."""
    worker = Follower(release, lease_seconds=100_000)
    random, failed, hits = Random(7), 0, 0
    running: list[Admission] = []
    prompts = [[random.randrange(30_000) for _ in range(64 + 3)] for _ in range(8)]
    for at in range(requests):
        if at % (requests // len(documents)) == 5:
            tables = documents[at // (requests // len(documents))]
            coming = compile_policy(load_policy(tables, name="x"), revision=worker.governor.table.revision + 1)
            worker.governor.call(lambda governor, new=coming: governor.activate(new, actor="grace"))
        tenant = random.choice(["holder", "reader", "third"])
        answer = worker.governor.admit(identify(issuer="idp", tenant=tenant), MODEL, random.choice(prompts))
        if not isinstance(answer, Admission):
            failed += 1
            continue
        hits += answer.hit_tokens > 0
        running.append(answer)
        if len(running) > 6:
            done = running.pop(random.randrange(len(running)))
            worker.governor.commit([done.request_id], [64])
            worker.governor.extend_many([done.request_id], [1])
            worker.governor.release(done.request_id)
        worker.clock.advance(2_000)
        worker.governor.step()
    assert worker.governor.check() == []
    return failed, hits, worker.governor.table.revision


def test_hot_reload_under_load_fails_no_request(release: Release) -> None:
    """2,000 requests, 40 revisions, requests in flight at each."""
    release.release_reads()
    kinds = [policy(READS), policy(), policy(READS, THIRD), policy(idle="1s"), policy(READS, rules=FORBID)]
    failed, hits, revision = _served(release, 2_000, [kinds[at % 5] for at in range(40)])
    assert revision == 41 and hits > 500, "void: no load"
    assert failed == 0


def test_a_reload_that_stops_admitting_a_tenant_does_fail_requests(release: Release) -> None:
    """The control: the same load notices a policy without one of its tenants."""
    release.release_reads()
    without = policy().replace("  third: {quota: {guaranteed: 0%, cap: 100%, borrow: true}}\n", "")
    assert _served(release, 400, [policy(), without])[0] > 0


def test_while_the_clock_is_in_doubt_only_what_narrows_is_released(release: Release) -> None:
    release.release_reads()
    last_us = release.desk.state().records[-1].at_us
    release.clock.step_utc(10 * 365 * 86_400 * MICROSECONDS)
    with pytest.raises(ReleaseError, match="ahead of its boot clock"):
        release.desk.propose(policy(), release.people.ada, note="x")
    release.desk.revoke(["reads"], release.people.grace, reason="x")
    assert release.desk.state().records[-1].at_us == last_us, "no step is dated in ten years"
    release.clock.step_utc(-10 * 365 * 86_400 * MICROSECONDS)
    release.desk.propose(policy(), release.people.ada, note="x")  # control: set right, it is taken
