"""Two tenants, one prompt, and Dynamo's standalone indexer in a process of its own."""

from __future__ import annotations

import json
import random
import socket
import subprocess
import sys
import time
import urllib.request
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import msgspec
import zmq

from kvcustody.governance.edge.current_namespaces import CurrentNamespaces
from kvcustody.governance.edge.named_requester import NamedRequester
from kvcustody.integrations.events.block_event import BlockEvent, EventScope, removed, stored
from standins.integrations.router_names import lasting_names

ISSUER = "https://idp.example"
BLOCK = 16
BLOCKS = 4
ACME = EventScope("acme", "tenant", "internal", 3, 5, NamedRequester(ISSUER, "acme"), NamedRequester(ISSUER, "acme"))
GLOBEX = EventScope("globex", "tenant", "internal", 4, 5, NamedRequester(ISSUER, "globex"))
ALICE = EventScope("acme", "subject", "internal", 6, 5, NamedRequester(ISSUER, "acme", "alice"))
PATIENCE_SECONDS = 20.0


def namespaces() -> CurrentNamespaces:
    return lasting_names(bytes(range(32)))


def prompt(number: int) -> list[int]:
    """Tokens of one prompt."""
    draw = random.Random(number)
    return [draw.randrange(30_000) for _ in range(BLOCK * BLOCKS)]


def keys(number: int, blocks: int = BLOCKS) -> bytes:
    return random.Random(1000 + number).randbytes(32 * BLOCKS)[: 32 * blocks]


def some_stored(number: int, scope: EventScope) -> BlockEvent:
    """The whole of a prompt's blocks, in one tenant's cache: keys are the tenant's, tokens the prompt's."""
    mine = keys(number * 10 + scope.domain)
    return stored(scope, mine, residency=7, block_tokens=BLOCK, tokens=prompt(number))


def some_removed(number: int, scope: EventScope, kept: int = 0) -> BlockEvent:
    return removed(scope, keys(number * 10 + scope.domain)[32 * kept :], cause="expired", residency=7)


def free_port() -> int:
    with socket.socket() as found:
        found.bind(("127.0.0.1", 0))
        port: int = found.getsockname()[1]
        return port


class Indexer:
    """The indexer of one worker, and questions to it."""

    def __init__(self, port: int) -> None:
        self.port = port

    def call(self, path: str, body: dict[str, Any] | None = None) -> Any:
        data = None if body is None else json.dumps(body).encode()
        head = {"Content-Type": "application/json"}
        request = urllib.request.Request(f"http://127.0.0.1:{self.port}{path}", data=data, headers=head)
        with urllib.request.urlopen(request, timeout=10) as answer:
            return json.loads(answer.read())

    def tokens_found(self, tokens: list[int], namespace: str | None = None) -> int:
        """Tokens of the prompt that worker 1 has on its device, as a router of that namespace is told."""
        scoped = {} if namespace is None else {"cache_salt": namespace}
        scores = self.call("/query", {"token_ids": tokens, "model_name": "m", **scoped})["scores"]
        return int(scores.get("1", {}).get("0", 0))

    def settles(self, condition: Callable[[], bool]) -> bool:
        until = time.monotonic() + PATIENCE_SECONDS
        while not condition():
            if time.monotonic() > until:
                return False
            time.sleep(0.05)
        return True


@contextmanager
def indexer(endpoint: str, log: Path) -> Iterator[Indexer]:
    """Dynamo's indexer, subscribed to `endpoint`."""
    indexer = Indexer(free_port())
    command = [
        *(sys.executable, "-m", "dynamo.indexer", "--block-size", str(BLOCK), "--port", str(indexer.port)),
        *("--workers", f"1={endpoint}", "--model-name", "m"),
    ]
    with log.open("w") as output:
        process = subprocess.Popen(command, stdout=output, stderr=subprocess.STDOUT)
        try:
            assert indexer.settles(lambda: process.poll() is not None or _answers(indexer)), log.read_text()
            assert process.poll() is None, log.read_text()
            yield indexer
        finally:
            process.terminate()
            process.wait(20)


def _answers(found: Indexer) -> bool:
    try:
        return found.call("/workers")[0]["status"] == "active"
    except OSError:
        return False


class RawPublisher:
    """An engine that nobody governs: whatever it is given goes out."""

    def __init__(self) -> None:
        self._context = zmq.Context()
        self._pub = self._context.socket(zmq.PUB)
        self._pub.bind("tcp://127.0.0.1:0")
        self.endpoint = self._pub.getsockopt_string(zmq.LAST_ENDPOINT)
        self._sequence = 0

    def send(self, *events: Any) -> None:
        self.forward(msgspec.msgpack.encode([time.time(), events, 0]))

    def forward(self, payload: bytes) -> None:
        self._pub.send_multipart([b"", self._sequence.to_bytes(8, "big"), payload])
        self._sequence += 1

    def close(self) -> None:
        self._context.destroy(linger=0)


def hashes(count: int = BLOCKS) -> list[int]:
    draw = random.Random(time.monotonic_ns())
    return [draw.randrange(-(2**63), 2**63) for _ in range(count)]
