"""Request bodies B1-B4: the engine gets our scope, ids of their owner, and everything else as it was."""

from __future__ import annotations

import copy
import json
from typing import Any

import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from kvcustody.governance.credentials.scope_token import Rejected, VerifiedToken
from kvcustody.integrations.identity import authenticate_request
from kvcustody.integrations.identity import request_body as body_module
from kvcustody.integrations.identity import request_gate as door_module
from kvcustody.integrations.identity.engine_requests import engine_requests
from kvcustody.integrations.identity.identity_document import load_identity
from kvcustody.integrations.identity.refusal import RequestRefused
from kvcustody.integrations.identity.request_body import (
    OUR_KINDS_FIELD,
    OUR_LATENCY_FIELD,
    OUR_MARKS_FIELD,
    OUR_TRACE_FIELD,
    OUR_TRANSFER_FIELD,
    owns_response,
    parse_body,
    write_body,
)
from kvcustody.integrations.identity.request_gate import RequestGate
from kvcustody.integrations.identity.routes import SCOPED, Body, Room
from kvcustody.integrations.sglang.middleware import SERVER
from standins.integrations.door_world import Deployment, ask, secret

SCALARS = st.none() | st.booleans() | st.integers(-(10**30), 10**30) | st.floats(allow_nan=False, allow_infinity=False)
# `from_type` text includes lone surrogates, which JSON escapes can carry.
TEXTS = st.text(st.characters(exclude_categories=[]), max_size=12)
VALUES = st.recursive(
    SCALARS | TEXTS,
    lambda inner: st.lists(inner, max_size=4) | st.dictionaries(TEXTS, inner, max_size=4),
    max_leaves=20,
)
OURS = {
    *("cache_salt", "kv_transfer_params", "ec_transfer_params", "kv_hints"),
    *("request_id", "session_id", "vllm_xargs", "sampling_params", "n"),
}
CLIENT_SALTS = st.text("abcXYZ 019!@/", min_size=9, max_size=40)


def problems(sent: dict[str, Any], got: dict[str, Any], deployment: Deployment) -> list[str]:
    """Everything that is wrong with what the engine got, for acme's key."""
    wrong = []
    outcome = deployment.verify(got)
    if isinstance(outcome, Rejected):
        return [f"the engine rejects the token: {outcome.reason}"]
    if outcome.principal.tenant != "acme":
        wrong.append("the engine sees another tenant")
    if (outcome.hints.salt is None) != (sent.get("cache_salt") is None):
        wrong.append("the client's salt does not narrow")
    if isinstance(sent.get("cache_salt"), str) and sent["cache_salt"] in json.dumps(got["cache_salt"]):
        wrong.append("the client's salt reaches the engine")
    if {k: v for k, v in got.items() if k not in OURS} != {k: v for k, v in sent.items() if k not in OURS}:
        wrong.append("something else changed")
    return wrong


@settings(max_examples=100, deadline=None, suppress_health_check=[HealthCheck.function_scoped_fixture])
@given(
    st.dictionaries(TEXTS.filter(lambda name: name not in OURS), VALUES, max_size=5),
    st.none() | CLIENT_SALTS,
    st.sampled_from(["/v1/completions", "/v1/chat/completions", "/v1/messages"]),
    st.integers(1, 7),
)
def test_any_body_arrives_whole_with_our_scope(
    deployment: Deployment, rest: dict[str, Any], salt: str | None, path: str, chunks: int
) -> None:
    sent = {**rest, "cache_salt": salt, "kv_transfer_params": {OUR_TRANSFER_FIELD: "forged"}}
    reply = ask(deployment.gate, path, sent, key=deployment.acme, chunks=chunks)
    if reply.status == 400:  # a request id of hypothesis's own making
        assert b"request_id" in reply.body
        return
    got = reply.passed
    assert got.headers["content-length"] == str(len(got.body))
    assert problems(sent, got.json, deployment) == []


def _keep_salt(body: dict[str, Any], carried: Any, scoped: Any) -> None:
    body.setdefault("cache_salt", carried.cache_salt)


