"""The range of vLLM releases, what is compared before one is governed, and how a cache's tensors are read."""

from __future__ import annotations

import numpy as np
import pytest
import torch

from kvcustody.allocator.pool.tensor_memory import TensorMemory
from kvcustody.errors import ConfigError, CustodyError
from kvcustody.integrations.vllm.versions import check_leading, check_signatures, check_type, check_version
from kvcustody.integrations.vllm.worker.kv_layout import block_tensors


@pytest.mark.parametrize("text", ["0.28.0", "0.32.0+cpu", "0.33.1"])
def test_versions_in_the_range(text: str) -> None:
    assert check_version(text).text == text


@pytest.mark.parametrize("text", ["0.27.1", "0.34.0", "1.0", "dev", ""])
def test_other_versions_are_refused_with_advice(text: str) -> None:
    with pytest.raises(ConfigError, match="install"):
        check_version(text)


def test_the_installed_release_is_what_it_says() -> None:
    check_version()


def test_a_changed_method_is_named() -> None:
    with pytest.raises(ConfigError, match="touch"):
        check_signatures({"vllm.v1.core.block_pool:BlockPool.touch": ("blocks", "more")})
    with pytest.raises(ConfigError, match="missing"):
        check_signatures({"vllm.v1.core.block_pool:BlockPool.missing": ()})


def test_a_method_that_begins_otherwise_is_named() -> None:
    place = "vllm.v1.core.block_pool:BlockPool.touch"
    check_leading(place, ())
    with pytest.raises(ConfigError, match="touch"):
        check_leading(place, ("more",))


def test_a_subclass_is_not_governed() -> None:
    class Other(dict):  # type: ignore[type-arg]
        pass

    with pytest.raises(ConfigError, match="another plugin"):
        check_type(Other(), dict, "the pool")


BLOCKS = 6


def memory(*views: torch.Tensor) -> TensorMemory:
    """What the adapter makes of these layers."""
    return TensorMemory.wrap([block_tensors({f"layer.{at}": view for at, view in enumerate(views)}, BLOCKS)])


@pytest.mark.parametrize(
    "view",
    [
        torch.ones(BLOCKS, 2, 16, 4),  # blocks first
        torch.ones(2, BLOCKS, 16, 4),  # K and V apart
        torch.ones(BLOCKS, 16, 8),  # latent
        torch.ones(BLOCKS * 4, 2, 4, 4),  # kernel blocks that split the manager's
        torch.ones(BLOCKS, 16, 2, 4).permute(0, 2, 1, 3),  # strides in another order
        torch.ones(2 * BLOCKS, 4, 4, dtype=torch.bfloat16).view(BLOCKS, 2, 4, 4),
    ],
)
def test_a_block_is_all_of_its_bytes_and_no_others(view: torch.Tensor) -> None:

    made = memory(view)
    assert made.bytes_per_block == view.numel() * view.element_size() // BLOCKS
    made.scrub(0, np.array([2, 5]), 1.0)
    by_block = view.transpose(0, 1) if view.shape[0] == 2 else view.reshape(BLOCKS, -1)
    zero = [not bool(by_block[block].any()) for block in range(BLOCKS)]
    assert zero == [block in (2, 5) for block in range(BLOCKS)]


def test_layers_that_overlay_each_other_are_listed_once() -> None:
    raw = torch.ones(BLOCKS * 64)
    assert memory(raw.view(BLOCKS, 2, 32), raw.view(BLOCKS, 64)).bytes_per_block == 256


def test_packed_layers_keep_to_their_own_bytes() -> None:
    raw = torch.ones(BLOCKS, 3, 32)
    made = memory(raw[:, 0], raw[:, 2])
    made.scrub(0, np.arange(BLOCKS), 1.0)
    assert not raw[:, 0].any() and not raw[:, 2].any() and bool(raw[:, 1].all())


@pytest.mark.parametrize("view", [torch.ones(5, 4), torch.ones(4)])
def test_what_does_not_count_blocks_is_refused(view: torch.Tensor) -> None:
    with pytest.raises(CustodyError):
        memory(view)


def test_an_ambiguous_shape_is_refused() -> None:
    with pytest.raises(ConfigError, match="either"):
        block_tensors({"layer": torch.ones(2, 2, 16)}, 2)
