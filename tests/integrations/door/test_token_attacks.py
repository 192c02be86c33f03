"""Attacks with door tokens: each is refused, or costs at most what the threat model says, beside a control that passes.

What a token may cost is uses x live workers until its deadline, in its own requester's scope.
"""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest

from kvcustody.audit.tlog.signed_note import KeyKind
from kvcustody.audit.tlog.signing_key import SigningKey
from kvcustody.clock import MICROSECONDS
from kvcustody.governance.credentials.scope_token import VerifiedToken
from kvcustody.governance.credentials.scope_token_bytes import decoded, encoded
from kvcustody.governance.edge.door_token import (
    PREFIX,
    SECONDS_MAX,
    DoorClaims,
    DoorTokenIssuer,
    DoorTokens,
    PresentedToken,
    RejectedToken,
)
from kvcustody.governance.edge.erase_epochs import (
    EpochScope,
    EpochTags,
    EraseEpochs,
    KnownEpochs,
    RaisedEpoch,
)
from kvcustody.governance.identity.principal import Principal
from kvcustody.governance.request import Hints
from kvcustody.ids import TenantId
from kvcustody.integrations.door.edge_gate import Forwarded
from standins.integrations.door_world import Signers, make_signers
from standins.integrations.fleet_edge import TRUSTS_DOORS, FleetEdge, WorkerDoor, door_key

WORKERS = 3
TAGS = EpochTags(bytes(32))


@pytest.fixture(scope="module")
def signers() -> Signers:
    return make_signers()


@pytest.fixture
def fleet(tmp_path: Path, signers: Signers) -> FleetEdge:
    made = FleetEdge(tmp_path, signers, retries=1)
    made.workers += [WorkerDoor(tmp_path, TRUSTS_DOORS, made.clock) for _ in range(WORKERS - 2)]
    made.clock.advance(MICROSECONDS)
    return made


def with_token(sent: Forwarded, token: str) -> Forwarded:
    return sent._replace(headers=sent.headers | {"authorization": f"Bearer {token}"})


def with_body(sent: Forwarded, **more: Any) -> Forwarded:
    return sent._replace(body=json.dumps({**json.loads(sent.body or b"{}"), **more}).encode())


def token_of(sent: Forwarded) -> str:
    return sent.headers["authorization"].removeprefix("Bearer ")


def statuses(fleet: FleetEdge, sent: Forwarded) -> list[int]:
    """What each worker answers to one presentation."""
    return [worker.ask(sent).status for worker in fleet.workers]


def claims_of(fleet: FleetEdge, sent: Forwarded) -> DoorClaims:
    """What an honest token says, read as a worker's code could."""
    tokens = DoorTokens(lambda: [door_key().verifier, door_key(2).verifier], fleet.clock)
    tokens._started_ms = 0
    found = tokens.present(token_of(sent))
    assert isinstance(found, PresentedToken), found
    return found.claims


def principal_at(worker: WorkerDoor, sent: Forwarded) -> Principal:
    found = worker.verify(worker.ask(sent).passed.json)
    assert isinstance(found, VerifiedToken), found
    return found.principal


# -- minted by a worker -----------------------------------------------------------------------------------------------


def test_a_worker_mints_a_victims_token(fleet: FleetEdge) -> None:
    """It has every public key, the secret of scope tokens, and honest tokens to copy from."""
    sent = fleet.send(fleet.clients.acme).forwarded
    victim = claims_of(fleet, sent)._replace(principal=Principal("api-keys", TenantId("globex")))
    own = SigningKey.from_seed("worker.example", KeyKind.ED25519, bytes([9]) * 32)
    minted = DoorTokenIssuer(lambda: own, fleet.clock).issue(victim)
    data = decoded(minted.removeprefix(PREFIX))
    assert data is not None
    as_the_doors = PREFIX + encoded(data[:1] + door_key().verifier.key_id + data[5:])
    for token in (minted, as_the_doors):
        assert statuses(fleet, with_token(sent, token)) == [401] * WORKERS
    by_the_door = DoorTokenIssuer(lambda: fleet.key, fleet.clock).issue(victim)
    assert statuses(fleet, with_token(sent, by_the_door)) == [200] * WORKERS, "the control: the key alone decides"


