"""A worker without a model: prompts as tokens, its own door, what a tenant finds, and what a stranger gets."""

from __future__ import annotations

import contextlib
import os
import sys
from collections.abc import Iterator
from concurrent.futures import Future, ThreadPoolExecutor
from pathlib import Path
from typing import Any

import httpx
import msgspec
import numpy as np
import pytest
import zmq
from sqlalchemy import select
from starlette.testclient import TestClient

pytest.importorskip("torch", reason="the worker's blocks are tensors")

from kvcustody.audit.store.database.engine import open_store
from kvcustody.audit.store.schema.ledger import incarnations
from kvcustody.governance.credentials.api_key_file import add_key
from kvcustody.governance.observability.metrics import worker_status
from kvcustody.governance.settings import Settings
from kvcustody.integrations.fleet_worker.engine import ModellessEngine
from kvcustody.integrations.fleet_worker.server import CHAT, ModellessServer, serve
from kvcustody.integrations.identity.from_settings import open_request_gate, open_verifier
from kvcustody.integrations.identity.middleware import IdentityMiddleware
from kvcustody.lab.fleet.local_processes import LocalProcesses, free_ports
from kvcustody.lab.fleet.prompt_tokens import tokens_of
from kvcustody.lab.replay.traces.token_ids import expand
from kvcustody.policies import library
from standins import builders
from standins.waiting import until

PROMPT = " ".join(f"word-{number}" for number in range(80))
WAIT_SECONDS = 60.0


@pytest.fixture(scope="module")
def world(tmp_path_factory: pytest.TempPathFactory) -> Iterator[tuple[TestClient, dict[str, str]]]:
    """A governed worker with a client's key for each of two tenants, and its HTTP server."""
    folder = tmp_path_factory.mktemp("modelless")
    settings, keys = settings_of(folder)
    engine = ModellessEngine(settings, blocks=256, hangs_every=2.0)
    engine.start()
    assert engine.serving.wait(WAIT_SECONDS) and engine.error is None, engine.error
    server = ModellessServer("worker-0", engine, open_verifier(settings).verify)
    gate = open_request_gate(settings)
    with TestClient(server.application(lambda served: IdentityMiddleware(served, gate))) as client:
        yield client, keys
    engine.stop()
    assert engine.error is None


def settings_of(folder: Path) -> tuple[Settings, dict[str, str]]:
    """A worker's settings in a folder, with a client's key for each of two tenants."""
    (folder / "policy.yaml").write_text(library.source("regulated-saas"))
    keys = {name: add_key(folder / "keys.yaml", {"name": name, "tenant": name}) for name in ("acme", "globex")}
    (folder / "identity.yaml").write_text("schema: kvcustody/identity@1\napi_keys: {path: keys.yaml}\n")
    made = Settings(
        **builders.worker_files(folder),
        identity_path=folder / "identity.yaml",
        scope_token_key_path=folder / "scope.key",
    )
    return made, keys


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
    until(lambda: ask(client, keys["acme"])[1] > 0, WAIT_SECONDS)
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


