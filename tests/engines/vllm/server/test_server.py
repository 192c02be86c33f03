"""`vllm serve` from outside: who gets in, what a tenant may find, and that answers are vLLM's own, byte for byte."""

from __future__ import annotations

import base64
import json
import re
import struct
import time

import pytest

from standins.engines.vllm.http_server import HttpServer, Reply
from standins.engines.vllm.local_engine import BLOCK
from standins.engines.vllm.tiny_model import words

CANARY = [
    337,
    211,
    489,
    173,
    499,
    131,
    457,
    283,
    389,
    151,
    433,
    269,
    419,
    197,
    359,
    241,
]  # sixteen tokens of one prompt
SALT = "canary-salt-5b1f0c9e7d"
PATHS = ("/v1/completions", "/v1/chat/completions")


@pytest.fixture(scope="module")
def servers(model, site, new_deployment, tmp_path_factory):
    """A plain and a governed server, started together."""
    folder = tmp_path_factory.mktemp("servers")
    plain = HttpServer(model, site, folder)
    governed = HttpServer(model, site, folder, deployment=new_deployment())
    for tenant in ("alpha", "beta"):
        governed.deployment.api_key(tenant)
    governed.deployment.operator_key()
    try:
        yield plain.wait(), governed.wait()
    finally:
        plain.close()
        governed.close()


@pytest.fixture
def plain(servers) -> HttpServer:
    return servers[0]


@pytest.fixture
def governed(servers) -> HttpServer:
    return servers[1]


def request_for(path: str, tokens: list[int], **more) -> dict:
    text = words(tokens)
    prompt = {"prompt": text} if path == "/v1/completions" else {"messages": [{"role": "user", "content": text}]}
    return prompt | {"max_tokens": 12, "temperature": 0, "seed": 3} | more


def normalised(reply: Reply) -> str:
    """The answer without what differs between two servers: ids, the second, and the digest of their configuration."""
    text = re.sub(r'"id":"[^"]*"', '"id":""', reply.text)
    text = re.sub(r'"system_fingerprint":"[^"]*"', '"system_fingerprint":""', text)
    return re.sub(r'"created":\d+', '"created":0', text)


def assembled(reply: Reply) -> dict[int, dict[str, object]]:
    """A stream put together, choice by choice: how vLLM interleaves choices and cuts chunks depends on the moment."""
    choices: dict[int, dict[str, object]] = {}
    for event in reply.events[:-1]:
        for choice in event["choices"]:
            whole = choices.setdefault(choice["index"], {"text": "", "logprobs": [], "finish": None})
            whole["text"] += choice.get("text") or choice.get("delta", {}).get("content") or ""
            logprobs = choice.get("logprobs") or {}
            whole["logprobs"] += logprobs.get("content") or list(logprobs.get("token_logprobs") or [])
            whole["finish"] = choice["finish_reason"] or whole["finish"]
    return choices


@pytest.mark.parametrize("path", PATHS)
@pytest.mark.parametrize("stream", [False, True], ids=["whole", "streamed"])
@pytest.mark.parametrize("n", [1, 2])
def test_answers_are_the_plain_servers_byte_for_byte(plain, governed, path, stream, n):
    tokens = [(at * (3 + stream) + 40 * n) % 470 + 20 for at in range(70)]
    more = {"stream": True, "stream_options": {"include_usage": True}} if stream else {}
    body = request_for(path, tokens, n=n, logprobs=True if "chat" in path else 2, **more)
    body["temperature"] = 0 if n == 1 else 0.7  # vLLM refuses several greedy answers
    expected, got = plain.post(path, body), governed.post(path, body, tenant="alpha")
    assert got.status == expected.status == 200
    assert len(normalised(expected)) > 200
    if stream:
        assert got.events[-1] == "[DONE]"
        assert assembled(got) == assembled(expected)
        assert all(len(choice["logprobs"]) == 12 for choice in assembled(got).values())
    if not stream or (n == 1 and len(got.events) == len(expected.events)):
        assert normalised(got) == normalised(expected)


def test_sampling_with_a_seed_is_unchanged(plain, governed):
    body = request_for("/v1/completions", list(range(30, 60)), max_tokens=40) | {"temperature": 1.0}
    expected = normalised(plain.post("/v1/completions", body))
    assert normalised(governed.post("/v1/completions", body, tenant="alpha")) == expected
    assert normalised(plain.post("/v1/completions", body | {"seed": 4})) != expected, "positive control"


@pytest.mark.parametrize("path", PATHS)
def test_nobody_gets_in_without_identity(plain, governed, path):
    body = request_for(path, [40, 41, 42])
    assert plain.post(path, body).status == 200
    for headers in (
        {},
        {"authorization": "Bearer kvc-nobody-has-this-key-at-all"},
        {"authorization": "Basic x"},
    ):
        refused = governed.post(path, body, **headers)
        assert refused.status == 401
        assert "choices" not in refused.json
    assert governed.get("/health").status == 200


