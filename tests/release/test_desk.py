"""The release workflow: who may do what, in which order, and what every step leaves behind. On files and in SQL."""

from __future__ import annotations

import shutil
from collections.abc import Callable, Iterator
from dataclasses import replace
from fractions import Fraction
from pathlib import Path

import pytest

from kvcustody.audit.kinds import ReleaseStep
from kvcustody.audit.store.database.engine import open_store
from kvcustody.clock import MICROSECONDS
from kvcustody.errors import ConfigError, CustodyError, LedgerUnavailable, PolicyError
from kvcustody.governance.decisions.staged_table import Stage
from kvcustody.governance.release import activation_gates as gates
from kvcustody.governance.release.record import ReleaseAction, ReleaseError, make_record
from kvcustody.governance.release.replay_records import fold
from kvcustody.governance.release.store import FolderStore, SqlStore
from kvcustody.policies.bundle.bundle import verify
from kvcustody.policies.bundle.trust import KeyRole
from kvcustody.signed_document import digest
from standins.release.release_world import FORBID, READS, THIRD, Release, policy

HOUR = 3600 * MICROSECONDS


@pytest.fixture(params=["folder", "sql"])
def release(request: pytest.FixtureRequest, tmp_path: Path, migrated: Path) -> Iterator[Release]:
    if request.param == "folder":
        yield Release(tmp_path)
        return
    shutil.copy(migrated, tmp_path / "ledger.db")
    engine = open_store(tmp_path / "ledger.db")
    yield Release(tmp_path, SqlStore(engine))
    engine.dispose()


@pytest.fixture
def files(tmp_path: Path) -> Release:
    return Release(tmp_path)


def test_a_release_from_proposal_to_effect(release: Release) -> None:
    desk, people = release.desk, release.people
    first = desk.propose(policy(READS), people.ada, note="joint evaluation")
    with pytest.raises(ReleaseError, match="not approved"):
        desk.activate(1, people.grace)
    with pytest.raises(ReleaseError, match="approve exactly that"):
        desk.approve(1, people.grace)
    found = desk.approve(1, people.grace, cells=desk.review(1).cells)
    assert found.proof.holds and [opening.id for opening in found.missing] == ["reads"]
    with pytest.raises(ReleaseError, match="`holder` has not consented"):
        desk.activate(1, people.grace)
    desk.consent(1, "reads", people.holger)
    desk.activate(1, people.grace)
    state = desk.state()
    assert state.active_revision == first.revision == 1
    table = gates.tables_of(state)
    assert table is not None and table.digest == first.manifest.digest


def test_every_step_is_a_durable_event(release: Release) -> None:
    release.release_reads()
    release.desk.revoke(["reads"], release.people.brock, reason="incident")
    steps = [event for event in release.ledger.durable if isinstance(event, ReleaseStep)]
    assert [event.action for event in steps] == ["proposed", "consented", "approved", "activated", "revoked"]
    stored = release.store.read()
    assert [(event.step, event.record) for event in steps] == [
        (number, digest(data)) for number, data in enumerate(stored, 1)
    ]


def test_without_the_ledger_nothing_widens_and_everything_narrows(files: Release) -> None:
    files.release_reads()
    files.ledger.failing = True
    with pytest.raises(LedgerUnavailable):
        files.desk.propose(policy(READS, THIRD), files.people.ada, note="more")
    assert files.desk.state().highest == 1
    with pytest.raises(LedgerUnavailable):
        files.desk.revoke(["reads"], files.people.grace, reason="incident")
    assert files.desk.state().revoked == {"reads"}


def test_nobody_approves_what_they_proposed(files: Release) -> None:
    people = files.people
    both = replace(people.trust.keys["ada"], roles=frozenset({KeyRole.AUTHOR, KeyRole.APPROVER}))
    careless = replace(people.trust, keys={**people.trust.keys, "ada": both})
    desk = type(files.desk)(files.store, careless, clock=files.clock, ledger=files.ledger)
    desk.propose(policy(), people.ada, note="mine")
    with pytest.raises(ReleaseError, match="proposed revision `1` and cannot approve"):
        desk.approve(1, people.ada, cells=desk.review(1).cells)
    desk.approve(1, people.grace, cells=desk.review(1).cells)


