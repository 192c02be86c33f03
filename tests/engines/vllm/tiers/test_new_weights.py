"""Weights that change under a running engine: nothing of the old ones comes back, from the device or from a tier."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file, save_file

from standins.engines.vllm.local_engine import BLOCK, LocalEngine
from standins.engines.vllm.tier_engines import PREFIX, deployment_with, displace, options, prompt
from standins.engines.vllm.tiny_model import save_model


def rewrite(model: Path, seed: int) -> None:
    """Other weights in the model's file."""
    file = model / "model.safetensors"
    random = torch.Generator().manual_seed(seed)
    tensors = {
        name: (torch.randn(tensor.shape, generator=random) * 0.2).to(tensor.dtype) if "proj" in name else tensor
        for name, tensor in load_file(file).items()
    }
    save_file(tensors, file, metadata={"format": "pt"})


@pytest.fixture
def model_of_its_own(tmp_path: Path) -> Path:
    return save_model(tmp_path / "model")


def test_after_new_weights_nothing_of_the_old_ones_is_reused(
    start: Callable[..., LocalEngine], model_of_its_own: Path, tmp_path: Path
) -> None:
    engine = start(model_of_its_own, deployment=deployment_with(tmp_path / "deployment"), **options())
    mine = prompt(1)
    engine.ask(mine, tenant="alpha")
    displace(engine)
    assert engine.ask(mine, tenant="alpha").cached_tokens == PREFIX * BLOCK, "control: a tier brings it back"
    rewrite(model_of_its_own, 5)
    engine.rpc("reload_weights")
    assert engine.ask(mine, tenant="alpha").cached_tokens == 0, "from the device"
    assert engine.ask(mine, tenant="alpha").cached_tokens == PREFIX * BLOCK, "of the new weights"
    displace(engine)
    assert engine.llm.reset_prefix_cache()
    assert engine.ask(mine, tenant="alpha").cached_tokens == 0, "a reset reaches what tiers have, too"
    displace(engine)
    engine.governance("weights_changed")
    assert engine.ask(mine, tenant="alpha").cached_tokens == 0, "told by whoever changed them"
    assert engine.governance("check") == []
