"""Batches as zstd frames: what comes plain comes compressed, and no frame gets more room than a batch may have."""

from __future__ import annotations

import resource
from typing import Any

import pytest
import zstandard

from kvcustody.audit.write.compression import CompressionError, compress, decompress
from standins.service.service_world import MEDIA, Worker, register

MAX = 16 << 20


def put(client: Any, key: str, worker: Worker, body: bytes, encoding: str | None = "zstd") -> Any:
    headers = MEDIA | ({} if encoding is None else {"Content-Encoding": encoding})
    return client("PUT", f"{worker.path}/batches/1", key, content=body, headers=headers)


@pytest.fixture
def worker(client: Any, people: Any) -> Worker:
    made = Worker("worker")
    register(client, people["worker"], made)
    return made


def test_a_compressed_batch_is_the_batch(client: Any, people: Any, worker: Worker) -> None:
    batch = worker.batch([worker.started(), *worker.request("acme")])
    key, sent = people["worker"], compress(batch.body)
    assert len(sent) < len(batch.body)
    assert put(client, key, worker, sent).json()["added"] == len(batch.leaves)
    assert put(client, key, worker, batch.body, None).json()["known"] == len(batch.leaves)
    answer = put(client, key, worker, sent, None)
    assert answer.status_code in (400, 422), "control: unnamed, a frame is no batch"


def test_an_encoding_that_is_not_known_is_refused_with_the_one_that_is(
    client: Any, people: Any, worker: Worker
) -> None:
    answer = put(client, people["worker"], worker, b"x", "gzip")
    assert answer.status_code == 415 and answer.headers["accept-encoding"] == "zstd"


@pytest.mark.parametrize("stated", [True, False])
def test_a_bomb_is_refused_before_it_is_inflated(client: Any, people: Any, worker: Worker, stated: bool) -> None:
    frames = zstandard.ZstdCompressor(write_content_size=stated)
    bomb = frames.compress(bytes(1 << 30))
    assert len(bomb) < 100_000
    before = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
    answer = put(client, people["worker"], worker, bomb)
    assert answer.status_code == (413 if stated else 400), answer.text
    assert resource.getrusage(resource.RUSAGE_SELF).ru_maxrss - before < 200 << 10  # KiB


def test_a_batch_counts_as_what_it_becomes(make_service: Any, make_people: Any, make_client: Any) -> None:
    service = make_service(batch_bytes_max=100_000)
    client, key = make_client(service), make_people(service)["worker"]
    made = Worker("worker")
    register(client, key, made)
    whole = b"[]" + b" " * 99_998
    assert put(client, key, made, compress(whole)).status_code == 200
    assert put(client, key, made, compress(whole + b" ")).status_code == 413
    assert put(client, key, made, whole + b" ", None).status_code == 413


FRAME = compress(b"[]")
LIES = bytearray(compress(b"a" * 100_000))
LIES[LIES.find((100_000).to_bytes(4, "little"))] -= 1


@pytest.mark.parametrize(
    "body",
    [
        FRAME + b"x",
        FRAME + FRAME,
        FRAME[:-1],
        FRAME[:4] + b"\xff" + FRAME[5:],
        bytes(LIES),
        b"",
        b"[]",
        compress(b""),
        compress(b"") + b"x",
        b"\x50\x2a\x4d\x18\x04\0\0\0abcd",
        b"\x50\x2a\x4d\x18\x04\0\0\0abcd" + FRAME,
    ],
)
def test_what_is_not_one_whole_frame_is_refused(client: Any, people: Any, worker: Worker, body: bytes) -> None:
    answer = put(client, people["worker"], worker, body)
    assert answer.status_code == 400 and answer.json()["type"].endswith(":malformed"), answer.text
    assert put(client, people["worker"], worker, FRAME).status_code == 200, "control"


def test_a_frame_holds_what_was_put_in() -> None:
    data = bytes(range(256)) * 1000
    assert decompress(compress(data), bytes_max=len(data)) == data
    with pytest.raises(CompressionError) as told:
        decompress(compress(data), bytes_max=len(data) - 1)
    assert told.value.over
