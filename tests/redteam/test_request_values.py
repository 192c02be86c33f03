"""What a request says in numbers is read exactly or refused: token ids, counts and extra content, at every entry."""

from __future__ import annotations

from collections.abc import Callable
from random import Random
from typing import Any

import numpy as np
import pytest

from kvcustody.allocator.external.pool import ExternalPool
from kvcustody.allocator.external.residency import ExternalResidency
from kvcustody.errors import ConfigError
from kvcustody.governance import request
from kvcustody.governance.admission_outcome import Admission
from kvcustody.governance.external.engine_port import EnginePort
from kvcustody.governance.identity.extra_content import Media, frame, is_framed
from standins.redteam.two_worlds import BLOCK, MODEL, World, table, tokens

IDS = tokens(Random(1), 3 * BLOCK + 1)
BAD: dict[str, Any] = {
    "beyond 32 bits": IDS.astype(np.int64) + (1 << 32),
    "beyond 31 bits": IDS.astype(np.int64) + (1 << 31),
    "negative": -1 - IDS,
    "uint64": IDS.astype(np.uint64) + (1 << 63),
    "floats": IDS.astype(np.float64),
    "halves": IDS + 0.5,
    "complex": IDS.astype(np.complex128),
    "strings": IDS.astype(str),
    "truth values": IDS > 7,
    "a list of truth values": (IDS > 7).tolist(),
    "a list of truth scalars": list(IDS > 7),
    "objects": IDS.astype(object) + 0.5,
    "two dimensions": IDS[: 3 * BLOCK].reshape(3, BLOCK),
    "bytes": IDS.tobytes(),
    "text": "1234",
    "a set": set(IDS.tolist()),
    "a number": 7,
}
GOOD: dict[str, Any] = {
    "int64": IDS.astype(np.int64),
    "uint64": IDS.astype(np.uint64),
    "uint16": IDS.astype(np.uint16),
    "other byte order": IDS.astype(">i4"),
    "a slice": np.repeat(IDS, 2)[::2],
    "tuple": tuple(IDS.tolist()),
    "list of numpy ints": list(IDS),
}


class Nobody:
    """An engine that is asked for nothing."""

    def __getattr__(self, name: str) -> Callable[..., None]:
        return lambda *_, **__: None


def port_of(world: World) -> EnginePort:
    pool = ExternalPool(64)
    engine: Any = Nobody()
    return EnginePort(pool, engine, table(), world.keyring, world.ledger, clock=world.clock, block_tokens=BLOCK)


@pytest.mark.parametrize("kind", BAD)
def test_token_ids_of_another_kind_are_refused_everywhere(kind: str) -> None:
    world, bad = World(table()), BAD[kind]
    governor = world.governor
    assert world.hit("victim", IDS) == 0
    running = world.admit("victim", IDS)
    assert running.hit_tokens == 3 * BLOCK
    slots = governor.slots([running.request_id])
    port = port_of(world)
    mine = port.admit(world.principal("victim"), MODEL, IDS, request_id="r")
    assert isinstance(mine, ExternalResidency)
    port.look_up(mine, lambda key: -1)
    before = governor.stats(), port.stats()
    entries: tuple[Callable[[], object], ...] = (
        lambda: world.admit("victim", bad),
        lambda: governor.extend_many([running.request_id], bad),
        lambda: governor.extend_slots(slots, bad),
        lambda: governor.fill(running.request_id, bad),
        lambda: port.admit(world.principal("victim"), MODEL, bad, request_id="q"),
        lambda: port.extend_keys(mine, bad),
    )
    for enter in entries:
        with pytest.raises(ConfigError, match="token ids must be integers of 31 bits"):
            enter()
    port.release(mine)
    with pytest.raises(ConfigError, match="31 bits"):
        port.resume(mine, bad)
    assert governor.stats() == before[0]
    assert governor.check() == port.check() == []


@pytest.mark.parametrize("kind", GOOD)
def test_the_same_ids_in_another_form_are_the_same_prompt(kind: str) -> None:
    world = World(table())
    world.hit("victim", IDS)
    assert world.hit("victim", GOOD[kind]) == 3 * BLOCK


def test_one_accepted_token_is_needed_for_each_request() -> None:
    world = World(table())
    running = [world.admit("victim", IDS[: 5 + n]).request_id for n in range(3)]
    slots = world.governor.slots(running)
    for ids in ([7], [7, 8, 9, 10]):
        with pytest.raises(ConfigError, match="`3` token ids are needed"):
            world.governor.extend_slots(slots, np.array(ids, dtype=np.int32))
        with pytest.raises(ConfigError, match="`3` token ids are needed"):
            world.governor.extend_many(running, ids)
    assert world.governor.extend_many(running, [7, 8, 9]) == ()


@pytest.mark.parametrize("count", [-5, 2.5, True, np.bool_(True), "3", None, np.float64(3)])
def test_counts_of_tokens_are_integers_and_not_negative(count: Any) -> None:
    world = World(table())
    running = world.admit("victim", IDS)
    other = world.admit("victim", IDS[:20])
    port = port_of(world)
    who = world.principal("victim")
    entries: tuple[Callable[[], object], ...] = (
        lambda: world.admit("victim", IDS, lookahead_tokens=count),
        lambda: world.governor.commit([other.request_id, running.request_id], [20, count]),
        lambda: port.admit(who, MODEL, IDS, request_id="q", max_tokens=count),
        lambda: port.admit(who, MODEL, IDS, request_id="q", groups=count),
    )
    for enter in entries:
        with pytest.raises(ConfigError, match=r"is not an integer|is less than"):
            enter()
    with pytest.raises(ConfigError, match="`0` is less than 1"):
        port.admit(who, MODEL, IDS, request_id="q", groups=0)
    manager = world.governor.managers[0]
    assert manager.decode.computed[[running.slot, other.slot]].tolist() == [0, 0]
    assert port.stats().running == 0 and port.check() == []
    world.governor.commit([other.request_id], [np.int64(20)])


@pytest.mark.parametrize(
    "extras", [{0: b"no frame"}, {0: frame(Media(b"d", (1,), "u8")) + b"x"}, {0: b""}, {0: "text"}, {9: b""}]
)
def test_extra_content_that_is_not_framed_is_refused(extras: Any) -> None:
    world = World(table())
    with pytest.raises(ConfigError, match="extras: "):
        world.admit("victim", IDS, extras=extras)


def test_frames_are_whole() -> None:
    one, two = (frame(Media(bytes([n]) * n, (n,), "u8")) for n in (1, 2))
    assert is_framed(one) and is_framed(one + two)
    assert not any(map(is_framed, (b"", one[:-1], one[1:], one + bytes(4), IDS.tobytes())))


def test_control_without_the_look_at_the_kind_another_prompt_hits(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(request, "_narrowed", lambda tokens: tokens.astype(np.int32))
    world = World(table())
    world.hit("victim", IDS)
    answer = world.admit("victim", BAD["beyond 32 bits"])
    assert isinstance(answer, Admission) and answer.hit_tokens == 3 * BLOCK
