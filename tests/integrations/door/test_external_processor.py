"""The door over Envoy's own protocol: a real gRPC server on loopback, asked as Envoy asks."""

from __future__ import annotations

import asyncio
import json
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any, NamedTuple

import grpc
import pytest
from envoy.config.core.v3 import base_pb2
from envoy.service.ext_proc.v3 import external_processor_pb2 as messages
from envoy.service.ext_proc.v3 import external_processor_pb2_grpc as service
from hypothesis import given, settings
from hypothesis import strategies as st

from kvcustody.governance.credentials.scope_token import VerifiedToken
from kvcustody.integrations.door.door_metrics import DoorMetrics
from kvcustody.integrations.door.edge_gate import EdgeGate, Forwarded
from kvcustody.integrations.door.external_processor import ExternalProcessor, add_processor
from standins.integrations.door_world import Signers, make_signers
from standins.integrations.fleet_edge import COMPLETIONS, FleetEdge

BODY_MAX = 4096


@pytest.fixture(scope="module")
def signers() -> Signers:
    return make_signers()


@pytest.fixture
def fleet(tmp_path: Path, signers: Signers) -> FleetEdge:
    return FleetEdge(tmp_path, signers)


class Answers(NamedTuple):
    """What the door answered to the messages of one request, and its metrics' text."""

    messages: list[Any]
    metrics: DoorMetrics

    @property
    def refusal(self) -> tuple[int, dict[str, Any]]:
        last = self.messages[-1].immediate_response
        return last.status.code, json.loads(last.body)

    @property
    def forwarded(self) -> Forwarded:
        common = self.messages[-1].request_body.response
        return Forwarded(_set_headers(common), common.body_mutation.body)


def _set_headers(common: Any) -> dict[str, str]:
    return {each.header.key: each.header.raw_value.decode() for each in common.header_mutation.set_headers}


def headers(given: dict[str, str], *, is_whole: bool = False) -> Any:
    """Request headers as Envoy sends them."""
    fields = [base_pb2.HeaderValue(key=name, raw_value=value.encode()) for name, value in given.items()]
    held = messages.HttpHeaders(headers=base_pb2.HeaderMap(headers=fields), end_of_stream=is_whole)
    return messages.ProcessingRequest(request_headers=held)


def request(key: str | None, path: str = COMPLETIONS, **more: str) -> Any:
    """The headers of a POST with a client's key."""
    given = {":method": "POST", ":path": path, ":authority": "edge", **more}
    return headers(given | ({} if key is None else {"authorization": f"Bearer {key}"}))


def body(data: bytes | dict[str, Any]) -> Any:
    sent = data if isinstance(data, bytes) else json.dumps(data).encode()
    return messages.ProcessingRequest(request_body=messages.HttpBody(body=sent, end_of_stream=True))


def exchange(
    gate: EdgeGate, *streams: Sequence[Any], under_way_bytes_max: int = 1 << 20, at_once: bool = False
) -> list[Answers]:
    """Send each stream's messages to a door of its own server; the answers of each."""

    async def run() -> list[Answers]:
        server = grpc.aio.server()
        processor = ExternalProcessor(gate, body_bytes_max=BODY_MAX, under_way_bytes_max=under_way_bytes_max)
        add_processor(server, processor)
        port = server.add_insecure_port("127.0.0.1:0")
        await server.start()
        async with grpc.aio.insecure_channel(f"127.0.0.1:{port}") as channel:
            stub = service.ExternalProcessorStub(channel)

            async def one(sent: Sequence[Any]) -> Answers:
                """Envoy waits for each answer, and sends nothing after a refusal."""
                call, answers = stub.Process(), list[Any]()
                for message in sent:
                    await call.write(message)
                    answers.append(await call.read())
                    if answers[-1].WhichOneof("response") == "immediate_response":
                        break
                await call.done_writing()
                return Answers(answers, gate.metrics)

            asked = [one(sent) for sent in streams]
            found = list(await asyncio.gather(*asked)) if at_once else [await each for each in asked]
        await server.stop(0)
        return found

    return asyncio.run(run())


