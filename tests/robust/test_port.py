"""An engine that allocates by itself, under the engine port: residue, isolation, time, erasure and evidence (R-ENG)."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from pathlib import Path

import numpy as np
import pytest
from sqlalchemy import Engine, select

from kvcustody.allocator.external.scrub_queue import ScrubOrder
from kvcustody.audit.evidence.coverage.summary import coverage
from kvcustody.audit.kinds import CustodyEnded, Event, ReceiptRecorded, ResidencyOpened, ResidencyReleased
from kvcustody.audit.store.schema.leaf_tables import custody_ends, hit_counters
from kvcustody.clock import MICROSECONDS
from kvcustody.errors import HandleError, IsolationError
from kvcustody.governance.erasure.selector import Selector
from kvcustody.policies.reading.load_policy import load_policy
from kvcustody.policies.table.compile import compile_policy
from standins.robust.custody_world import BLOCK, MODEL
from standins.robust.port_world import POLICY, PortWorld

Make = Callable[..., PortWorld]
PROMPT = list(range(5 * BLOCK + 3))
SHORTER = POLICY.replace("low:  {idle: 2m", "low:  {idle: 10s")
SUBJECTS = POLICY.replace("scope: tenant", "scope: subject")


@pytest.fixture
def make(store: Engine, tmp_path: Path) -> Iterator[Make]:
    worlds: list[PortWorld] = []

    def build(**options: object) -> PortWorld:
        world = PortWorld(store, tmp_path, **options)  # type: ignore[arg-type]
        worlds.append(world)
        return world

    yield build
    for world in worlds:
        world.writer.close(5.0)


def serve(world: PortWorld, tenant: str | None, tokens: list[int], **options: int) -> int:
    """Run one request to its end; returns how many blocks it reused."""
    number = world.arrive(tenant, tokens, **options)
    assert number is not None and world.start(number)
    hit = world.requests[number].hit
    world.compute(number)
    world.step()
    world.end(number)
    world.step()
    return hit


@pytest.mark.parametrize(("seed", "lag"), [(1, 0), (2, 0), (3, 1), (4, 2), (5, 3)])
def test_a_busy_engine_keeps_every_promise(make: Make, seed: int, lag: int) -> None:
    world = make(seed=seed, lag=lag)
    for _ in range(12):
        for _ in range(25):
            world.act()
        assert world.port.check() == []
        assert world.port.scan() == []
    assert world.seen["hits"] > 50 and world.seen["preempted"] and world.seen["deferred"]
    assert world.first_writes > 200
    assert world.dirty_at_first_write == 0, "a block was written to before what it held was zeroed"
    world.drain()
    assert world.broken() == {}
    world.settle()
    assert world.broken() == {}
    assert world.port.stats().pools[0].by_state["clean"] == world.pool.partition.size
    assert world.memory.nonzero_bytes(np.arange(1, world.pool.blocks)) == 0
    with world.store.connect() as connection:
        total = coverage(connection).total
    assert total.due > 400 and total.coverage == 1.0 and total.disputed == 0, total


def test_without_the_orders_there_is_residue(make: Make, monkeypatch: pytest.MonkeyPatch) -> None:
    """The control: the same engine, its scrub orders not carried out."""
    world = make(seed=1)
    monkeypatch.setattr(world.memory, "scrub", lambda shard, blocks, share: None)
    monkeypatch.setattr(world.port, "scrubbed", lambda *answer: None)
    for _ in range(150):
        world.act()
    assert world.dirty_at_first_write > 0.9 * world.first_writes


STEPS: dict[str, Callable[[Event], bool]] = {
    "opening": lambda event: isinstance(event, ResidencyOpened),
    "release": lambda event: isinstance(event, ResidencyReleased),
    "end": lambda event: isinstance(event, CustodyEnded),
    "receipt": lambda event: isinstance(event, ReceiptRecorded) and event.shard == 1,
}


@pytest.mark.parametrize("step", STEPS)
def test_one_lost_event_breaks_an_identity(make: Make, step: str) -> None:
    lost: list[Event] = []

    def chosen(event: Event) -> bool:
        if STEPS[step](event) and len(lost) < 1:
            lost.append(event)
            return True
        return False

    world = make(seed=2, chosen=chosen)
    for _ in range(80):
        world.act()
    world.settle()
    assert lost and world.broken()


def test_tenants_meet_only_through_a_grant(make: Make) -> None:
    world = make()
    assert serve(world, "alpha", PROMPT) == 0
    assert serve(world, "alpha", PROMPT) == 5
    assert serve(world, "gamma", PROMPT) == 0
    assert serve(world, None, PROMPT) == 0
    assert serve(world, None, PROMPT) == 0, "a request without identity reads nothing, not even its own"
    assert serve(world, "beta", PROMPT) == 0, "a first use is durable before it serves"
    world.port.settle()
    assert serve(world, "beta", [*PROMPT[: 3 * BLOCK], *range(900, 940)]) == 3
    assert world.port.check() == []


def test_what_a_reader_adds_stays_its_own(make: Make) -> None:
    world = make()
    serve(world, "alpha", PROMPT)
    serve(world, "beta", PROMPT[: BLOCK + 1])
    world.port.settle()
    longer = [*PROMPT[: 5 * BLOCK], *range(500, 500 + 3 * BLOCK)]
    assert serve(world, "beta", longer) == 5
    assert serve(world, "beta", longer) == 7, "its own continuation behind the granted blocks"
    assert serve(world, "alpha", longer) == 5, "which the owner does not see"
    world.drain()
    world.writer.close()  # which tells what was counted
    with world.store.connect() as connection:
        found = connection.execute(select(hit_counters).where(hit_counters.c.effect == "permit")).all()
    assert [(row.tenant, row.owner, row.rule, row.requests) for row in found] == [
        ("beta", "alpha", "beta-reads-alpha", 2)
    ]


def test_idle_blocks_end_with_no_request_arriving(make: Make) -> None:
    world = make()
    serve(world, "alpha", PROMPT)
    held = world.cached("alpha")
    assert len(held) == 5
    due_us = world.port.next_due_us()
    assert due_us is not None and not world.port.has_work()
    world.clock.advance(due_us - world.clock.now_us())
    assert world.port.has_work(), "the timer knows"
    world.step()
    world.step()
    assert len(world.cached("alpha")) == 0 and not world.index
    assert world.memory.nonzero_bytes(held) == 0


def test_an_expired_block_is_not_served_though_no_sweep_ran(make: Make, monkeypatch: pytest.MonkeyPatch) -> None:
    world = make()
    serve(world, "alpha", PROMPT)
    monkeypatch.setattr(world.pool, "sweep", lambda now_us, at_most: [])
    world.clock.advance(119 * MICROSECONDS)
    assert serve(world, "alpha", PROMPT) == 5
    world.clock.advance(121 * MICROSECONDS)
    assert serve(world, "alpha", PROMPT) == 0, "two minutes idle"


def test_a_conversation_ends_with_its_root(make: Make, store: Engine) -> None:
    """Touched every minute, gone after the absolute ten: no hold or attach moves a ceiling (L8)."""
    world = make()
    hits, begun_us = [], world.clock.now_us()
    for minute in range(12):
        hits.append(serve(world, "alpha", [*PROMPT[: 5 * BLOCK], *range(700 + minute, 740 + minute)]))
        world.wait(61)
    assert hits == [0, *[5] * 9, 0, 5]
    world.writer.flush()
    with store.connect() as connection:
        ends = connection.execute(select(custody_ends).where(custody_ends.c.high > 0)).all()
    root = begun_us + 600 * MICROSECONDS
    recorded = {row.ceiling_boot_us for row in ends if row.ended_boot_us < root + MICROSECONDS}
    assert recorded == {root}, "whatever was added to a conversation has its root's ceiling on record"


def test_erasure_of_one_subject_leaves_the_others(make: Make) -> None:
    world = make(policy=SUBJECTS)
    for tokens in (PROMPT, [7, *PROMPT], [8, *PROMPT]):  # users 1, 2 and 0
        serve(world, "alpha", tokens)
    running = world.arrive("alpha", PROMPT)  # user 1 again
    assert running is not None and world.start(running)
    assert world.requests[running].hit == 5
    result = world.port.erase(Selector(tenant="alpha", subject="alpha-user-1"))
    world.step()
    assert result.aborted_requests == 1 and running not in world.requests
    assert result.ended_blocks >= 5 and result.remaining_blocks == 0
    assert len(world.cached("alpha")) == 10
    assert serve(world, "alpha", [7, *PROMPT]) == 5
    assert serve(world, "alpha", [8, *PROMPT]) == 5
    assert serve(world, "alpha", PROMPT) == 0
    assert world.port.check() == [] and world.port.scan() == []


def test_the_owner_s_erasure_takes_what_readers_built_on_it(make: Make) -> None:
    world = make()
    serve(world, "alpha", PROMPT)
    serve(world, "beta", PROMPT[: BLOCK + 1])
    world.port.settle()
    longer = [*PROMPT[: 5 * BLOCK], *range(500, 500 + 3 * BLOCK)]
    serve(world, "beta", longer)
    before = len(world.cached("beta"))
    world.port.erase(Selector(tenant="alpha"))
    world.step()
    assert len(world.cached("alpha")) == 0
    assert len(world.cached("beta")) == before - 3, "three blocks continued the owner's"
    assert world.port.check() == [] and world.port.scan() == []


def test_a_tenant_over_its_cap_waits_alone(make: Make) -> None:
    world = make()
    half = 28 * BLOCK
    first = world.arrive("alpha", list(range(half)), most=1)
    second = world.arrive("alpha", list(range(5000, 5000 + half)), most=1)
    third = world.arrive("beta", list(range(half)), most=1)
    assert first and second and third
    assert world.start(first)
    assert not world.start(second), "70 % of 80 blocks is 56"
    assert world.start(third)
    world.end(first)
    assert world.start(second)
    too_long = world.port.admit(None, MODEL, list(range(60 * BLOCK)), request_id="long")
    assert "the tenant may have `48`" in str(too_long)


def test_guarantees_are_never_lent_to_running_requests(make: Make) -> None:
    """Beta's 16 blocks are there for it, whatever alpha and unlisted tenants run."""
    world = make()
    for tenant, blocks in (("gamma", 48), ("alpha", 16)):
        number = world.arrive(tenant, list(range(blocks * BLOCK - 1)), most=1)
        assert number and world.start(number)
    more = world.arrive("alpha", list(range(5000, 5000 + BLOCK - 1)), most=1)
    assert more and not world.start(more)
    guaranteed = world.arrive("beta", list(range(16 * BLOCK - 1)), most=1)
    assert guaranteed and world.start(guaranteed)