def test_a_worker_whose_key_is_trusted_would_pass(fleet: FleetEdge) -> None:
    """The control of every forgery: its key in the file of doors."""
    own = SigningKey.from_seed("worker.example", KeyKind.ED25519, bytes([9]) * 32)
    sent = fleet.send(fleet.clients.acme).forwarded
    victim = claims_of(fleet, sent)._replace(principal=Principal("api-keys", TenantId("globex")))
    fleet.trust(door_key(), own)
    minted = DoorTokenIssuer(lambda: own, fleet.clock).issue(victim)
    assert principal_at(fleet.workers[0], with_token(sent, minted)).tenant == "globex"


def test_a_workers_own_scope_token_is_no_door_token(fleet: FleetEdge) -> None:
    """What every worker can make, under the symmetric secret, opens no door."""
    sent = fleet.send(fleet.clients.acme).forwarded
    made = fleet.workers[0].tokens.issue(Principal("api-keys", TenantId("globex")))
    for token in (made, PREFIX + made):
        assert statuses(fleet, with_token(sent, token)) == [401] * WORKERS


# -- replayed ---------------------------------------------------------------------------------------------------------


def test_a_replay_is_bounded_by_uses_times_live_workers(fleet: FleetEdge) -> None:
    """One request with one declared retry: two uses at each worker, whoever presents them."""
    sent = fleet.send(fleet.clients.acme).forwarded
    uses = claims_of(fleet, sent).uses
    asked = [statuses(fleet, sent) for _ in range(5)]
    assert sum(row.count(200) for row in asked) == uses * WORKERS == 2 * WORKERS
    assert all(row == [401] * WORKERS for row in asked[uses:])
    other = fleet.send(fleet.clients.acme).forwarded
    assert statuses(fleet, other) == [200] * WORKERS, "the control: a token of its own"


def test_a_replay_stays_in_its_requesters_scope(fleet: FleetEdge) -> None:
    """Another body, and headers that name somebody else, change whose it is in nothing."""
    sent = fleet.send(fleet.clients.alice).forwarded
    forged = {"x-kvcustody-subject": "bob", "x-kvcustody-session": "s", "x-tenant-id": "globex"}
    replayed = with_body(sent, prompt="another's prompt")
    replayed = replayed._replace(headers=replayed.headers | forged)
    got = [principal_at(worker, replayed) for worker in fleet.workers]
    assert {(of.tenant, of.subject, of.session) for of in got} == {("acme", "alice", None)}
    bob = fleet.send(fleet.clients.acme, headers={"x-kvcustody-subject": "bob"}).forwarded
    assert principal_at(fleet.workers[0], bob).subject == "bob", "the control: the door says so"


def test_a_restarted_worker_takes_no_token_from_before(fleet: FleetEdge, tmp_path: Path) -> None:
    """It has forgotten which uses are spent."""
    sent = fleet.send(fleet.clients.acme).forwarded
    fleet.clock.advance(MICROSECONDS)
    restarted = WorkerDoor(tmp_path, TRUSTS_DOORS, fleet.clock)
    assert restarted.ask(sent).status == 401 and fleet.workers[0].ask(sent).status == 200
    fleet.clock.advance(MICROSECONDS)
    assert restarted.ask(fleet.send(fleet.clients.acme).forwarded).status == 200


# -- after its deadline, beyond its uses ------------------------------------------------------------------------------


@pytest.mark.parametrize(("waited_ms", "status"), [(29_999, 200), (30_000, 401), (3_600_000, 401)])
def test_a_token_ends_at_its_deadline(fleet: FleetEdge, waited_ms: int, status: int) -> None:
    sent = fleet.send(fleet.clients.acme).forwarded
    fleet.clock.advance(waited_ms * 1000)
    assert statuses(fleet, sent) == [status] * WORKERS