def _leave_salt(body: dict[str, Any]) -> object:
    return body.get("cache_salt")


@pytest.mark.parametrize(
    ("part", "broken", "expected"),
    [
        ("put_token", _keep_salt, "the engine rejects the token: malformed"),
        ("take_client_salt", lambda body: None, "the client's salt does not narrow"),
        ("write_body", lambda body: json.dumps({**body, "prompt": "q"}).encode(), "something else changed"),
    ],
)
def test_the_check_above_catches_a_door_that_forgets_a_step(
    deployment: Deployment, monkeypatch: pytest.MonkeyPatch, part: str, broken: Any, expected: str
) -> None:
    monkeypatch.setattr(door_module, part, broken)
    if part == "put_token":
        monkeypatch.setattr(door_module, "take_client_salt", _leave_salt)
    sent = {"prompt": "p", "cache_salt": "mine"}
    got = ask(deployment.gate, body=sent, key=deployment.acme).passed.json
    assert expected in problems(sent, got, deployment)


MALFORMED: dict[str, bytes] = {
    "empty": b"",
    "not json": b"prompt=p",
    "a list": b"[]",
    "text": b'"p"',
    "repeated name": b'{"prompt": "p", "prompt": "q"}',
    "repeated salt": b'{"cache_salt": "a", "cache_salt": "b"}',
    "repeated by escape": b'{"cache_salt": "a", "cache\\u005fsalt": "b"}',
    "repeated below": b'{"messages": [{"role": "user", "role": "system"}]}',
    "two documents": b'{"prompt": "p"}{"prompt": "q"}',
    "not a number": b'{"temperature": NaN}',
    "infinite": b'{"temperature": -Infinity}',
    "out of range": b'{"temperature": 1e999}',
    "digits without end": b'{"seed": ' + b"9" * 5_000 + b"}",
    "deep": b'{"a": ' + b"[" * 100_000 + b"]" * 100_000 + b"}",
    "deep messages": b'{"messages": ' + b"[" * 80 + b"]" * 80 + b"}",
    "not utf-8": b'{"prompt": "\xff"}',
    "utf-16": '{"prompt": "p"}'.encode("utf-16"),
    "byte order mark": b'\xef\xbb\xbf{"prompt": "p"}',
    "truncated": b'{"prompt": "p"',
    "nul after": b'{"prompt": "p"}\x00',
    "salt empty": b'{"cache_salt": ""}',
    "salt long": b'{"cache_salt": "' + b"s" * 129 + b'"}',
    "salt of a mebibyte": b'{"cache_salt": "' + b"s" * (1 << 20) + b'"}',
    "salt number": b'{"cache_salt": 7}',
    "salt list": b'{"cache_salt": ["s"]}',
    "salt control": b'{"cache_salt": "a\\u0000b"}',
    "salt line": b'{"cache_salt": "a\\nb"}',
    "salt surrogate": b'{"cache_salt": "\\ud800"}',
    "salt reversed": b'{"cache_salt": "a\\u202eb"}',
    "samples text": b'{"n": "2"}',
    "samples true": b'{"n": true}',
    "samples float": b'{"n": 2.0}',
    "samples none": b'{"n": 0}',
    "samples many": b'{"n": 65536}',
    "transfer": b'{"kv_transfer_params": {"do_remote_prefill": true}}',
    "transfer text": b'{"kv_transfer_params": "kvcustody"}',
    "encoder transfer": b'{"ec_transfer_params": {"a": 1}}',
    "transfer as argument": b'{"vllm_xargs": {"kv_transfer_params": "x"}}',
    "request id": b'{"request_id": "../../x"}',
    "request id number": b'{"request_id": 7}',
}


@pytest.mark.parametrize("data", MALFORMED.values(), ids=MALFORMED.keys())
def test_a_malformed_body_is_a_400_before_admission(deployment: Deployment, data: bytes) -> None:
    reply = ask(deployment.gate, body=data, key=deployment.acme, body_bytes_max=4 << 20)
    assert (reply.status, reply.received) == (400, None)
    error = json.loads(reply.body)["error"]
    assert error["type"] == "invalid_request_error" and error["param"]
    assert len(reply.body) < 400, "the reply quotes the request"


