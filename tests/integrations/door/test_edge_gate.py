"""The door before a router: what goes on of a client's request, and what an engine's own door makes of it."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest

from kvcustody.clock import MICROSECONDS
from kvcustody.errors import ConfigError
from kvcustody.governance.credentials.scope_token import VerifiedToken
from kvcustody.governance.edge.name_scopes import NameScopes
from kvcustody.integrations.door.edge_gate import EdgeGate, Forwarded
from kvcustody.integrations.identity.identity_document import load_identity
from kvcustody.integrations.identity.refusal import RequestRefused
from kvcustody.policies.document.model import Scope
from standins.integrations.door_world import DOCUMENT, Signers, make_signers, secret
from standins.integrations.fleet_edge import TRUSTS_DOORS, FleetEdge, WorkerDoor, door_key


@pytest.fixture(scope="module")
def signers() -> Signers:
    return make_signers()


@pytest.fixture
def fleet(tmp_path: Path, signers: Signers) -> FleetEdge:
    return FleetEdge(tmp_path, signers)


def engine_sees(worker: WorkerDoor, forwarded: Forwarded) -> VerifiedToken:
    found = worker.verify(worker.ask(forwarded).passed.json)
    assert isinstance(found, VerifiedToken), found
    return found


def test_an_engine_behind_the_router_knows_whose_a_request_is(fleet: FleetEdge) -> None:
    sent = fleet.send(fleet.clients.alice, headers={"x-kvcustody-session": "s1"})
    got = engine_sees(fleet.workers[0], sent.forwarded).principal
    assert (got.issuer, got.tenant, got.subject, got.session) == ("api-keys", "acme", "alice", "s1")
    assert got.session_asserted and not got.subject_asserted
    assert (got.classification, got.route) == ("internal", "/v1/completions")


def test_the_clients_credential_ends_at_the_door(fleet: FleetEdge) -> None:
    sent = fleet.send(fleet.clients.acme)
    assert sent.forwarded.headers["authorization"].startswith("Bearer kvd1.")
    assert fleet.clients.acme not in json.dumps([sent.forwarded.headers, sent.kept])
    worker = fleet.workers[0]
    refused = worker.ask(Forwarded({"authorization": f"Bearer {fleet.clients.acme}"}, b'{"prompt":"p"}'))
    assert refused.status == 401, "workers behind the door take door tokens alone"


@pytest.mark.parametrize(
    ("scope", "alike"),
    [
        (Scope.SESSION, [{"alice s1"}, {"alice s2"}, {"bob s1"}, {"s1"}]),
        (Scope.SUBJECT, [{"alice", "alice s1", "alice s2"}, {"bob", "bob s1"}, {"s1"}]),
        (Scope.TENANT, [{"", "alice", "alice s1", "alice s2", "bob", "bob s1", "s1"}]),
    ],
)
def test_the_namespace_is_of_the_scope_that_policy_says(
    tmp_path: Path, signers: Signers, scope: Scope, alike: list[set[str]]
) -> None:
    """Whoever is in none of `alike` has a name for each request."""
    fleet = FleetEdge(tmp_path, signers, scopes=lambda: NameScopes(Scope.TENANT, {"acme": scope}))
    clients = fleet.clients
    who = {
        "": (clients.acme, {}),
        "alice": (clients.alice, {}),
        "alice s1": (clients.alice, {"x-kvcustody-session": "s1"}),
        "alice s2": (clients.alice, {"x-kvcustody-session": "s2"}),
        "bob": (clients.acme, {"x-kvcustody-subject": "bob"}),
        "bob s1": (clients.acme, {"x-kvcustody-subject": "bob", "x-kvcustody-session": "s1"}),
        "s1": (clients.acme, {"x-kvcustody-session": "s1"}),
    }
    found: dict[str, set[str]] = {}
    for one, (key, headers) in [*who.items(), *who.items()]:
        found.setdefault(fleet.send(key, headers=headers).json["cache_salt"], set()).add(one)
    lasting = set().union(*alike)
    named_once = [each for each in found.values() if not each <= lasting]
    assert sorted(map(sorted, (each for each in found.values() if each <= lasting))) == sorted(map(sorted, alike))
    assert len(named_once) == 2 * (len(who) - len(lasting))
    own = fleet.send(clients.alice).json["cache_salt"]
    for forged in ({"cache_salt": own}, {"nvext": {"cache_salt": own}}):
        got = fleet.send(clients.globex, {"prompt": "p", **forged}).json["cache_salt"]
        assert got == fleet.send(clients.globex).json["cache_salt"] != own


def test_where_no_policy_is_known_each_session_has_a_name(tmp_path: Path, signers: Signers) -> None:
    fleet = FleetEdge(tmp_path, signers, scopes=NameScopes)
    first, again, other = (
        fleet.send(fleet.clients.alice, headers={"x-kvcustody-session": one}).json["cache_salt"]
        for one in ("s1", "s1", "s2")
    )
    assert first == again != other
    (lacks,) = fleet.edge.lacks()
    assert "policy" in lacks
    assert not FleetEdge(tmp_path, signers).edge.lacks(), "the control"


def test_a_subjects_conversation_has_the_namespace_that_its_token_states(fleet: FleetEdge) -> None:
    sent = fleet.send(fleet.clients.alice)
    assert engine_sees(fleet.workers[0], sent.forwarded).principal.subject == "alice"
    other = json.dumps(sent.json | {"cache_salt": fleet.send(fleet.clients.acme).json["cache_salt"]}).encode()
    assert fleet.workers[0].ask(fleet.send(fleet.clients.alice).forwarded._replace(body=other)).status == 400


def test_a_clients_salt_narrows_and_never_reaches_a_router(fleet: FleetEdge) -> None:
    salts = [
        {"cache_salt": "a"},
        {"cache_salt": "a"},
        {"nvext": {"cache_salt": "a"}},
        {"cache_salt": "b"},
        {},
    ]
    sent = [fleet.send(fleet.clients.alice, {"prompt": "p", **salt}) for salt in salts]
    assert len({each.json["cache_salt"] for each in sent}) == 1
    narrowed = [engine_sees(fleet.workers[0], each.forwarded).hints.salt for each in sent]
    assert narrowed[0] == narrowed[1] == narrowed[2] is not None
    assert len({narrowed[0], narrowed[3], narrowed[4]}) == 3 and narrowed[4] is None


def test_a_salt_that_is_not_the_namespace_is_refused_by_the_engine(fleet: FleetEdge) -> None:
    sent = fleet.send(fleet.clients.acme)
    other = fleet.send(fleet.clients.globex).json["cache_salt"]
    for salt in (other, "s"):
        body = json.dumps(sent.json | {"cache_salt": salt}).encode()
        assert fleet.workers[0].ask(sent.forwarded._replace(body=body)).status == 400
    lost = json.dumps({"prompt": "p"}).encode()
    assert fleet.workers[0].ask(sent.forwarded._replace(body=lost)).status == 200, "a router may drop it"


def test_a_token_serves_as_many_requests_as_the_body_asks_for(fleet: FleetEdge) -> None:
    """A router that adds samples to a body, or presents it again, spends what there is and no more."""
    sent = fleet.send(fleet.clients.acme, {"prompt": "p", "n": 2})
    more = json.dumps(sent.json | {"n": 3}).encode()
    first, second = fleet.workers
    assert first.ask(sent.forwarded._replace(body=more)).status == 401
    assert first.ask(sent.forwarded).status == 200
    assert first.ask(sent.forwarded).status == 401, "no retry was declared"
    assert second.ask(sent.forwarded).status == 200, "each worker counts by itself"
    assert second.ask(sent.forwarded).status == 401


def test_declared_retries_are_more_uses(tmp_path: Path, signers: Signers) -> None:
    fleet = FleetEdge(tmp_path, signers, retries=2)
    sent = fleet.send(fleet.clients.acme, {"prompt": "p", "n": 2})
    assert [fleet.workers[0].ask(sent.forwarded).status for _ in range(4)] == [200, 200, 200, 401]


def test_a_request_has_one_id(fleet: FleetEdge) -> None:
    """The engine takes the id in a body before the header's: the door moves it there."""
    sent = fleet.send(fleet.clients.acme, {"prompt": "p", "request_id": "r"})
    assert sent.forwarded.headers["x-request-id"].endswith("-r") and "request_id" not in sent.json
    both = fleet.send(fleet.clients.acme, {"prompt": "p", "request_id": "r"}, {"x-request-id": "h"})
    assert both.forwarded.headers["x-request-id"].endswith("-h") and "request_id" not in both.json
    named = fleet.send(fleet.clients.acme, {"input": "p", "request_id": "r"}, path="/v1/responses")
    assert named.json["request_id"] == "r", "a stored response is named by it"


