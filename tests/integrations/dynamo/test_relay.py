"""The relay on real sockets: what passes, what is refused, and a clear wherever the engine's numbers have a hole."""

from __future__ import annotations

import socket
import subprocess
import sys
import time
from collections.abc import Iterator
from typing import Any

import msgspec
import pytest
import zmq

from kvcustody.errors import ConfigError
from kvcustody.integrations.dynamo.relay import ScopedRelay, main

LOCAL = "tcp://127.0.0.1:0"
SCOPED = {"type": "BlockStored", "block_hashes": [1], "token_ids": [1], "block_size": 1, "cache_salt": "s"}
UNSCOPED = ["BlockStored", [1], None, [1], 1, None, "GPU", None, [["s"]]]
CLEAR = {"type": "AllBlocksCleared"}


class World:
    """An engine, the relay, and a subscriber behind it."""

    def __init__(self) -> None:
        self._context = zmq.Context()
        self._engine = self._context.socket(zmq.PUB)
        self._engine.bind(LOCAL)
        self.relay = ScopedRelay(self._engine.getsockopt_string(zmq.LAST_ENDPOINT), LOCAL)
        self._sub = self._context.socket(zmq.SUB)
        self._sub.setsockopt(zmq.SUBSCRIBE, b"")
        self._sub.connect(self.relay.endpoint)
        self.number = 0
        until = time.monotonic() + 60
        while not self.sent(CLEAR):
            assert time.monotonic() < until

    def sent(self, *events: Any, skipped: int = 0) -> list[tuple[int, list[Any]]]:
        """Send one batch; what came out behind the relay."""
        self.number += skipped
        payload = msgspec.msgpack.encode([1.0, events, 0])
        self._engine.send_multipart([b"", self.number.to_bytes(8, "big"), payload])
        self.number += 1
        self.relay.step(100)
        got = []
        while self._sub.poll(100):
            frames = self._sub.recv_multipart()
            got.append((int.from_bytes(frames[1], "big"), msgspec.msgpack.decode(frames[2])[1]))
        return got

    def close(self) -> None:
        self.relay.close()
        self._context.destroy(linger=0)


@pytest.fixture
def world() -> Iterator[World]:
    made = World()
    yield made
    made.close()


def test_only_scoped_stores_pass_and_numbers_have_no_hole(world: World) -> None:
    ((first, events),) = world.sent(SCOPED, UNSCOPED, ["BlockRemoved", [1]])
    assert events == [SCOPED, ["BlockRemoved", [1]]]
    assert world.sent(UNSCOPED) == [] and world.relay.stats().refused == 2
    assert world.sent(SCOPED) == [(first + 1, [SCOPED])]


def test_a_hole_or_a_new_life_of_the_engine_is_a_clear(world: World) -> None:
    (clear, after) = world.sent(SCOPED, skipped=3)
    assert clear[1] == [CLEAR] and after[1] == [SCOPED] and after[0] == clear[0] + 1
    world.number = 0
    assert [CLEAR] in [events for _, events in world.sent(SCOPED)]


def test_it_binds_to_loopback_alone() -> None:
    with pytest.raises(ConfigError, match="kv_events_remote"):
        ScopedRelay(LOCAL, "tcp://0.0.0.0:5560")


@pytest.mark.parametrize(
    ("engine", "publish", "words"),
    [
        (LOCAL, "tcp://0.0.0.0:5560", "allow it"),
        ("127.0.0.1:5557", "tcp://127.0.0.1:*", "`127.0.0.1:5557` is no endpoint"),
        (LOCAL, "tcp://127.0.0.1:99999", "`tcp://127.0.0.1:99999` is no endpoint"),
    ],
)
def test_the_command_says_in_one_line_what_it_cannot_use(
    engine: str, publish: str, words: str, capsys: pytest.CaptureFixture[str]
) -> None:
    with pytest.raises(SystemExit) as ended:
        main(["--engine", engine, "--publish", publish])
    (line,) = capsys.readouterr().err.splitlines()
    assert ended.value.code == 2 and line.startswith("error: ") and words in line


def test_the_command_ends_in_order() -> None:
    """As a process: it binds, passes on, and leaves with 0 when it is asked to end."""
    context = zmq.Context()
    engine, sub = context.socket(zmq.PUB), context.socket(zmq.SUB)
    engine.bind(LOCAL)
    with socket.socket() as found:
        found.bind(("127.0.0.1", 0))
        publish = f"tcp://127.0.0.1:{found.getsockname()[1]}"
    sub.setsockopt(zmq.SUBSCRIBE, b"")
    sub.connect(publish)
    where = ["--engine", engine.getsockopt_string(zmq.LAST_ENDPOINT), "--publish", publish]
    process = subprocess.Popen([sys.executable, "-m", "kvcustody.integrations.dynamo.relay", *where])
    try:
        until, number = time.monotonic() + 60, 0
        while not sub.poll(50):
            assert time.monotonic() < until and process.poll() is None
            engine.send_multipart(
                [b"", number.to_bytes(8, "big"), msgspec.msgpack.encode([1.0, [UNSCOPED, SCOPED], 0])]
            )
            number += 1
        told: list[Any] = []
        while SCOPED not in told and sub.poll(5_000):
            told = msgspec.msgpack.decode(sub.recv_multipart()[2])[1]
        assert SCOPED in told and UNSCOPED not in told
        process.terminate()
        assert process.wait(30) == 0
    finally:
        process.kill()
        process.wait(30)
        context.destroy(linger=0)
