"""The door G1-G3 and the middleware M1-M3 in one process: paths, headers, assertions, hints and replies."""

from __future__ import annotations

import asyncio
import json
from typing import Any

import pytest
import structlog
from prometheus_client import CollectorRegistry, generate_latest
from starlette._utils import get_route_path

from kvcustody.governance.credentials.scope_token import VerifiedToken
from kvcustody.integrations.identity import authenticate_request, request_gate
from kvcustody.integrations.identity.middleware import IdentityMiddleware
from kvcustody.integrations.identity.routes import PLAIN, SCOPED, route_path
from kvcustody.integrations.vllm.middleware import counted
from standins.integrations.door_world import DOCUMENT, Deployment, Signers, ask

ADMINISTRATION = (
    *("/reset_prefix_cache", "/reset_mm_cache", "/sleep", "/wake_up", "/collective_rpc", "/server_info", "/load"),
    *("/pause", "/resume", "/abort_requests", "/inference/v1/abort_requests", "/update_weights", "/start_profile"),
    *("/v1/load_lora_adapter", "/v1/unload_lora_adapter", "/scale_elastic_ep", "/invocations", "/docs"),
    *("/kv_event_sources", "/v1/audio/transcriptions", "/", "", "/v1", "/openapi.json"),
    *("/metrics", "/metrics/x", "/v1/completions/"),  # what the engine counts is everybody's work
)  # fmt: skip


def scoped(deployment: Deployment, key: str, headers: dict[str, str] | None = None, path: str = "/v1/completions"):  # type: ignore[no-untyped-def]
    found = deployment.verify(ask(deployment.gate, path, headers=headers, key=key).passed.json)
    assert isinstance(found, VerifiedToken), found
    return found


@pytest.mark.parametrize("path", ["/health", "/ping", "/version"])
def test_open_paths_need_no_identity(deployment: Deployment, path: str) -> None:
    assert ask(deployment.gate, path, method="GET").passed.path == path


@pytest.mark.parametrize(
    "path",
    [*sorted(SCOPED), *sorted(PLAIN), *sorted(ADMINISTRATION), "/v1/responses/resp_x", "/HEALTH", "//health"],
)
@pytest.mark.parametrize("method", ["GET", "POST", "OPTIONS"])
def test_every_other_path_needs_identity(deployment: Deployment, path: str, method: str) -> None:
    reply = ask(deployment.gate, path, method=method)
    assert (reply.status, reply.received) == (401, None)
    assert reply == ask(deployment.gate, key="not-a-key-of-this-deployment"), "one answer for every reason"


def test_the_401_is_openais_shape_and_says_how(deployment: Deployment) -> None:
    reply = ask(deployment.gate)
    assert reply.headers["www-authenticate"] == "Bearer"
    assert reply.headers["content-type"] == "application/json"
    assert set(json.loads(reply.body)["error"]) == {"message", "type", "param", "code"}


def test_the_reason_of_a_401_is_in_the_log_and_quotes_nothing(deployment: Deployment) -> None:
    with structlog.testing.capture_logs() as lines:
        ask(deployment.gate)
        ask(deployment.gate, key="a-secret-that-somebody-mistyped")
        ask(deployment.gate, key=deployment.token(exp=5))
        ask(deployment.gate, key=deployment.token(org="initech"))
    reasons = [line["reason"] for line in lines]
    assert reasons == [
        "no credential",
        "unknown API key",
        "token expired",
        "issuer may not speak for the tenant",
    ]
    assert "mistyped" not in str(lines)


def test_every_identity_that_is_refused_is_noted_with_its_network(deployment: Deployment) -> None:
    noted: list[tuple[str, str]] = []

    def refused(reason: str, source: str) -> None:
        noted.append((reason, source))

    for key in (None, "a-secret-that-somebody-mistyped", deployment.token(exp=5), deployment.acme):
        ask(deployment.gate, key=key, refused=refused)
    ask(deployment.gate, "/v1/completions", b"{", key=deployment.acme, refused=refused)  # of somebody, and wrong
    ask(deployment.gate, "/metrics", key=deployment.acme, refused=refused)
    ask(deployment.gate, "/v1/responses/resp_x", method="GET", key=deployment.acme, refused=refused)
    network = "203.0.113.0/24"
    reasons = ["missing", "invalid", "expired", "not-served", "not-found"]
    assert noted == [(reason, network) for reason in reasons]


