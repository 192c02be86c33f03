"""An admission that fails, wherever on its way, has not happened; what one returns is the engine's copy."""

from __future__ import annotations

import importlib
from collections.abc import Callable
from random import Random
from typing import Any

import numpy as np
import pytest

from kvcustody.allocator.manager.block_manager import BlockManager
from kvcustody.errors import HandleError
from kvcustody.governance.observability.tenant_counters import TenantCounters
from standins.redteam.two_worlds import BLOCK, World, table, tokens

PROMPT = tokens(Random(1), 12 * BLOCK + 5)
CACHED = PROMPT[: 4 * BLOCK + 3]
STEPS = (
    "governance.decisions.reuse_decision:ReuseDecider.read_plan",
    "allocator.manager.block_manager:BlockManager.match_prefix",
    "allocator.manager.block_manager:BlockManager.residency",
    "allocator.manager.block_manager:BlockManager.allocate",
    "allocator.manager.reclaim:Reclaimer.ensure",
    "allocator.manager.block_manager:BlockManager._hand_to_request",
    "allocator.manager.block_manager:BlockManager._allocate_spans",
    "allocator.manager.block_manager:BlockManager._key",
    "allocator.manager.block_manager:keys_of",
    "allocator.prefix.decode_table:DecodeTable.add",
    "allocator.pool.pool:Pool.move",
    "governance.governor.governor:opening_events",
    "governance.governor.governor:_admission",
    "governance.governor.governor:Admission",
    "governance.governor.sequence_events:residency_opened",
)
NOBODY = TenantCounters()
BEFORE_ANY_EFFECT = {"Pool.move", "BlockManager.allocate"}  # after them their caller cannot know what to undo


def timeless(governor: Any) -> dict[str, float]:
    """The measures but for how long look-ups took, which an admission that fails has looked up as well."""
    return {name: value for name, value in governor.stats().serving.items() if name != "look_up_seconds"}


def world_of(windows: tuple[int, ...]) -> World:
    options: Any = {"windows": windows}
    world = World(table(), blocks=256, options=options, keep_events=True)
    world.hit("victim", CACHED)
    world.admit("victim", CACHED, request_id="stays")
    world.step()
    return world


def standing(world: World) -> object:
    """Every book that an admission writes to."""
    governor, (manager,) = world.governor, world.governor.managers
    pool = manager.pool
    nodes = []
    stack = list(manager.tree.roots)
    while stack:
        node = stack.pop()
        nodes.append((node.depth, node.length, node.refs, node.holds, node.blocks.tolist()))
        child = node.first_child
        while child is not None:
            stack.append(child)
            child = child.next_sibling
    return (
        repr(governor.stats()._replace(tenants={}, departed=NOBODY, serving=timeless(governor))),
        pool.state.tolist(),
        pool.next_generation,
        [(p.clean_count, p.over_blocks, p.charged_over) for p in pool.partitions],
        {a.name: (a.used_blocks, a.active_blocks, a.cached_blocks) for a in manager.accounts.values()},
        sorted(nodes),
        len(manager.decode._free),
        [repr([getattr(c, name) for name in c.__slots__]) for c in governor.tenant_counters.values()],
        len(governor._outbox),
        len(world.ledger.events),  # type: ignore[attr-defined]
    )


def failing(step: str, monkeypatch: pytest.MonkeyPatch, *, after: bool) -> None:
    module, path = step.split(":")
    owner: Any = importlib.import_module(f"kvcustody.{module}")
    *outer, name = path.split(".")
    for part in outer:
        owner = getattr(owner, part)
    original: Callable[..., object] = getattr(owner, name)

    def fail(*arguments: Any, **named: Any) -> object:
        if after:
            original(*arguments, **named)
        raise MemoryError(step)

    monkeypatch.setattr(owner, name, fail)


@pytest.mark.parametrize("windows", [(), (2, 3)])
@pytest.mark.parametrize("after", [False, True])
@pytest.mark.parametrize("step", STEPS)
def test_an_admission_that_fails_leaves_nothing(step: str, after: bool, windows: tuple[int, ...]) -> None:
    if after and step.split(":")[1] in BEFORE_ANY_EFFECT:
        pytest.skip("has no caller that could undo it")
    world, other = world_of(windows), world_of(windows)
    with pytest.MonkeyPatch.context() as fault:  # the tree may be cut at the match: that is no residue
        for each in (world, other):
            answer = each.admit("victim", PROMPT)
            each.governor.release(answer.request_id)
            each.step(10_000_000)
        before = standing(world)
        failing(step, fault, after=after)
        with pytest.raises(MemoryError):
            world.admit("victim", PROMPT)
    assert standing(world) == before
    assert world.governor.check() == [] == world.governor.scan()
    for each in (world, other):
        answer = each.admit("victim", PROMPT)
        each.finish(answer, len(PROMPT))
        each.step(10_000_000)
    assert standing(world) == standing(other)
    assert world.governor.check() == []


def test_wrong_extra_content_leaves_nothing() -> None:
    world = world_of(())
    before = standing(world)
    for extras in ({0: "text"}, {"0": b""}, {0: None}, 7, {3: b"unframed"}):
        with pytest.raises(Exception, match="extras"):
            world.admit("victim", PROMPT, extras=extras)
    assert standing(world) == before


def test_control_without_withdrawal_blocks_are_held_by_nobody(monkeypatch: pytest.MonkeyPatch) -> None:
    world = world_of(())
    monkeypatch.setattr(BlockManager, "withdraw", lambda *_: None)
    failing("allocator.manager.block_manager:BlockManager._key", monkeypatch, after=False)
    with pytest.raises(MemoryError):
        world.admit("victim", PROMPT)
    assert world.governor.check() != []


def test_what_is_returned_cannot_be_written_through() -> None:
    world = World(table())
    governor = world.governor
    mine = world.admit("victim", PROMPT)
    governor.commit([mine.request_id], [len(PROMPT)])
    child = governor.fork(mine.request_id, "child")
    mine_now = governor.blocks(mine.request_id)
    for blocks in (mine.blocks, child.blocks, mine_now, governor.blocks(child.request_id)):
        expected = blocks.tolist()
        with pytest.raises(ValueError, match="read-only"):
            blocks[:] = 0
        blocks.setflags(write=True)  # whoever insists writes to a copy
        blocks[:] = 0
        assert governor.blocks(mine.request_id).tolist() == expected
        assert governor.check() == []


def test_a_hand_out_that_others_followed_is_not_taken_back() -> None:
    world = World(table())
    (manager,) = world.governor.managers
    first = world.admit("victim", PROMPT)
    world.admit("attacker", PROMPT)
    account = manager.accounts["victim"]
    with pytest.raises(Exception, match="not the newest"):
        manager.pool.take_back(account.partition, np.array(first.blocks), account)
    with pytest.raises(HandleError):
        world.governor.blocks("absent")
