"""What each attention layer stores per token: its kind of attention, its window, and its heads and their widths.

    layers = layers_of(model)                 # one AttentionLayer for each layer with keys and values of its own
    layers[0].attention, layers[0].kv_heads   # heads are of the whole model

- Layers of one model may differ: by kind (`layer_types`, a pattern), by what sliding or global layers have of their
  own (`swa_head_dim`, `global_head_dim`), and one by one (`per_layer_config`).
- A kind of layer or an override that is not known here is a `ConfigError` that names field and value.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from enum import StrEnum
from typing import Any, NamedTuple

from kvcustody.errors import ConfigError
from kvcustody.lab.sizing.hf_config_fields import ModelConfig
from kvcustody.lab.sizing.recurrent_state import RECURRENT_TYPES


class Attention(StrEnum):
    """What a layer keeps of earlier tokens."""

    FULL = "full"
    SLIDING = "sliding"  # the last `window_tokens`
    CHUNKED = "chunked"  # the current chunk of `window_tokens`
    LATENT = "latent"  # all of it, compressed (MLA)
    INDEXER = "indexer"  # the keys by which sparse attention chooses
    RECURRENT = "recurrent"  # a state of one size, whatever the past
    CROSS = "cross"  # keys and values of the encoder's `source_tokens`


class AttentionLayer(NamedTuple):
    """One layer. `window_tokens` is None where it keeps all earlier tokens; `kv_heads` counts the whole model's."""

    attention: Attention
    window_tokens: int | None
    kv_heads: int
    key_dim: int
    value_dim: int


# Every n-th layer is full, the others slide.
_PATTERNS = {"gemma2": 2, "gemma3_text": 6, "gpt_oss": 2, "cohere2": 4, "olmo3": 4, "exaone4": 4}
# A window only with `use_sliding_window`.
_OPT_IN_WINDOW = frozenset(("qwen2", "qwen2_moe", "qwen3", "qwen3_moe"))
_SPARSE = "minimax_m3_sparse"
_LAYER_TYPES = {
    "full_attention": Attention.FULL,
    "sliding_attention": Attention.SLIDING,
    "chunked_attention": Attention.CHUNKED,
    _SPARSE: Attention.FULL,
}
_KEEP_NOTHING = ("moe", "mlp")
# Fields by which `_kinds` tells a layer's window.
_OF_WINDOWS = ("sliding_window", "use_sliding_window", "max_window_layers", "attention_chunk_size")
# Fields that say again, in their model's own way, what `layer_types` lists.
_PATTERN_FIELDS = (
    "sliding_window_pattern", "_sliding_window_pattern", "prefix_dense_sliding_window_pattern", "hybrid_layer_pattern",
    "global_attn_every_n_layers",
)  # fmt: skip
# What `per_layer_config` may change of a layer's keys and values, by this class's field.
_OVERRIDES = {
    "num_key_value_heads": "kv_heads",
    "head_dim": "key_dim",
    "v_head_dim": "value_dim",
    "sliding_window": "window_tokens",
    "attention_chunk_size": "window_tokens",
}
# What it may change besides, which no key or value depends on.
_OVERRIDES_OF_NOTHING = frozenset((
    "intermediate_size", "moe_intermediate_size", "hidden_act", "num_attention_heads", "n_routed_experts",
    "num_local_experts", "num_experts", "num_experts_per_tok", "attention_bias", "mlp_bias",
))  # fmt: skip


def layers_of(model: ModelConfig) -> list[AttentionLayer]:
    """Return the layers that keep keys and values, in order.

    Raises:
        ConfigError: a layer's kind is unknown.
    """
    return [layer for layer in every_layer(model) if layer is not None]


def every_layer(model: ModelConfig) -> list[AttentionLayer | None]:
    """Return all layers by number; None: the layer keeps nothing.

    Raises:
        ConfigError: a layer's kind is unknown.
    """
    kinds = _kinds(model)
    overrides = _per_layer(model)
    has_value_dim = model.raw("v_head_dim") is not None
    first = next((kind[0] for kind in kinds if kind is not None), Attention.FULL)
    return [
        None
        if kind is None
        else _overridden(
            index,
            _by_kind(model, *kind, is_hybrid=kind[0] is not first),
            overrides.get(index, {}),
            has_value_dim,
        )
        for index, kind in enumerate(kinds)
    ]


def full_layer(model: ModelConfig) -> AttentionLayer:
    """Return a layer that keeps all earlier tokens, with the whole model's heads."""
    return _by_kind(model, Attention.FULL, None, is_hybrid=False)


def sparse_index_dim(model: ModelConfig) -> int | None:
    """Return elements of the key by which a sparse layer of MiniMax M3 chooses blocks; None for other models."""
    said = model.raw("sparse_attention_config")
    if isinstance(said, Mapping) and said.get("sparse_index_dim"):
        return int(said["sparse_index_dim"])
    return model.count("index_head_dim") if model.model_type.startswith("minimax_m3") else None


def sparse_layers(model: ModelConfig) -> int:
    """Return the number of layers that keep such a key."""
    said = model.raw("sparse_attention_config")
    if isinstance(said, Mapping) and "sparse_attention_freq" in said:
        return sum(bool(is_sparse) for is_sparse in _of_length(said["sparse_attention_freq"], model.layers))
    return sum(kind == _SPARSE for kind in model.raw("layer_types") or ())