def test_what_a_door_refused_is_in_the_metrics_of_its_server(deployment: Deployment) -> None:
    registry, noted = CollectorRegistry(), list[str]()
    refused = counted(lambda reason, source: noted.append(reason), registry)
    counted(refused, registry)  # an application that is built twice has one counter
    for path, key in (("/metrics", deployment.acme), ("/metrics", deployment.acme), ("/v1/models", None)):
        ask(deployment.gate, path, method="GET", key=key, refused=refused)
    text = generate_latest(registry).decode()
    assert 'kvcustody_door_refused_total{reason="not-served"} 2.0' in text
    assert 'kvcustody_door_refused_total{reason="missing"} 1.0' in text
    assert 'kvcustody_door_refused_total{reason="forged"} 0.0' in text, "control: nobody forged anything"
    assert noted == ["not-served", "not-served", "missing"] and "203.0.113" not in text


@pytest.mark.parametrize("path", sorted(ADMINISTRATION))
def test_administration_is_refused_to_tenants_and_open_to_operators(deployment: Deployment, path: str) -> None:
    for key in (deployment.acme, deployment.token()):
        reply = ask(deployment.gate, path, key=key)
        assert (reply.status, reply.received) == (403, None)
    assert ask(deployment.gate, path, key=deployment.operator).passed.path == path


@pytest.mark.parametrize("path", sorted(SCOPED))
def test_the_body_is_scoped_on_every_path_to_the_engine(deployment: Deployment, path: str) -> None:
    found = scoped(deployment, deployment.acme, path=path)
    assert found.principal.tenant == "acme"
    assert found.principal.route == ("/search" if path == "/v1/embeddings" else path)
    assert ask(deployment.gate, path, key=deployment.acme, method="PUT").status == 403


def test_what_another_path_is_sent_passes_untouched(deployment: Deployment) -> None:
    body = b'{"prompt": "p", "cache_salt": "", "prompt": "q"}'
    got = ask(deployment.gate, "/tokenize", body, key=deployment.acme).passed
    assert got.body == body and got.headers["content-length"] == str(len(body))


@pytest.mark.parametrize(
    ("path", "root", "expected"),
    [
        ("/v1/completions", "", "/v1/completions"),
        ("/llm/v1/completions", "/llm", "/v1/completions"),
        ("/llmv1/completions", "/llm", "/llmv1/completions"),
        ("/v1/completions", "/llm", "/v1/completions"),
        ("/llm", "/llm", ""),
        ("/llm/health", "/llm", "/health"),
    ],
)
def test_paths_are_read_as_the_server_routes_them(path: str, root: str, expected: str) -> None:
    assert route_path(path, root) == expected == get_route_path({"path": path, "root_path": root})


def test_a_mounted_server_is_not_opened_by_its_prefix(deployment: Deployment) -> None:
    assert ask(deployment.gate, "/llm/v1/completions", root_path="/llm").status == 401
    assert ask(deployment.gate, "/llm/v1/completions", root_path="/llm", key=deployment.acme).status == 200
    assert ask(deployment.gate, "/health/v1/completions", root_path="/health").status == 401


def test_our_headers_and_hop_lengths_do_not_pass(deployment: Deployment) -> None:
    sent = {
        "X-KVCustody-Subject": "bob",
        "x_kvcustody_tenant": "globex",
        "Transfer-Encoding": "chunked",
        "X-Other": "1",
    }
    got = ask(deployment.gate, headers=sent, key=deployment.acme).passed
    assert not [name for name in got.headers if "kvcustody" in name]
    assert "transfer-encoding" not in got.headers and got.headers["x-other"] == "1"
    assert got.headers["content-length"] == str(len(got.body))


