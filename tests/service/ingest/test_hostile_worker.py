"""A hostile worker: every kind of leaf with every field of another's, generated from the declaration of the kinds."""

from __future__ import annotations

from typing import Any, NamedTuple

import msgspec
import pytest
from sqlalchemy import text

from kvcustody.audit.evidence.erasure.requests_and_answers import pending
from kvcustody.audit.evidence.processes.enforcement import newest_order
from kvcustody.audit.evidence.query.issuers import known_issuers
from kvcustody.audit.kinds import (
    KINDS,
    BlocksAssigned,
    CaseOpened,
    CaseStepped,
    CustodyEnded,
    EnforcementOrdered,
    ErasureRequested,
    Event,
    IssuerAssigned,
    ResidencyOpened,
)
from kvcustody.audit.kinds.event import FieldMeaning, OneOf
from kvcustody.audit.leaf.leaf_schema import FOLDED, WORKERS_KINDS, plain_type
from kvcustody.audit.store.database.engine import SCHEMA_REVISION, VERSION_TABLE
from kvcustody.audit.verify.ledger.fsck_ledger import fsck
from kvcustody.governance.service.ingest import check_leaves, worker_claims
from kvcustody.governance.service.ingest.worker_claims import WorkerClaims
from kvcustody.governance.service.ingest.worker_protocol import HEADER, PROTOCOL
from kvcustody.governance.service.service import Service
from standins.service.service_world import MEDIA, OFFSET_US, Worker, register, ship

OTHER_LIFE = "the incarnation of another worker"
OWN, STRANGER, UNKNOWN = "acme", "labs", "never-seen"
ERASURES = {OWN: "e-own", STRANGER: "e-stranger"}
CASES = {OWN: "0" * 32, STRANGER: "1" * 32}
NAMES = {kind: named.name for kind, named in KINDS.items() if named.name != "hit-counted"}
WORKERS = [kind for kind, name in NAMES.items() if name in WORKERS_KINDS]
OTHERS = [kind for kind, name in NAMES.items() if name not in WORKERS_KINDS]


class Fleet(NamedTuple):
    """A worker of acme's, one of a stranger's, and a control plane that has given orders about both."""

    service: Service
    client: Any
    key: str
    worker: Worker
    other: str  # the incarnation of the stranger's worker

    def hand_in(self, event: Event, **headers: str) -> Any:
        """Hand in one event at the worker's next sequence; one that is refused leaves that sequence free."""
        batch = self.worker.batch([event])
        answer = self.client(
            "PUT",
            f"{self.worker.path}/batches/{batch.first}",
            self.key,
            content=batch.body,
            headers=MEDIA | {HEADER: str(PROTOCOL)} | headers,
        )
        if answer.status_code != 200:
            self.worker.sequence -= 1
        return answer


@pytest.fixture(scope="module")
def fleet(service: Service, client: Any, people: Any) -> Fleet:
    return open_fleet(service, client, people, "worker")


@pytest.fixture
def own_fleet(make_service: Any, make_client: Any, make_people: Any, request: pytest.FixtureRequest) -> Fleet:
    """Of a service that one test may harm; the name of its worker is the parameter."""
    service = make_service()
    return open_fleet(service, make_client(service), make_people(service), request.param)


