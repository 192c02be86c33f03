"""Random operations on governed layers against the classes they stand for: same tensors, no rest."""

from __future__ import annotations

import random
from collections.abc import Iterator
from typing import Any

import pytest
import torch
from transformers import Cache, DynamicCache, Qwen3Config, StaticCache

from kvcustody.errors import CapacityError, ConfigError
from kvcustody.integrations.transformers.classic.governed_cache import governed_cache
from standins.engines.transformers.classic_world import (
    MODEL,
    World,
    gemma,
    llama,
    nonzero,
    open_world,
    person,
    plain_cache,
)

TOKENS, HEADS, WIDTH, ROWS = 64, 2, 16, 4
OPERATIONS = {
    "dynamic": ("update",) * 6 + ("crop", "reorder", "repeat", "select", "reset"),
    "offloaded": ("update",) * 6 + ("crop", "reorder", "repeat", "select", "reset"),
    "static": ("update",) * 6 + ("reorder", "reset"),
    "quantized": ("update",) * 6 + ("reorder",),  # transformers' own class cannot do the others
}


@pytest.fixture(scope="module")
def world(tmp_path_factory: pytest.TempPathFactory) -> Iterator[World]:
    with open_world(tmp_path_factory.mktemp("world")) as opened:
        yield opened


class Pair:
    """A governed cache and its plain twin, driven with the same states."""

    def __init__(self, ours: Cache, theirs: Cache, seed: int) -> None:
        self.ours, self.theirs = ours, theirs
        self.random = random.Random(seed)
        self.generator = torch.Generator().manual_seed(seed)
        self.rows, self.tokens = 2, 0

    def both(self, act: Any) -> None:
        act(self.ours)
        act(self.theirs)

    def do(self, operation: str) -> None:
        getattr(self, operation)()
        for layer in range(len(self.theirs)):
            assert int(self.ours.get_seq_length(layer)) == int(self.theirs.get_seq_length(layer)) == self.tokens
            assert self.ours.get_mask_sizes(1, layer) == self.theirs.get_mask_sizes(1, layer)

    def update(self) -> None:
        count = self.random.choice([1, 1, 1, 2, 5, 19])
        if self.tokens + count > TOKENS:
            return
        for layer in range(len(self.theirs)):
            states = [torch.randn(self.rows, HEADS, count, WIDTH, generator=self.generator) for _ in range(2)]
            got = self.ours.update(*states, layer)
            expected = self.theirs.update(*states, layer)
            assert all(torch.equal(a, b) for a, b in zip(got, expected, strict=True))
        self.tokens += count

    def crop(self) -> None:
        count = self.random.randint(0, self.tokens)
        self.both(lambda past: past.crop(-count))
        self.tokens -= count

    def reorder(self) -> None:
        order = torch.tensor(self.random.choices(range(self.rows), k=self.rows))
        if self.tokens:
            self.both(lambda past: past.reorder_cache(order))

    def repeat(self) -> None:
        if self.rows * 2 <= ROWS and self.tokens:
            self.both(lambda past: past.batch_repeat_interleave(2))
            self.rows *= 2

    def select(self) -> None:
        if self.tokens:
            chosen = torch.tensor(sorted(self.random.sample(range(self.rows), max(1, self.rows - 1))))
            self.both(lambda past: past.batch_select_indices(chosen))
            self.rows = len(chosen)

    def reset(self) -> None:
        self.both(lambda past: past.reset())
        assert nonzero(self.ours.residency.slabs[:1]) == 0 or len(self.ours.residency.slabs) == 2
        self.tokens = 0


@pytest.mark.parametrize("seed", range(12))
@pytest.mark.parametrize(
    ("model", "kind"),
    [(llama, "dynamic"), (llama, "static"), (llama, "quantized"), (llama, "offloaded"), (gemma, "static")],
)
def test_random_operations(world: World, model: Any, kind: str, seed: int) -> None:
    config = model().config
    plain = StaticCache(config, max_cache_len=TOKENS) if kind == "static" else plain_cache(kind, config)
    with world.open(kind, model=model(), max_tokens=TOKENS, batch_size=ROWS) as cache:
        pair = Pair(cache, plain, seed)
        # A static window is rolled in the class and slides here: batch rows are reordered before it is full alone.
        operations = ("update",) * 6 + ("reset",) if model is gemma else OPERATIONS[kind]
        for _ in range(60):
            pair.do(pair.random.choice(operations))
        slabs = cache.residency.slabs
    assert nonzero(slabs) == 0


@pytest.mark.parametrize("seed", range(12))
@pytest.mark.parametrize("records", [False, True])
def test_random_operations_on_windows(world: World, seed: int, records: bool) -> None:
    """Updates, reorders and, where the past is recorded, a crop after each update, as assisted decoding does."""
    config = gemma().config
    with world.open(model=gemma(), max_tokens=TOKENS, batch_size=ROWS) as cache:
        pair = Pair(cache, DynamicCache(config=config), seed)
        if records:
            pair.both(lambda past: past.activate_past_recording())
        for _ in range(60):
            before = pair.tokens
            pair.do(pair.random.choice(("update", "update", "update", "reorder", "select", "repeat")))
            if records and pair.tokens > before:
                back = pair.random.randint(0, min(4, pair.tokens - before))
                pair.both(lambda past, back=back: past.crop(-back))
                pair.tokens -= back
        slabs = cache.residency.slabs
    assert nonzero(slabs) == 0