def test_a_subject_that_the_tenant_asserts_is_recorded_as_asserted(deployment: Deployment) -> None:
    found = scoped(deployment, deployment.acme, {"X-KVCustody-Subject": "bob", "X-KVCustody-Session": "s1"})
    assert (found.principal.subject, found.principal.session) == ("bob", "s1")
    assert found.principal.subject_asserted and found.principal.session_asserted
    both = scoped(deployment, deployment.token(), {"X-KVCustody-Session": "s1"})
    assert (both.principal.subject_asserted, both.principal.session_asserted) == (False, True)


def test_a_verified_subject_cannot_be_contradicted(deployment: Deployment) -> None:
    same = scoped(deployment, deployment.alice, {"X-KVCustody-Subject": "alice"})
    assert not same.principal.subject_asserted
    reply = ask(deployment.gate, headers={"X-KVCustody-Subject": "bob"}, key=deployment.alice)
    assert reply.status == 400 and b"contradicts" in reply.body and b"bob" not in reply.body


def test_an_assertion_that_the_document_does_not_allow_is_not_read(deployment: Deployment) -> None:
    found = scoped(deployment, deployment.token(sub=None), {"X-KVCustody-Subject": "bob"})
    assert found.principal.subject is None, "the issuer's tenants may assert sessions only"
    for header in ("X-KVCustody-Tenant", "X-KVCustody-Route", "X-KVCustody-Issuer"):
        found = scoped(deployment, deployment.acme, {header: "/globex"})
        assert (found.principal.tenant, found.principal.route) == ("acme", "/v1/completions")


def test_a_hint_travels_as_a_hint(deployment: Deployment) -> None:
    found = scoped(deployment, deployment.alice, {"X-KVCustody-Classification": "restricted"})
    assert found.hints.classification == "restricted"
    assert found.principal.classification == "internal"


BAD_HEADERS: dict[str, list[tuple[bytes, bytes]]] = {
    **{
        f"{name.decode()} {what}": [(name, value)]
        for name in (b"X-KVCustody-Subject", b"X-KVCustody-Session", b"X-KVCustody-Classification")
        for what, value in {
            "empty": b"",
            "space": b"a b",
            "control": b"a\x01b",
            "nul": b"a\x00",
            "traversal": b"../globex",
            "wildcard": b"*",
            "emoji": "🙂".encode(),
            "not utf-8": b"\xff",
            "reversed": "a\u202eb".encode(),
            "not in normal form": "e\u0301".encode(),
            "long": b"s" * 129,
            "a mebibyte": b"s" * (1 << 20),
        }.items()
    },
    "subject twice": [(b"x-kvcustody-subject", b"a"), (b"X-KVCustody-Subject", b"b")],
    "subject twice alike": [(b"x-kvcustody-subject", b"a"), (b"x-kvcustody-subject", b"a")],
    "request id twice": [(b"x-request-id", b"a"), (b"x-request-id", b"b")],
    "request id control": [(b"x-request-id", b"a\x01")],
    "request id long": [(b"x-request-id", b"a" * 129)],
    "request id empty": [(b"x-request-id", b"")],
    "request id path": [(b"x-request-id", b"../a")],
    "compressed": [(b"content-encoding", b"gzip")],
}


@pytest.mark.parametrize("headers", BAD_HEADERS.values(), ids=BAD_HEADERS.keys())
def test_a_malformed_header_is_a_400_and_never_a_missing_one(
    deployment: Deployment, headers: list[tuple[bytes, bytes]]
) -> None:
    reply = ask(deployment.gate, headers=headers, key=deployment.acme)
    assert (reply.status, reply.received) == (400, None)
    assert len(reply.body) < 300