def test_a_clock_that_is_set_back_revives_no_token(fleet: FleetEdge) -> None:
    sent = fleet.send(fleet.clients.acme).forwarded
    assert statuses(fleet, sent) == [200] * WORKERS, "the control: in time"
    fleet.clock.advance(31 * MICROSECONDS)
    assert statuses(fleet, sent) == [401] * WORKERS
    fleet.clock.step_utc(-31 * MICROSECONDS)
    assert statuses(fleet, sent) == [401] * WORKERS


def test_no_token_lives_longer_than_a_minute(tmp_path: Path, signers: Signers) -> None:
    fleet = FleetEdge(tmp_path, signers, token_seconds=SECONDS_MAX)
    first, second = (fleet.send(fleet.clients.acme).forwarded for _ in range(2))
    fleet.clock.advance(SECONDS_MAX * MICROSECONDS - 1000)
    assert fleet.workers[0].ask(first).status == 200
    fleet.clock.advance(1000)
    assert fleet.workers[0].ask(second).status == 401


@pytest.mark.parametrize("more", [{"n": 3}, {"prompt": ["a", "b", "c"]}, {"n": 2, "prompt": ["a", "b"]}])
def test_a_body_that_asks_for_more_than_was_declared(fleet: FleetEdge, more: dict[str, Any]) -> None:
    sent = fleet.send(fleet.clients.acme).forwarded
    assert statuses(fleet, with_body(sent, **more)) == [401] * WORKERS
    assert statuses(fleet, sent) == [200] * WORKERS, "a refused one spends nothing"


# -- another request id, another scope, another group -----------------------------------------------------------------


def test_another_request_id_is_not_believed(fleet: FleetEdge) -> None:
    sent = fleet.send(fleet.clients.acme, headers={"x-request-id": "mine"}).forwarded
    own = sent.headers["x-request-id"]
    changed = with_body(sent, request_id="victims")
    changed = changed._replace(headers=changed.headers | {"x-request-id": "victims"})
    for worker in fleet.workers:
        arrived = worker.ask(changed).passed
        assert arrived.headers["x-request-id"] == own and "request_id" not in arrived.json
    other = fleet.send(fleet.clients.acme, headers={"x-request-id": "other"}).forwarded
    arrived = fleet.workers[0].ask(other).passed
    assert arrived.headers["x-request-id"].endswith("-other"), "the control: the door says so"


def test_another_scopes_namespace_is_refused(fleet: FleetEdge) -> None:
    sent = fleet.send(fleet.clients.acme).forwarded
    foreign = fleet.send(fleet.clients.globex).json["cache_salt"]
    assert statuses(fleet, with_body(sent, cache_salt=foreign)) == [400] * WORKERS
    assert statuses(fleet, with_body(sent, nvext={"cache_salt": foreign})) == [400] * WORKERS
    assert statuses(fleet, sent) == [200] * WORKERS


def test_every_byte_of_scope_group_uses_and_deadline_is_signed(fleet: FleetEdge) -> None:
    sent = fleet.send(fleet.clients.acme).forwarded
    data = decoded(token_of(sent).removeprefix(PREFIX))
    assert data is not None
    worker = fleet.workers[0]
    for place in range(len(data)):
        changed = data[:place] + bytes([data[place] ^ 1]) + data[place + 1 :]
        assert worker.ask(with_token(sent, PREFIX + encoded(changed))).status == 401, place
    assert worker.ask(sent).status == 200