def test_a_block_in_use_cannot_be_handed_out(make: Make) -> None:
    world = make()
    first = world.arrive("alpha", PROMPT)
    second = world.arrive("beta", PROMPT)
    assert first and second and world.start(first)
    taken = world.requests[first].table
    with pytest.raises(IsolationError, match="is ACTIVE and cannot be handed out"):
        world.port.handed_out(world.requests[second].residency, [taken[0]])
    with pytest.raises(IsolationError, match="cannot be attached"):
        world.port.attached(world.requests[second].residency, [world.free[0]])
    with pytest.raises(IsolationError, match="does not hold block"):
        world.port.returned(world.requests[second].residency, [taken[0]])


def test_a_receipt_counts_once_and_only_for_its_order(make: Make) -> None:
    world = make()
    order = world.port.step()
    assert isinstance(order, ScrubOrder) and order.blocks == 80, "the whole pool, before its first use"
    results = [world.memory.scrub(0, blocks, share) for share, blocks in order.batches]
    world.port.scrubbed(order.number, 0, results)
    assert world.pool.counts()["clean"] == 0, "one shard of two"
    with pytest.raises(HandleError, match="has no scrub order"):
        world.port.scrubbed(order.number, 0, results)
    with pytest.raises(HandleError, match="has no scrub order"):
        world.port.scrubbed(order.number + 1, 1, results)
    world.port.scrubbed(order.number, 1, [world.memory.scrub(1, blocks, share) for share, blocks in order.batches])
    assert world.pool.counts()["clean"] == 80