def test_a_body_over_the_bound_is_a_413_stated_or_not(deployment: Deployment) -> None:
    body = {"prompt": "p" * 2_000}
    stated = ask(deployment.gate, body=body, key=deployment.acme, body_bytes_max=1_000)
    unstated = ask(
        deployment.gate,
        body=body,
        headers=[(b"content-length", b"7")],
        key=deployment.acme,
        body_bytes_max=1_000,
    )
    assert stated.status == 413 and stated.received is None
    assert unstated.status == 400  # two lengths
    assert ask(deployment.gate, body=body, key=deployment.acme, body_bytes_max=2_014).status == 200


@pytest.mark.parametrize(
    ("path", "body", "expected"),
    [
        ("/v1/completions", {"prompt": "p"}, 1),
        ("/v1/completions", {"prompt": [1, 2, 3]}, 1),
        ("/v1/completions", {"prompt": ["a", "b", "c"]}, 3),
        ("/v1/completions", {"prompt": [[1, 2], [3]], "n": 4}, 8),
        ("/v1/completions", {"prompt": "p", "n": None}, 1),
        ("/v1/completions", {"prompt_embeds": ["e", "f"]}, 2),
        ("/v1/completions", {"prompt": ["a"], "prompt_embeds": "e", "n": 2}, 4),
        ("/v1/completions", {"prompt": []}, 1),
        ("/v1/completions", {"prompt": "p", "use_beam_search": True, "n": 4, "max_tokens": 5}, 20),
        ("/v1/chat/completions", {"messages": [{}, {}], "n": 3}, 3),
        ("/v1/chat/completions", {"messages": [{}], "n": 2, "use_beam_search": 1, "max_tokens": 3}, 6),
        ("/v1/chat/completions/batch", {"messages": [[{}], [{}]]}, 2),
        ("/v1/responses", {"input": "p"}, 1),
        ("/v1/responses", {"input": "p", "tools": [{"type": "function"}]}, 1),
        ("/v1/responses", {"input": "p", "tools": [{"type": "mcp"}], "max_tool_calls": 3}, 4),
        ("/v1/messages", {"messages": [{}], "n": 5}, 1),
        ("/inference/v1/generate", {"token_ids": [1], "sampling_params": {"n": 3}}, 3),
        ("/v1/embeddings", {"input": "p"}, 1),
        ("/v1/embeddings", {"input": ["a", "b"]}, 2),
        ("/v1/embeddings", {"input": [1, 2, 3]}, 1),
        ("/v1/embeddings", {"input": [[1], [2]]}, 2),
        ("/v1/embeddings", {"input": [{"role": "user"}]}, 1),
        ("/v1/embeddings", {"messages": [[{}], [{}], [{}]]}, 3),
        ("/pooling", {"data": {"x": 1}}, 1),
        ("/score", {"queries": "q", "documents": ["a", "b"]}, 3),
        ("/v1/rerank", {"query": "q", "documents": ["a", "b", "c"]}, 4),
    ],
)
def test_a_token_covers_the_engine_requests_of_its_body(
    deployment: Deployment, path: str, body: dict[str, Any], expected: int
) -> None:
    assert engine_requests(SCOPED[path].body, body) == expected
    got = ask(deployment.gate, path, body, key=deployment.acme).passed.json
    outcomes = [deployment.verify(got) for _ in range(expected + 1)]
    assert [type(outcome) for outcome in outcomes] == [VerifiedToken] * expected + [Rejected]
    assert outcomes[-1] == Rejected("replayed")


def test_two_requests_never_share_a_token(deployment: Deployment) -> None:
    first, second = (ask(deployment.gate, key=deployment.acme).passed.json["cache_salt"] for _ in range(2))
    assert first != second