ACTS: dict[str, tuple[Callable[[Release, str], object], set[str]]] = {
    "propose": (
        lambda r, who: r.desk.propose(policy(), getattr(r.people, who), note="x"),
        {"ada"},
    ),
    "approve": (
        lambda r, who: r.desk.approve(2, getattr(r.people, who), cells=r.desk.review(2).cells),
        {"grace"},
    ),
    "consent": (lambda r, who: r.desk.consent(2, "third-reads", getattr(r.people, who)), {"holger"}),
    "activate": (lambda r, who: r.desk.activate(3, getattr(r.people, who)), {"grace"}),
    "stage": (
        lambda r, who: r.desk.activate(3, getattr(r.people, who), stage=Stage(frozenset({"third"}))),
        {"grace", "olive"},
    ),
    "revoke": (
        lambda r, who: r.desk.revoke(["reads"], getattr(r.people, who), reason="x"),
        {"grace", "brock", "holger"},
    ),
    "break the glass": (
        lambda r, who: r.desk.break_glass(getattr(r.people, who), reason="x", seconds=60, document=policy()),
        {"brock"},
    ),
}


@pytest.mark.parametrize("act", ACTS)
def test_each_act_needs_its_role(files: Release, act: str) -> None:
    """Every person tries every act; nobody but those with its role succeeds. Each success is its own control."""
    files.release_reads()
    files.desk.propose(policy(READS, THIRD), files.people.ada, note="waits")
    narrower = files.desk.propose(policy(READS, idle="30m"), files.people.ada, note="ready").revision
    files.approve(narrower)
    do, allowed = ACTS[act]
    for who in ("ada", "grace", "olive", "holger", "rita", "brock", "eve"):
        trial = _copy(files, who)
        if who in allowed:
            do(trial, who)
        else:
            before = trial.store.read()
            with pytest.raises(PolicyError):
                do(trial, who)
            assert trial.store.read() == before, who


def _copy(files: Release, name: str) -> Release:
    """The same release in a folder of its own."""
    folder = files.folder / f"copy-{name}"
    folder.mkdir()
    trial = Release(folder)
    trial.people = files.people
    trial.desk = type(files.desk)(trial.store, files.people.trust, clock=files.clock, ledger=files.ledger)
    for number, data in enumerate(files.store.read(), 1):
        trial.store.append(number, data)
    return trial


def test_an_approval_is_of_exactly_what_was_shown(files: Release) -> None:
    """A gate's control: with `check` replaced by `review`, cells that nobody signed come into effect."""
    files.release(policy())
    wide = files.desk.propose(policy(READS), files.people.ada, note="x").revision
    files.desk.consent(wide, "reads", files.people.holger)
    _forged_approval(files, wide, cells="sha256:" + "0" * 64)
    with pytest.raises(ReleaseError, match="than its approver signed"):
        files.desk.activate(wide, files.people.grace)
    files.desk._gate = gates.review
    files.desk.activate(wide, files.people.grace)
    assert files.desk.state().active_revision == wide


def _forged_approval(files: Release, revision: int, cells: str) -> None:
    """A well-signed approval of other cells: what a desk that shows one thing and signs another would make."""
    real = gates.review
    try:
        gates.review = lambda state, proposal: replace(  # type: ignore[assignment]
            real(state, proposal), change=_Shown(real(state, proposal).change, cells)
        )
        files.desk.approve(revision, files.people.grace, cells=cells)
    finally:
        gates.review = real


class _Shown:
    def __init__(self, change: object, cells: str) -> None:
        self._change, self.cells_digest, self.approval_digest = change, cells, cells

    def __getattr__(self, name: str) -> object:
        return getattr(self._change, name)


def test_an_approval_is_void_under_another_active_revision(files: Release) -> None:
    files.release(policy())
    waiting = files.desk.propose(policy(READS), files.people.ada, note="x").revision
    files.desk.consent(waiting, "reads", files.people.holger)
    files.approve(waiting)
    other = files.desk.propose(policy(rules=FORBID), files.people.ada, note="y").revision
    files.approve(other)
    files.desk.activate(other, files.people.grace)
    with pytest.raises(ReleaseError, match="not newer than the active"):
        files.desk.activate(waiting, files.people.grace)
    late = files.desk.propose(policy(READS, rules=FORBID), files.people.ada, note="z").revision
    files.desk.consent(late, "reads", files.people.holger)
    files.approve(late)
    files.desk.break_glass(files.people.brock, reason="x", seconds=60, document=policy(rules=FORBID, idle="1m"))
    with pytest.raises(ReleaseError):
        files.desk.activate(late, files.people.grace)


