"""A worker without a model: prompts as tokens, its own door, what a tenant finds, and what a stranger gets."""

from __future__ import annotations

import time
from collections.abc import Iterator
from typing import Any

import numpy as np
import pytest
from starlette.testclient import TestClient

pytest.importorskip("torch", reason="the worker's blocks are tensors")

from kvcustody.governance.credentials.api_key_file import add_key
from kvcustody.governance.settings import Settings
from kvcustody.integrations.fleet_worker.engine import ModellessEngine, tokens_of
from kvcustody.integrations.fleet_worker.server import CHAT, ModellessServer
from kvcustody.integrations.identity.from_settings import open_request_gate, open_verifier
from kvcustody.integrations.identity.middleware import IdentityMiddleware
from kvcustody.lab.replay.traces.token_ids import expand
from kvcustody.policies import library

PROMPT = " ".join(f"word-{number}" for number in range(80))
WAIT_SECONDS = 60.0


@pytest.fixture(scope="module")
def world(tmp_path_factory: pytest.TempPathFactory) -> Iterator[tuple[TestClient, dict[str, str]]]:
    """A governed worker with a client's key for each of two tenants, and its HTTP server."""
    folder = tmp_path_factory.mktemp("modelless")
    (folder / "policy.yaml").write_text(library.source("regulated-saas"))
    keys = {
        name: add_key(folder / "keys.yaml", {"name": name, "tenant": name}) for name in ("acme", "globex")
    }
    (folder / "identity.yaml").write_text("schema: kvcustody/identity@1\napi_keys: {path: keys.yaml}\n")
    settings = Settings(
        policy_path=folder / "policy.yaml",
        database_url=f"sqlite:///{folder / 'ledger.db'}",
        spill_path=folder / "spill",
        root_key_path=folder / "root.key",
        keyring_path=folder / "keys.json",
        identity_path=folder / "identity.yaml",
        scope_token_key_path=folder / "scope.key",
    )
    engine = ModellessEngine(settings, blocks=256, hangs_every=2.0)
    engine.start()
    assert engine.serving.wait(WAIT_SECONDS) and engine.error is None, engine.error
    server = ModellessServer("worker-0", engine, open_verifier(settings).verify)
    gate = open_request_gate(settings)
    with TestClient(server.application(lambda served: IdentityMiddleware(served, gate))) as client:
        yield client, keys
    engine.stop()
    assert engine.error is None


def ask(client: TestClient, key: str, prompt: str = PROMPT, **more: Any) -> tuple[int, int]:
    body = {"model": "toy", "messages": [{"role": "user", "content": prompt}], "max_tokens": 2, **more}
    answer = client.post(CHAT, json=body, headers={"authorization": f"Bearer {key}"})
    if answer.status_code != 200:
        return answer.status_code, 0
    return 200, answer.json()["usage"]["prompt_tokens_details"]["cached_tokens"]


def test_a_tenant_finds_its_own_prompt_and_no_other_one_does(
    world: tuple[TestClient, dict[str, str]],
) -> None:
    client, keys = world
    assert ask(client, keys["acme"]) == (200, 0)
    until = time.monotonic() + WAIT_SECONDS
    while ask(client, keys["acme"])[1] == 0:
        assert time.monotonic() < until, "its own prompt is never found"
    assert ask(client, keys["globex"]) == (200, 0)


def test_a_stranger_gets_nothing_but_what_routers_ask_about(
    world: tuple[TestClient, dict[str, str]],
) -> None:
    client, keys = world
    assert ask(client, "nobody-s-key-of-twenty-characters")[0] == 401
    assert client.get("/health").status_code == client.get("/v1/models").status_code == 200
    assert client.post("/health", json={}).status_code != 200
    assert ask(client, keys["acme"], " ".join(f"x{number}" for number in range(256 * 16)))[0] == 400


def test_blocks_of_a_trace_are_its_tokens_and_other_words_are_one_each() -> None:
    block = expand(np.array([31]), 16)
    assert np.array_equal(tokens_of("b1f", 16), block)
    mixed = tokens_of("hello b1f world", 16)
    assert len(mixed) == 18 and np.array_equal(mixed[1:17], block)
    assert len(tokens_of("", 16)) == 0 and mixed[0] == tokens_of("hello", 16)[0]


def test_a_worker_without_custody_says_its_name_and_finds_nothing() -> None:
    with TestClient(ModellessServer("plain-1", None, None).application(None)) as client:
        body = {"messages": [{"role": "user", "content": "a b c"}]}
        said = client.post(CHAT, json=body).json()
        assert said["choices"][0]["message"]["content"] == "plain-1"
        assert said["usage"]["prompt_tokens"] == 3
        assert client.post(f"{CHAT}/render", json=body).json()["token_ids"] == [97, 32, 98, 32, 99]