def open_fleet(service: Service, client: Any, people: Any, name: str) -> Fleet:
    """A worker that serves one tenant, another that serves another, and orders about both."""
    worker, other = Worker(name), Worker("other")
    keys = {each.name: people.keys.get(each.name) or people.add(each.name, "worker") for each in (worker, other)}
    for one, tenant in ((worker, OWN), (other, STRANGER)):
        register(client, keys[one.name], one)
        assert ship(client, keys[one.name], one, one.batch([one.started(), *one.request(tenant)])).status_code == 200
    with service.reading() as connection:
        is_new = newest_order(connection) is None
    now_us = service.clock.now_us()
    if is_new:
        for tenant in (OWN, STRANGER):
            about = (ERASURES[tenant], tenant, "tenant", None, None, now_us + 10**9, "dora")
            service.record(ErasureRequested(now_us, *about))
            service.record(
                CaseOpened(now_us, CASES[tenant], tenant, "p" * 24, "restriction", "mail", 5, "UTC", (), "dora")
            )
            service.record(
                CaseStepped(now_us, CASES[tenant], tenant, "restrict", "", "18(1)(a)", "", "test", "", "dora")
            )
        until = (service.clock.utc_us() // 10**6) + 3600
        service.record(EnforcementOrdered(now_us, "monitor", (), 0, "ab" * 16, until, "olga", "test"))
    return Fleet(service, client, keys[name], worker, other.incarnation)


def honest(fleet: Fleet, kind: type[Event]) -> Event:
    """An event of this kind that its worker may write."""
    meant: dict[Any, Any] = {
        FieldMeaning.WORDS: "low",
        FieldMeaning.TRACE: "",
        FieldMeaning.WORKER: fleet.worker.name,
        FieldMeaning.LIFE: "",
        FieldMeaning.EARLIER: 1,
        FieldMeaning.SERVED: OWN,
        FieldMeaning.HELD: OWN,
        FieldMeaning.OWNER: OWN,
        FieldMeaning.OF_ORDER: OWN,
        FieldMeaning.ACTOR: fleet.worker.name,
        FieldMeaning.ERASURE: ERASURES[OWN],
        FieldMeaning.CASE: CASES[OWN],
        FieldMeaning.ORDER: 0,
        FieldMeaning.ORDERED: "enforce",
        int: 2,
        float: 1.0,
        bool: False,
        tuple[int, ...]: (1,),
        tuple[str, ...]: ("ab",),
    }
    values = {}
    for field in msgspec.structs.fields(kind):
        plain = plain_type(field.type)
        if plain == tuple[str, ...] and field.name != "tenants":
            values[field.name] = ("ab",)
        elif plain == tuple[str, ...] or plain in {tuple[folded, ...] for folded in FOLDED.values()}:  # type: ignore[valid-type]
            values[field.name] = ()
        else:
            meaning = meaning_of(field.type)
            known = min(meaning.values) if isinstance(meaning, OneOf) else meant.get(meaning, meant.get(plain))
            values[field.name] = () if known is None and plain not in (str, str | None) else known
            if values[field.name] is None:
                values[field.name] = OWN
        if field.name in ("share_millionths", "until_seconds"):
            values[field.name] = 0
    values["at_us"] = fleet.worker.now_us
    return kind(**values)


def forged(fleet: Fleet, kind: type[Event], changes: dict[str, Any]) -> Event:
    """An event of this kind with some fields of another's."""
    if OTHER_LIFE in changes.values():
        changes = dict.fromkeys(changes, fleet.other)
    return honest(fleet, kind)._replace(**changes)


def meaning_of(annotation: Any) -> Any:
    return next((each for each in getattr(annotation, "__metadata__", ())), None)


def attacks(kind: type[Event]) -> list[tuple[str, dict[str, Any]]]:
    """Every field of a kind that names somebody or something, each with another's value."""
    foreign: dict[Any, Any] = {
        FieldMeaning.TRACE: "not a trace",
        FieldMeaning.WORKER: "other",
        FieldMeaning.LIFE: OTHER_LIFE,
        FieldMeaning.EARLIER: 1 << 40,
        FieldMeaning.HELD: STRANGER,
        FieldMeaning.OWNER: UNKNOWN,
        FieldMeaning.OF_ORDER: STRANGER,
        FieldMeaning.ACTOR: "olga",
        FieldMeaning.ERASURE: ERASURES[STRANGER],
        FieldMeaning.CASE: CASES[STRANGER],
        FieldMeaning.ORDER: 1 << 40,
    }
    changes = []
    for field in msgspec.structs.fields(kind):
        meaning = meaning_of(field.type)
        if isinstance(meaning, OneOf):
            changes.append((field.name, {field.name: "boom"}))
        elif meaning is FieldMeaning.ORDERED:
            changes.append((field.name, {field.name: "monitor" if plain_type(field.type) is str else (STRANGER,)}))
        elif meaning in foreign:
            changes.append((field.name, {field.name: foreign[meaning]}))
    return changes


ATTACKS = [(kind, *attack) for kind in WORKERS for attack in attacks(kind)]


@pytest.mark.parametrize("kind", WORKERS, ids=lambda kind: NAMES[kind])
def test_what_a_worker_says_of_itself_is_taken(fleet: Fleet, kind: type[Event]) -> None:
    answer = fleet.hand_in(honest(fleet, kind))
    assert answer.status_code == 200, answer.text


@pytest.mark.parametrize(
    ("kind", "field", "changes"), ATTACKS, ids=[f"{NAMES[kind]}-{field}" for kind, field, _ in ATTACKS]
)
def test_a_field_of_anothers_is_refused(fleet: Fleet, kind: type[Event], field: str, changes: dict[str, Any]) -> None:
    answer = fleet.hand_in(forged(fleet, kind, changes))
    assert answer.status_code == 422, answer.text
    told = answer.json()
    assert told["type"].endswith(":refused-leaf") and told["leaf"] == 0
    assert "field" not in told or told["kind"] == NAMES[kind]


@pytest.mark.parametrize("kind", WORKERS, ids=lambda kind: NAMES[kind])
@pytest.mark.parametrize("log", ["system", f"tenant/{STRANGER}", "tenant/acme"])
def test_a_leaf_in_a_log_of_anothers_is_refused(fleet: Fleet, kind: type[Event], log: str) -> None:
    event = honest(fleet, kind)
    batch = fleet.worker.batch([event])
    fleet.worker.sequence -= 1  # it is refused
    [leaf] = batch.leaves[:1]
    body = msgspec.json.decode(leaf)
    if body["log"] == log:
        pytest.skip("its own log")
    forged = msgspec.json.encode(dict(sorted((body | {"log": log}).items())))
    answer = ship(fleet.client, fleet.key, fleet.worker, batch._replace(body=check_leaves.write_batch([], [forged])))
    assert answer.status_code == 422 and answer.json()["field"] == "log", answer.text


@pytest.mark.parametrize("kind", OTHERS, ids=lambda kind: NAMES[kind])
def test_a_kind_of_the_control_planes_is_refused(fleet: Fleet, kind: type[Event]) -> None:
    answer = fleet.hand_in(honest(fleet, kind))
    assert answer.status_code == 422 and answer.json()["kind"] == NAMES[kind], answer.text


@pytest.mark.parametrize("kind", OTHERS, ids=lambda kind: NAMES[kind])
def test_an_older_worker_hears_that_it_is_older(fleet: Fleet, kind: type[Event]) -> None:
    answer = fleet.hand_in(honest(fleet, kind), **{HEADER: str(PROTOCOL - 1)})
    assert answer.status_code == 426, answer.text
    assert answer.json()["type"].endswith(":worker-protocol") and answer.json()["protocol"] == PROTOCOL
    assert fleet.hand_in(honest(fleet, kind), **{HEADER: str(PROTOCOL)}).status_code == 422, "control"


def record_revision(service: Service, revision: str) -> None:
    """Have the ledger say that its schema is this one, as an upgrade does: it is no write of the service's."""
    with service.engine.begin() as connection:
        connection.execute(text(f"UPDATE {VERSION_TABLE} SET version_num = '{revision}'"))


def test_a_batch_waits_while_the_ledger_has_another_schema(fleet: Fleet) -> None:
    """The control plane is the older program then; nothing is refused for good, and nothing is lost."""
    opened = honest(fleet, ResidencyOpened)._replace(residency=987_654)
    batch = fleet.worker.batch([opened])
    record_revision(fleet.service, "9999")
    answer = ship(fleet.client, fleet.key, fleet.worker, batch)
    record_revision(fleet.service, SCHEMA_REVISION)
    assert answer.status_code == 503 and answer.json()["type"].endswith(":ledger-schema"), answer.text
    assert "is newer than this program's" in answer.json()["detail"]
    again = ship(fleet.client, fleet.key, fleet.worker, batch)
    assert again.status_code == 200 and again.json()["added"] == len(batch.leaves), again.text


@pytest.mark.parametrize("own_fleet", ["namer"], indirect=True)
def test_a_tenant_of_an_issuer_that_nobody_assigned_is_refused(
    own_fleet: Fleet, monkeypatch: pytest.MonkeyPatch
) -> None:
    opened = honest(own_fleet, ResidencyOpened)._replace(tenant="acme^https://evil.example")
    answer = own_fleet.hand_in(opened)
    assert answer.status_code == 422, answer.text
    said = answer.json()
    assert (said["kind"], said["field"]) == ("residency-opened", "tenant") and "evil" not in answer.text
    monkeypatch.setattr(worker_claims, "_is_assigned", lambda *_, **__: True)
    assert own_fleet.hand_in(opened).status_code == 200, "control"


def test_a_worker_asks_no_erasure_of_an_issuers_tenant_that_nobody_assigned(fleet: Fleet) -> None:
    path, deadline = "/v1/worker/erasures/e-named", {"deadline_us": 1_900_000_000_000_000}
    asked = {"selector": '{"tenant":"acme^https://evil.example"}'} | deadline
    refused = fleet.client("PUT", path, fleet.key, json=asked)
    assert refused.status_code == 409 and "assignIssuer" in refused.text
    own = {"selector": '{"tenant":"globex"}'} | deadline
    assert fleet.client("PUT", path, fleet.key, json=own).status_code == 200, "control"


def _restarted(fleet: Fleet) -> Fleet:
    """Another process of the same worker, of which nothing is missing, at a control plane that remembers nothing."""
    worker = Worker(fleet.worker.name)
    register(fleet.client, fleet.key, worker)
    assert ship(fleet.client, fleet.key, worker, worker.batch([worker.started()])).status_code == 200
    fleet.service.claims = WorkerClaims(fleet.service.reader, fleet.service.policies.released)
    return fleet._replace(worker=worker)


def _claim(fleet: Fleet, about: str) -> Event:
    """What a worker says of a stranger: that it held something of it, or that it reads what it owns."""
    if about == "held":
        return honest(fleet, CustodyEnded)._replace(tenant=STRANGER)
    return honest(fleet, BlocksAssigned)._replace(owner=UNKNOWN)


@pytest.mark.parametrize(
    ("own_fleet", "about"), [("spilling", "held"), ("spilling-too", "owner")], indirect=["own_fleet"]
)
def test_what_falls_into_a_hole_is_taken_shown_and_gives_no_permission(
    own_fleet: Fleet, about: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """What would show it may be in a spill. Control: leaves of any kind believed, one hole admits a worker for good."""
    claim = _claim(own_fleet, about)
    assert own_fleet.hand_in(claim).status_code == 422, "control: nothing is missing before it"
    own_fleet.worker.sequence += 1
    assert own_fleet.hand_in(claim).status_code == 200
    with own_fleet.service.reading() as connection:
        shown = [what for what in fsck(connection).unproved if f"`{own_fleet.worker.name}`" in what]
    assert len(shown) == (about == "held"), shown
    restarted = _restarted(own_fleet)
    assert restarted.hand_in(_claim(restarted, about)).status_code == 422
    with monkeypatch.context() as believing:
        believing.setattr(worker_claims, "SERVING_KINDS", frozenset(NAMES.values()))
        believing.setattr(worker_claims, "CLAIMING_KINDS", frozenset())
        assert restarted.hand_in(_claim(restarted, about)).status_code == 200, "control"


@pytest.mark.parametrize("own_fleet", ["spilled"], indirect=True)
def test_once_the_spill_is_handed_in_the_claim_is_known(own_fleet: Fleet) -> None:
    worker = own_fleet.worker
    hole = worker.sequence
    worker.sequence += 1
    assert own_fleet.hand_in(_claim(own_fleet, "held")).status_code == 200
    highest, worker.sequence = worker.sequence, hole
    served = honest(own_fleet, ResidencyOpened)._replace(tenant=STRANGER)
    assert own_fleet.hand_in(served).status_code == 200
    worker.sequence = highest
    with own_fleet.service.reading() as connection:
        assert not [what for what in fsck(connection).unproved if "`spilled`" in what]
    restarted = _restarted(own_fleet)
    assert restarted.hand_in(_claim(restarted, "held")).status_code == 200


@pytest.mark.parametrize("own_fleet", ["defenceless"], indirect=True)
def test_without_the_defence_every_attack_is_taken_and_orders_take_effect(
    own_fleet: Fleet, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Control: what a stranger's worker and every other one would follow."""
    monkeypatch.setattr(check_leaves, "WORKERS_KINDS", frozenset(NAMES.values()))
    monkeypatch.setattr(check_leaves, "_check_kind", lambda *_: None)
    monkeypatch.setattr(WorkerClaims, "check", lambda *_: None)
    for kind, field, changes in ATTACKS:
        own_fleet.worker.now_us += 1
        taken = own_fleet.hand_in(forged(own_fleet, kind, changes))
        assert taken.status_code == 200 or field == "trace", (kind, field, taken.text)
    now_us, until = own_fleet.worker.now_us, (OFFSET_US + own_fleet.worker.now_us) // 10**6 + 3600
    orders: list[Event] = [
        EnforcementOrdered(now_us, "monitor", (), 0, "cd" * 16, until, "olga", "forged"),
        ErasureRequested(now_us, "e-forged", STRANGER, "tenant", None, None, now_us + 10**9, "dora"),
        IssuerAssigned(now_us, "https://evil.example", "bare", "governor"),
    ]
    for event in orders:
        assert own_fleet.hand_in(event).status_code == 200
    with own_fleet.service.reading() as connection:
        order = newest_order(connection)
        assert order is not None and order.reason == "forged"
        assert "e-forged" in {one.erasure for one in pending(connection, "other")}
        assert known_issuers(connection).home == "https://evil.example"
