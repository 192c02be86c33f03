"""A Hugging Face `config.json` read as the shape of its K/V cache: groups of layers that store the same thing.

Nothing is guessed. A missing field without a documented default for its model type is a `ConfigError` that names it. So
is a field that would change what a layer keeps and that no code here reads.

- Every layer is in exactly one group of its kind, keeps nothing (a bare MLP), or shares another layer's cache
  (`num_kv_shared_layers`). A kind of layer that is not known here is a `ConfigError` that names field and value.
- `bytes_per_token` of a group is layers x kv_heads x bytes of a key and a value, with their scales, on one shard.
- A latent (MLA) group stores one vector a token for all heads, whole on every shard; so does a sparse indexer.
- A recurrent group (Mamba, linear attention) keeps `state_bytes` a layer and sequence, whatever its length.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from enum import StrEnum
from typing import Any

from kvcustody.errors import ConfigError
from kvcustody.lab.sizing.attention_layers import (
    Attention,
    AttentionLayer,
    full_layer,
    layers_of,
    sparse_index_dim,
    sparse_layers,
)
from kvcustody.lab.sizing.hf_config_fields import ModelConfig
from kvcustody.lab.sizing.recurrent_state import RecurrentLayers, recurrent_layers


class KvDtype(StrEnum):
    """The storage format of a K/V element."""

    FP32 = "fp32"
    FP16 = "fp16"
    BF16 = "bf16"
    FP8 = "fp8"  # one scale a tensor
    FP8_PER_TOKEN_HEAD = "fp8_per_token_head"  # noqa: S105 - no password
    INT8_PER_TOKEN_HEAD = "int8_per_token_head"  # noqa: S105
    NVFP4 = "nvfp4"  # two elements a byte, an 8-bit scale for every 16
    FP8_BLOCKS = "fp8_blocks"  # a 4-byte scale for every 128: what sparse indexers keep

    def vector_bytes(self, dim: int) -> int:
        """Return the bytes of one head's vector of `dim` elements, with its scales."""
        if self is KvDtype.NVFP4:
            if dim % 16:
                raise ConfigError(f"nvfp4 has a scale for every 16 elements: a vector of `{dim}` does not fit")
            return dim // 2 + dim // 16
        if self in (KvDtype.FP8_PER_TOKEN_HEAD, KvDtype.INT8_PER_TOKEN_HEAD):
            return dim + 4
        if self is KvDtype.FP8_BLOCKS:
            return dim + dim // 128 * 4
        return dim * {"fp32": 4, "fp16": 2, "bf16": 2, "fp8": 1}[self.value]


@dataclass(frozen=True, slots=True)
class LayerGroup:
    """Layers with equal pages; they share one block table. Head counts are those of one shard."""

    attention: Attention
    layers: int
    kv_heads: int
    key_dim: int
    value_dim: int
    window_tokens: int | None
    dtype: KvDtype
    state_bytes: int = 0  # of one layer and sequence
    source_tokens: int = 0  # of one sequence

    @property
    def name(self) -> str:
        """`full`, `latent`, `sliding-4096`, ..."""
        return self.attention.value if self.window_tokens is None else f"{self.attention.value}-{self.window_tokens}"

    @property
    def bytes_per_token(self) -> int:
        """The bytes of one token in this group's layers on one shard; of a source token in a cross-attention group."""
        if self.attention is Attention.RECURRENT:
            return 0
        value = self.dtype.vector_bytes(self.value_dim) if self.value_dim else 0
        return self.layers * self.kv_heads * (self.dtype.vector_bytes(self.key_dim) + value)

    def bytes_per_block(self, block_tokens: int) -> int:
        """Return the bytes of one block in this group's layers; of one sequence's states in a recurrent group."""
        return self.layers * self.state_bytes or self.bytes_per_token * block_tokens

    def blocks_for(self, context_tokens: int, block_tokens: int) -> int:
        """Return the most blocks that a sequence of this length holds; a window may straddle one block more."""
        if self.attention is Attention.RECURRENT:
            return 1
        if self.attention is Attention.CROSS:
            return -(-self.source_tokens // block_tokens)
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
        """The layers with a cache of their own."""
        return sum(group.layers for group in self.groups)

    @property
    def bytes_per_token(self) -> int:
        """The bytes of one token that every group still keeps, on one shard."""
        return sum(group.bytes_per_token for group in self.groups if group.attention is not Attention.CROSS)


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
    "int8": KvDtype.INT8_PER_TOKEN_HEAD,
    "int8_per_token_head": KvDtype.INT8_PER_TOKEN_HEAD,
    "fp8_per_token_head": KvDtype.FP8_PER_TOKEN_HEAD,
    "nvfp4": KvDtype.NVFP4,
}