@pytest.mark.parametrize("kind", ["dynamic", "quantized", "offloaded"])
def test_what_is_cropped_or_dropped_is_zero_at_once(world: World, kind: str) -> None:
    with world.open(kind, max_tokens=TOKENS, batch_size=ROWS) as cache:
        states = torch.ones(4, HEADS, 10, WIDTH)
        for layer in range(3):
            cache.update(states, states, layer)
        one = nonzero(cache.residency.slabs[:1]) // 4  # values differ in width, not in number
        cache.batch_select_indices(torch.tensor([2]))
        assert nonzero(_homes(cache)) <= one + 64
        cache.crop(-10)
        assert nonzero(_homes(cache)) <= 64  # two scales a layer where there are any


def _homes(cache: Any) -> list[torch.Tensor]:
    """The regions in which the layers keep their states."""
    return [buffer.region for layer in cache.layers for buffer in layer._buffers]


@pytest.mark.parametrize("kind", ["dynamic", "static"])
def test_a_lent_copy_lives_until_its_layer_is_used_again(world: World, kind: str) -> None:
    """Not until another layer is: models that share states between layers read them later."""
    with world.open(kind, model=gemma()) as cache:
        states, lent = torch.ones(1, HEADS, 20, WIDTH), cache.residency.lent
        for _ in range(2):
            for layer in range(4):
                cache.update(states, states, layer)
        copies = [tensor for held in lent.values() for tensor in held]
        assert len(copies) == 4 and all(bool((copy == 1).all()) for copy in copies)  # two windowed layers, two sides
        cache.update(states[:, :, :1], states[:, :, :1], 0)
        assert [nonzero([copy]) > 0 for copy in copies] == [False, False, True, True]
    assert nonzero(copies) == 0


def test_a_refused_update_changes_nothing(world: World) -> None:
    for kind in ("dynamic", "static", "quantized", "offloaded"):
        with world.open(kind, max_tokens=8) as cache:
            states = torch.ones(1, HEADS, 6, WIDTH)
            cache.update(states, states, 0)
            with pytest.raises(CapacityError, match="reserved for `8`"):
                cache.update(states, states, 0)
            with pytest.raises(CapacityError, match="do not continue a cache"):
                cache.update(states[:, :1, :1], states[:, :, :1], 0)
            with pytest.raises(CapacityError, match="do not continue a cache"):
                cache.update(states[:, :, :1], states[:, :1, :1], 0)
            assert int(cache.get_seq_length(0)) == 6
            cache.update(states[:, :, :2], states[:, :, :2], 0)


def test_states_wider_than_declared_are_refused(world: World) -> None:
    with world.open(max_tokens=8) as cache:
        states = torch.ones(3, HEADS, 1, WIDTH)
        with pytest.raises(CapacityError, match="batch_size"):
            cache.update(states, states, 0)
    with world.open(max_tokens=8, dtype=torch.bfloat16) as cache, pytest.raises(CapacityError, match="dtype"):
        cache.update(states[:1], states[:1], 0)


def config_of(*types: str, **more: object) -> Any:
    fields = {"num_key_value_heads": 1, "num_attention_heads": 1, "head_dim": 8, "hidden_size": 8} | more
    return Qwen3Config(
        num_hidden_layers=len(types),
        sliding_window=4,
        use_sliding_window=True,
        layer_types=list(types),
        **fields,
    )


@pytest.mark.parametrize(
    ("config", "options", "words"),
    [
        (config_of("full_attention", "linear_attention"), {}, "layer `1` is `linear_attention`"),
        (config_of("full_attention", kv_lora_rank=16), {}, "give `kv_shape`"),
        (config_of("full_attention", "sliding_attention"), {"kind": "quantized"}, "needs full attention"),
        (config_of("sliding_attention"), {"kind": "offloaded"}, "nothing to offload"),
        (config_of("full_attention", "moe"), {"kind": "offloaded"}, "may share another's"),
        (config_of("full_attention"), {"kind": "imaginary"}, "use one of dynamic, static"),
        (config_of("full_attention"), {"max_tokens": 0}, "must be at least 1"),
        (config_of("full_attention"), {"device": "meta"}, "only CPUs and CUDA devices"),
    ],
)
def test_what_has_no_governed_form_is_an_error(world: World, config: Any, options: Any, words: str) -> None:
    with pytest.raises(ConfigError, match=words):
        governed_cache(world.custodian, person(), MODEL, config=config, **({"max_tokens": 8} | options))
    assert world.memory.bound_bytes == 0


def test_shared_layers_hold_nothing(world: World) -> None:
    config = config_of("full_attention", "moe", "sliding_attention")
    for kind in ("dynamic", "static"):
        with governed_cache(world.custodian, person(), MODEL, config=config, kind=kind, max_tokens=8) as cache:
            states = torch.ones(1, 1, 3, 8)
            cache.update(states, states, 0)
            cache.update(states, states, 2)
            assert cache.is_dummy == [False, True, False]


def test_the_compiler_leaves_updates_alone(world: World) -> None:
    """A graph that swallowed the update would skip the deadlines."""
    with world.open("static", max_tokens=8) as cache:
        step = torch.compile(lambda past, states: past.update(states + 1, states, 0)[0] * 2, backend="eager")
        states = torch.ones(1, HEADS, 2, WIDTH)
        assert step(cache, states)[0, 0, 1, 0] == 4
        cache.end()
        with pytest.raises(Exception, match="ended and zeroed"):
            step(cache, states)