def test_anothers_stored_response_is_none(fleet: FleetEdge) -> None:
    """A router that keeps responses would answer with it."""
    owner = fleet.send(fleet.clients.acme, headers={"x-request-id": "r"}).forwarded.headers["x-request-id"][:-2]
    own = {"input": "p", "previous_response_id": f"resp_{owner}_1"}
    assert fleet.send(fleet.clients.acme, own, path="/v1/responses").json["previous_response_id"]
    for key, body in (
        (fleet.clients.globex, own),
        (fleet.clients.acme, own | {"previous_response_id": "resp_1"}),
    ):
        with pytest.raises(RequestRefused) as refused:
            fleet.send(key, body, path="/v1/responses")
        assert refused.value.status == 404


@pytest.mark.parametrize("chosen", ["r", "a" * 128])
def test_a_clients_request_id_goes_on_behind_its_owners_tag(fleet: FleetEdge, chosen: str) -> None:
    sent = fleet.send(fleet.clients.acme, headers={"x-request-id": chosen})
    other = fleet.send(fleet.clients.globex, headers={"x-request-id": chosen})
    ids = [each.forwarded.headers["x-request-id"] for each in (sent, other)]
    assert all(each.endswith(f"-{chosen}") for each in ids) and len(set(ids)) == 2
    changed = sent.forwarded._replace(headers=sent.forwarded.headers | {"x-request-id": "a router's own"})
    for worker, forwarded in zip(fleet.workers, (sent.forwarded, changed), strict=True):
        assert worker.ask(forwarded).passed.headers["x-request-id"] == ids[0], "the token's counts"
    made = [fleet.send(fleet.clients.acme).forwarded.headers["x-request-id"] for _ in range(2)]
    assert len(set(made)) == 2, "a request without one gets one"


