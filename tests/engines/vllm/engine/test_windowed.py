"""Windowed tokens in a real EngineCore, asked by a front end of our own that passes by Python.

The front end sends requests as vLLM's Rust one does: an `EngineCoreRequest` as a list in msgpack, made without vLLM's
classes, over the EngineCore's own ZMQ socket.
"""

from __future__ import annotations

import itertools
import time
from collections.abc import Callable
from typing import Any

import msgspec
import pytest

from kvcustody.clock import SystemClock, VirtualClock
from kvcustody.governance.edge.erase_epochs import NO_EPOCHS, Epochs
from kvcustody.governance.edge.windowed_token import WindowedClaims, WindowedTokenIssuer
from kvcustody.times import SECOND_US
from standins.engines.vllm.deployment import IDENTITY, Deployment, principal
from standins.engines.vllm.local_engine import BLOCK, LocalEngine
from standins.integrations.fleet_edge import door_key

PREFIX = 3  # whole blocks
ADD = b"\x00"
WINDOW = next(each for each in (3600, 5000, 7001) if time.time() % each < each - 300)  # none ends while these run
_prompts = itertools.count()


class FrontEnd:
    """Speaks to one EngineCore."""

    def __init__(self, engine: LocalEngine) -> None:
        self._client = engine.engine.engine_core
        self._numbers = itertools.count()

    def cached(self, tokens: list[int], salt: str | None) -> int:
        """Ask for one token more; how many of the prompt's were found."""
        request_id = f"own-{next(self._numbers)}"
        sampling: dict[str, Any] = {"max_tokens": 1, "temperature": 0.0, "ignore_eos": True}
        request = [request_id, tokens, None, sampling, None, time.time(), None, salt, None]
        frames = (self._client.core_engine, ADD, msgspec.msgpack.encode(request))
        self._client.input_socket.send_multipart(frames)
        while True:
            for output in self._client.get_output().outputs:
                if output.request_id == request_id and output.finish_reason is not None:
                    return int(output.prefill_stats.num_cached_tokens)


def token(subject: str = "ann", *, windows_ago: int = 0, epochs: Epochs = NO_EPOCHS, key: int = 1) -> str:
    """What a door gives for a subject of `alpha`."""
    clock = VirtualClock()
    clock.step_utc(SystemClock().utc_us() - windows_ago * WINDOW * SECOND_US - clock.utc_us())
    issuer = WindowedTokenIssuer(lambda: door_key(key), clock, window_seconds=WINDOW)
    return issuer.issue(WindowedClaims(principal("alpha", subject), None, "f" * 32, "default", epochs))


def fresh_prompt() -> list[int]:
    place = next(_prompts)
    return [(place * 89 + at * (place % 5 + 3)) % 480 + 20 for at in range(PREFIX * BLOCK)] + [18]


class Windowed(Deployment):
    """A deployment whose engine takes windowed tokens of one door."""

    def environment(self, worker: str = "engine-0") -> dict[str, str]:
        (self.folder / "doors.vkeys").write_text(f"{door_key().verifier}\n")
        (self.folder / "identity.yaml").write_text(IDENTITY + "doors: {keys: doors.vkeys}\n")
        return super().environment(worker) | {"KVCUSTODY_WINDOWED_TOKEN_SECONDS": str(WINDOW)}


@pytest.fixture(scope="module")
def front_end(engines: Callable[..., LocalEngine], tmp_path_factory: pytest.TempPathFactory) -> FrontEnd:
    return FrontEnd(engines(deployment=Windowed(tmp_path_factory.mktemp("windowed-tokens"))))


def test_own_window_finds_its_prompt_and_another_subject_does_not(front_end: FrontEnd) -> None:
    prompt = fresh_prompt()
    assert front_end.cached(prompt, token()) == 0
    assert [front_end.cached(prompt, token()) for _ in range(2)] == [PREFIX * BLOCK] * 2
    assert front_end.cached(prompt, token("bob")) == 0


def test_the_last_window_is_accepted_and_no_older_one(front_end: FrontEnd) -> None:
    prompt = fresh_prompt()
    front_end.cached(prompt, token())
    assert front_end.cached(prompt, token(windows_ago=1)) == PREFIX * BLOCK
    assert front_end.cached(prompt, token(windows_ago=2)) == 0


@pytest.mark.parametrize("how", ["missing", "forged", "of another key", "of another epoch"])
def test_what_is_not_its_token_finds_nothing_and_leaves_nothing(front_end: FrontEnd, how: str) -> None:
    def salt() -> str | None:
        match how:
            case "missing":
                return None
            case "forged":
                return token()[:-2] + ("AA" if not token().endswith("AA") else "BA")
            case "of another key":
                return token(key=2)
        return token(epochs=Epochs(0, 0, 1))

    prompt = fresh_prompt()
    front_end.cached(prompt, token())
    assert front_end.cached(prompt, token()) == PREFIX * BLOCK, "the control"
    assert [front_end.cached(prompt, salt()) for _ in range(2)] == [0, 0]
    other = fresh_prompt()
    front_end.cached(other, salt())
    assert front_end.cached(other, token()) == 0, "it left nothing"


def test_where_the_setting_is_off_no_such_token_counts(governed: LocalEngine) -> None:
    prompt, front_end = fresh_prompt(), FrontEnd(governed)
    assert [front_end.cached(prompt, token()) for _ in range(2)] == [0, 0]
