"""Governed classic caches give what the classes they stand for give, token for token, and end at zero."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
from transformers import EncoderDecoderCache, T5Config, T5ForConditionalGeneration

from kvcustody.integrations.transformers.classic.governed_cache import governed_cache
from standins.engines.transformers.classic_world import (
    MODEL,
    World,
    gemma,
    generate,
    llama,
    nonzero,
    open_world,
    person,
    plain_cache,
)

CASES = [(model, kind) for model in (llama, gemma) for kind in ("dynamic", "static", "quantized", "offloaded")]
CASES.remove((gemma, "quantized"))  # transformers refuses windows there, and so do we


@pytest.fixture(scope="module")
def world(tmp_path_factory: pytest.TempPathFactory) -> Iterator[World]:
    with open_world(tmp_path_factory.mktemp("world")) as opened:
        yield opened


@pytest.mark.parametrize(("model", "kind"), CASES)
def test_greedy_output_is_identical_and_the_end_is_zero(world: World, model: Any, kind: str) -> None:
    expected = generate(model(), plain_cache(kind, model().config))
    with world.open(kind, model=model()) as cache:
        assert generate(model(), cache) == expected
        slabs = cache.residency.slabs
        assert nonzero(slabs) > 1000
    assert nonzero(slabs) == 0
    assert world.memory.bound_bytes == 0


@pytest.mark.parametrize(("model", "kind"), [case for case in CASES if case[1] != "static"])
def test_logits_are_equal_to_the_last_bit(world: World, model: Any, kind: str) -> None:
    """A stricter view of one step: prompt, then three tokens one by one."""
    ids = torch.arange(1, 24)[None]
    with world.open(kind, model=model()) as cache, torch.no_grad():
        plain = plain_cache(kind, model().config)
        for piece in (ids[:, :20], ids[:, 20:21], ids[:, 21:22], ids[:, 22:]):
            ours, theirs = (model()(piece, past_key_values=past).logits for past in (cache, plain))
            assert torch.equal(ours, theirs)


@pytest.mark.parametrize(("model", "kind"), CASES)
def test_a_conversation_goes_on_in_the_same_cache(world: World, model: Any, kind: str) -> None:
    with world.open(kind, model=model()) as cache:
        plain = plain_cache(kind, model().config)
        ours = theirs = list(range(1, 21))
        for more in ([], [7, 8, 9], [11] * 12):
            ours = generate(model(), cache, 6, prompt=[*ours, *more])
            theirs = generate(model(), plain, 6, prompt=[*theirs, *more])
            assert ours == theirs


@pytest.mark.parametrize("kind", ["dynamic", "static", "quantized", "offloaded"])
def test_beams_are_reordered_in_place(world: World, kind: str) -> None:
    expected = generate(llama(), plain_cache(kind, llama().config), 20, num_beams=3)
    with world.open(kind, batch_size=3) as cache:
        assert generate(llama(), cache, 20, num_beams=3) == expected


def test_prompt_look_up_decoding_takes_tokens_back(world: World) -> None:
    for model in (llama(), gemma()):
        repeated = list(range(1, 9)) * 4
        expected = generate(model, plain_cache("dynamic", model.config), prompt=repeated, prompt_lookup_num_tokens=4)
        with world.open(model=model) as cache:
            got = generate(model, cache, prompt=repeated, prompt_lookup_num_tokens=4)
        assert got == expected


def test_half_precision(world: World) -> None:
    model = llama().to(torch.bfloat16)
    try:
        for kind in ("dynamic", "quantized", "offloaded"):
            expected = generate(model, plain_cache(kind, model.config))
            with world.open(kind, dtype=torch.bfloat16) as cache:
                assert generate(model, cache) == expected
    finally:
        model.to(torch.float32)


def test_an_encoder_and_a_decoder_have_a_cache_each(world: World) -> None:
    torch.manual_seed(3)
    config = T5Config(vocab_size=64, d_model=32, d_kv=8, d_ff=64, num_layers=2, num_heads=4, decoder_start_token_id=0)
    model = T5ForConditionalGeneration(config).eval()
    options = {"config": model.config, "kv_shape": (4, 8, 8)}
    ids = torch.arange(1, 12)[None]
    chosen = {"max_new_tokens": 15, "do_sample": False, "eos_token_id": None}
    expected = model.generate(ids, **chosen)
    with (
        governed_cache(world.custodian, person(), MODEL, max_tokens=16, **options) as own,
        governed_cache(world.custodian, person(), MODEL, max_tokens=11, **options) as cross,
    ):
        got = model.generate(ids, past_key_values=EncoderDecoderCache(own, cross), **chosen)
        slabs = [*own.residency.slabs, *cross.residency.slabs]
        assert nonzero(slabs) > 500
    assert torch.equal(got, expected)
    assert nonzero(slabs) == 0


def test_the_world_is_in_order(world: World, tmp_path: Path) -> None:
    """After all of the above in one worker: no disagreement, nothing open, complete evidence."""
    governor = world.worker.governor
    assert governor.check() == [] and governor.scan() == []
    assert not governor.running
    found, broken = world.evidence()
    assert broken == []
    assert found.total.due > 100 and found.total.coverage == 1.0
