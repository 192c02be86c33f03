"""Residencies of classic caches: every way to end one, with zeros and evidence (R, K, C2), and what is refused."""

from __future__ import annotations

import copy
import gc
import pickle
import threading
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
from sqlalchemy import select
from transformers import DynamicCache

from kvcustody.allocator.pool.block_state import BlockState
from kvcustody.allocator.pool.tensor_memory import TensorMemory, TensorSpec
from kvcustody.audit.store.database.engine import open_store
from kvcustody.audit.store.schema.leaf_tables import releases
from kvcustody.clock import MICROSECONDS, VirtualClock
from kvcustody.errors import AdmissionError, ConfigError, DeviceError, HandleError, IsolationError
from kvcustody.governance.erasure.selector import Selector
from kvcustody.governance.request import Hints
from kvcustody.governance.settings import Settings
from kvcustody.governance.worker.worker import MemoryPlan, open_worker
from kvcustody.integrations.transformers.classic.custodian import Custodian, SlabMemory, SlabSize
from kvcustody.policies.reading.load_policy import load_policy
from kvcustody.policies.table.compile import compile_policy
from standins.engines.transformers.classic_world import (
    POLICY,
    World,
    generate,
    llama,
    nonzero,
    open_world,
    person,
)

KINDS = ["dynamic", "static", "quantized", "offloaded"]
CPU = torch.device("cpu")


@pytest.fixture
def world(tmp_path: Path) -> Iterator[World]:
    with open_world(tmp_path) as opened:
        yield opened


def advance(world: World, seconds: float) -> None:
    assert isinstance(world.clock, VirtualClock)
    world.clock.advance(int(seconds * MICROSECONDS))


def states(tokens: int = 4) -> torch.Tensor:
    return torch.ones(1, 2, tokens, 16)


def fill(cache: Any, tokens: int = 4) -> list[torch.Tensor]:
    """Write to every layer; returns the slabs, for a look at them later."""
    for layer in range(len(cache.layers)):
        cache.update(states(tokens), states(tokens), layer)
    slabs = list(cache.residency.slabs)
    assert nonzero(slabs) > 0
    return slabs


def causes(world: World) -> set[str]:
    assert world.worker.writer.flush()
    engine = open_store(world.folder / "ledger.db", read_only=True)
    with engine.connect() as connection:
        found = set(connection.execute(select(releases.c.cause)).scalars())
    engine.dispose()
    return found


def ended_well(world: World, cause: str) -> None:
    """Nothing is bound or running, the allocator agrees with itself, and the ledger covers it all."""
    governor = world.worker.governor
    with world.custodian.lock:  # a timer that is at it finishes first
        assert not governor.running and world.memory.bound_bytes == 0
        assert governor.check() == [] and governor.scan() == []
    found, broken = world.evidence()
    assert broken == []
    assert found.total.coverage == 1.0 and found.total.due > 0
    assert cause in causes(world)


@pytest.mark.parametrize("kind", KINDS)
def test_idle(world: World, kind: str) -> None:
    with world.open(kind) as cache:
        slabs = fill(cache)
        for _ in range(3):  # each use starts the idle time anew
            advance(world, 59)
            assert world.custodian.step() == 0
            cache.update(states(1), states(1), 0)
        advance(world, 60)
        assert world.custodian.step() == 1
        assert nonzero(slabs) == 0 and cache.is_ended
        with pytest.raises(HandleError, match="ended and zeroed: `idle`"):
            cache.update(states(), states(), 0)
        assert nonzero(slabs) == 0
    ended_well(world, "idle")


def test_idle_without_a_timer_is_seen_by_the_next_use(world: World) -> None:
    with world.open() as cache:
        slabs = fill(cache)
        advance(world, 61)
        with pytest.raises(HandleError, match="`idle`"):
            cache.crop(-1)
        assert nonzero(slabs) == 0
    ended_well(world, "idle")


