"""A Hugging Face `config.json`, read as the shape of its K/V cache: groups of layers that store the same
thing.

Nothing is guessed: a field that is missing and has no documented default for its model type is a
`ConfigError` that names it.

- Every layer is in exactly one group, or shares another layer's cache (`num_kv_shared_layers`).
- `bytes_per_token` of a group is layers x kv_heads x (key_dim + value_dim) x bytes, on one shard.
- A latent (MLA) group stores one vector a token for all heads, whole on every shard.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from enum import StrEnum
from typing import Any

from kvcustody.allocator.sizing.hf_config_fields import ModelConfig
from kvcustody.errors import ConfigError


class KvDtype(StrEnum):
    """How a K/V element is stored."""

    FP32 = "fp32"
    FP16 = "fp16"
    BF16 = "bf16"
    FP8 = "fp8"

    @property
    def bytes(self) -> int:
        """Bytes of one element."""
        return {"fp32": 4, "fp16": 2, "bf16": 2, "fp8": 1}[self.value]


class Attention(StrEnum):
    """What a layer keeps of its past."""

    FULL = "full"
    SLIDING = "sliding"  # the last `window_tokens`
    CHUNKED = "chunked"  # the current chunk of `window_tokens`
    LATENT = "latent"  # all of it, compressed (MLA)


@dataclass(frozen=True, slots=True)
class LayerGroup:
    """Layers whose pages are alike; one block table each. Head counts are of one shard."""

    attention: Attention
    layers: int
    kv_heads: int
    key_dim: int
    value_dim: int
    window_tokens: int | None
    dtype: KvDtype

    @property
    def name(self) -> str:
        """`full`, `latent`, `sliding-4096`, ..."""
        return (
            self.attention.value
            if self.window_tokens is None
            else f"{self.attention.value}-{self.window_tokens}"
        )

    @property
    def bytes_per_token(self) -> int:
        """Bytes of one token in this group's layers, on one shard."""
        return self.layers * self.kv_heads * (self.key_dim + self.value_dim) * self.dtype.bytes

    def blocks_for(self, context_tokens: int, block_tokens: int) -> int:
        """Blocks that one sequence of this length holds at most; a window may straddle one block more."""
        whole = -(-context_tokens // block_tokens)
        if self.window_tokens is None:
            return whole
        if self.attention is Attention.CHUNKED:
            return min(whole, -(-self.window_tokens // block_tokens))
        return min(whole, -(-(self.window_tokens - 1) // block_tokens) + 1)


@dataclass(frozen=True, slots=True)
class KvLayout:
    """The K/V cache of one model, on one tensor-parallel shard."""

    model_type: str
    groups: tuple[LayerGroup, ...]
    dtype: KvDtype
    tensor_parallel: int
    context_tokens_max: int | None
    notes: tuple[str, ...]

    @property
    def layers(self) -> int:
        """Layers with a cache of their own."""
        return sum(group.layers for group in self.groups)

    @property
    def bytes_per_token(self) -> int:
        """Bytes of one token that every group still keeps, on one shard."""
        return sum(group.bytes_per_token for group in self.groups)


_DTYPES = {
    "float32": KvDtype.FP32,
    "fp32": KvDtype.FP32,
    "float16": KvDtype.FP16,
    "half": KvDtype.FP16,
    "fp16": KvDtype.FP16,
    "bfloat16": KvDtype.BF16,
    "bf16": KvDtype.BF16,
    "fp8": KvDtype.FP8,
    "fp8_e4m3": KvDtype.FP8,
    "fp8_e5m2": KvDtype.FP8,
    "float8_e4m3fn": KvDtype.FP8,
    "float8_e5m2": KvDtype.FP8,
}
# Every n-th layer is full, the others slide.
_PATTERNS = {"gemma2": 2, "gemma3_text": 6, "gpt_oss": 2, "cohere2": 4, "olmo3": 4, "exaone4": 4}
# A window only with `use_sliding_window`.
_OPT_IN_WINDOW = frozenset(("qwen2", "qwen2_moe", "qwen3", "qwen3_moe"))
_LAYER_TYPES = {
    "full_attention": Attention.FULL,
    "sliding_attention": Attention.SLIDING,
    "chunked_attention": Attention.CHUNKED,
}
_NOT_A_KV_CACHE = {  # fields of models that keep something else besides K and V
    "index_head_dim": "a sparse-attention indexer keeps its own cache",
    "ssm_cfg": "a state-space layer keeps a recurrent state",
    "hybrid_override_pattern": "a state-space layer keeps a recurrent state",
    "attn_layer_period": "a state-space layer keeps a recurrent state",
    "linear_attn_config": "a linear-attention layer keeps a recurrent state",
}


def parse_config(
    config: Mapping[str, Any], *, kv_dtype: str | None = None, tensor_parallel: int = 1
) -> KvLayout:
    """Read a `config.json` as a K/V layout; `kv_dtype` overrides the config's (fp8, bf16, fp16, fp32).

    Raises `ConfigError` that names the field and what to do about it.
    """
    model = ModelConfig(config)
    if tensor_parallel < 1:
        raise ConfigError(
            f"tensor parallel size `{tensor_parallel}` is not positive", tensor_parallel=tensor_parallel
        )
    for field, reason in _NOT_A_KV_CACHE.items():
        if model.raw(field) is not None:
            raise ConfigError(f"field `{field}`: {reason}, which this calculator does not size", field=field)
    if model.raw("is_encoder_decoder"):
        raise ConfigError(
            "field `is_encoder_decoder`: cross-attention caches are not sized", field="is_encoder_decoder"
        )
    dtype = _dtype(model, kv_dtype)
    groups = _latent(model, dtype) if model.latent else _groups(model, dtype, tensor_parallel)
    return KvLayout(
        model.model_type,
        groups,
        dtype,
        tensor_parallel,
        model.count("max_position_embeddings", "n_positions", "max_seq_len", "seq_length"),
        tuple(model.notes),
    )


def _dtype(model: ModelConfig, override: str | None) -> KvDtype:
    if override not in (None, "auto"):
        return _named_dtype(str(override), "kv_dtype")
    quantised = model.raw("quantization_config")
    scheme = quantised.get("kv_cache_scheme") if isinstance(quantised, Mapping) else None
    if isinstance(scheme, Mapping) and scheme.get("num_bits") == 8:
        model.note("the checkpoint's `kv_cache_scheme` stores K/V in 8 bits")
        return KvDtype.FP8
    declared = model.raw("torch_dtype", "dtype")
    if declared is None:
        raise ConfigError(
            "field `torch_dtype` is missing: say which with a KV dtype (fp8, bf16, fp16, fp32)",
            field="torch_dtype",
        )
    return _named_dtype(str(declared).removeprefix("torch."), "torch_dtype")


def _named_dtype(name: str, field: str) -> KvDtype:
    if name.lower() not in _DTYPES:
        raise ConfigError(f"`{field}` is `{name}`: use one of fp8, bf16, fp16, fp32", field=field, value=name)
    return _DTYPES[name.lower()]


def _latent(model: ModelConfig, dtype: KvDtype) -> tuple[LayerGroup, ...]:
    """The compressed K/V and the rotary key side by side, whole on every shard."""
    width = model.need("kv_lora_rank") + model.need("qk_rope_head_dim")
    model.note("MLA: the latent cache is whole on every tensor-parallel shard")
    return (LayerGroup(Attention.LATENT, model.layers, 1, width, 0, None, dtype),)


def _groups(model: ModelConfig, dtype: KvDtype, tensor_parallel: int) -> tuple[LayerGroup, ...]:
    kinds = _kinds(model)
    shared = model.raw("num_kv_shared_layers") or 0
    if not 0 <= shared < len(kinds):
        raise ConfigError(
            f"field `num_kv_shared_layers` is `{shared}` of `{len(kinds)}` layers",
            field="num_kv_shared_layers",
        )
    if shared:
        model.note(f"the last {shared} layers share the cache of earlier ones")
        kinds = kinds[:-shared]
    counts: dict[tuple[Attention, int | None], int] = {}
    for kind in kinds:
        counts[kind] = counts.get(kind, 0) + 1
    groups = []
    for (attention, window), layers in sorted(counts.items()):
        heads, key_dim = model.kv_heads, model.head_dim
        if (
            attention is Attention.FULL and attention is not kinds[0][0]
        ):  # hybrids may widen their global layers
            key_dim = model.count("global_head_dim") or key_dim
            heads = model.count("num_global_key_value_heads") or heads
        value_dim = model.count("v_head_dim") or key_dim
        sharded = _sharded(heads, tensor_parallel, model)
        groups.append(LayerGroup(attention, layers, sharded, key_dim, value_dim, window, dtype))
    return tuple(groups)


def _sharded(kv_heads: int, tensor_parallel: int, model: ModelConfig) -> int:
    """K/V heads of one shard: split evenly, or each head repeated on several shards."""
    if kv_heads % tensor_parallel == 0:
        return kv_heads // tensor_parallel
    if tensor_parallel % kv_heads == 0:
        model.note(f"{kv_heads} K/V heads are repeated over {tensor_parallel} shards, one on each")
        return 1
    raise ConfigError(
        f"`{kv_heads}` K/V heads do not split over `{tensor_parallel}` shards: "
        "use a tensor parallel size that divides them, or a multiple of them",
        kv_heads=kv_heads,
        tensor_parallel=tensor_parallel,
    )


def _kinds(model: ModelConfig) -> list[tuple[Attention, int | None]]:
    """Each layer's (attention, window), by the first rule that the config answers."""
    layers = model.layers
    declared = model.raw("layer_types")
    if declared is not None:
        return [_declared(model, str(one)) for one in _of_length(declared, layers)]
    if model.raw("attention_chunk_size") is not None and model.model_type.startswith("llama4"):
        rope = model.raw("no_rope_layers") or _every(layers, model.count("no_rope_layer_interval") or 4)
        return [
            _declared(model, "chunked_attention" if one else "full_attention")
            for one in _of_length(rope, layers)
        ]
    window = model.count("sliding_window", "attention_window_size")
    if window is None or model.raw("use_sliding_window") is False:
        return [(Attention.FULL, None)] * layers
    pattern = model.raw("sliding_window_pattern", "_sliding_window_pattern") or _PATTERNS.get(
        model.model_type
    )
    if isinstance(pattern, str):
        return [(Attention.SLIDING, window) if pattern[i % len(pattern)] == "L" else (Attention.FULL, None)
                for i in range(layers)]  # fmt: skip
    if pattern:
        return [
            (Attention.SLIDING, window) if one else (Attention.FULL, None) for one in _every(layers, pattern)
        ]
    if model.model_type in _OPT_IN_WINDOW:
        if not model.raw("use_sliding_window"):
            return [(Attention.FULL, None)] * layers
        full = model.need("max_window_layers")
        return [(Attention.SLIDING, window) if i >= full else (Attention.FULL, None) for i in range(layers)]
    return [(Attention.SLIDING, window)] * layers


def _every(layers: int, interval: int) -> list[int]:
    """1 for each layer but every `interval`-th, which is 0."""
    return [int((index + 1) % interval != 0) for index in range(layers)]


def _of_length(declared: Any, layers: int) -> Sequence[Any]:
    if not isinstance(declared, Sequence) or isinstance(declared, str) or len(declared) != layers:
        size = len(declared) if isinstance(declared, Sequence) else type(declared).__name__
        raise ConfigError(f"field `layer_types` lists `{size}` layers of `{layers}`", field="layer_types")
    return declared


def _declared(model: ModelConfig, name: str) -> tuple[Attention, int | None]:
    attention = _LAYER_TYPES.get(name)
    if attention is None:
        raise ConfigError(
            f"layer type `{name}` keeps no K/V pages that this calculator knows "
            f"(known: {', '.join(_LAYER_TYPES)})",
            field="layer_types",
            value=name,
        )
    if attention is Attention.FULL:
        return attention, None
    field = "sliding_window" if attention is Attention.SLIDING else "attention_chunk_size"
    return attention, model.need(field, hint=f"a `{name}` layer needs it")
