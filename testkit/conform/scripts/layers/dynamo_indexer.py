"""To whom does Dynamo's prefix index reveal where a tenant's blocks are?

    python dynamo_indexer.py unscoped-events        # needs: ai-dynamo-runtime, pyzmq and msgspec

The standalone indexer runs in a process of its own on loopback, and reads events as engines send them.
"""

from __future__ import annotations

import json
import os
import socket
import subprocess
import sys
import time
import urllib.request
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any

BLOCK, BLOCKS = 16, 32
TOKENS = list(range(BLOCK * BLOCKS))
HASHES = [number * 0x9E3779B97F4A7C % 2**62 for number in range(1, BLOCKS + 1)]


def positional(salt: str) -> list[Any]:
    """Return the event in vLLM's form: an array, whose extra keys begin with the salt."""
    extra = [[salt], *[None] * (BLOCKS - 1)]
    return ["BlockStored", HASHES, None, TOKENS, BLOCK, None, "GPU", None, extra]


def named(salt: str) -> dict[str, Any]:
    """Return the event in Dynamo's own form."""
    body = {"block_hashes": HASHES, "parent_block_hash": None, "token_ids": TOKENS, "block_size": BLOCK}
    return {"type": "BlockStored", **body, "lora_id": None, "medium": "GPU", "cache_salt": salt}


class Index:
    """An indexer of one worker, and requests to it."""

    def __init__(self, port: int) -> None:
        self._url = f"http://127.0.0.1:{port}"

    def call(self, path: str, body: Any = None) -> Any:
        """Return its answer."""
        data = None if body is None else json.dumps(body).encode()
        request = urllib.request.Request(self._url + path, data, {"Content-Type": "application/json"})  # noqa: S310
        with urllib.request.urlopen(request, timeout=10) as answer:  # noqa: S310 - loopback
            return json.loads(answer.read())

    def blocks(self, salt: str | None, tokens: list[int] = TOKENS) -> int:
        """Return how many of the prompt's blocks the indexer reveals to a client with this salt."""
        scope = {} if salt is None else {"cache_salt": salt}
        scores = self.call("/query", {"token_ids": tokens, "model_name": "m", **scope})["scores"]
        return int(scores.get("1", {}).get("0", 0)) // BLOCK

    def is_up(self) -> bool:
        """Return whether the indexer listens to its worker."""
        try:
            return bool(self.call("/workers")[0]["status"] == "active")
        except OSError:
            return False


@contextmanager
def indexer(endpoint: str) -> Iterator[Index]:
    """Yield an indexer that listens to `endpoint`."""
    with socket.socket() as found:
        found.bind(("127.0.0.1", 0))
        port = found.getsockname()[1]
    process = subprocess.Popen(  # noqa: S603 - this interpreter
        [
            *(sys.executable, "-m", "dynamo.indexer", "--block-size", str(BLOCK), "--port", str(port)),
            *("--workers", f"1={endpoint}", "--model-name", "m"),
        ],
        stdout=subprocess.DEVNULL,
        stderr=subprocess.DEVNULL,
        env={**os.environ, "DYN_TCP_RPC_HOST": "127.0.0.1"},
    )
    try:
        index = Index(port)
        wait(index.is_up, "the indexer did not start")
        yield index
    finally:
        process.kill()
        process.wait(20)


def wait(until: Callable[[], bool], otherwise: str) -> None:
    """Wait up to 30 seconds until the condition holds.

    Raises:
        RuntimeError: it does not hold in time.
    """
    end = time.monotonic() + 30
    while not until():
        if time.monotonic() > end:
            raise RuntimeError(otherwise)
        time.sleep(0.05)


@contextmanager
def stored(event: Any, salt: str | None) -> Iterator[Index]:
    """Yield an indexer to which an engine has sent the event, as soon as it reveals the event to `salt`."""
    import msgspec
    import zmq

    with zmq.Context() as context, context.socket(zmq.PUB) as engine:
        engine.setsockopt(zmq.LINGER, 0)
        engine.bind("tcp://127.0.0.1:0")
        with indexer(engine.getsockopt_string(zmq.LAST_ENDPOINT)) as index:
            numbers = iter(range(1 << 20))

            def is_told() -> bool:
                payload = msgspec.msgpack.encode([time.time(), [event], 0])
                engine.send_multipart([b"", next(numbers).to_bytes(8, "big"), payload])
                return index.blocks(salt) == BLOCKS

            wait(is_told, f"{salt} is told of nothing")
            yield index


def guessed(tokens: list[int], salt: str | None) -> list[int]:
    """Return the keys that a client can compute for a guessed prompt with Dynamo's own function."""
    from dynamo._core import compute_block_hash_for_seq

    return [int(hash_) for hash_ in compute_block_hash_for_seq(tokens, BLOCK, cache_namespace=salt)]


def main(case: str) -> dict[str, Any]:
    """Return what was seen."""
    if case == "index-dump":
        with stored(named("acme"), "acme") as index:
            dump = json.dumps(index.call("/dump"))
        told = [sum(str(hash_) in dump for hash_ in guessed(TOKENS, salt)) for salt in ("acme", "beta")]
        evidence = f"of a guessed prompt and tenant the dump, which anybody gets, tells {told[0]} of {BLOCKS} blocks"
        assert told[1] == 0, "another tenant's are other blocks"
        return {"found": told[0] > 0, "evidence": evidence}
    if case == "unscoped-events":
        with stored(named("acme"), "acme") as index:
            assert index.blocks(None) == 0, "an event that names its salt is scoped"
        try:
            with stored(positional("acme"), None) as index:
                foreign = index.blocks(None)
        except RuntimeError:
            foreign = 0
        evidence = f"{foreign} of {BLOCKS} blocks of a salted prompt are told to whoever names no salt"
        return {"found": foreign > 0, "evidence": evidence}
    assert case == "salt-dropped"
    with stored(named("acme"), "acme") as index:
        foreign = index.blocks("beta") + index.blocks(None)
    return {
        "found": foreign > 0,
        "evidence": f"{foreign} of {BLOCKS} blocks of `acme` are told to `beta` and to nobody's namespace",
    }


if __name__ == "__main__":
    print(json.dumps(main(sys.argv[1])))