def test_a_stolen_token_sent_by_another_tenant_is_only_a_salt(deployment: Deployment) -> None:
    stolen = ask(deployment.gate, key=deployment.acme).passed.json["cache_salt"]
    body = {"prompt": "p", "cache_salt": stolen, "kv_transfer_params": {OUR_TRANSFER_FIELD: stolen}}
    outcome = deployment.verify(ask(deployment.gate, body=body, key=deployment.globex).passed.json)
    assert isinstance(outcome, VerifiedToken) and outcome.principal.tenant == "globex"


def test_a_token_too_long_for_a_salt_goes_beside_it_or_is_refused(deployment: Deployment) -> None:
    token = deployment.token(sub="s" * 128, sid="x" * 128)
    got = ask(deployment.gate, key=token).passed.json
    assert len(got["cache_salt"]) <= 128 and OUR_TRANSFER_FIELD in got["kv_transfer_params"]
    outcome = deployment.verify(got)
    assert isinstance(outcome, VerifiedToken) and outcome.principal.subject == "s" * 128
    refused = ask(deployment.gate, "/v1/embeddings", {"input": "p"}, key=token)
    assert refused.status == 400 and b"too long" in refused.body


def _ids(deployment: Deployment, key: str, path: str, body: dict[str, Any]) -> dict[str, Any]:
    return ask(deployment.gate, path, copy.deepcopy(body), {"X-Request-Id": "mine"}, key=key).passed.json


SESSIONS: dict[str, tuple[dict[str, Any], dict[str, str]]] = {  # where a client may put one: body, headers
    "body": ({"session_id": "s1"}, {}),
    "header": ({}, {"X-Session-Id": "s1"}),
    "vllm_xargs": ({"vllm_xargs": {"session_id": "s1", "kept": 1}}, {}),
    "extra_args": ({"sampling_params": {"extra_args": {"session_id": "s1"}}}, {}),
}


def sessions_seen(deployment: Deployment, where: str) -> set[str]:
    """The session ids with which three owners' requests reach the engine."""
    body, headers = SESSIONS[where]
    seen = set()
    for key in (deployment.acme, deployment.globex, deployment.alice):
        sent = {"prompt": "p", **copy.deepcopy(body)}
        got = ask(deployment.gate, "/inference/v1/generate", sent, headers, key=key).passed
        extra = got.json.get("vllm_xargs") or got.json.get("sampling_params", {}).get("extra_args", {})
        assert extra.get("kept", 1) == 1
        seen.add(got.headers.get("x-session-id") or got.json.get("session_id") or extra.get("session_id"))
    return seen


@pytest.mark.parametrize("where", SESSIONS)
def test_sessions_of_different_owners_never_meet(deployment: Deployment, where: str) -> None:
    seen = sessions_seen(deployment, where)
    assert len(seen) == 3 and all(session.endswith("-s1") for session in seen)


@pytest.mark.parametrize("where", SESSIONS)
def test_without_binding_sessions_would_meet(
    deployment: Deployment, monkeypatch: pytest.MonkeyPatch, where: str
) -> None:
    for module in (authenticate_request, body_module):
        monkeypatch.setattr(module, "bound_session", lambda param, value, owner: value)
    assert sessions_seen(deployment, where) == {"s1"}


def test_a_session_that_is_none_is_dropped_and_a_malformed_one_refused(deployment: Deployment) -> None:
    key = deployment.acme
    empty = ask(deployment.gate, body={"prompt": "p", "session_id": None}, headers={"X-Session-Id": ""}, key=key)
    assert empty.passed.json["session_id"] is None and "x-session-id" not in empty.passed.headers
    for body, headers in (
        ({"session_id": "a b"}, {}),
        ({"session_id": 7}, {}),
        ({}, {"X-Session-Id": "a b"}),
    ):
        assert ask(deployment.gate, body={"prompt": "p", **body}, headers=headers, key=key).status == 400
    hinted = ask(deployment.gate, body={"prompt": "p", "kv_hints": {"actions": []}}, key=key)
    assert hinted.status == 400 and b"kv_hints" in hinted.body