def test_a_render_spends_no_use(fleet: FleetEdge) -> None:
    sent = fleet.send(fleet.clients.acme)
    worker = fleet.workers[0]
    for _ in range(3):
        assert worker.ask(Forwarded(sent.forwarded.headers, b"{}"), "/tokenize").status == 200
    assert worker.ask(sent.forwarded).status == 200


def test_one_token_speaks_for_one_tenant_whatever_the_headers_say(fleet: FleetEdge) -> None:
    sent = fleet.send(fleet.clients.acme)
    worker = fleet.workers[0]
    headers = sent.forwarded.headers | {"x-kvcustody-subject": "bob", "x-kvcustody-classification": "public"}
    got = engine_sees(worker, sent.forwarded._replace(headers=headers))
    assert got.principal.tenant == "acme" and got.principal.subject is None
    assert got.hints.classification is None


def test_two_credentials_are_none(fleet: FleetEdge) -> None:
    sent = fleet.send(fleet.clients.acme)
    headers = sent.forwarded.headers | {"x-api-key": fleet.clients.globex}
    assert fleet.workers[0].ask(sent.forwarded._replace(headers=headers)).status == 401


def test_a_worker_that_does_not_know_the_door_refuses(fleet: FleetEdge) -> None:
    sent = fleet.send(fleet.clients.acme)
    fleet.trust(door_key(2))
    assert fleet.workers[0].ask(fleet.send(fleet.clients.acme).forwarded).status == 401
    fleet.trust(door_key(1), door_key(2))
    assert fleet.workers[0].ask(fleet.send(fleet.clients.acme).forwarded).status == 200
    assert sent