def test_an_expired_proposal_is_not_activated(files: Release) -> None:
    files.desk.propose(policy(), files.people.ada, note="x", seconds=3600)
    files.approve(1)
    files.clock.advance(HOUR)
    with pytest.raises(ReleaseError, match="has expired"):
        files.desk.activate(1, files.people.grace)


def test_rollback_is_a_new_revision_without_what_was_revoked(release: Release) -> None:
    release.release_reads()
    release.release(policy(rules=FORBID))
    release.desk.revoke(["reads"], release.people.holger, reason="over")
    back = release.desk.rollback(1, release.people.ada, note="the rule was wrong")
    assert back.revision == 3 and back.manifest.revoked == ("reads",) and back.document == policy(READS)
    found = release.desk.review(3)
    assert found.change.consents == () and found.change.widens  # against the active one: `high` is reused again
    release.approve(3)
    release.desk.activate(3, release.people.grace)
    table = gates.tables_of(release.desk.state())
    assert table is not None and table.grants_for("reader", 0, release.clock.utc_us()) == ()
    waiting = release.desk.propose(policy(), release.people.ada, note="x").revision
    with pytest.raises(ReleaseError, match="never in effect"):
        release.desk.rollback(waiting, release.people.ada, note="x")


def test_a_rollback_that_opens_a_grant_again_needs_consent_again(files: Release) -> None:
    files.release_reads()
    files.release(policy())
    files.desk.rollback(1, files.people.ada, note="back")
    files.approve(3)
    with pytest.raises(ReleaseError, match="has not consented"):
        files.desk.activate(3, files.people.grace)
    files.desk.consent(3, "reads", files.people.holger)
    files.desk.activate(3, files.people.grace)


WIDER = {
    "a grant": policy(READS, THIRD),
    "a longer grant": policy(READS.replace("2027-01-01", "2028-01-01")),
    "a higher grant": policy(READS.replace("at_most: low", "at_most: high")),
    "another reader": policy(READS.replace("reader: reader", "reader: third")),
    "longer retention": policy(READS, idle="2h"),
    "a rule less": policy(READS),
}


@pytest.mark.parametrize("how", WIDER)
def test_breaking_the_glass_cannot_widen(files: Release, how: str) -> None:
    files.release(
        policy(READS, rules=FORBID if how == "a rule less" else ""),
        consents=(("reads", files.people.holger),),
    )
    before = files.store.read()
    with pytest.raises(ReleaseError, match="only narrows"):
        files.desk.break_glass(files.people.brock, reason="now", seconds=60, document=WIDER[how])
    assert files.store.read() == before
    files.desk._gate = gates.review  # the control: without the gate it widens
    files.desk.break_glass(files.people.brock, reason="now", seconds=60, document=WIDER[how])
    assert files.desk.state().active_revision == 2


def test_a_reader_of_the_store_asks_the_gate_again(files: Release) -> None:
    """A desk that skipped its gate is not believed by whoever takes the revision over."""
    files.release_reads()
    files.desk._gate = gates.review
    files.desk.break_glass(files.people.brock, reason="now", seconds=60, document=WIDER["a grant"])
    state = files.desk.state()
    assert state.active is not None
    with pytest.raises(ReleaseError, match="only narrows"):
        gates.check(state, state.active)


def test_breaking_the_glass_restores_what_was_in_effect_less_what_was_revoked(release: Release) -> None:
    release.release_reads()
    release.release(policy(rules=FORBID))
    with pytest.raises(ReleaseError, match="at most 4 hours"):
        release.desk.break_glass(release.people.brock, reason="x", seconds=5 * 3600, restores=1)
    release.desk.break_glass(release.people.brock, reason="the rule broke hr", seconds=3600, restores=1)
    state = release.desk.state()
    assert state.active is not None and state.active.is_break_glass and state.active_revision == 3
    release.desk.revoke(["reads"], release.people.brock, reason="leak")
    release.desk.break_glass(release.people.brock, reason="again", seconds=3600, restores=1)
    table = gates.tables_of(release.desk.state())
    assert table is not None and table.grants_for("reader", 0, release.clock.utc_us()) == ()


def test_an_owner_revokes_its_own_grants_alone(files: Release) -> None:
    files.release_reads()
    with pytest.raises(ReleaseError, match="not a grant or segment of `reader`"):
        files.desk.revoke(["reads"], files.people.rita, reason="mine?")
    with pytest.raises(ReleaseError, match="not a grant or segment of `holder`"):
        files.desk.revoke(["reads", "unknown"], files.people.holger, reason="x")
    assert files.desk.revoke(["reads"], files.people.holger, reason="x") == {"reads"}