def test_a_block_that_does_not_verify_is_withheld(make: Make) -> None:
    world = make()
    world.step()
    number = world.arrive("gamma", PROMPT)
    assert number and world.start(number)
    world.compute(number)
    world.step()
    victim = world.requests[number].table[-1]
    world.memory.stuck.add((1, victim))
    world.end(number)
    world.step()
    assert world.pool.counts()["quarantined"] == 1 and victim in world.withheld
    assert victim not in world.free
    world.memory.stuck.clear()
    world.drain()
    assert world.broken() == {}


def test_a_new_revision_binds_what_is_cached(make: Make) -> None:
    world = make()
    serve(world, "alpha", PROMPT)
    shorter = compile_policy(load_policy(SHORTER, name="shorter.yaml"), revision=2)
    world.port.activate(shorter, actor="operator")
    world.clock.advance(11 * MICROSECONDS)
    assert serve(world, "alpha", PROMPT) == 0
    assert world.port.check() == []


def test_close_leaves_nothing(make: Make) -> None:
    world = make(seed=4)
    for _ in range(60):
        world.act()
    for number in list(world.requests):
        world.end(number, "shutdown")
    world.port.close()
    world.drain()
    assert world.port.stats().pools[0].by_state["clean"] == world.pool.partition.size
    assert world.broken() == {}