def test_another_groups_token_is_refused(tmp_path: Path, signers: Signers) -> None:
    fleet = FleetEdge(tmp_path, signers, group="dedicated")
    dedicated = TRUSTS_DOORS.replace("doors.vkeys", "doors.vkeys, group: dedicated")
    there = WorkerDoor(tmp_path, dedicated, fleet.clock)
    fleet.clock.advance(MICROSECONDS)
    sent = fleet.send(fleet.clients.acme).forwarded
    assert [worker.ask(sent).status for worker in fleet.workers] == [401, 401]
    assert there.ask(sent).status == 200


# -- an older epoch ---------------------------------------------------------------------------------------------------


def test_a_token_from_before_an_erasure_cannot_claim_the_epoch_after_it(tmp_path: Path, signers: Signers) -> None:
    """It says the older epoch, under signature, and names the older namespace: no router finds what came after."""
    raised: list[RaisedEpoch] = []

    def known() -> KnownEpochs:
        return KnownEpochs(EraseEpochs(raised, version=len(raised)), TAGS)

    fleet = FleetEdge(tmp_path, signers, epochs=known)
    before = fleet.send(fleet.clients.alice).forwarded
    raised.append(RaisedEpoch(1, TAGS.of(EpochScope("api-keys", "acme", "alice"))))
    after = fleet.send(fleet.clients.alice).forwarded
    stated = [claims_of(fleet, sent) for sent in (before, after)]
    of_now = known().of("api-keys", "acme", "alice")
    assert [claims.epochs == of_now for claims in stated] == [False, True]
    assert stated[0].namespace != stated[1].namespace
    renamed = with_body(before, cache_salt=stated[1].namespace)
    assert fleet.workers[0].ask(renamed).status == 400, "the older token with the name after the erasure"
    assert fleet.workers[0].ask(with_body(after, cache_salt=stated[0].namespace)).status == 400
    assert fleet.workers[0].ask(after).status == 200


# -- keys of doors ----------------------------------------------------------------------------------------------------


def test_a_former_key_ends_with_its_line_in_the_file(fleet: FleetEdge) -> None:
    """A rotation: both keys overlap, and who kept the former one signs nothing once its line is gone."""
    former, current = door_key(1), door_key(2)
    fleet.trust(former, current)
    under_former = fleet.send(fleet.clients.acme).forwarded
    fleet.key = current
    assert statuses(fleet, under_former) == statuses(fleet, fleet.send(fleet.clients.acme).forwarded) == [200] * WORKERS
    fleet.trust(current)
    assert statuses(fleet, under_former) == [401] * WORKERS
    stolen = DoorTokenIssuer(lambda: former, fleet.clock).issue(claims_of(fleet, under_former))
    assert statuses(fleet, with_token(under_former, stolen)) == [401] * WORKERS
    assert statuses(fleet, fleet.send(fleet.clients.acme).forwarded) == [200] * WORKERS


def test_a_revoked_doors_tokens_end_within_a_second(fleet: FleetEdge) -> None:
    """The bound is how often workers look at the file."""
    other = door_key(2)
    fleet.trust(door_key(), other)
    sent = fleet.send(fleet.clients.acme).forwarded
    of_other = DoorTokenIssuer(lambda: other, fleet.clock).issue(claims_of(fleet, sent))
    assert statuses(fleet, with_token(sent, of_other)) == [200] * WORKERS
    path = fleet.folder / "doors.vkeys"
    path.write_text(f"{door_key().verifier}\n")
    fleet.clock.advance(MICROSECONDS + 1)
    assert statuses(fleet, with_token(sent, of_other)) == [401] * WORKERS
    assert statuses(fleet, sent) == [200] * WORKERS


def test_hints_of_a_token_are_those_that_the_door_wrote(fleet: FleetEdge) -> None:
    """Claims that are read without their signature are nobody's."""
    sent = fleet.send(fleet.clients.acme, headers={"x-kvcustody-classification": "internal"}).forwarded
    assert claims_of(fleet, sent).hints == Hints("internal")
    unsigned = DoorTokens(lambda: [], fleet.clock).present(token_of(sent))
    assert unsigned == RejectedToken("other-key")