def parse_config(config: Mapping[str, Any], *, kv_dtype: str | None = None, tensor_parallel: int = 1) -> KvLayout:
    """Read a `config.json` as a K/V layout; `kv_dtype` overrides the config's (fp8, bf16, fp16, fp32).

    Raises `ConfigError` that names the field and what to do about it.
    """
    model = ModelConfig(config)
    if tensor_parallel < 1:
        raise ConfigError(f"tensor parallel size `{tensor_parallel}` is not positive", tensor_parallel=tensor_parallel)
    dtype = _dtype(model, kv_dtype)
    if model.raw("is_encoder_decoder"):
        groups = _encoder_decoder(model, dtype, tensor_parallel)
    else:
        states = recurrent_layers(model, tensor_parallel)
        groups = (*_attention(model, dtype, tensor_parallel, states), *_recurrent(model, states, dtype))
    model.refuse_unread()
    return KvLayout(
        model.model_type,
        groups,
        dtype,
        tensor_parallel,
        model.count("max_position_embeddings", "n_positions", "max_seq_len", "seq_length", "context_length"),
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
        raise ConfigError(
            f"`{field}` is `{name}`: use one of fp8, int8, nvfp4, bf16, fp16, fp32", field=field, value=name
        )
    return _DTYPES[name.lower()]


def _attention(
    model: ModelConfig, dtype: KvDtype, tensor_parallel: int, states: RecurrentLayers | None
) -> tuple[LayerGroup, ...]:
    """Return what the attention layers keep: all layers, or those in a hybrid's pattern."""
    attending = model.layers if states is None else states.attention_layers
    if not attending:
        return ()
    if model.latent:
        return _latent(model, dtype, attending)
    layers = layers_of(model) if states is None else [full_layer(model)] * attending
    return (*_groups(model, dtype, tensor_parallel, layers), *_index_keys(model, dtype))


def _recurrent(model: ModelConfig, states: RecurrentLayers | None, dtype: KvDtype) -> tuple[LayerGroup, ...]:
    if states is None:
        return ()
    model.note("recurrent states are of the sizes that vLLM keeps; transformers keeps some of them in 32 bits")
    return (LayerGroup(Attention.RECURRENT, states.layers, 1, 0, 0, None, dtype, states.state_bytes),)


def _encoder_decoder(model: ModelConfig, dtype: KvDtype, tensor_parallel: int) -> tuple[LayerGroup, ...]:
    """Return the decoder's own K/V, and the K/V of the encoder's output."""
    layers = model.need("decoder_layers", "num_decoder_layers")
    heads = model.need("decoder_attention_heads", "num_attention_heads", "num_heads")
    head_dim = model.count("d_kv") or model.hidden // heads
    source = model.need(
        "max_source_positions", hint="a cross-attention layer keeps the encoder's tokens: add their number"
    )
    model.note(f"cross-attention is planned for {source} source tokens a sequence (`max_source_positions`)")
    sharded = _sharded(heads, tensor_parallel, model)
    own = LayerGroup(Attention.FULL, layers, sharded, head_dim, head_dim, None, dtype)
    return own, replace(own, attention=Attention.CROSS, source_tokens=source)


def _latent(model: ModelConfig, dtype: KvDtype, layers: int) -> tuple[LayerGroup, ...]:
    """Return the compressed K/V with the rotary key, whole on every shard, and an indexer's keys."""
    if dtype not in (KvDtype.FP32, KvDtype.FP16, KvDtype.BF16, KvDtype.FP8):
        raise ConfigError(f"a latent (MLA) cache is not kept as {dtype.value}: use fp8, bf16, fp16 or fp32")
    width = model.need("kv_lora_rank") + model.need("qk_rope_head_dim")
    model.note("MLA: the latent cache is whole on every tensor-parallel shard")
    latent = LayerGroup(Attention.LATENT, layers, 1, width, 0, None, dtype)
    index = model.count("index_head_dim")
    if index is None:
        return (latent,)
    if index % 128:
        raise ConfigError(
            f"field `index_head_dim` is `{index}`: an indexer's keys have a scale for every 128 elements",
            field="index_head_dim",
            value=index,
        )
    if dtype is KvDtype.FP8:
        raise ConfigError(
            "a sparse model's fp8 cache has a layout of its engine's own, which is not sized: use bf16",
            field="kv_dtype",
        )
    model.note("sparse attention: the indexer keeps 8-bit keys of its own, with scales, on every shard")
    kinds = model.raw("indexer_types")
    if kinds is not None:  # a `shared` layer chooses by the keys of an earlier one
        unknown = sorted(set(map(str, kinds)) - {"full", "shared"})
        if unknown or len(kinds) != layers:
            raise ConfigError(
                f"field `indexer_types` lists `{len(kinds)}` of `{layers}` layers, of kinds "
                f"{', '.join(sorted(set(map(str, kinds))))}: full and shared are known",
                field="indexer_types",
            )
        layers = sum(kind == "full" for kind in kinds)
    return latent, LayerGroup(Attention.INDEXER, layers, 1, index, 0, None, KvDtype.FP8_BLOCKS)


def _groups(
    model: ModelConfig, dtype: KvDtype, tensor_parallel: int, layers: Sequence[AttentionLayer]
) -> tuple[LayerGroup, ...]:
    shared = model.raw("num_kv_shared_layers") or 0
    if not 0 <= shared < len(layers):
        raise ConfigError(
            f"field `num_kv_shared_layers` is `{shared}` of `{len(layers)}` layers",
            field="num_kv_shared_layers",
        )
    if shared:
        model.note(f"the last {shared} layers share the cache of earlier ones")
        layers = layers[:-shared]
    counts = Counter(layers)
    return tuple(
        LayerGroup(
            layer.attention,
            counts[layer],
            _sharded(layer.kv_heads, tensor_parallel, model),
            layer.key_dim,
            layer.value_dim,
            layer.window_tokens,
            dtype,
        )
        for layer in sorted(counts, key=lambda layer: (layer.attention, layer.window_tokens or 0, *layer[2:]))
    )


def _index_keys(model: ModelConfig, dtype: KvDtype) -> tuple[LayerGroup, ...]:
    """Return the keys by which MiniMax's sparse layers choose blocks: one vector per token and layer, whole on every
    shard.
    """
    width = sparse_index_dim(model)
    if width is None:
        return ()
    layers = sparse_layers(model)
    if not layers:
        return ()
    model.note(f"sparse attention: {layers} layers keep an index key of {width} elements a token besides")
    return (LayerGroup(Attention.INDEXER, layers, 1, width, 0, None, dtype),)


def _sharded(kv_heads: int, tensor_parallel: int, model: ModelConfig) -> int:
    """Return one shard's K/V heads: split evenly, or each head repeated on several shards."""
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
