"""Two issuers with one tenant id, through a worker with a real ledger: nothing of the one is ever the other's.

Each control drops the issuer from names: the same calls then end, find, charge or confuse the other's.
"""

from __future__ import annotations

import json
from collections.abc import Iterator
from contextlib import contextmanager
from functools import cache
from pathlib import Path
from typing import Any

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from sqlalchemy import Engine, select

from kvcustody.allocator.pool.tensor_memory import TensorMemory, TensorSpec
from kvcustody.audit.evidence.query.issuers import known_issuers, named_tenant
from kvcustody.audit.evidence.query.known_names import known_tenant
from kvcustody.audit.evidence.subjects.subject_key_store import SubjectKeys
from kvcustody.audit.evidence.subjects.subject_table import names_of
from kvcustody.audit.keep.purge_and_legal_hold import check_no_hold, place_hold
from kvcustody.audit.reports.subject_access import subject_page
from kvcustody.audit.store.database.engine import open_store
from kvcustody.audit.store.schema.ledger import events, logs
from kvcustody.audit.verify.ledger.fsck_ledger import fsck
from kvcustody.clock import MICROSECONDS, VirtualClock
from kvcustody.errors import ConfigError, LedgerUnavailable
from kvcustody.governance.admission_outcome import Admission, AdmissionRefused
from kvcustody.governance.decisions.tenant_names import TenantNames
from kvcustody.governance.erasure.selector import Selector
from kvcustody.governance.governor.governor import Governor
from kvcustody.governance.identity.principal import Principal, identify
from kvcustody.governance.keys.keyring import Keyring
from kvcustody.governance.keys.locked_buffer import KEY_BYTES, KeyBuffer
from kvcustody.governance.keys.root_key_wrapping import RootKeyWrapping
from kvcustody.governance.keys.wrapped_key_store import FileKeyStore
from kvcustody.governance.ledger_protocol import CountingLedger
from kvcustody.governance.observability import attempts
from kvcustody.governance.observability.metrics import worker_status
from kvcustody.governance.settings import Settings
from kvcustody.governance.worker.worker import MemoryPlan, Worker, open_worker
from kvcustody.ids import TenantId
from kvcustody.policies.reading.load_policy import load_policy
from kvcustody.policies.table.compile import compile_policy
from kvcustody.tenants import OWN, Issuers
from kvcustody.testkit.tiny_model import tiny_model
from standins import builders

BLOCKS, PROMPT = 64, list(range(1, 100))
SPEC = TensorSpec(layers=1, kv_heads=1, head_dim=8, dtype=torch.float16)
MODEL = tiny_model()


def issuing(tenants: dict[str, str], issuers: str = "") -> str:
    """A policy of these tenants, by quota."""
    kept = "{idle: 30m, absolute: 8h, active_max: 2h}"
    return builders.policy(tenants, name="issuers", retention=kept, scrub="{within: 1s, verify: all}", more=issuers)


TWO = issuing(
    {"acme^corp": "{guaranteed: 25%, cap: 75%}", "acme^partner": "{guaranteed: 25%, cap: 25%}"},
    "issuers: [corp, partner]",
)
ONE = issuing({"acme": "{guaranteed: 25%, cap: 75%}"})
CORP, PARTNER = "acme", "acme^partner"


def of(issuer: str, subject: str = "ada") -> Principal:
    return identify(issuer=issuer, tenant="acme", verified={"subject": subject})


def opened(folder: Path, policy: str = TWO, **more: object) -> Worker:
    (folder / "policy.yaml").write_text(policy, encoding="utf-8")
    settings = Settings(
        **builders.worker_files(folder),
        **more,  # type: ignore[arg-type]
    )
    size = TensorMemory.allocate(1, SPEC).bytes_per_block
    return open_worker(settings, MemoryPlan(lambda blocks: TensorMemory.allocate(blocks, SPEC), BLOCKS, 1, size))


@contextmanager
def ledger(folder: Path) -> Iterator[Engine]:
    engine = open_store(folder / "ledger.db")
    try:
        yield engine
    finally:
        engine.dispose()


def serve(governor: Governor, who: Principal, tokens: list[int] = PROMPT, **more: Any) -> int:
    """One request from beginning to end; how many tokens it hit."""
    answer = governor.admit(who, MODEL, tokens, **more)
    assert isinstance(answer, Admission), answer
    governor.commit([answer.request_id], [len(tokens)])
    governor.release(answer.request_id)
    governor.step()
    return answer.hit_tokens


