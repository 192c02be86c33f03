"""What goes on of clients' bodies and headers: what is listed, and nothing that a router or an engine places by."""

from __future__ import annotations

import json
import sys
from pathlib import Path
from typing import Any

import pytest

from kvcustody.errors import ConfigError
from kvcustody.integrations.door import passed_fields
from kvcustody.integrations.door.passed_fields import (
    ACTED_ON_FIELDS,
    ACTED_ON_HEADERS,
    DROPPED_FIELDS,
    HOP_HEADERS,
    PASSED_FIELDS,
    PASSED_HEADERS,
    PASSED_SAMPLING,
    PassedFields,
)
from kvcustody.integrations.identity.refusal import RequestRefused
from kvcustody.integrations.identity.routes import SCOPED, Body
from standins.integrations.door_world import Signers, make_signers
from standins.integrations.fleet_edge import FleetEdge

ROOT = Path(__file__).resolve().parents[3]
PATHS = {scoped.body: path for path, scoped in SCOPED.items()}
HINTS = {"priority", "nvext", "kv_hints"}  # clipped, see `test_client_hints`
SALT = "cache_salt"


@pytest.fixture(scope="module")
def signers() -> Signers:
    return make_signers()


@pytest.fixture
def fleet(tmp_path: Path, signers: Signers) -> FleetEdge:
    return FleetEdge(tmp_path, signers)


def prompt(kind: Body) -> dict[str, Any]:
    """The least body of a kind."""
    return {
        Body.COMPLETION: {"prompt": "p"},
        Body.GENERATE: {"token_ids": [1]},
        Body.POOLING: {"input": "p"},
        Body.SCORING: {"query": "p"},
        Body.RESPONSES: {"input": "p"},
    }.get(kind, {"messages": []})


def refused(fleet: FleetEdge, body: dict[str, Any], path: str) -> RequestRefused:
    with pytest.raises(RequestRefused) as found:
        fleet.send(fleet.clients.acme, body, path=path)
    return found.value


@pytest.mark.parametrize("kind", list(PATHS))
def test_every_field_that_is_acted_on_is_refused_by_name_on_every_route(fleet: FleetEdge, kind: Body) -> None:
    for field in sorted(ACTED_ON_FIELDS - HINTS - {SALT}):
        answer = refused(fleet, {**prompt(kind), field: {"forged": 1}}, PATHS[kind])
        assert (answer.status, answer.param) == (400, field)
        assert field not in fleet.send(fleet.clients.acme, {**prompt(kind), field: None}, path=PATHS[kind]).json


@pytest.mark.parametrize("several", [False, True])
def test_and_so_it_is_inside_sampling_parameters(fleet: FleetEdge, several: bool) -> None:
    for field in sorted(ACTED_ON_FIELDS):
        inner = {"top_p": 0.5, field: 1}
        body = {"token_ids": [1], "sampling_params": [inner] if several else inner}
        answer = refused(fleet, body, "/inference/v1/generate")
        assert (answer.status, answer.param) == (400, f"sampling_params.{field}")