def refused(gate: EdgeGate, *sent: Any, **more: Any) -> int:
    status, said = exchange(gate, sent, **more)[0].refusal
    assert said["error"]["type"] == "invalid_request_error"
    return status


def test_a_request_goes_on_with_namespace_and_token(fleet: FleetEdge) -> None:
    sent = [
        request(fleet.clients.alice, **{"x-tenant-id": "forged", "user-agent": "k"}),
        body({"prompt": "p"}),
    ]
    answers = exchange(fleet.edge, sent)[0]
    forwarded, change = answers.forwarded, answers.messages[-1].request_body.response.header_mutation
    assert list(change.remove_headers) == ["x-tenant-id"]
    assert forwarded.headers["content-length"] == str(len(forwarded.body or b""))
    got = fleet.workers[0].verify(fleet.workers[0].ask(_without_length(forwarded)).passed.json)
    assert isinstance(got, VerifiedToken) and got.principal.subject == "alice"


def _without_length(forwarded: Forwarded) -> Forwarded:
    kept = {name: value for name, value in forwarded.headers.items() if name != "content-length"}
    return forwarded._replace(headers=kept)


def test_a_plain_path_goes_on_with_a_token_and_its_own_body(fleet: FleetEdge) -> None:
    asked = headers(
        {":method": "GET", ":path": "/v1/models?x=1", "authorization": f"Bearer {fleet.clients.acme}"},
        is_whole=True,
    )
    common = exchange(fleet.edge, [asked])[0].messages[0].request_headers.response
    assert _set_headers(common)["authorization"].startswith("Bearer kvd1.") and not common.HasField("body_mutation")


def test_an_open_path_needs_nothing_and_gets_nothing(fleet: FleetEdge) -> None:
    common = exchange(fleet.edge, [request(None, "/health")])[0].messages[0].request_headers.response
    assert _set_headers(common) == {"x-forwarded-proto": "http"}, "what Envoy routes by"


def test_an_open_path_passes_no_credential_on(fleet: FleetEdge) -> None:
    asked = request(fleet.clients.acme, "/health", **{"x-tenant-id": "forged"})
    common = exchange(fleet.edge, [asked])[0].messages[0].request_headers.response
    assert set(common.header_mutation.remove_headers) == {"authorization", "x-tenant-id"}


@pytest.mark.parametrize(
    ("make", "status"),
    [
        (lambda fleet: [request(None)], 401),
        (lambda fleet: [request("kvc_wrong")], 401),
        (lambda fleet: [request(fleet.clients.acme, "/v1/load_lora_adapter")], 403),
        (lambda fleet: [request(fleet.clients.acme, upgrade="websocket")], 403),
        (lambda fleet: [request(fleet.clients.acme, **{"content-length": str(BODY_MAX + 1)})], 413),
        (lambda fleet: [request(fleet.clients.acme, **{"content-encoding": "gzip"})], 400),
        (lambda fleet: [request(fleet.clients.acme), body(b"x" * (BODY_MAX + 1))], 413),
        (lambda fleet: [request(fleet.clients.acme), body(b"x" * BODY_MAX)], 400),
        (lambda fleet: [request(fleet.clients.acme), body(b'{"a":1,"a":2}')], 400),
        (lambda fleet: [request(fleet.clients.acme), _trailers()], 400),
        (lambda fleet: [body({"prompt": "p"})], 400),
        (lambda fleet: [_trailers()], 400),
    ],
)
def test_what_may_not_pass_is_answered(fleet: FleetEdge, make: Callable[[FleetEdge], list[Any]], status: int) -> None:
    assert refused(fleet.edge, *make(fleet)) == status


def _trailers() -> Any:
    return messages.ProcessingRequest(request_trailers=messages.HttpTrailers())


@pytest.mark.parametrize(("size", "status"), [(BODY_MAX, 0), (BODY_MAX + 1, 413)])
def test_the_largest_body_is_exact(fleet: FleetEdge, size: int, status: int) -> None:
    data = json.dumps({"prompt": ""}).encode()
    data = data.replace(b'""', b'"' + b"p" * (size - len(data)) + b'"')
    assert len(data) == size
    answers = exchange(fleet.edge, [request(fleet.clients.acme), body(data)])[0]
    assert answers.messages[-1].immediate_response.status.code == status


