"""Preemption by swap: a running request goes to a tier with its last, partial block, and goes on where it was."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

import numpy as np
import pytest

from kvcustody.governance.admission_outcome import Admission
from kvcustody.governance.erasure.selector import Selector
from standins.governance.offload_world import MODEL, TOKENS, World, prompt, who

pytestmark = pytest.mark.system


@pytest.fixture(params=["host", "nvme"])
def world(request: pytest.FixtureRequest, tmp_path: Path) -> Iterator[World]:
    made = World(tmp_path, request.param)
    yield made
    made.worker.close()


def run(world: World, tokens: list[int], generated: list[int], whose: str = "acme") -> Admission:
    """A request that has decoded `generated`, the last of which has no K/V yet; each computed byte says what it is."""
    governor = world.worker.governor
    admitted = governor.admit(who(whose), MODEL, tokens)
    assert isinstance(admitted, Admission)
    governor.commit([admitted.request_id], [len(tokens)])
    for token in generated:
        assert governor.extend_many([admitted.request_id], [token]) == ()
    for block, index in enumerate(governor.blocks(admitted.request_id).tolist()):
        world.memory.write(0, np.array([index]), memoryview(bytearray(content(world, tokens + generated, block))))
    return admitted


def content(world: World, tokens: list[int], block: int) -> bytes:
    seed = hash(tuple(tokens[: TOKENS * block])) & 0xFFFFFFFF
    return np.random.default_rng(seed).bytes(world.size)


def resumed(world: World, tokens: list[int], whose: str = "acme", *, partial: bool = True) -> int:
    """How many tokens the request has when it is admitted again; the blocks under them are checked."""
    governor = world.worker.governor
    admitted = governor.admit(who(whose), MODEL, tokens, is_resumed=True, takes_partial=partial)
    assert isinstance(admitted, Admission)
    for block in range(-(-admitted.hit_tokens // TOKENS)):
        read = bytearray(world.size)
        world.memory.read(0, admitted.blocks[block : block + 1].copy(), memoryview(read))
        assert bytes(read) == content(world, tokens, block), block
    governor.commit([admitted.request_id], [len(tokens)])
    governor.release(admitted.request_id)
    governor.step()
    assert governor.check() == []
    return admitted.hit_tokens


@pytest.mark.parametrize("decoded", [1, 5, 15, 16, 17, 30])
def test_it_goes_on_where_it_was(world: World, decoded: int) -> None:
    tokens, made = prompt(1, 6, 3), prompt(2, 0, decoded)
    request = run(world, tokens, made)
    assert world.worker.governor.preempt(request.request_id, swap=True)
    world.crowd()
    assert resumed(world, tokens + made) == len(tokens) + decoded - 1, "all but the last token"


def test_without_swap_the_last_block_is_computed_again(world: World) -> None:
    """The control."""
    tokens, made = prompt(1, 6, 3), prompt(2, 0, 5)
    request = run(world, tokens, made)
    assert world.worker.governor.preempt(request.request_id)
    world.crowd()
    assert resumed(world, tokens + made) == 6 * TOKENS


def test_nobody_else_gets_the_tail_and_no_prompt_finds_it(world: World) -> None:
    tokens, generated = prompt(1, 6, 3), prompt(2, 0, 5)
    request = run(world, tokens, generated)
    assert world.worker.governor.preempt(request.request_id, swap=True)
    world.crowd()
    assert resumed(world, tokens + generated, "beta") == 0
    assert resumed(world, tokens + generated, partial=False) == 6 * TOKENS
    assert resumed(world, [*tokens, *generated[:-1], generated[-1] + 1]) == len(tokens) + 4, "the last has none yet"
    assert resumed(world, [*tokens, *generated[:-2], generated[-2] + 1, 7]) == 6 * TOKENS, "other tokens"


def test_an_erasure_ends_what_was_swapped_out(world: World) -> None:
    tokens, generated = prompt(1, 6, 3), prompt(2, 0, 5)
    request = run(world, tokens, generated)
    assert world.worker.governor.preempt(request.request_id, swap=True)
    world.crowd()
    world.worker.governor.erase(Selector("acme"))
    world.worker.governor.step()
    assert resumed(world, tokens + generated) == 0


@pytest.mark.parametrize("tokens", [5, 4 * TOKENS + 5])
def test_no_number_of_swaps_prolongs_what_was_computed_first(world: World, tokens: int) -> None:
    """At most an hour, swapped out and in every nine minutes, decoding on; a partial block without a parent, too."""
    text, generated, minute = prompt(1, 0, tokens), prompt(2, 0, 40), 60_000_000
    governor, at = world.worker.governor, 1
    request = run(world, text, generated[:at])
    for trip in range(8):
        governor.preempt(request.request_id, swap=True)
        world.crowd(trip)
        world.clock.advance(9 * minute)
        governor.step()
        admitted = governor.admit(who("acme"), MODEL, text + generated[:at], is_resumed=True, takes_partial=True)
        assert isinstance(admitted, Admission)
        if 9 * (trip + 1) >= 60:
            assert admitted.hit_tokens == 0, f"after {9 * (trip + 1)} minutes"
            break
        assert admitted.hit_tokens == tokens + at - 1
        governor.commit([admitted.request_id], [tokens + at])
        for token in generated[at : at + 5]:
            assert governor.extend_many([admitted.request_id], [token]) == ()
        at += 5
        request = admitted
        for block, index in enumerate(governor.blocks(request.request_id).tolist()):
            world.memory.write(
                0, np.array([index]), memoryview(bytearray(content(world, text + generated[:at], block)))
            )
    assert trip == 6