def test_ids_of_different_owners_never_meet(deployment: Deployment) -> None:
    image = {"type": "image_url", "image_url": {"url": "u"}, "uuid": "cat-picture"}
    body = {
        "request_id": "7",
        "messages": [{"role": "user", "content": [image, {"type": "text", "text": "uuid"}]}],
    }
    seen = {"request_id": set(), "uuid": set(), "header": set()}
    for key in (deployment.acme, deployment.globex, deployment.alice):
        reply = ask(deployment.gate, "/v1/chat/completions", copy.deepcopy(body), {"X-Request-Id": "7"}, key=key)
        got = reply.passed.json
        seen["request_id"].add(got["request_id"])
        seen["uuid"].add(got["messages"][0]["content"][0]["uuid"])
        seen["header"].add(reply.passed.headers["x-request-id"])
        assert got["messages"][0]["content"][1] == {"type": "text", "text": "uuid"}
        again = ask(deployment.gate, "/v1/chat/completions", copy.deepcopy(body), {"X-Request-Id": "7"}, key=key)
        assert again.passed.json["request_id"] == got["request_id"]
    assert all(len(values) == 3 for values in seen.values()), seen
    assert all(value.endswith("7") for value in seen["request_id"] | seen["header"])


def test_without_binding_the_ids_would_meet(deployment: Deployment, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(door_module, "bind_ids", lambda *_: None)
    body = {"request_id": "7", "prompt": "p"}
    keys = (deployment.acme, deployment.globex)
    assert {ask(deployment.gate, body=body, key=key).passed.json["request_id"] for key in keys} == {"7"}


def test_a_tools_own_data_named_uuid_is_not_touched(deployment: Deployment) -> None:
    call = {"type": "tool_use", "id": "t", "name": "f", "input": {"type": "row", "uuid": "u", "content": "c"}}
    body = {
        "messages": [{"role": "assistant", "content": [call]}],
        "tools": [{"uuid": "u"}],
        "metadata": {"uuid": "u"},
    }
    got = ask(deployment.gate, "/v1/messages", copy.deepcopy(body), key=deployment.acme).passed.json
    assert {name: got[name] for name in body} == body


def test_media_hashes_of_the_raw_token_interface_are_refused(deployment: Deployment) -> None:
    body = {"token_ids": [1], "sampling_params": {}, "features": {"mm_hashes": {"image": ["h"]}}}
    assert ask(deployment.gate, "/inference/v1/generate", body, key=deployment.acme).status == 400
    smuggled = {
        "token_ids": [1],
        "sampling_params": {"extra_args": {"kv_transfer_params": {"kvcustody": "x"}}},
    }
    assert ask(deployment.gate, "/inference/v1/generate", smuggled, key=deployment.acme).status == 400


def test_a_stored_response_is_its_owners_alone(deployment: Deployment) -> None:
    body = {"input": "p", "request_id": "chosen"}
    response_id = _ids(deployment, deployment.acme, "/v1/responses", body)["request_id"]
    assert response_id.startswith("resp_") and response_id.endswith("_chosen")
    assert _ids(deployment, deployment.acme, "/v1/responses", {"input": "p"})["request_id"] != response_id
    follow = {"input": "q", "previous_response_id": response_id}
    assert ask(deployment.gate, "/v1/responses", follow, key=deployment.acme).status == 200
    absent = ask(deployment.gate, "/v1/responses/resp_none", key=deployment.acme, method="GET")
    for key in (deployment.globex, deployment.alice):
        assert ask(deployment.gate, "/v1/responses", follow, key=key) == absent
        for method, path in (
            ("GET", f"/v1/responses/{response_id}"),
            ("POST", f"/v1/responses/{response_id}/cancel"),
        ):
            assert ask(deployment.gate, path, key=key, method=method) == absent
    got = ask(deployment.gate, f"/v1/responses/{response_id}", key=deployment.acme, method="GET")
    assert got.passed.path == f"/v1/responses/{response_id}"
    assert (absent.status, absent.received) == (404, None)


@given(st.text(max_size=40) | st.none() | st.integers())
def test_only_ids_that_we_made_are_owned(value: object) -> None:
    assert not owns_response("0123456789abcdef", value)
    assert owns_response("0123456789abcdef", "resp_0123456789abcdef_x")


@settings(max_examples=100, deadline=None)
@given(st.dictionaries(TEXTS, VALUES, max_size=5))
def test_parsing_and_writing_lose_nothing(body: dict[str, Any]) -> None:
    assert parse_body(write_body(body)) == json.loads(json.dumps(body))


COUNTED = [
    "n",
    "prompt",
    "input",
    "messages",
    "tools",
    "documents",
    "sampling_params",
    "max_tokens",
    "use_beam_search",
]


@settings(max_examples=150, deadline=None)
@given(st.sampled_from(list(Body)), st.dictionaries(st.sampled_from(COUNTED), VALUES, max_size=6))
def test_counting_never_fails_on_strange_bodies(kind: Body, body: dict[str, Any]) -> None:
    try:
        assert 1 <= engine_requests(kind, body) <= 65_535
    except RequestRefused as refusal:
        assert refusal.status == 400


TRACE = "4bf92f3577b34da6a3ce929d0e0e4736"
TRACEPARENT = f"00-{TRACE}-00f067aa0ba902b7-01"


@pytest.mark.parametrize("path", sorted(SCOPED))
def test_the_headers_trace_goes_with_the_body_where_there_is_room(deployment: Deployment, path: str) -> None:
    sent = {"prompt": "p"}
    bare, traced = (
        ask(deployment.gate, path, sent, key=deployment.acme, headers=headers).passed
        for headers in ({}, {"traceparent": TRACEPARENT})
    )
    had, got = (passed.json.get("kv_transfer_params", {}) for passed in (bare, traced))
    assert got == had | ({OUR_TRACE_FIELD: TRACE} if SCOPED[path].room is Room.TRANSFER else {})
    assert OUR_TRACE_FIELD not in had, "control"
    assert isinstance(deployment.verify(traced.json), VerifiedToken)


@pytest.mark.parametrize("header", ["", "x", TRACE, TRACEPARENT.upper(), TRACEPARENT.replace(TRACE, "0" * 32)])
def test_what_is_no_trace_goes_nowhere_and_refuses_nothing(deployment: Deployment, header: str) -> None:
    """Nor does a trace that the client writes where ours goes."""
    sent = {"prompt": "p", "kv_transfer_params": {OUR_TRACE_FIELD: TRACE}}
    got = ask(deployment.gate, body=sent, key=deployment.acme, headers={"traceparent": header}).passed.json
    assert OUR_TRACE_FIELD not in got.get("kv_transfer_params", {})


SPANS = [{"from": 0, "to": 512, "kind": "pasted_log"}, {"from": 600, "to": 601, "kind": "x"}]


@pytest.mark.parametrize("path", sorted(SCOPED))
def test_what_a_client_says_of_its_content_goes_with_the_body_where_there_is_room(
    deployment: Deployment, path: str
) -> None:
    marks = [[0, 9, "system_prompt"]]  # which the server alone may write, behind the door
    forged = {"kv_transfer_params": {OUR_KINDS_FIELD: [[0, 9, "y"]], OUR_MARKS_FIELD: marks}}
    got = ask(deployment.gate, path, {"prompt": "p", OUR_KINDS_FIELD: SPANS, **forged}, key=deployment.acme).passed.json
    carried = got.get("kv_transfer_params", {}).get(OUR_KINDS_FIELD)
    assert carried == ([[0, 512, "pasted_log"], [600, 601, "x"]] if SCOPED[path].room is Room.TRANSFER else None)
    assert OUR_KINDS_FIELD not in got and OUR_MARKS_FIELD not in str(got)
    assert isinstance(deployment.verify(got), VerifiedToken)


@pytest.mark.parametrize(
    "said",
    [7, "pasted_log", SPANS[0], [7], [[0, 9, "x"]], [{"from": 0, "to": 0, "kind": "x"}],
     [{"from": -1, "to": 4, "kind": "x"}], [{"from": 0, "to": 4, "kind": 4}], [{"from": 0, "to": 4}], SPANS * 33],
)  # fmt: skip
def test_what_is_no_span_of_content_is_refused(deployment: Deployment, said: object) -> None:
    assert ask(deployment.gate, body={"prompt": "p", OUR_KINDS_FIELD: said}, key=deployment.acme).status == 400


FORGED = {
    OUR_KINDS_FIELD: [0, 9, "y"],
    OUR_MARKS_FIELD: [0, 9, "system_prompt"],
    OUR_TRACE_FIELD: TRACE,
    OUR_LATENCY_FIELD: "batch",
}


OUR_THREE = (OUR_KINDS_FIELD, OUR_TRACE_FIELD, OUR_LATENCY_FIELD)


@pytest.mark.parametrize(
    ("path", "body"),
    [
        ("/v1/chat/completions", {"messages": [], "custom_params": {"mine": 1} | FORGED}),
        ("/v1/completions", {"prompt": "p", "custom_params": {"mine": 1} | FORGED}),
        ("/generate", {"text": "p", "sampling_params": {"custom_params": {"mine": 1} | FORGED}}),
        ("/generate", {"text": ["p", "q"], "sampling_params": [{"custom_params": {"mine": 1} | FORGED}, {}]}),
        ("/generate", {"text": "p"}),
    ],
)
def test_sglangs_bodies_carry_the_trace_and_kinds_in_custom_params(
    deployment: Deployment, path: str, body: dict[str, object]
) -> None:
    """And what the client writes there of ours is gone: without a trace and kinds of its own nothing is there."""
    directory = deployment.directory
    gate = RequestGate(load_identity(directory / "identity.yaml"), directory, secret(), deployment.clock, server=SERVER)
    headers = {"traceparent": TRACEPARENT}
    sent = body | {OUR_KINDS_FIELD: SPANS, OUR_LATENCY_FIELD: "interactive"}
    bare = ask(gate, path, body, key=deployment.acme).passed.json
    got = ask(gate, path, sent, key=deployment.acme, headers=headers).passed.json
    assert not any(field in str(bare) for field in FORGED)
    holders = [got]
    if path == "/generate":
        holders = got["sampling_params"] if isinstance(got["sampling_params"], list) else [got["sampling_params"]]
    for holder in holders:
        ours = {field: holder["custom_params"].pop(field) for field in OUR_THREE}
        assert ours == dict(zip(OUR_THREE, ([0, 512, "pasted_log", 600, 601, "x"], TRACE, "interactive"), strict=True))
        assert holder["custom_params"] in ({}, {"mine": 1})
    assert OUR_KINDS_FIELD not in got and "kv_transfer_params" not in got


@pytest.mark.parametrize("path", sorted(SCOPED))
def test_the_class_that_a_client_gives_its_request_goes_with_the_body_where_there_is_room(
    deployment: Deployment, path: str
) -> None:
    forged = {"kv_transfer_params": {OUR_LATENCY_FIELD: "interactive"}}
    for said in ("interactive", "batch", None):
        sent = {"prompt": "p", **forged} | ({} if said is None else {OUR_LATENCY_FIELD: said})
        got = ask(deployment.gate, path, sent, key=deployment.acme).passed.json
        carried = got.get("kv_transfer_params", {}).get(OUR_LATENCY_FIELD)
        assert carried == (said if SCOPED[path].room is Room.TRANSFER else None)
        assert OUR_LATENCY_FIELD not in got
        assert isinstance(deployment.verify(got), VerifiedToken)


@pytest.mark.parametrize("said", [7, "urgent", "Interactive", ["batch"], {"class": "batch"}, False])
def test_what_is_no_class_of_request_is_refused(deployment: Deployment, said: object) -> None:
    sent = {"prompt": "p", OUR_LATENCY_FIELD: said}
    assert ask(deployment.gate, body=sent, key=deployment.acme).status == 400