def test_a_busy_door_says_so(fleet: FleetEdge) -> None:
    sent = (request(fleet.clients.acme), body({"prompt": "p" * 100}))
    assert refused(fleet.edge, *sent, under_way_bytes_max=100) == 503
    assert exchange(fleet.edge, sent, under_way_bytes_max=200)[0].forwarded.body


def test_an_error_of_ours_is_a_500_and_never_a_pass(fleet: FleetEdge, monkeypatch: pytest.MonkeyPatch) -> None:
    def broken(*_: Any, **__: Any) -> Any:
        raise RuntimeError("a bug")

    sent = (request(fleet.clients.acme), body({"prompt": "p"}))
    for part in ("authenticate", "scope"):
        with monkeypatch.context() as patch:
            patch.setattr(EdgeGate, part, broken)
            assert refused(fleet.edge, *sent) == 500
    assert exchange(fleet.edge, sent)[0].forwarded.body, "the control: it passes"


def test_a_response_says_nothing_of_workers(fleet: FleetEdge) -> None:
    headers = ("x-smg-routed-worker-id", "x-llm-d-pod", "x-kvcustody-found", "x-a-router-of-tomorrow", "server")
    names = (":status", "content-type", "transfer-encoding", *headers, "x-request-id")
    fields = [base_pb2.HeaderValue(key=name, raw_value=b"1") for name in names]
    sent = messages.ProcessingRequest(response_headers=messages.HttpHeaders(headers=base_pb2.HeaderMap(headers=fields)))
    answer = exchange(fleet.edge, [request(fleet.clients.acme), body({"prompt": "p"}), sent])[0].messages[-1]
    removed = set(answer.response_headers.response.header_mutation.remove_headers)
    assert removed == {*headers}


def test_requests_at_once_do_not_meet(fleet: FleetEdge) -> None:
    keys = [fleet.clients.acme, fleet.clients.globex] * 16
    sent = [[request(key), body({"prompt": str(place)})] for place, key in enumerate(keys)]
    for place, answers in enumerate(exchange(fleet.edge, *sent, at_once=True)):
        got = json.loads(answers.forwarded.body or b"")
        worker = fleet.workers[0].verify(fleet.workers[0].ask(_without_length(answers.forwarded)).passed.json)
        assert isinstance(worker, VerifiedToken)
        assert got["prompt"] == str(place) and worker.principal.tenant == ("acme", "globex")[place % 2]


def test_metrics_count_what_passed_and_what_did_not(fleet: FleetEdge) -> None:
    sent = [[request(fleet.clients.acme), body({"prompt": "p"})], [request(None)], [request(None)]]
    registry = exchange(fleet.edge, *sent)[0].metrics.registry
    assert registry.get_sample_value("kvcustody_door_passed_total") == 1
    assert registry.get_sample_value("kvcustody_door_refused_total", {"status": "401"}) == 2
    assert registry.get_sample_value("kvcustody_door_seconds_count", {"message": "request_body"}) == 1


_HOSTILE = st.lists(
    st.one_of(
        st.builds(
            lambda fields, whole: headers(fields, is_whole=whole),
            st.dictionaries(
                st.sampled_from([":method", ":path", "authorization", "x-api-key", "content-length", "upgrade"]),
                st.text(max_size=40),
            ),
            st.booleans(),
        ),
        st.binary(max_size=200).map(body),
        st.just(_trailers()),
        st.just(messages.ProcessingRequest()),
    ),
    min_size=1,
    max_size=4,
)


def test_hostile_streams_end_in_an_answer_and_pass_nothing(fleet: FleetEdge) -> None:
    seen = set[str]()

    @settings(max_examples=60, deadline=None)
    @given(st.lists(_HOSTILE, min_size=1, max_size=8))
    def hostile(streams: list[list[Any]]) -> None:
        for answers in exchange(fleet.edge, *streams):
            for answer in answers.messages:
                kind = answer.WhichOneof("response")
                seen.add(kind)
                if kind == "request_body":
                    assert not answer.request_body.response.HasField("body_mutation")

    hostile()
    assert "immediate_response" in seen
