"""Hostile requests at the door: no crash, no pass without a credential, and memory that does not grow."""

from __future__ import annotations

import asyncio
import gc
import json
import random
import resource
from collections.abc import AsyncIterator, Iterator
from pathlib import Path
from typing import Any

import pytest
from envoy.config.core.v3 import base_pb2
from envoy.service.ext_proc.v3 import external_processor_pb2 as messages

from kvcustody.integrations.door.external_processor import ExternalProcessor
from standins.integrations.door_world import Signers, make_signers
from standins.integrations.fleet_edge import FleetEdge

BODY_MAX = 4096
PATHS = (
    "/v1/completions",
    "/v1/chat/completions",
    "/v1/embeddings",
    "/v1/responses",
    "/health",
    "/",
    "/../admin",
)


@pytest.fixture(scope="module")
def signers() -> Signers:
    return make_signers()


class Hostile:
    """Streams of one request each: a seed gives the same ones."""

    def __init__(self, fleet: FleetEdge, seed: int) -> None:
        self._chance = random.Random(seed)
        self._keys = [fleet.clients.acme, fleet.clients.globex, fleet.clients.alice]

    def streams(self, count: int) -> Iterator[tuple[bool, list[Any]]]:
        """Whether a request has a credential that counts, and its messages."""
        for _ in range(count):
            credential, is_known = self._credential()
            fields = {":method": "POST", ":path": self._chance.choice(PATHS), **credential, **self._header()}
            held = [
                base_pb2.HeaderValue(key=name, raw_value=value.encode("utf-8", "replace"))
                for name, value in fields.items()
            ]
            sent = messages.HttpHeaders(headers=base_pb2.HeaderMap(headers=held))
            body = messages.HttpBody(body=self._body(), end_of_stream=True)
            yield (
                is_known,
                [
                    messages.ProcessingRequest(request_headers=sent),
                    messages.ProcessingRequest(request_body=body),
                ],
            )

    def _credential(self) -> tuple[dict[str, str], bool]:
        chance = self._chance
        key = chance.choice(self._keys)
        wrong = chance.choice([key[:-1], key + "x", "", "kvd1.AAAA", "eyJ.a.b", "\u0141", "k" * 5000])
        is_known = chance.random() < 0.5
        return {"authorization": f"Bearer {key if is_known else wrong}"}, is_known

    def _header(self) -> dict[str, str]:
        chance = self._chance
        name = chance.choice(
            [
                "x-request-id",
                "x-kvcustody-subject",
                "x-kvcustody-classification",
                "content-encoding",
                "content-length",
            ]
        )
        value = chance.choice(["", "a", "../x", "\u0001", "9" * 30, "\u202eabc", "x" * 300, "-1"])
        return {name: value} if chance.random() < 0.5 else {}

    def _body(self) -> bytes:
        chance = self._chance
        base: dict[str, Any] = {
            "prompt": "p",
            "messages": [],
            "n": chance.choice([1, 0, -1, 70_000, "2", None]),
        }
        base |= {
            "cache_salt": chance.choice(["s", "", 7, None, "x" * 200]),
            "nvext": chance.choice([{}, [], 1]),
        }
        base["sampling_params"] = chance.choice([{}, [{}], [1, {"extra_args": 1}], "x"])
        data = json.dumps(base).encode()
        kind = chance.randrange(6)
        if kind == 0:
            return chance.randbytes(chance.randrange(64))
        if kind == 1:
            return b"[" * chance.randrange(1, 3000)
        if kind == 2:
            return b'{"a":1,' + data[1:-1] + b',"a":2}'
        if kind == 3:
            return data + b" " * (BODY_MAX + 1)
        if kind == 4:
            place = chance.randrange(len(data))
            return data[:place] + bytes([chance.randrange(256)]) + data[place + 1 :]
        return data


async def _answers(processor: ExternalProcessor, sent: list[Any]) -> list[Any]:
    async def each() -> AsyncIterator[Any]:
        for message in sent:
            yield message

    return [answer async for answer in processor.Process(each(), None)]


def _attack(fleet: FleetEdge, seed: int, count: int) -> dict[str, int]:
    """How the requests ended, by status; 0 is passed on."""
    processor = ExternalProcessor(fleet.edge, body_bytes_max=BODY_MAX, under_way_bytes_max=1 << 20)
    statuses: dict[str, int] = {}

    async def run() -> None:
        for is_known, sent in Hostile(fleet, seed).streams(count):
            last = (await _answers(processor, sent))[-1]
            status = last.immediate_response.status.code
            assert status != 500, sent
            changed = last.WhichOneof("response") == "request_body" and last.request_body.response.HasField(
                "body_mutation"
            )
            assert is_known or not changed, sent
            statuses[str(status)] = statuses.get(str(status), 0) + 1

    asyncio.run(run())
    return statuses


@pytest.mark.parametrize("count", [1_000, pytest.param(100_000, marks=pytest.mark.soak)])
def test_hostile_requests_crash_nothing_and_pass_nothing(tmp_path: Path, signers: Signers, count: int) -> None:
    fleet = FleetEdge(tmp_path, signers)
    found = _attack(fleet, 1, count)
    assert found.keys() >= {"0", "400", "401", "403", "413"}, found
    if count >= 100_000:
        gc.collect()
        before = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
        _attack(fleet, 2, count)
        grown = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss - before
        assert grown < 16 << 10, f"{grown} KiB more after as many requests again"