def _by_kind(model: ModelConfig, attention: Attention, window: int | None, *, is_hybrid: bool) -> AttentionLayer:
    """Return a layer with its kind's heads: sliding layers, and global layers among others, may have their own."""
    heads, key_dim, value_dim = None, None, None
    if attention is Attention.SLIDING:
        setting = model.raw("attention_other_setting") or {}
        heads = model.count("swa_num_key_value_heads") or setting.get("num_attention_groups")
        if heads is None and model.model_type == "mimo_v2_flash":  # transformers saves it without the field
            heads = 2 * model.kv_heads
        key_dim, value_dim = (
            model.count("swa_head_dim") or setting.get("head_dim"),
            model.count("swa_v_head_dim"),
        )
    elif attention is Attention.FULL and is_hybrid:
        heads, key_dim = model.count("num_global_key_value_heads"), model.count("global_head_dim")
    key_dim = key_dim or model.head_dim
    return AttentionLayer(
        attention, window, heads or model.kv_heads, key_dim, value_dim or model.count("v_head_dim") or key_dim
    )


def _per_layer(model: ModelConfig) -> dict[int, Mapping[str, Any]]:
    """Return `per_layer_config` by layer number; transformers writes the numbers as text."""
    said = model.raw("per_layer_config") or {}
    try:
        overrides: dict[int, Mapping[str, Any]] = {int(index): dict(changes) for index, changes in said.items()}
    except (AttributeError, TypeError, ValueError):
        raise ConfigError(
            "field `per_layer_config` is no mapping of layer numbers to fields: give it as transformers writes it",
            field="per_layer_config",
        ) from None
    for index in overrides:
        if not 0 <= index < model.layers:
            raise ConfigError(
                f"field `per_layer_config` names layer `{index}` of `{model.layers}`",
                field="per_layer_config",
                value=index,
            )
    return overrides


def _overridden(index: int, layer: AttentionLayer, changes: Mapping[str, Any], has_value_dim: bool) -> AttentionLayer:
    """Return the layer with the values of `per_layer_config` for it."""
    fields: dict[str, Any] = {}
    for name, value in changes.items():
        field = _OVERRIDES.get(name)
        if field is None and name not in _OVERRIDES_OF_NOTHING:
            raise ConfigError(
                f"field `per_layer_config` changes `{name}` of layer `{index}`, which this calculator does not "
                f"know; it knows {', '.join((*_OVERRIDES, *sorted(_OVERRIDES_OF_NOTHING)))}: size such a model by "
                "its engine's own figures",
                field="per_layer_config",
                value=name,
            )
        if field == "window_tokens" and layer.window_tokens is None:
            continue
        if field is not None:
            if type(value) is not int or value < 1:
                raise ConfigError(
                    f"field `per_layer_config.{index}.{name}` is `{value}`: a positive integer is needed",
                    field="per_layer_config",
                    value=value,
                )
            fields[field] = value
    if "key_dim" in fields and "value_dim" not in fields and not has_value_dim:
        fields["value_dim"] = fields["key_dim"]
    return layer._replace(**fields)


def _kinds(model: ModelConfig) -> list[tuple[Attention, int | None] | None]:
    """Return each layer's (attention, window) by the first matching rule; None: it keeps nothing."""
    layers = model.layers
    model.decided_by(*_OF_WINDOWS)
    declared = model.raw("layer_types")
    if declared is not None:
        model.decided_by(*_PATTERN_FIELDS)
        return [
            None if str(name) in _KEEP_NOTHING else _declared(model, str(name)) for name in _of_length(declared, layers)
        ]
    if model.raw("attention_chunk_size") is not None and model.model_type.startswith("llama4"):
        rope = model.raw("no_rope_layers") or _every(layers, model.count("no_rope_layer_interval") or 4)
        return [
            _declared(model, "chunked_attention" if has_rope else "full_attention")
            for has_rope in _of_length(rope, layers)
        ]
    window = model.count("sliding_window", "attention_window_size", "sliding_window_size")
    slides = model.raw("hybrid_layer_pattern")
    if slides is not None:
        return [
            _declared(model, "sliding_attention" if is_sliding else "full_attention")
            for is_sliding in _of_length(slides, layers)
        ]
    if window is None or model.raw("use_sliding_window") is False:
        return [(Attention.FULL, None)] * layers
    pattern = model.raw("sliding_window_pattern", "_sliding_window_pattern") or _PATTERNS.get(model.model_type)
    if isinstance(pattern, str):
        return [(Attention.SLIDING, window) if pattern[i % len(pattern)] == "L" else (Attention.FULL, None)
                for i in range(layers)]  # fmt: skip
    if pattern:
        return [(Attention.SLIDING, window) if one else (Attention.FULL, None) for one in _every(layers, pattern)]
    if model.model_type in _OPT_IN_WINDOW:
        if not model.raw("use_sliding_window"):
            return [(Attention.FULL, None)] * layers
        full = model.need("max_window_layers")
        return [(Attention.SLIDING, window) if i >= full else (Attention.FULL, None) for i in range(layers)]
    return [(Attention.SLIDING, window)] * layers


def _every(layers: int, interval: int) -> list[int]:
    """Return 1 for each layer, except for every `interval`-th, which is 0."""
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
            f"`layer_types` of `{model.model_type}` has `{name}`, which keeps nothing that this calculator knows; "
            f"it knows {', '.join((*_LAYER_TYPES, *RECURRENT_TYPES))}: size such a model by its engine's own figures",
            field="layer_types",
            value=name,
        )
    if attention is Attention.FULL:
        return attention, None
    field = "sliding_window" if attention is Attention.SLIDING else "attention_chunk_size"
    return attention, model.need(field, hint=f"a `{name}` layer needs it")