@pytest.fixture(params=[False, True], ids=["kept", "dropped"])
def dropped(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> bool:
    """The control: a tenant is called by its id alone."""
    if request.param:
        monkeypatch.setattr(TenantNames, "called", lambda self, issuer, tenant: TenantId(tenant))
    return bool(request.param)


# -- names --------------------------------------------------------------------------------------------------------


IDS = st.text("ab.:@/|-~+=", min_size=1, max_size=6)


@given(IDS, IDS, IDS, IDS, st.lists(IDS, max_size=3, unique=True))
def test_no_two_tenants_have_one_name(
    issuer: str, tenant: str, other_issuer: str, other: str, listed: list[str]
) -> None:
    issuers = Issuers(listed[0], tuple(listed[1:])) if listed else Issuers()
    one, two = issuers.name(issuer, tenant), issuers.name(other_issuer, other)
    assert (one == two) == ((issuer, tenant) == (other_issuer, other))
    if issuer in listed:
        assert issuers.parts(one) == (issuer, tenant)
        assert issuers.resolve(issuers.full(one)) == one


def test_an_id_alone_is_a_name_only_where_one_issuer_gives_ids() -> None:
    assert Issuers("corp").resolve("acme") == "acme" == Issuers("corp").resolve("acme^corp")
    both = Issuers("corp", ("partner",))
    assert both.resolve("acme^corp") == "acme" and both.resolve("acme^partner") == "acme^partner"
    with pytest.raises(ConfigError, match=r"say whose it is: `acme\^corp` or `acme\^partner`"):
        both.resolve("acme")
    with pytest.raises(ConfigError, match=r"say whose it is: `acme\^partner`$"):
        both.resolve("acme", known=["acme^partner"])
    with pytest.raises(ConfigError, match=r"`other` is no issuer here; there are `corp`, `partner`"):
        both.resolve("acme^other")
    assert both.resolve(f"anonymous^{OWN}") == f"anonymous^{OWN}"


# -- a worker -----------------------------------------------------------------------------------------------------


def test_an_erasure_by_id_leaves_the_other_issuers_tenant_alone(tmp_path: Path, dropped: bool) -> None:
    with opened(tmp_path) as worker:
        governor = worker.governor
        for issuer in ("corp", "partner"):
            assert [serve(governor, of(issuer)) for _ in range(2)] == [0, 96]
        governor.erase(Selector(tenant=CORP))
        governor.step()
        left = 0 if dropped else 96
        assert [serve(governor, of(issuer)) for issuer in ("corp", "partner")] == [0, left]


def test_a_quota_is_one_tenants(tmp_path: Path, dropped: bool) -> None:
    """`acme^partner` may have a quarter of the pool; what `acme^corp` has is not counted there."""
    wide = list(range(1, 16 * 40))
    with opened(tmp_path) as worker:
        answer = worker.governor.admit(of("corp"), MODEL, wide, request_id="wide")
        assert isinstance(answer, Admission)
        worker.governor.commit([answer.request_id], [len(wide)])
        (account,) = [one for one in worker.governor.managers[0].accounts.values() if one.active_blocks]
        assert account.name == CORP
        late = worker.governor.admit(of("partner"), MODEL, list(range(1, 16 * 15)), request_id="late")
        assert isinstance(late, Admission) == (not dropped), late
        worker.governor.release(answer.request_id)


def test_handles_of_two_issuers_do_not_meet(tmp_path: Path, dropped: bool) -> None:
    with opened(tmp_path) as worker:
        governor = worker.governor
        first = governor.admit(of("corp"), MODEL, PROMPT, request_id="r")
        second = governor.admit(of("partner"), MODEL, PROMPT, request_id="r")
        assert isinstance(first, Admission)
        if dropped:
            assert isinstance(second, AdmissionRefused) and second.reason == "this request id is in use"
            return
        assert isinstance(second, Admission) and first.request_id != second.request_id
        assert not set(first.blocks.tolist()) & set(second.blocks.tolist())
        governor.release(first.request_id)
        assert len(governor.blocks(second.request_id)) == len(second.blocks)


def test_every_leaf_about_a_tenant_names_its_issuer(tmp_path: Path, dropped: bool) -> None:
    """By its own name, or by the leaf that says whose the bare ids are; and nothing found by name is the other's."""
    with opened(tmp_path) as worker:
        for issuer, subject in (("corp", "ada"), ("partner", "bob")):
            serve(worker.governor, of(issuer, subject))
    with ledger(tmp_path) as engine, engine.connect() as connection:
        found = [json.loads(bytes(leaf)) for leaf in connection.scalars(select(events.c.leaf))]
        named = {body["tenant"] for body in found if body.get("tenant")}
        assert named == ({CORP} if dropped else {CORP, PARTNER})
        assigned = [(body["issuer"], body["tenants"]) for body in found if body["kind"] == "issuer-assigned"]
        assert assigned == [("corp", "bare"), ("partner", "qualified")]
        assert known_issuers(connection) == Issuers("corp", ("partner",))
        keys = SubjectKeys.open(tmp_path / "ledger-subjects.db")
        people = {
            (tenant, subject): len(subject_page(connection, tenant, names, now_us=1 << 50).holdings)
            for tenant in (CORP, PARTNER)
            for subject in ("ada", "bob")
            for names in [names_of(connection, tenant, subject, keys)]
        }
        assert people[CORP, "ada"] == 1
        assert people[CORP, "bob"] == int(dropped), "the control finds a stranger under the name"
        assert people[PARTNER, "bob"] == int(not dropped)


def test_a_hold_and_a_question_are_about_one_of_them(tmp_path: Path) -> None:
    with opened(tmp_path) as worker:
        for issuer in ("corp", "partner"):
            serve(worker.governor, of(issuer))
    with ledger(tmp_path) as engine:
        with engine.connect() as connection:
            with pytest.raises(ConfigError, match=r"`acme\^corp` or `acme\^partner`"):
                known_tenant(connection, "acme")
            with pytest.raises(ConfigError, match="`evil` is no issuer here"):
                named_tenant(connection, "acme^evil")
            chosen = known_tenant(connection, "acme^corp")
            assert (chosen, known_tenant(connection, PARTNER)) == (CORP, PARTNER)
        place_hold(engine, "case-9", chosen, actor="counsel", reason="case 9")
        with engine.connect() as connection:
            check_no_hold(connection, PARTNER)
            with pytest.raises(Exception, match="case-9"):
                check_no_hold(connection, CORP)


# -- whose the bare ids are ---------------------------------------------------------------------------------------


def test_a_ledger_of_one_issuer_goes_on_under_two_without_a_byte_rewritten(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A ledger from before issuers were on record; then one issuer's, then two issuers'."""
    with monkeypatch.context() as before:
        before.setattr(TenantNames, "met", lambda self, principal: TenantId(principal.tenant))
        before.setattr(TenantNames, "called", lambda self, issuer, tenant: TenantId(tenant))
        with opened(tmp_path, ONE) as worker:
            serve(worker.governor, of("corp"))
    was = everything(tmp_path)
    assert not any(kind == "issuer-assigned" for _, _, kind, _ in was)
    with opened(tmp_path, ONE) as worker:
        assert isinstance(worker.governor.admit(of("partner"), MODEL, PROMPT), AdmissionRefused)
        serve(worker.governor, of("corp"))
    for _ in range(2):
        with opened(tmp_path, TWO) as worker:
            serve(worker.governor, of("corp"))
            serve(worker.governor, of("partner"))
    now = everything(tmp_path)
    assert was == [row for row in now if row in was], "each leaf stands as it was, where it was"
    said = [json.loads(leaf) for _, _, kind, leaf in now if kind == "issuer-assigned"]
    assert [(body["issuer"], body["tenants"]) for body in said] == [
        ("corp", "bare"),
        ("partner", "qualified"),
    ]
    with ledger(tmp_path) as engine, engine.connect() as connection:
        assert fsck(connection).ok


def everything(folder: Path) -> list[tuple[str, int, str, bytes]]:
    with ledger(folder) as engine, engine.connect() as connection:
        query = select(logs.c.name, events.c.idx, events.c.kind, events.c.leaf).join(logs, logs.c.id == events.c.log)
        return sorted((name, idx, kind, bytes(leaf)) for name, idx, kind, leaf in connection.execute(query))


def test_fsck_names_a_log_whose_issuer_nobody_assigned(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(TenantNames, "met", lambda self, principal: self.called("evil", principal.tenant))
    with opened(tmp_path, issuing({"acme^evil": builders.BORROWS}, "issuers: [corp, evil]")) as worker:
        serve(worker.governor, of("evil"))
    with ledger(tmp_path) as engine, engine.connect() as connection:
        (problem,) = fsck(connection).problems
    assert problem.log == "tenant/acme^evil" and "issuer `evil`" in problem.what


def test_a_policy_that_gives_the_bare_ids_to_another_issuer_is_refused(tmp_path: Path) -> None:
    with opened(tmp_path, ONE) as worker:
        serve(worker.governor, of("partner"))
        other = compile_policy(load_policy(TWO, name="two.yaml"), revision=2)
        with pytest.raises(ConfigError, match=r"issuer `partner`'s for good; list `partner` first"):
            worker.governor.activate(other, actor="approver")
        assert serve(worker.governor, of("partner")) == 96, "the active revision stays as it was"
    with pytest.raises(ConfigError, match="list `partner` first"):
        opened(tmp_path, TWO)


def test_only_tenants_of_listed_issuers_are_admitted(tmp_path: Path) -> None:
    with_default = TWO.replace("rules:", "  default: {quota: {guaranteed: 0%, cap: 25%}}\nrules:")
    with opened(tmp_path, with_default) as worker:
        governor = worker.governor
        refused = governor.admit(of("evil"), MODEL, PROMPT)
        assert isinstance(refused, AdmissionRefused) and refused.reason == "tenant is not in the policy"
        assert serve(governor, identify(issuer="partner", tenant="globex")) == 0, "control: it admits strangers"
        assert {account.name for account in governor.managers[0].accounts.values()} >= {"globex^partner"}


def test_who_is_not_admitted_is_on_record(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Under the name that was tried, once a window, and at the latest at the end; counted at once."""
    with opened(tmp_path) as worker:
        for _ in range(3):
            worker.governor.admit(of("evil"), MODEL, PROMPT)
        worker.governor.step()
        worker.writer.flush()
        assert not any(kind == "attempts-refused" for _, _, kind, _ in everything(tmp_path)), "not each by itself"
        status = worker_status(worker.governor.stats(), 16)
        assert status["identity.unknown-tenant"] == 3
        monkeypatch.setattr(attempts, "WINDOW_SECONDS", 0)
        worker.governor.admit(identify(issuer="partner", tenant="globex"), MODEL, PROMPT)
        worker.governor.attempts.due_us = 0
        worker.governor.step()
        serve(worker.governor, of("corp"))
    said = [json.loads(leaf) for _, _, kind, leaf in everything(tmp_path) if kind == "attempts-refused"]
    assert {(body["place"], body["reason"], body["source"], body["attempts"]) for body in said} == {
        ("engine", "unknown-tenant", "acme^evil", 3),
        ("engine", "unknown-tenant", "globex^partner", 1),
    }


class SharedLedger(CountingLedger):
    """One ledger for several workers; `racing` is what another one records a moment before."""

    def __init__(self) -> None:
        super().__init__()
        self.said: list[tuple[str, str]] = []
        self.racing: list[tuple[str, str]] = []
        self.away = False
        self.asked = 0

    def issuers(self) -> Issuers:
        self.asked += 1
        if self.away:
            raise LedgerUnavailable("away")
        home = next((one for one, tenants in self.said if tenants == "bare"), "")
        return Issuers(home, tuple(one for one, tenants in self.said if tenants != "bare"))

    def submit_durable(self, event: Any, /) -> int:
        if self.away:
            raise LedgerUnavailable("away")
        self.said += [*self.racing, (event.issuer, event.tenants)]
        self.racing = []
        return 1


def names(folder: Path, shared: SharedLedger, listed: tuple[str, ...] = ()) -> TenantNames:
    clock = VirtualClock()
    keyring = Keyring(FileKeyStore(folder / "keys.json"), RootKeyWrapping(root_key()), clock)
    return TenantNames(shared, keyring, clock, listed)


@cache
def root_key() -> KeyBuffer:
    return KeyBuffer.random(KEY_BYTES)


def test_of_two_first_issuers_one_is_the_home(tmp_path: Path) -> None:
    """Two workers meet a new ledger at once, each with another issuer: who was recorded first, for good."""
    shared = SharedLedger()
    shared.racing = [("corp", "bare")]
    late = names(tmp_path, shared)
    assert late.met(of("partner")) is None and late.met(of("corp")) == CORP
    assert names(tmp_path, shared).met(of("partner")) is None


def test_while_the_ledger_is_away_those_go_on_who_have_keys(tmp_path: Path) -> None:
    shared = SharedLedger()
    shared.away = True
    known = names(tmp_path, shared)
    for _ in range(9):
        with pytest.raises(LedgerUnavailable, match="away"):
            known.met(of("corp"))
    assert shared.asked == 1, "each question holds up the engine: one in eight seconds"
    known._keyring.ensure([known.owner("acme^corp")])
    assert known.met(of("corp")) == CORP
    with pytest.raises(LedgerUnavailable):
        known.met(of("partner"))
    shared.away = False
    known._clock.advance(8 * MICROSECONDS)  # type: ignore[attr-defined]
    assert known.met(of("corp")) == CORP and shared.said == [("corp", "bare")]


def test_keys_of_two_issuers_ask_for_a_policy_that_lists_them(tmp_path: Path) -> None:
    """A deployment from before that served two issuers: nobody guesses whose its bare ids are."""
    shared = SharedLedger()
    first = names(tmp_path, shared)
    first._keyring.ensure([first.owner(name) for name in ("acme^corp", "acme^partner")])
    unlisted = names(tmp_path, shared)
    assert unlisted.met(of("corp")) is None and unlisted.met(of("partner")) is None
    listed = names(tmp_path, shared, ("corp", "partner"))
    assert (listed.met(of("partner")), listed.met(of("corp"))) == (PARTNER, CORP)
    assert shared.said == [("corp", "bare"), ("partner", "qualified")]
    assert {listed.named(owner) for owner in listed._keyring.owners()} == {CORP, PARTNER}
