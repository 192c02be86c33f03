"""Dynamo's selection service as a router: requests go where their prompt is under their name, and nowhere else."""

from __future__ import annotations

import http.client
import json
import threading
from collections.abc import Iterator
from typing import Any

import pytest
import zmq

from kvcustody.lab.fleet.dynamo_front import CHAT, DynamoFront, server
from kvcustody.lab.fleet.dynamo_selection import BLOCK_TOKENS, EventSource
from kvcustody.lab.fleet.local_processes import free_ports
from kvcustody.lab.fleet.prompt_tokens import tokens_of
from kvcustody.testkit.conform.scripts.layers.routers import RecorderServer
from standins.waiting import until

TEXT = "b7 b8 b9"


class World:
    """Two workers behind the front; the second says that it has `TEXT` under the name `acme`."""

    def __init__(self) -> None:
        self._context = zmq.Context()
        self.workers = [RecorderServer("w1"), RecorderServer("w2")]
        self.sources = [EventSource(self._context, number) for number in (1, 2)]
        taints = [("east",), ("west",)]
        told = [
            (one.url, source.endpoint, each)
            for one, source, each in zip(self.workers, self.sources, taints, strict=True)
        ]
        self.front = DynamoFront(told)
        until(self.front.is_ready, 30)
        [self.port] = free_ports(1)
        self._server = server(self.front, self.port)
        threading.Thread(target=self._server.serve_forever, daemon=True).start()
        self._tokens = [int(token) for token in tokens_of(TEXT, BLOCK_TOKENS)]
        until(self._is_told, 30)

    def _is_told(self) -> bool:
        """What is told before the service listens is lost, so it is told again."""
        self.sources[1].store([1, 2, 3], self._tokens, "acme")
        return {self.served_by("acme") for _ in range(8)} == {"w2"}

    def ask(self, body: Any, path: str = CHAT) -> tuple[int, Any]:
        connection = http.client.HTTPConnection("127.0.0.1", self.port, timeout=30)
        connection.request("POST", path, json.dumps(body), {"content-type": "application/json"})
        answer = connection.getresponse()
        return answer.status, json.loads(answer.read())

    def served_by(self, name: str, text: str = TEXT, **more: Any) -> str:
        body = {"model": "toy", "messages": [{"role": "user", "content": text}], "cache_salt": name, **more}
        status, said = self.ask(body)
        return str(said["choices"][0]["message"]["content"]) if status == 200 else str(status)

    def close(self) -> None:
        self._server.shutdown()
        self._server.server_close()
        self._context.destroy(linger=0)


@pytest.fixture(scope="module")
def world() -> Iterator[World]:
    made = World()
    yield made
    made.close()


def test_a_prompt_goes_to_its_worker_under_its_name_alone(world: World) -> None:
    assert {world.served_by("acme") for _ in range(12)} == {"w2"}
    others = [world.served_by(name) for name in ("globex", "b", "c", "d") * 5]
    assert set(others) == {"w1", "w2"}, "another name finds it nowhere, and is spread"


def test_taints_name_the_workers_that_may_serve(world: World) -> None:
    east = {"routing_constraints": {"required_taints": ["east"]}}
    assert {world.served_by("acme", nvext=east) for _ in range(8)} == {"w1"}
    nowhere = {"routing_constraints": {"required_taints": ["north"]}}
    assert world.served_by("acme", nvext=nowhere).startswith(("4", "5"))


def test_what_is_no_chat_completion_reaches_no_worker(world: World) -> None:
    before = [len(one.bodies) for one in world.workers]
    assert world.ask([1])[0] == world.ask({"messages": "x"})[0] == 400
    assert world.ask({}, "/generate")[0] == 404
    assert [len(one.bodies) for one in world.workers] == before


def test_a_worker_that_is_away_is_left_out() -> None:
    context, alive = zmq.Context(), RecorderServer("w1")
    sources = [EventSource(context, number) for number in (1, 2)]
    [dead] = free_ports(1)
    front = DynamoFront([(alive.url, sources[0].endpoint, ()), (f"http://127.0.0.1:{dead}", sources[1].endpoint, ())])
    until(front.is_ready, 30)
    body = json.dumps({"model": "toy", "messages": [{"role": "user", "content": "a b"}]}).encode()
    assert [front.complete(body, {}).status for _ in range(8)] == [200] * 8 and len(alive.bodies) == 8
    context.destroy(linger=0)