@pytest.mark.parametrize(
    "headers",
    [
        [(b"authorization", b"Bearer %s"), (b"authorization", b"Bearer %s")],
        [(b"authorization", b"Bearer %s"), (b"x-api-key", b"%s")],
        [(b"authorization", b"Basic %s")],
        [(b"authorization", b"%s")],
        [(b"authorization", b"Bearer")],
        [(b"authorization", b"Bearer  %s")],
        [(b"authorization", b"Bearer %s ")],
        [(b"x-api-key", b"")],
        [(b"x-api-key", b"\xff")],
        [(b"proxy-authorization", b"Bearer %s")],
    ],
)
def test_anything_but_one_credential_is_the_401(deployment: Deployment, headers: list[tuple[bytes, bytes]]) -> None:
    key = deployment.acme.encode()
    raw = [(name, value.replace(b"%s", key)) for name, value in headers]
    assert ask(deployment.gate, headers=raw) == ask(deployment.gate)


def test_a_key_may_come_in_either_header(deployment: Deployment) -> None:
    assert ask(deployment.gate, headers={"X-Api-Key": deployment.acme}).status == 200
    assert ask(deployment.gate, headers={"authorization": f"bEaReR {deployment.acme}"}).status == 200


def test_identity_comes_before_the_body(deployment: Deployment) -> None:
    read: list[str] = []

    async def receive() -> dict[str, Any]:
        read.append("body")
        return {"type": "http.request", "body": b"", "more_body": True}

    async def send(message: Any) -> None:
        pass

    scope = {"type": "http", "method": "POST", "path": "/v1/completions", "headers": []}
    asyncio.run(IdentityMiddleware(_unreachable, deployment.gate)(scope, receive, send))
    assert read == []


async def _unreachable(*_: Any) -> None:
    raise AssertionError("the application was reached")


def test_a_client_that_leaves_mid_body_reaches_nothing(deployment: Deployment) -> None:
    inbox = [{"type": "http.request", "body": b'{"pro', "more_body": True}, {"type": "http.disconnect"}]

    async def receive() -> dict[str, Any]:
        return inbox.pop(0)

    headers = [(b"authorization", b"Bearer " + deployment.acme.encode())]
    scope = {"type": "http", "method": "POST", "path": "/v1/completions", "headers": headers}
    asyncio.run(IdentityMiddleware(_unreachable, deployment.gate)(scope, receive, _unreachable))
    assert inbox == []


@pytest.mark.parametrize("kind", ["websocket", "webtransport"])
def test_sockets_are_refused_with_any_credential(deployment: Deployment, kind: str) -> None:
    sent: list[dict[str, Any]] = []

    async def receive() -> dict[str, Any]:
        return {"type": f"{kind}.connect"}

    async def send(message: Any) -> None:
        sent.append(message)

    headers = [(b"authorization", b"Bearer " + deployment.operator.encode())]
    scope = {"type": kind, "path": "/health", "headers": headers}
    asyncio.run(IdentityMiddleware(_unreachable, deployment.gate)(scope, receive, send))
    assert sent == [{"type": "websocket.close", "code": 1008}]


def test_an_error_of_ours_is_never_a_pass(deployment: Deployment, monkeypatch: pytest.MonkeyPatch) -> None:
    def broken(*_: Any, **__: Any) -> Any:
        raise RuntimeError("a bug")

    for module, part in ((authenticate_request, "identify"), (request_gate, "parse_body")):
        with monkeypatch.context() as patch:
            patch.setattr(module, part, broken)
            with pytest.raises(RuntimeError):
                ask(deployment.gate, key=deployment.acme)


def test_transfer_parameters_pass_where_the_document_says_so(tmp_path: Any, signers: Signers) -> None:
    trusting = Deployment(tmp_path, signers, DOCUMENT + "allow_transfer_parameters: true\n")
    sent = {"prompt": "p", "kv_transfer_params": {"do_remote_decode": True, "kvcustody": "forged"}}
    got = ask(trusting.gate, body=sent, key=trusting.token(sid="x" * 128)).passed.json
    assert got["kv_transfer_params"]["do_remote_decode"] is True
    assert isinstance(trusting.verify(got), VerifiedToken)
    short = ask(trusting.gate, body=sent, key=trusting.acme).passed.json
    assert short["kv_transfer_params"] == {"do_remote_decode": True}
    assert isinstance(trusting.verify(short), VerifiedToken)