def test_a_stage_needs_something_to_stand_beside(files: Release) -> None:
    files.desk.propose(policy(), files.people.ada, note="x")
    files.approve(1)
    with pytest.raises(ReleaseError, match="cannot be staged"):
        files.desk.activate(1, files.people.grace, stage=Stage(share=Fraction(1, 2)))


def test_a_stage_is_of_the_tenants_that_were_named(files: Release) -> None:
    """Among several issuers an id alone is nobody's name; the record holds what tenants are called."""
    document = policy().replace("profile:", "issuers: [corp, partner]\nprofile:")
    for tenant in ("holder", "reader", "third"):
        document = document.replace(f"  {tenant}: ", f"  {tenant}^corp: ")
    files.release(document)
    files.desk.propose(document.replace("idle: 1h", "idle: 30m"), files.people.ada, note="x")
    files.approve(2)
    with pytest.raises(ConfigError, match=r"say whose it is: `third\^corp`"):
        files.desk.activate(2, files.people.grace, stage=Stage(frozenset({"third"})))
    files.desk.activate(2, files.people.grace, stage=Stage(frozenset({"third^corp"})))
    assert files.desk.state().stage == Stage(frozenset({"third"}))


def test_the_bundle_of_an_approved_revision_is_what_a_worker_may_start_from(files: Release) -> None:
    files.desk.propose(policy(), files.people.ada, note="x")
    with pytest.raises(ReleaseError, match="not approved"):
        files.desk.bundle(1)
    files.approve(1)
    verified = verify(files.desk.bundle(1), files.people.trust, now_utc_us=files.clock.utc_us())
    assert set(verified.signers) == {"ada", "grace"}
    files.desk.revoke(["anything"], files.people.grace, reason="x")
    with pytest.raises(ReleaseError, match="does not know that `anything` was revoked"):
        files.desk.bundle(1)


def test_no_byte_of_a_record_may_change(files: Release) -> None:
    """Each record: bytes all over it flipped, and every record dropped, doubled or moved; 0 accepted."""
    files.release_reads()
    good = files.store.read()
    accepted = 0
    for at, data in enumerate(good):
        buffer = bytearray(data)
        for place in range(0, len(data), 31):
            buffer[place] ^= 1
            accepted += _folds([*good[:at], bytes(buffer), *good[at + 1 :]], files)
            buffer[place] ^= 1
        if at + 1 < len(good):
            accepted += _folds([*good[:at], *good[at + 1 :]], files)
        accepted += _folds([*good[:at], data, *good[at:]], files)
    assert accepted == 0 and _folds(good, files)


def _folds(records: list[bytes], files: Release) -> bool:
    try:
        fold(records, files.people.trust)
    except CustodyError:
        return False
    return True


def test_a_record_of_another_deployment_is_refused(files: Release) -> None:
    files.release_reads()
    state = files.desk.state()
    body = {"ids": ["reads"], "reason": "x"}
    chain = {"number": len(state.records) + 1, "previous": state.head, "at_us": files.clock.utc_us()}
    foreign = make_record(files.people.grace, ReleaseAction.REVOKED, body, audience="staging", **chain)  # type: ignore[arg-type]
    with pytest.raises(ReleaseError, match="for `staging`"):
        state.apply(foreign.to_bytes())
    state.apply(make_record(files.people.grace, ReleaseAction.REVOKED, body, audience="prod", **chain).to_bytes())  # type: ignore[arg-type]


def test_two_desks_do_not_both_take_the_next_step(release: Release) -> None:
    stale = release.desk.state()
    release.desk.propose(policy(), release.people.ada, note="first")
    record = make_record(
        release.people.brock,
        ReleaseAction.REVOKED,
        {"ids": ["x"], "reason": ""},
        number=1,
        previous=stale.head,
        audience="prod",
        at_us=1,
    )
    with pytest.raises(ReleaseError, match="taken by somebody else"):
        release.store.append(1, record.to_bytes())


def test_a_folder_with_a_gap_is_refused(files: Release) -> None:
    files.release_reads()
    assert isinstance(files.store, FolderStore)
    (files.store.path / "000002.json").unlink()
    with pytest.raises(ReleaseError, match="out of place, or one is missing"):
        files.desk.state()