def test_own_hits_and_no_foreign_ones(plain, governed):
    body = request_for("/v1/completions", list(range(100, 100 + 3 * BLOCK + 1)))
    assert [plain.post("/v1/completions", body).cached_tokens for _ in range(2)] == [0, 3 * BLOCK]
    asked = [governed.post("/v1/completions", body, tenant=tenant).cached_tokens for tenant in ("alpha", "beta")]
    asked += [governed.post("/v1/completions", body, tenant=tenant).cached_tokens for tenant in ("alpha", "beta")]
    assert asked == [0, 0, 3 * BLOCK, 3 * BLOCK]


def test_a_client_cannot_choose_its_scope(plain, governed):
    """The same salt in two hands: without governance it is a meeting place; with it, it can only narrow."""
    body = request_for("/v1/completions", list(range(200, 200 + 3 * BLOCK + 1)), cache_salt=SALT)
    assert [plain.post("/v1/completions", body).cached_tokens for _ in range(2)] == [0, 3 * BLOCK]
    assert governed.post("/v1/completions", body, tenant="alpha").cached_tokens == 0
    assert governed.post("/v1/completions", body, tenant="beta").cached_tokens == 0
    assert governed.post("/v1/completions", body, tenant="alpha").cached_tokens == 3 * BLOCK
    token = governed.deployment.token("alpha")
    for salt in (token, "other", None):
        bare = {name: value for name, value in body.items() if name != "cache_salt"}
        salted = bare if salt is None else bare | {"cache_salt": salt}
        assert governed.post("/v1/completions", salted, tenant="beta").cached_tokens == 0


def test_a_client_that_hangs_up_frees_its_blocks(governed):
    body = request_for("/v1/completions", list(range(300, 400)), max_tokens=400, ignore_eos=True)
    stream = governed.begin("/v1/completions", body, tenant="alpha")
    next(stream)
    stream.close()
    until = time.monotonic() + 60
    while time.monotonic() < until and _running(governed):
        time.sleep(0.2)
    assert _running(governed) == 0


def _running(server: HttpServer) -> float:
    found = re.search(
        r"^vllm:num_requests_running\{[^}]*\} (\S+)", server.get("/metrics", operator=True).text, re.MULTILINE
    )
    return float(found[1])


def test_no_secret_and_no_prompt_left_the_engine(governed):
    """The last test of this server: everything that it and its deployment wrote, searched in every spelling."""
    deployment = governed.deployment
    alpha = deployment.api_key("alpha")
    body = request_for("/v1/completions", CANARY * 8, cache_salt=SALT)
    assert [governed.post("/v1/completions", body, tenant="alpha").cached_tokens for _ in range(2)] == [
        0,
        3 * BLOCK,
    ]
    forged = deployment.token("alpha")[:-1]
    governed.post("/v1/completions", body | {"cache_salt": forged}, tenant="alpha")
    governed.post("/v1/completions", body, authorization="Bearer kvc-unknown-canary-key-000")
    printed = governed.close()
    assert "worker stopped" in printed, printed[-2000:]
    secrets = {
        "salt": SALT.encode(),
        "key": alpha.encode(),
        "token": forged.encode(),
        "bad key": b"kvc-unknown-canary-key",
    }
    for key_file in ("scope.key", "root.key"):
        secrets[key_file] = (deployment.folder / key_file).read_bytes()
    secrets["prompt"] = words(CANARY).encode()
    secrets["prompt, 32 bit"] = struct.pack(f"<{len(CANARY)}i", *CANARY)
    secrets["prompt, big-endian"] = struct.pack(f">{len(CANARY)}i", *CANARY)
    secrets["prompt, 64 bit"] = struct.pack(f"<{len(CANARY)}q", *CANARY)
    secrets["prompt, listed"] = ", ".join(map(str, CANARY)).encode()
    secrets["prompt, JSON"] = ",".join(map(str, CANARY)).encode()
    private = {"scope.key", "root.key"}
    sinks = {"log": printed.encode()}
    sinks |= {
        path.name: path.read_bytes()
        for path in deployment.folder.rglob("*")
        if path.is_file() and path.name not in private
    }
    ledger = b"".join(content for sink, content in sinks.items() if sink.startswith("ledger.db"))
    assert b"alpha" in ledger, "positive control: the ledger is where it is looked for"
    leaks = [
        (name, sink, spelling)
        for name, secret in secrets.items()
        for sink, content in sinks.items()
        for spelling, text in spellings(secret).items()
        if text in content
    ]
    assert leaks == []


def spellings(secret: bytes) -> dict[str, bytes]:
    """The same bytes as they might be written down."""
    forms = {"raw": secret, "hex": secret.hex().encode(), "HEX": secret.hex().upper().encode()}
    for shift in range(3):  # base64 depends on where in three bytes it starts
        coded = base64.b64encode(b"\0" * shift + secret)
        forms[f"base64+{shift}"] = coded[4 if shift else 0 : -4]
    forms["JSON"] = json.dumps(secret.decode("latin-1"))[1:-1].encode()
    forms["UTF-16"] = secret.decode("latin-1").encode("utf-16-le")
    return forms