@pytest.mark.parametrize(("tenant", "seconds", "cause"), [("org", 600, "active-max"), ("lab", 300, "absolute")])
def test_no_use_prolongs_the_ceiling(world: World, tenant: str, seconds: int, cause: str) -> None:
    with world.open(who=person(tenant)) as cache:
        slabs = fill(cache)
        for _ in range(seconds // 30 - 1):
            advance(world, 30)
            assert world.custodian.step() == 0
            cache.update(states(1), states(1), 0)
        advance(world, 30)
        assert world.custodian.step() == 1
        assert nonzero(slabs) == 0
    ended_well(world, cause)


def test_a_classification_that_is_never_kept_has_only_its_active_time(world: World) -> None:
    with world.open(who=person("vault")) as cache:
        slabs = fill(cache)
        advance(world, 599)
        assert world.custodian.step() == 0 and nonzero(slabs) > 0
        advance(world, 1)
        assert world.custodian.step() == 1 and nonzero(slabs) == 0
    ended_well(world, "active-max")


def test_the_timer_ends_an_idle_cache_with_no_call_arriving(tmp_path: Path) -> None:
    with open_world(tmp_path, is_virtual=False) as world:
        cache = world.open()
        slabs = fill(cache)
        cache.residency.idle_us = 200_000  # the policy's minute, shortened
        until = time.monotonic() + 60
        while nonzero(slabs) and time.monotonic() < until:
            time.sleep(0.01)
        assert nonzero(slabs) == 0 and cache.is_ended
        ended_well(world, "idle")


def test_erasure_of_a_subject_from_another_thread(tmp_path: Path) -> None:
    with open_world(tmp_path, is_virtual=False) as world:
        with world.open() as cache, world.open(who=person(subject="bob")) as other:
            slabs, others = fill(cache), fill(other)
            command = world.worker.governor.call(lambda governor: governor.erase(Selector("org", "ada")))
            assert command.result(60).aborted_requests == 1
            until = time.monotonic() + 60
            while nonzero(slabs) and time.monotonic() < until:
                time.sleep(0.01)
            assert nonzero(slabs) == 0
            with pytest.raises(HandleError, match="released by the governor"):
                cache.update(states(), states(), 0)
            assert nonzero(others) > 0
            other.update(states(), states(), 0)
        ended_well(world, "erased")


@pytest.mark.parametrize("kind", KINDS)
def test_an_exception_in_generate(world: World, kind: str) -> None:
    held: list[torch.Tensor] = []

    def fail_late(ids: torch.Tensor, scores: torch.Tensor) -> torch.Tensor:
        if ids.shape[-1] > 25:
            raise RuntimeError("the fifth token")
        return scores

    with pytest.raises(RuntimeError, match="the fifth token"), world.open(kind) as cache:
        held += cache.residency.slabs
        generate(llama(), cache, logits_processor=[fail_late])
    assert held and nonzero(held) == 0
    ended_well(world, "aborted")


def test_collection(world: World) -> None:
    """The collector may run anywhere, so it leaves a note and the next step ends the custody."""
    cache = world.open()
    slabs = fill(cache)
    del cache
    gc.collect()
    assert nonzero(slabs) > 0
    assert world.custodian.step() == 1
    assert nonzero(slabs) == 0
    ended_well(world, "collected")


def test_closing_the_custodian_and_closing_the_worker(tmp_path: Path) -> None:
    with open_world(tmp_path) as world:
        kept = world.open()
        slabs = fill(kept)
        world.custodian.close()
        assert nonzero(slabs) == 0 and kept.is_ended
        ended_well(world, "shutdown")
        late = world.open()
        others = fill(late)
    assert nonzero(others) == 0  # the worker's own end
    with pytest.raises(HandleError):
        late.update(states(), states(), 0)


def test_ending_twice_changes_nothing(world: World) -> None:
    cache = world.open()
    fill(cache)
    assert cache.end() and not cache.end()
    for act in (
        cache.reset,
        lambda: cache.reorder_cache(torch.tensor([0])),
        lambda: cache.batch_repeat_interleave(2),
    ):
        with pytest.raises(HandleError, match="finished"):
            act()
    assert cache.get_seq_length() == 0
    ended_well(world, "finished")


def test_a_stale_view_reads_zeros_whoever_comes_after(world: World) -> None:
    with world.open() as cache:
        keys, _ = cache.update(states(), states(), 0)
    with world.open(who=person("lab")) as other:
        fill(other)
        assert int(torch.count_nonzero(keys)) == 0
        keys.fill_(7)  # a write through it reaches nobody either
        assert not (other.residency.slabs[0].view(torch.float32) == 7).any()


def test_copies_are_refused(world: World) -> None:
    with world.open() as cache:
        for make in (copy.copy, copy.deepcopy, pickle.dumps):
            with pytest.raises(ConfigError, match="cannot be copied"):
                make(cache)
        with pytest.raises(DeviceError, match="not copied"):
            world.memory.copy([0], [1])


# -- admission --------------------------------------------------------------------------------------------------------


def test_quota_by_bytes(world: World) -> None:
    """4 MiB in all, org may have 60 %; one tenant's refusal costs the other nothing."""
    big = {"max_tokens": 2048}  # 3 layers x 2 x 2 heads x 16 x 4 bytes x 2048 = 1.5 MiB
    with world.open(**big) as cache:
        with pytest.raises(AdmissionError, match="over-quota") as refused:
            world.open(**big)
        assert refused.value.is_deferred and refused.value.reason == "over-quota"
        with world.open(who=person("lab")) as other:
            fill(other)
        fill(cache)
    with world.open(**big) as again:
        fill(again)
    ended_well(world, "finished")


def test_who_is_not_admitted(world: World) -> None:
    with pytest.raises(AdmissionError, match="not in the policy") as refused:
        world.open(who=person("stranger"))
    assert not refused.value.is_deferred
    with pytest.raises(AdmissionError, match="policy"):
        world.open(hints=Hints(classification="banned"))
    assert world.memory.bound_bytes == 0 and not world.worker.governor.running


@pytest.mark.parametrize("tenant", ["lab", "vault"])
def test_plain_host_copies_only_where_the_policy_allows_them(world: World, tenant: str) -> None:
    with world.open(who=person(tenant)) as cache:
        fill(cache)
    with pytest.raises(AdmissionError, match="plain copies in host memory"):
        world.open("offloaded", who=person(tenant))
    assert world.memory.bound_bytes == 0
    ended_well(world, "finished")


def test_a_narrower_policy_binds_open_caches(world: World) -> None:
    narrower = POLICY.replace("low:    {idle: 60s", "low:    {idle: 5s")
    with world.open() as cache:
        slabs = fill(cache)
        table = compile_policy(load_policy(narrower, name="narrower.yaml"), revision=2)
        world.worker.governor.activate(table, actor="test")
        advance(world, 5)
        assert world.custodian.step() == 1
        assert nonzero(slabs) == 0
    ended_well(world, "idle")


def test_a_device_without_room_is_an_error_and_no_custody(world: World, monkeypatch: pytest.MonkeyPatch) -> None:
    def full(*args: object, **options: object) -> torch.Tensor:
        raise RuntimeError("out of memory")

    monkeypatch.setattr(torch, "zeros", full)
    with pytest.raises(DeviceError, match="cannot allocate a cache"):
        world.open()
    monkeypatch.undo()
    assert not world.worker.governor.running and world.memory.bound_bytes == 0
    assert world.worker.governor.check() == []
    found, broken = world.evidence()  # nothing was there to scrub, and nothing else is claimed
    assert broken == [] and found.total.failed == found.total.due > 0


def test_a_pool_of_another_kind_is_refused(tmp_path: Path) -> None:
    (tmp_path / "policy.yaml").write_text(POLICY, encoding="utf-8")
    settings = Settings(
        policy_path=tmp_path / "policy.yaml",
        database_url=f"sqlite:///{tmp_path / 'ledger.db'}",
        spill_path=tmp_path / "spill",
        root_key_path=tmp_path / "root.key",
        keyring_path=tmp_path / "keys.json",
    )
    spec = TensorSpec(layers=1, kv_heads=1, head_dim=8)
    plan = MemoryPlan(lambda blocks: TensorMemory.allocate(blocks, spec), 8, 1, spec.bytes_per_block)
    with open_worker(settings, plan) as worker, pytest.raises(ConfigError, match=r"SlabMemory\.plan"):
        Custodian(worker.governor, tick_seconds=None)


# -- memory -----------------------------------------------------------------------------------------------------------


def test_a_block_that_does_not_become_zero_is_quarantined_with_its_slab(world: World) -> None:
    lab = person("lab")  # verifies all
    with world.open(who=lab) as cache:
        slabs = fill(cache)
        running = world.worker.governor.running[cache.residency.handle]
        world.memory.stuck.add(int(running.blocks[0]))
    counts = world.worker.governor.managers[0].pool.counts
    assert counts[BlockState.QUARANTINED] == 1
    assert nonzero(slabs) == 1  # the injected byte, which the verification saw
    assert world.memory.bound_bytes == sum(len(slab) for slab in slabs)  # never back to the allocator
    found, broken = world.evidence()
    assert broken == [] and found.total.failed == 1
    assert world.worker.governor.check() == []


def test_results_name_every_slab_and_the_weakest_level() -> None:
    memory = SlabMemory(8, 64)
    blocks = torch.arange(5).numpy()
    unbound = memory.scrub(0, blocks, 1.0)
    assert (unbound.method, unbound.level, unbound.bytes, unbound.verified) == ("none", "unread", 0, 0)
    first, second = memory.bind(blocks, [SlabSize(2, CPU, CPU), SlabSize(3, CPU, CPU)])
    first.fill_(1), second.fill_(2)
    with pytest.raises(IsolationError, match="another cache's bytes"):
        memory.bind(blocks[:1], [SlabSize(1, CPU, CPU)])
    bound = memory.scrub(0, blocks, 1.0)
    assert (bound.level, bound.bytes, bound.verified, len(bound.failed)) == ("full", 5 * 64, 5, 0)
    assert nonzero([first, second]) == 0 and memory.bound_bytes == 0
    memory.bind(blocks[:2], [SlabSize(2, CPU, CPU)])
    mixed = memory.scrub(0, blocks, 1.0)
    assert (mixed.level, mixed.bytes) == ("unread", 2 * 64)
    assert memory.scrubbed(0) == 5 + 5 + 5
    with pytest.raises(ConfigError, match="multiple of 64"):
        SlabMemory(8, 100)
    with pytest.raises(ConfigError, match="less than one block"):
        SlabMemory.plan(10)


def test_threads_share_one_custodian(tmp_path: Path) -> None:
    """Eight threads generate and end caches while the timer steps: outputs right, nothing left."""
    expected = generate(llama(), DynamicCache(config=llama().config), 8)
    wrong: list[object] = []
    with open_world(tmp_path, is_virtual=False, megabytes=16) as world:

        def work(number: int) -> None:
            try:
                for _ in range(2):
                    with world.open(who=person(subject=f"user-{number}")) as cache:
                        if generate(llama(), cache, 8) != expected:
                            wrong.append(number)
            except Exception as error:
                wrong.append(error)

        threads = [threading.Thread(target=work, args=(number,)) for number in range(8)]
        for thread in threads:
            thread.start()
        for thread in threads:
            thread.join()
        assert wrong == []
        ended_well(world, "finished")