def test_blocks_of_prompts_are_told_with_their_tokens(tmp_path: Path) -> None:
    """A router computes its own hashes of them: what is told is the prompt, in the order of its blocks."""
    settings, keys = settings_of(tmp_path)
    [port] = free_ports(1)
    endpoint = f"tcp://127.0.0.1:{port}"
    told = {"kv_events_endpoint": endpoint, "kv_events_format": "dynamo", "kv_events_tokens": "published"}
    engine = ModellessEngine(settings.model_copy(update=told), blocks=64)
    stored = list[dict[str, Any]]()
    context = zmq.Context()
    listening = context.socket(zmq.SUB)
    listening.subscribe(b"")
    engine.start()
    assert engine.serving.wait(WAIT_SECONDS) and engine.error is None, engine.error
    listening.connect(endpoint)
    gate, verify = open_request_gate(settings), open_verifier(settings).verify
    application = ModellessServer("worker-0", engine, verify).application(lambda inner: IdentityMiddleware(inner, gate))
    wanted = tokens_of(PROMPT, engine.block_tokens).tolist()
    with TestClient(application) as client:

        def heard() -> bool:
            assert ask(client, keys["acme"], f"{PROMPT} {len(stored)}")[0] == 200
            while listening.poll(100):
                batch = msgspec.msgpack.decode(listening.recv_multipart()[2])
                stored.extend(event for event in batch[1] if event["type"] == "BlockStored")
            return any(event["token_ids"][: len(wanted)] == wanted for event in stored)

        until(heard, WAIT_SECONDS)
        said = engine._governor.call(lambda owner: worker_status(owner.stats(), 16)).result(WAIT_SECONDS)
    told_blocks = {key for event in stored for key in event["block_hashes"]}
    assert said["events_told_blocks.socket"] >= len(told_blocks) > 0, "none was evicted"
    assert said["events_sent.socket"] > 0 and said["events_lost.socket"] == 0
    engine.stop()
    context.destroy(linger=0)
    assert engine.error is None and all(event["cache_salt"] for event in stored)


def served(folder: Path) -> tuple[ModellessEngine, str, Future[None], ThreadPoolExecutor]:
    """One whose server runs, its address, and what comes of its end."""
    settings, _ = settings_of(folder)
    engine, [port] = ModellessEngine(settings, blocks=64), free_ports(1)
    pool = ThreadPoolExecutor(1)
    running = pool.submit(serve, engine, settings, port)
    health = f"http://127.0.0.1:{port}/health"

    def answers() -> bool:
        assert not running.done(), running.exception()
        with contextlib.suppress(httpx.HTTPError):
            return httpx.get(health).status_code == 200
        return False

    until(answers, WAIT_SECONDS)
    return engine, health, running, pool


def test_a_server_ends_with_its_engine(tmp_path: Path) -> None:
    """The control: until then it is healthy, and serves."""
    engine, health, running, pool = served(tmp_path)
    with pool:
        refused = engine.ask(None)  # type: ignore[arg-type] - what ends the engine's thread as a bug would
        assert isinstance(running.exception(WAIT_SECONDS), AttributeError) and not engine.is_running
        assert refused.result(1).status == 503
        with pytest.raises(httpx.ConnectError):
            httpx.get(health)


def test_an_engine_that_ended_is_not_healthy(tmp_path: Path) -> None:
    settings, _ = settings_of(tmp_path)
    engine = ModellessEngine(settings, blocks=64)
    with TestClient(ModellessServer("worker-0", engine, None).application(None)) as client:
        engine.start()
        assert engine.serving.wait(WAIT_SECONDS) and client.get("/health").status_code == 200
        engine.stop()
        assert client.get("/health").status_code == client.get("/get_load").status_code == 503


@pytest.mark.system("a worker that is told to end leaves no end on record")
def test_a_signal_ends_its_process_in_order(tmp_path: Path) -> None:
    settings, _ = settings_of(tmp_path)
    [port] = free_ports(1)
    environment = dict(os.environ) | {
        f"KVCUSTODY_{name.upper()}": str(value)
        for name, value in settings.model_dump(include=settings.model_fields_set).items()
    }
    with LocalProcesses(tmp_path / "logs") as processes:
        command = [sys.executable, "-m", "kvcustody.integrations.fleet_worker.server", "--port", str(port)]
        processes.start("worker", [*command, "--blocks", "64"], environment=environment)
        processes.wait_for("worker", f"http://127.0.0.1:{port}/health")
        processes.end("worker")
    store = open_store(tmp_path / "ledger.db")
    with store.connect() as connection:
        ends = connection.scalars(select(incarnations.c.ended_us)).all()
    store.dispose()
    assert len(ends) == 1 and ends[0] is not None
