"""What `kvcustody size` says is what vLLM allocates: the real models, built without memory, and vLLM's own block count.

Each model is made on the meta device, its layers say what they keep, and vLLM turns that into groups and blocks. Ours
come from the config alone.
"""

from __future__ import annotations

import tempfile
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import pytest

pytest.importorskip("vllm")

import torch
from vllm import envs
from vllm.config import get_layers_from_vllm_config, set_current_vllm_config
from vllm.distributed import (
    destroy_distributed_environment,
    destroy_model_parallel,
    init_distributed_environment,
    initialize_model_parallel,
)
from vllm.engine.arg_utils import EngineArgs
from vllm.model_executor.layers.attention_layer_base import AttentionLayerBase
from vllm.model_executor.layers.mamba.mamba_utils import MambaStateDtypeCalculator, MambaStateShapeCalculator
from vllm.model_executor.model_loader.utils import initialize_model
from vllm.platforms import current_platform
from vllm.platforms.cpu import CpuPlatform
from vllm.v1.attention.backends.triton_attn import TritonAttentionBackend
from vllm.v1.kv_cache_interface import (
    ChunkedLocalAttentionSpec,
    CrossAttentionSpec,
    FullAttentionSpec,
    KVQuantMode,
    MambaSpec,
    MLAAttentionSpec,
    SlidingWindowSpec,
)

from standins.engines.vllm.sizing_models import MODELS, folder_of

try:
    from vllm.v1.core.kv_cache_planning import get_kv_cache_config_from_groups, get_kv_cache_groups
except ImportError:  # before 0.33
    from vllm.v1.core.kv_cache_utils import get_kv_cache_config_from_groups, get_kv_cache_groups

from kvcustody.lab.sizing.attention_layers import Attention
from kvcustody.lab.sizing.engine_blocks import engine_blocks
from kvcustody.lab.sizing.hf_config import KvDtype, parse_config

MEMORY = 1 << 30
KINDS = {
    MambaSpec: Attention.RECURRENT,
    CrossAttentionSpec: Attention.CROSS,
    SlidingWindowSpec: Attention.SLIDING,
    ChunkedLocalAttentionSpec: Attention.CHUNKED,
    FullAttentionSpec: Attention.FULL,
}
OPTIONS: dict[str, dict[str, Any]] = {
    "llama-fp32": {"dtype": "float32"},
}
OPTIONS |= {"kimi-linear": {"enable_prefix_caching": False}}  # vLLM caches no prefix of it
# vLLM 0.32 has no such model any more (below). Bamba's states are compared with what is left of it.
NOT_HERE = {"minimax-text", "bamba"}


def kind_of(spec: Any) -> Attention:
    if isinstance(spec, MLAAttentionSpec):
        return Attention.INDEXER if spec.dtype == torch.uint8 else Attention.LATENT
    return KINDS[type(spec)]


@contextmanager
def _one_process() -> Iterator[None]:
    init_distributed_environment(1, 0, f"file://{tempfile.mktemp()}", 0, "gloo")
    initialize_model_parallel(1, 1)
    try:
        yield
    finally:
        destroy_model_parallel()
        destroy_distributed_environment()


class Allocated:
    """What vLLM allocates for a model: by kind how many layers, and the bytes that each needs; blocks of all."""

    def __init__(self, config: dict[str, Any], **options: Any) -> None:
        args = EngineArgs(
            model=folder_of(config),
            skip_tokenizer_init=True,
            load_format="dummy",
            enforce_eager=True,
            **options,
        )
        engine = args.create_engine_config()
        with set_current_vllm_config(engine), _one_process():
            dtype = torch.get_default_dtype()
            torch.set_default_dtype(engine.model_config.dtype)
            try:
                with torch.device("meta"):
                    initialize_model(engine)
            finally:
                torch.set_default_dtype(dtype)
            current_platform.update_block_size_for_backend(engine)
            engine.cache_config.kv_cache_layout = "LBHNC"
            layers = get_layers_from_vllm_config(engine, AttentionLayerBase)
            specs = {
                name: spec for name, layer in layers.items() if (spec := layer.get_kv_cache_spec(engine)) is not None
            }
            self.block_tokens = engine.cache_config.block_size
            self.kinds: dict[Attention, tuple[int, int]] = {}
            for spec in specs.values():
                kind = kind_of(spec)
                size = spec.real_page_size_bytes
                if kind is not Attention.RECURRENT:
                    size = size * self.block_tokens // spec.block_size
                count, before = self.kinds.get(kind, (0, size))
                assert before == size, "layers of a kind are of one size"
                self.kinds[kind] = (count + 1, size)
            groups = get_kv_cache_groups(engine, specs)
            self.group_count = len(groups)
            self.blocks = get_kv_cache_config_from_groups(engine, groups, MEMORY).num_blocks


