"""What is left in memory: nothing where a block is written next, nothing after a deadline, nothing at the end."""

from __future__ import annotations

import time
from collections.abc import Callable

import numpy as np
import pytest
import torch

from kvcustody.integrations.transformers.batching.custody import BatchCustody
from kvcustody.kernels.host import HostRows
from standins.engines.transformers.continuous_world import (
    IDLE_US,
    PAGE,
    Driver,
    Governed,
    batching,
    generation,
    governed,
    person,
    plain,
    prompt,
)

RARE = [  # shares of layers with windows, and a window below a page
    pytest.param(kind, marks=pytest.mark.system("a block of a rare shape is not zero before its first write"))
    for kind in ("wide", "narrow")
]
TICK_US = 20_000  # deadlines fall due in ticks of 16 ms
SMALL = {"num_blocks": 20, "max_batch_tokens": 32}


def churn(engine: Driver, add: Callable[[list[int]], str]) -> list[int]:
    """More prompts than fit, one after another; bytes found in blocks as they are about to be written first."""
    residue: list[int] = []
    known: dict[tuple[str, str], int] = {}

    def look() -> None:
        for allocator in engine.allocators:
            for name, table in engine.tables(allocator).items():
                key = (allocator.layer_type, name)
                fresh = table[known.get(key, engine.reused.get(name, 0) // PAGE) :]
                known[key] = len(table)
                if fresh:
                    residue.append(engine.nonzero(fresh, allocator))

    engine.before_forward = look
    for seed in range(7):
        known.clear()
        add(prompt(40 + seed, seed))
        add(prompt(30, seed % 3))
        engine.run()
    return residue


@pytest.mark.parametrize("kind", ["llama", "sliding", "windows", *RARE])
def test_every_block_is_zero_before_its_first_write_and_the_plain_engines_are_not(kind: str) -> None:
    with plain(kind, config=batching(**SMALL), generate=generation(max_new_tokens=12)) as engine:
        baseline = churn(engine, engine.add)
    with governed(kind, config=batching(**SMALL), generate=generation(max_new_tokens=12)) as engine:
        tenants = iter("ab" * 20)
        found = churn(engine, lambda tokens: engine.submit(person(next(tenants)), tokens))
        assert engine.governor.stats().pools[0].allocated > 60  # blocks were handed out many times over
    assert len(found) >= 14 and sum(found) == 0
    print(f"bytes not zero before a first write: plain {sum(baseline)}, governed {sum(found)}")
    assert sum(baseline) > 10_000


@pytest.mark.parametrize("kind", ["llama", "sliding", "windows"])
def test_the_check_of_first_writes_sees_a_scrub_that_does_nothing(kind: str) -> None:
    with governed(kind, config=batching(**SMALL)) as engine:
        (memory,) = engine.custody.blocks.memories
        for table in memory.tables:  # what is zeroed and read back is a copy
            table.words = tuple(words.clone() for words in table.words)
            table.rows = HostRows(table.words)
        found = churn(engine, lambda tokens: engine.submit(person(), tokens))
    assert sum(found) > 10_000


def settle(engine: Governed, done: Callable[[], bool]) -> None:
    deadline = time.monotonic() + 60
    while not done():
        assert time.monotonic() < deadline, "nothing happened for a minute"
        time.sleep(0.02)


def used(engine: Governed) -> int:
    return engine.nonzero(range(engine.custody.blocks.parts[0].first, engine.custody.blocks.parts[0].first + 64))


def test_an_idle_loop_wipes_what_is_past_its_deadline() -> None:
    with governed() as engine:
        engine.batching.generate_batch(person(), [prompt(50)])
        assert used(engine) > 0
        engine.batching.start()
        engine.clock.advance(IDLE_US - 1_000_000)
        time.sleep(0.3)
        assert used(engine) > 0  # not before its time
        engine.clock.advance(1_000_000 + TICK_US)  # lapses
        settle(engine, lambda: engine.governor.managers[0].accounts["a"].cached_blocks == 0)
        engine.clock.advance(1_000_001)  # and must be gone within a second
        settle(engine, lambda: used(engine) == 0)
        assert engine.manager.is_running()
        engine.batching.stop()


def test_a_timer_wipes_where_no_loop_runs() -> None:
    with governed() as engine:
        engine.submit(person(), prompt(50))
        engine.run()
        assert used(engine) > 0 and not engine.manager.is_running()
        engine.clock.advance(IDLE_US + TICK_US)
        settle(engine, lambda: engine.governor.managers[0].accounts["a"].cached_blocks == 0)
        engine.clock.advance(1_000_001)
        settle(engine, lambda: used(engine) == 0)


def test_positive_control_a_loop_that_does_nothing_while_idle_wipes_nothing(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    with governed() as engine:
        engine.batching.generate_batch(person(), [prompt(50)])
        with monkeypatch.context() as off:
            off.setattr(BatchCustody, "tick", lambda self: [])
            engine.batching.start()
            past_every_deadline(engine)
            assert used(engine) > 0 and engine.manager.is_running()
            engine.batching.stop()
        settle(engine, lambda: used(engine) == 0)


def test_positive_control_without_the_timer_nothing_is_wiped_where_no_loop_runs() -> None:
    with governed(tick_seconds=None) as engine:
        engine.submit(person(), prompt(50))
        engine.run()
        past_every_deadline(engine)
        assert used(engine) > 0
        engine.batching.tick()
        assert used(engine) == 0


def past_every_deadline(engine: Governed) -> None:
    """Idle time and the time to scrub are over, and whoever looks at the clock has had time to."""
    engine.clock.advance(IDLE_US + TICK_US)
    time.sleep(0.25)
    engine.clock.advance(1_000_001)
    time.sleep(0.25)


def test_what_is_past_its_deadline_serves_nobody_though_no_sweep_has_run() -> None:
    with governed() as engine, engine.custody.turn:  # the timer cannot have a turn
        engine.submit(person(), prompt(50))
        engine.run()
        fresh = engine.submit(person(), prompt(50))
        engine.step()
        assert engine.reused[fresh] == 48
        engine.run()
        engine.clock.advance(IDLE_US + 1)
        engine.governor.step = lambda: ()  # type: ignore[method-assign]
        late = engine.submit(person(), prompt(50))
        engine.run()
        assert engine.reused[late] == 0


def test_the_write_trash_is_zeroed_on_time() -> None:
    with governed() as engine:
        allocator, blocks = engine.allocator, engine.custody.blocks
        for layer in allocator.layer_indices:  # as padding does
            states = torch.ones((1, allocator.num_key_value_heads, allocator.head_dim))
            index = torch.tensor([allocator.write_trash_index])
            allocator.update(states, states, layer, torch.empty(0, dtype=torch.int64), index)
        assert blocks.trash_nonzero_bytes() > 0
        engine.clock.advance(600_000)
        engine.step()
        assert blocks.trash_nonzero_bytes() == 0


@pytest.mark.parametrize("kind", ["llama", "sliding", "windows"])
def test_closing_leaves_zeroed_memory(kind: str) -> None:
    with governed(kind, generate=generation(max_new_tokens=30)) as engine:
        engine.submit(person(), prompt(50))
        for _ in range(3):
            engine.step()
        assert used(engine) > 0
        (memory,) = engine.custody.blocks.memories
    assert memory.nonzero_bytes(np.arange(engine.custody.blocks.blocks)) == 0
    assert int(torch.count_nonzero(engine.cache.cache_tensor)) == 0