@pytest.mark.parametrize("field", sorted(ACTED_ON_FIELDS - HINTS - {SALT}))
def test_a_list_that_had_it_would_pass_it(fleet: FleetEdge, field: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """The control."""
    listed = {**PASSED_FIELDS, Body.COMPLETION: PASSED_FIELDS[Body.COMPLETION] | {field}}
    monkeypatch.setattr(passed_fields, "PASSED_FIELDS", listed)
    assert fleet.send(fleet.clients.acme, {"prompt": "p", field: {"forged": 1}}).json[field] == {"forged": 1}


@pytest.mark.parametrize("kind", list(PATHS))
def test_what_is_listed_goes_on_as_it_is(fleet: FleetEdge, kind: Body) -> None:
    moved = {"request_id", "previous_response_id", "kvcustody_kinds", "kvcustody_latency", "n"}
    given = {field: [1, "x", 0.1] for field in PASSED_FIELDS[kind] - moved - {"use_beam_search"}}
    got = fleet.send(fleet.clients.acme, given, path=PATHS[kind]).json
    assert got.pop(SALT) and got == given


def test_what_engines_ignore_is_dropped(fleet: FleetEdge) -> None:
    for field in sorted(DROPPED_FIELDS):
        assert field not in fleet.send(fleet.clients.acme, {"prompt": "p", field: "x"}).json
    kept = fleet.send(fleet.clients.acme, {"input": "p", "metadata": {"a": "b"}}, path="/v1/responses").json
    assert kept["metadata"] == {"a": "b"}, "responses give it back"


@pytest.mark.parametrize("field", ["made_up", "", "a b", "x" * 65, "\u0141"])
def test_a_field_that_nobody_knows_is_refused(fleet: FleetEdge, field: str) -> None:
    answer = refused(fleet, {"prompt": "p", field: 1}, "/v1/completions")
    assert answer.status == 400 and answer.param == ("made_up" if field == "made_up" else "body")
    assert field == "made_up" or not field or field not in answer.message, "text of a client's is not quoted"


def test_the_lists_do_not_contradict_each_other() -> None:
    for fields in (*PASSED_FIELDS.values(), PASSED_SAMPLING):
        assert not fields & ACTED_ON_FIELDS
    assert not DROPPED_FIELDS & ACTED_ON_FIELDS
    assert not [name for name in PASSED_HEADERS if _is_acted_on(name)]
    assert PASSED_FIELDS.keys() == set(Body)


def _is_acted_on(header: str) -> bool:
    return any(header.startswith(each) if each.endswith("-") else header == each for each in ACTED_ON_HEADERS)


@pytest.mark.parametrize("spelling", [str.lower, str.title, lambda name: name.replace("-", "_")])
@pytest.mark.parametrize("header", ACTED_ON_HEADERS)
def test_a_header_that_is_acted_on_goes_no_further(header: str, spelling: Any) -> None:
    name = header + "anything" if header.endswith("-") else header
    assert not PassedFields().header(spelling(name))
    with pytest.raises(ConfigError, match="clients may not set it"):
        PassedFields(headers=[spelling(name)])


@pytest.mark.parametrize("header", sorted(PASSED_HEADERS))
def test_a_header_that_is_listed_goes_on(header: str) -> None:
    passed = PassedFields()
    assert passed.header(header) and passed.header(header.title()) and not passed.header(f"x-{header}")
    assert "-" not in header or not passed.header(header.replace("-", "_"))


def test_an_operator_lists_more(tmp_path: Path, signers: Signers) -> None:
    passed = PassedFields(["house_field"], ["X-House"])
    fleet = FleetEdge(tmp_path, signers, passed=passed)
    sent = fleet.send(fleet.clients.acme, {"prompt": "p", "house_field": 1}, {"x-house": "1", "x-other": "1"})
    assert sent.json["house_field"] == 1 and sent.kept == {"x-house": "1"}
    for field in sorted(ACTED_ON_FIELDS):
        with pytest.raises(ConfigError, match=field):
            PassedFields([field])


def test_an_operator_lists_more_of_answers() -> None:
    assert not PassedFields().is_returned("x-house") and PassedFields(returned=["X-House"]).is_returned("x-house")
    for header in ("x-smg-routed-worker-id", "x-gateway-destination-endpoint", "x-kvcustody-worker"):
        with pytest.raises(ConfigError, match=header):
            PassedFields(returned=[header])


def test_what_the_routers_probes_send_is_decided(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.syspath_prepend(str(ROOT / "benchmarks/fleet/routers"))
    import router_probes

    sys.modules.pop("router_probes", None)
    listed = PASSED_FIELDS[Body.CHAT] | DROPPED_FIELDS | ACTED_ON_FIELDS
    assert router_probes.FIELDS.keys() <= listed
    decided = {name for name in router_probes.HEADERS if name in PASSED_HEADERS or _is_acted_on(name)}
    assert decided == router_probes.HEADERS.keys()


def test_headers_of_one_connection_are_nobodys_to_set() -> None:
    assert set(ACTED_ON_HEADERS) >= HOP_HEADERS


def test_repeated_names_are_refused(fleet: FleetEdge) -> None:
    assert json.loads(fleet.send(fleet.clients.acme).forwarded.body or b"")["prompt"] == "p"
    raw = b'{"prompt":"p","temperature":1,"temperature":2}'
    admitted = fleet.admit(fleet.clients.acme)
    with pytest.raises(RequestRefused) as found:
        fleet.edge.scope(admitted, raw)
    assert found.value.status == 400