def _plain(value: Any) -> Any:
    return value._replace(use_sparse=False) if getattr(value, "use_sparse", False) else value


@pytest.fixture(autouse=True)
def _quiet(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("HF_HUB_OFFLINE", "1")
    # A CPU keeps recurrent states in 32 bits where it has these instructions; a GPU in the model's dtype.
    monkeypatch.setattr(torch.cpu, "_is_avx512_bf16_supported", lambda: False)
    choose = CpuPlatform.get_attn_backend_cls.__func__

    def without_sparse(cls: Any, *rest: Any, **named: Any) -> Any:
        """A sparse model has no kernels on a CPU; what it keeps does not depend on them."""
        named = {name: _plain(value) for name, value in named.items()}
        return choose(cls, *map(_plain, rest), **named)

    monkeypatch.setattr(CpuPlatform, "get_attn_backend_cls", classmethod(without_sparse))
    prefer = getattr(CpuPlatform, "_preferred_block_size_for_backends", None)  # 0.33 and later

    def any_size(cls: Any, backends: Any, default: int, config: Any) -> Any:
        """Nor is there a size of block that a CPU's attention and a sparse model's index share."""
        try:
            return prefer.__func__(cls, backends, default, config)
        except ValueError:
            return default

    if prefer is not None:
        monkeypatch.setattr(CpuPlatform, "_preferred_block_size_for_backends", classmethod(any_size))


class _Nothing:
    """A stream or an event of a device, of which nothing that is kept depends."""

    def __init__(self, *_: Any, **__: Any) -> None:
        pass


@pytest.fixture
def without_nvidia(monkeypatch: pytest.MonkeyPatch) -> None:
    """Kimi-Linear's model is NVIDIA's: it asks for streams, for fused collectives, and for blocks that a CPU has no
    attention for. What its layers say that they keep depends on none of them.
    """
    monkeypatch.setenv("VLLM_KIMI_K3_GEMM_AR", "0")
    monkeypatch.setenv("VLLM_ENABLE_GEMM_RS", "0")
    envs.disable_envs_cache()  # an engine before this one may have had it on
    monkeypatch.setattr(torch.cuda, "Stream", _Nothing)
    monkeypatch.setattr(torch.cuda, "Event", _Nothing)
    monkeypatch.setattr(CpuPlatform, "_check_aligned_block_size", classmethod(lambda *_: None))


def test_kimi_linear_keeps_what_we_say_and_as_many_blocks_fit(without_nvidia: None) -> None:
    compare("kimi-linear")


def test_what_is_not_compared_is_not_in_vllm() -> None:
    """Else it would have to be."""
    from vllm.model_executor.models.registry import _PREVIOUSLY_SUPPORTED_MODELS

    assert {MODELS[name]["architectures"][0] for name in NOT_HERE} <= set(_PREVIOUSLY_SUPPORTED_MODELS)


@pytest.mark.parametrize("name", sorted(set(MODELS) - NOT_HERE - {"kimi-linear"}))
def test_every_layer_keeps_what_we_say_and_as_many_blocks_fit(name: str) -> None:
    compare(name)


def compare(name: str) -> None:
    """Layers, bytes, groups and blocks: vLLM's and ours."""
    allocated = Allocated(MODELS[name], **OPTIONS.get(name, {}))
    layout = parse_config(MODELS[name])
    ours = {
        group.attention: (group.layers, group.bytes_per_block(allocated.block_tokens) // group.layers)
        for group in layout.groups
    }
    assert ours == allocated.kinds
    found = engine_blocks(layout, block_tokens=allocated.block_tokens, kv_bytes=MEMORY)
    assert (found.blocks, found.tables, found.block_tokens) == (
        allocated.blocks,
        allocated.group_count,
        allocated.block_tokens,
    )


def test_at_least_twenty_configurations_are_compared() -> None:
    assert len(set(MODELS) - NOT_HERE) >= 20


def test_kimis_delta_attention_keeps_what_vllm_says() -> None:
    said = MODELS["kimi-linear"]["linear_attn_config"]
    shapes = MambaStateShapeCalculator.kda_state_shape(
        1, said["num_heads"], said["head_dim"], conv_kernel_size=said["short_conv_kernel_size"]
    )
    dtypes = MambaStateDtypeCalculator.kda_state_dtype(torch.bfloat16, "auto")
    spec = MambaSpec(block_size=16, shapes=shapes, dtypes=dtypes)
    latent, states = parse_config(MODELS["kimi-linear"]).groups
    assert (latent.attention, latent.layers, states.layers) == (Attention.LATENT, 2, 6)
    assert states.state_bytes == spec.page_size_bytes


def test_bambas_layers_keep_what_vllm_says_of_mamba_2() -> None:
    """vLLM had the model until 0.22, made of the layers that Granite-4-H has still."""
    shapes = MambaStateShapeCalculator.mamba2_state_shape(1, 512, 1, 16, 32, 48, 4)
    dtypes = MambaStateDtypeCalculator.mamba2_state_dtype(torch.bfloat16, "auto", "auto")
    spec = MambaSpec(block_size=16, shapes=shapes, dtypes=dtypes)
    full, states = parse_config(MODELS["bamba"]).groups
    assert (full.attention, full.layers, states.layers) == (Attention.FULL, 2, 6)
    assert states.state_bytes == spec.page_size_bytes


@pytest.mark.parametrize("shards", [1, 2, 4])
def test_states_split_over_shards_as_vllm_splits_them(shards: int) -> None:
    """Groups that do not divide go with every shard of their heads."""
    for name, inner, groups, heads, width, state, kernel in (
        ("bamba", 512, 1, 16, 32, 48, 4),
        ("zamba2", 512, 2, 16, 32, 24, 4),
    ):
        shapes = MambaStateShapeCalculator.mamba2_state_shape(shards, inner, groups, heads, width, state, kernel)
        dtypes = MambaStateDtypeCalculator.mamba2_state_dtype(torch.bfloat16, "auto", "auto")
        (states,) = (
            group
            for group in parse_config(MODELS[name], tensor_parallel=shards).groups
            if group.attention is Attention.RECURRENT
        )
        assert states.state_bytes == MambaSpec(block_size=16, shapes=shapes, dtypes=dtypes).page_size_bytes


@pytest.mark.parametrize("head_dim", [64, 96, 128])
def test_quantised_keys_and_values_are_as_the_backends_pack_them(head_dim: int) -> None:
    from vllm.utils.torch_utils import nvfp4_kv_cache_full_dim

    assert KvDtype.NVFP4.vector_bytes(head_dim) == nvfp4_kv_cache_full_dim(head_dim)
    for mode, ours, dtype in (
        (KVQuantMode.INT8_PER_TOKEN_HEAD, KvDtype.INT8_PER_TOKEN_HEAD, torch.int8),
        (KVQuantMode.FP8_PER_TOKEN_HEAD, KvDtype.FP8_PER_TOKEN_HEAD, torch.uint8),
        (KVQuantMode.FP8_PER_TENSOR, KvDtype.FP8, torch.uint8),
        (KVQuantMode.NONE, KvDtype.BF16, torch.bfloat16),
    ):
        spec = FullAttentionSpec(block_size=16, num_kv_heads=3, head_size=head_dim, dtype=dtype, kv_quant_mode=mode)
        packed = TritonAttentionBackend.customize_spec(spec)
        assert packed.page_size_bytes == 16 * 3 * 2 * ours.vector_bytes(head_dim)