def test_a_late_token_is_a_401_like_every_other(fleet: FleetEdge) -> None:
    sent, worker = fleet.send(fleet.clients.acme), fleet.workers[0]
    fleet.clock.advance(31 * MICROSECONDS)
    late, none = worker.ask(sent.forwarded), worker.ask(Forwarded({}, b"{}"))
    assert (late.status, late.body) == (none.status, none.body) == (401, none.body)


def test_mixed_fleets_take_clients_and_doors(tmp_path: Path, signers: Signers) -> None:
    """Door first, engines later: a worker that has both takes both."""
    both = DOCUMENT + "doors: {keys: doors.vkeys}\n"
    fleet = FleetEdge(tmp_path, signers, doors=both)
    sent = fleet.send(fleet.clients.acme)
    assert engine_sees(fleet.workers[0], sent.forwarded).principal.tenant == "acme"
    direct = Forwarded({"authorization": f"Bearer {fleet.clients.globex}"}, b'{"prompt":"p"}')
    assert engine_sees(fleet.workers[0], direct).principal.tenant == "globex"


@pytest.mark.parametrize(
    ("key", "path", "body", "status"),
    [
        ("wrong", "/v1/completions", {"prompt": "p"}, 401),
        (None, "/v1/load_lora_adapter", {}, 403),
        (None, "/v1/completions", {"prompt": "p", "n": 0}, 400),
        (None, "/v1/completions", {"prompt": "p", "cache_salt": ""}, 400),
        (None, "/v1/completions", {"prompt": "p", "cache_salt": 7}, 400),
        (None, "/v1/completions", {"prompt": "p", "nvext": {"cache_salt": "a"}, "cache_salt": "b"}, 400),
    ],
)
def test_it_refuses_as_an_engines_own_door(
    fleet: FleetEdge, key: str | None, path: str, body: dict[str, Any], status: int
) -> None:
    with pytest.raises(RequestRefused) as refused:
        fleet.send(key or fleet.clients.acme, body, path=path)
    assert refused.value.status == status


def test_the_doors_key_may_change_while_it_runs(fleet: FleetEdge) -> None:
    fleet.trust(door_key(1), door_key(2))
    fleet.key = door_key(2)
    assert fleet.workers[0].ask(fleet.send(fleet.clients.acme).forwarded).status == 200
    fleet.trust(door_key(1))
    assert fleet.workers[0].ask(fleet.send(fleet.clients.acme).forwarded).status == 401


def test_a_door_before_a_router_trusts_no_other_door(fleet: FleetEdge) -> None:
    (fleet.folder / "both.yaml").write_text(TRUSTS_DOORS)
    document = load_identity(fleet.folder / "both.yaml")
    with pytest.raises(ConfigError, match="doors"):
        EdgeGate(document, fleet.folder, door_key, secret(), fleet.clock)


@pytest.mark.parametrize("text", ["", "# nothing\n", "no key\n", "door+00000000+AAAA\n"])
def test_a_file_without_keys_opens_no_worker(fleet: FleetEdge, text: str) -> None:
    (fleet.folder / "doors.vkeys").write_text(text)
    with pytest.raises(ConfigError, match=r"doors\.vkeys"):
        WorkerDoor(fleet.folder, TRUSTS_DOORS, fleet.clock)
