"""The state that recurrent layers keep per sequence.

Covers Mamba, Mamba-2, gated delta nets, Kimi's delta attention, linear attention, short convolutions and RWKV.

    states = recurrent_layers(model, tensor_parallel)     # None: every layer attends
    states.layers, states.state_bytes                     # of one layer and sequence, on one shard
    states.attention_layers                               # the layers that keep K/V besides

- A model type is known here or it is none of ours: a field that only recurrent models have, in a type that is not
  known, is a `ConfigError` that names it.
- States are of the sizes that the engines keep: the convolution's last inputs, and the recurrent state itself, without
  room for speculated tokens.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any, NamedTuple

from kvcustody.errors import ConfigError
from kvcustody.lab.sizing.hf_config_fields import ModelConfig

RECURRENT_TYPES = ("linear_attention", "mamba", "conv")
_MARKS = (  # fields that only models with recurrent layers have
    "ssm_cfg", "ssm_state_size", "hybrid_override_pattern", "attn_layer_period", "linear_attn_config", "attn_type_list",
    "linear_num_key_heads", "mamba_d_state", "mamba_n_heads", "state_size", "attn_layer_indices", "layers_block_type",
    "conv_L_cache", "lru_width", "time_step_rank", "mamba_d_ssm",
)  # fmt: skip
_ELEMENT = {"float32": 4, "float16": 2, "bfloat16": 2}


class RecurrentLayers(NamedTuple):
    """The number of layers that keep a state, the state's bytes, and the number of layers that keep K/V."""

    layers: int
    state_bytes: int
    attention_layers: int


def recurrent_layers(model: ModelConfig, tensor_parallel: int) -> RecurrentLayers | None:
    """Return a model's recurrent layers; None for a model without any.

    Raises:
        ConfigError: the layers' states are unknown.
    """
    known = _MODELS.get(model.model_type)
    if known is not None:
        model.decided_by("hybrid_layer_ids", "hybrid_override_pattern", "layer_types", "layers_block_type")
        return known(model, tensor_parallel)
    declared = model.raw("layer_types") or ()
    marks = [name for name in _MARKS if model.raw(name) is not None]
    if model.model_type.startswith("rwkv"):  # later ones name their fields as models that attend do
        marks.append("model_type")
    if marks and not _is_all_attention(model, marks):
        raise ConfigError(
            f"field `{marks[0]}`: `{model.model_type}` has recurrent layers whose state is not known here "
            f"(known: {', '.join(sorted(_MODELS))}); size it by its engine's own figures",
            field=marks[0],
            model_type=model.model_type,
        )
    for name in declared:
        if name in RECURRENT_TYPES:
            raise ConfigError(
                f"`layer_types` of `{model.model_type}` has `{name}`, whose state is not known for this model "
                f"type (known: {', '.join(sorted(_MODELS))}); size it by its engine's own figures",
                field="layer_types",
                value=name,
            )
    return None


def _is_all_attention(model: ModelConfig, marks: list[str]) -> bool:
    """Return whether all layers attend: MiniMax names every layer's kind, and its later models attend in all layers."""
    kinds = model.raw("attn_type_list")
    return marks == ["attn_type_list"] and all(kind == 1 for kind in kinds)


def _mamba2(
    model: ModelConfig,
    shards: int,
    names: tuple[str, str, str, str, str],
    dtype: str | None = None,
    *,
    width: int | None = None,
) -> int:
    """Return the bytes of Mamba-2's state: a convolution over inner width and groups, and heads x head width x
    state.
    """
    heads, state, groups, kernel = (model.need(names[at]) for at in (0, 2, 3, 4))
    width = width or model.need(names[1])
    if groups % shards:
        groups += shards - groups  # a group goes with every shard of its heads
    convolved = _split(heads * width + 2 * groups * state, shards, names[0])
    return _bytes(model, (kernel - 1) * convolved, _split(heads, shards, names[0]) * width * state, dtype)


def _mamba1(model: ModelConfig, shards: int, state: str, kernel: str, inner: int) -> int:
    mine = _split(inner, shards, "intermediate_size")
    return _bytes(model, (model.need(kernel) - 1) * mine, mine * model.need(state))


def _jamba(model: ModelConfig, shards: int) -> RecurrentLayers:
    period, offset = model.need("attn_layer_period"), model.raw("attn_layer_offset") or 0
    attending = sum(index % period == offset for index in range(model.layers))
    inner = model.need("mamba_expand") * model.hidden
    state = _mamba1(model, shards, "mamba_d_state", "mamba_d_conv", inner)
    return RecurrentLayers(model.layers - attending, state, attending)


def _granite(model: ModelConfig, shards: int) -> RecurrentLayers:
    kinds = _listed(model, "layer_types", "layers_block_type")
    attending = _count(model, kinds, ("attention", "full_attention"), ("mamba",))
    recurrent = len(kinds) - attending
    return RecurrentLayers(recurrent, _mamba2(model, shards, _MAMBA2), attending)


_MAMBA2 = ("mamba_n_heads", "mamba_d_head", "mamba_d_state", "mamba_n_groups", "mamba_d_conv")


def _mamba2_by_head(model: ModelConfig, shards: int) -> int:
    """Return Mamba-2's state as Bamba and Falcon-H1 configure it; `mamba_d_head` may be `auto`, the inner width by
    heads.
    """
    if model.raw("mamba_d_head") not in (None, "auto"):
        return _mamba2(model, shards, _MAMBA2)
    inner = model.count("mamba_d_ssm") or model.need("mamba_expand") * model.hidden
    return _mamba2(model, shards, _MAMBA2, width=inner // model.need("mamba_n_heads"))


def _bamba(model: ModelConfig, shards: int) -> RecurrentLayers:
    attending = len(set(_indices(model, "attn_layer_indices")))
    return RecurrentLayers(model.layers - attending, _mamba2_by_head(model, shards), attending)


def _falcon_h1(model: ModelConfig, shards: int) -> RecurrentLayers:
    """Return layers that all attend and keep a state, side by side."""
    return RecurrentLayers(model.layers, _mamba2_by_head(model, shards), model.layers)


def _zamba2(model: ModelConfig, shards: int) -> RecurrentLayers:
    """Return layers that all keep a state; the hybrid ones attend too. Hybrid layers share weights, but not K/V."""
    if model.raw("layers_block_type", "layer_types") is not None:
        kinds = _listed(model, "layers_block_type", "layer_types")
        attending = _count(model, kinds, ("hybrid",), ("mamba", "linear_attention"), "layers_block_type")
    else:
        attending = len(set(_indices(model, "hybrid_layer_ids")))
    names = ("n_mamba_heads", "mamba_headdim", "mamba_d_state", "mamba_ngroups", "mamba_d_conv")
    inner = model.need("mamba_expand") * model.hidden
    width = model.count("mamba_headdim") or inner // model.need("n_mamba_heads")
    return RecurrentLayers(model.layers, _mamba2(model, shards, names, width=width), attending)


def _lfm2(model: ModelConfig, shards: int) -> RecurrentLayers:
    """Return short convolutions: they keep their last inputs and no other state."""
    if model.raw("layer_types") is not None:
        kinds = _listed(model, "layer_types")
        attending = _count(model, kinds, ("full_attention",), ("conv",))
    else:
        attending = len(set(_indices(model, "full_attn_idxs")))
    mine = _split(model.count("conv_dim") or model.hidden, shards, "conv_dim")
    return RecurrentLayers(
        model.layers - attending, _bytes(model, (model.need("conv_L_cache") - 1) * mine, 0), attending
    )


def _rwkv(model: ModelConfig, shards: int) -> RecurrentLayers:
    """Return RWKV-4's state as transformers keeps it: two inputs in the model's dtype, and three sums in 32 bits."""
    if shards > 1:
        raise ConfigError("no engine splits RWKV's state over shards", field="tensor_parallel", value=shards)
    inner = model.count("attention_hidden_size") or model.hidden
    if inner != model.hidden:
        raise ConfigError(
            f"field `attention_hidden_size` is `{inner}` beside a hidden size of `{model.hidden}`: such a state is not "
            "known",
            field="attention_hidden_size",
            value=inner,
        )
    return RecurrentLayers(model.layers, 2 * inner * _element(model) + 3 * inner * 4, 0)


def _nemotron(model: ModelConfig, shards: int) -> RecurrentLayers:
    pattern = model.raw("hybrid_override_pattern")
    if pattern is None:
        kinds = _listed(model, "layers_block_type")
        letters = {"mamba": "M", "attention": "*", "mlp": "-", "moe": "E"}
        pattern = "".join(letters.get(str(kind), "?") for kind in kinds)
    unknown = sorted(set(pattern) - set("M*-E"))
    if unknown:
        raise ConfigError(
            f"field `hybrid_override_pattern` has `{unknown[0]}`: known are M (Mamba-2), * (attention), - (MLP) "
            "and E (MoE)",
            field="hybrid_override_pattern",
            value=unknown[0],
        )
    names = ("mamba_num_heads", "mamba_head_dim", "ssm_state_size", "n_groups", "conv_kernel")
    dtype = str(model.raw("mamba_ssm_cache_dtype") or "float32")
    return RecurrentLayers(pattern.count("M"), _mamba2(model, shards, names, dtype), pattern.count("*"))


def _gated_delta(model: ModelConfig, shards: int) -> RecurrentLayers:
    declared = model.raw("layer_types")
    if declared is None:
        interval = model.need("full_attention_interval")
        attending = model.layers // interval
    else:
        kinds = _listed(model, "layer_types")
        attending = _count(model, kinds, ("full_attention",), ("linear_attention",))
    key_heads, value_heads = model.need("linear_num_key_heads"), model.need("linear_num_value_heads")
    key_dim, value_dim = model.need("linear_key_head_dim"), model.need("linear_value_head_dim")
    convolved = _split(2 * key_dim * key_heads + value_dim * value_heads, shards, "linear_num_key_heads")
    kernel = model.need("linear_conv_kernel_dim")
    heads = _split(value_heads, shards, "linear_num_value_heads")
    declared_dtype = model.raw("mamba_ssm_dtype")
    dtype = None if declared_dtype is None else str(declared_dtype)
    state = _bytes(model, (kernel - 1) * convolved, heads * value_dim * key_dim, dtype)
    return RecurrentLayers(model.layers - attending, state, attending)


def _kimi(model: ModelConfig, shards: int) -> RecurrentLayers:
    attention = model.raw("linear_attn_config")
    if not isinstance(attention, dict):
        raise ConfigError(
            "field `linear_attn_config` is missing: it says which layers attend", field="linear_attn_config"
        )
    needed = ("full_attn_layers", "kda_layers", "num_heads", "head_dim", "short_conv_kernel_size")
    missing = [name for name in needed if name not in attention]
    if missing:
        raise ConfigError(
            f"field `linear_attn_config.{missing[0]}` is missing: add it to the config",
            field=f"linear_attn_config.{missing[0]}",
        )
    attending, recurrent = len(attention["full_attn_layers"]), len(attention["kda_layers"])
    if attending + recurrent != model.layers:
        raise ConfigError(
            f"field `linear_attn_config` names `{attending + recurrent}` layers of `{model.layers}`",
            field="linear_attn_config",
        )
    heads, width, kernel = attention["num_heads"], attention["head_dim"], attention["short_conv_kernel_size"]
    convolved = _split(3 * heads * width, shards, "linear_attn_config.num_heads")
    mine = _split(heads, shards, "linear_attn_config.num_heads")
    state = (kernel - 1) * convolved * _element(model) + mine * width * width * 4
    return RecurrentLayers(recurrent, state, attending)


def _minimax(model: ModelConfig, shards: int) -> RecurrentLayers:
    if model.raw("attn_type_list") is not None:
        kinds = _listed(model, "attn_type_list")
        attending = _count(model, kinds, (1,), (0,), "attn_type_list")
    else:
        kinds = _listed(model, "layer_types")
        attending = _count(model, kinds, ("full_attention",), ("linear_attention",))
    width = model.head_dim
    heads = _split(model.heads, shards, "num_attention_heads")
    return RecurrentLayers(len(kinds) - attending, heads * width * width * _element(model), attending)


def _only_mamba2(model: ModelConfig, shards: int) -> RecurrentLayers:
    names = ("num_heads", "head_dim", "state_size", "n_groups", "conv_kernel")
    return RecurrentLayers(model.layers, _mamba2(model, shards, names), 0)


def _only_mamba(model: ModelConfig, shards: int) -> RecurrentLayers:
    inner = model.count("intermediate_size") or model.need("expand") * model.hidden
    return RecurrentLayers(model.layers, _mamba1(model, shards, "state_size", "conv_kernel", inner), 0)


_MODELS: dict[str, Callable[[ModelConfig, int], RecurrentLayers]] = {
    "bamba": _bamba,
    "falcon_h1": _falcon_h1,
    "falcon_mamba": _only_mamba,
    "granitemoehybrid": _granite,
    "jamba": _jamba,
    "kimi_linear": _kimi,
    "lfm2": _lfm2,
    "lfm2_moe": _lfm2,
    "mamba": _only_mamba,
    "mamba2": _only_mamba2,
    "minimax": _minimax,
    "minimax_text_01": _minimax,
    "nemotron_h": _nemotron,
    "qwen3_5": _gated_delta,
    "qwen3_5_moe": _gated_delta,
    "qwen3_5_moe_text": _gated_delta,
    "qwen3_5_text": _gated_delta,
    "qwen3_next": _gated_delta,
    "rwkv": _rwkv,
    "zamba2": _zamba2,
}


def _bytes(model: ModelConfig, convolved: int, state: int, dtype: str | None = None) -> int:
    """Return the bytes of both states in the model's dtype, unless its type keeps the recurrent state in another
    dtype.
    """
    return convolved * _element(model) + state * _element(model, dtype)


def _element(model: ModelConfig, dtype: str | None = None) -> int:
    declared = dtype or str(model.raw("torch_dtype", "dtype")).removeprefix("torch.")
    if declared not in _ELEMENT:
        raise ConfigError(
            f"field `torch_dtype` is `{declared}`: a recurrent state is in float32, float16 or bfloat16",
            field="torch_dtype",
            value=declared,
        )
    return _ELEMENT[declared]


def _split(count: int, shards: int, field: str) -> int:
    if count % shards:
        raise ConfigError(f"field `{field}`: a state of `{count}` does not split over `{shards}` shards", field=field)
    return count // shards


def _indices(model: ModelConfig, name: str) -> list[int]:
    """Return the numbers of the attention layers."""
    found = model.raw(name)
    if not isinstance(found, list) or not all(type(one) is int and 0 <= one < model.layers for one in found):
        raise ConfigError(f"field `{name}` is not a list of some of `{model.layers}` layers", field=name)
    return found


def _listed(model: ModelConfig, *names: str) -> Sequence[Any]:
    found = model.raw(*names)
    if not isinstance(found, Sequence) or isinstance(found, str) or len(found) != model.layers:
        size = len(found) if isinstance(found, Sequence) else "nothing"
        raise ConfigError(f"field `{names[0]}` lists `{size}` of `{model.layers}` layers", field=names[0])
    return found


def _count(
    model: ModelConfig,
    kinds: Sequence[Any],
    attending: tuple[Any, ...],
    recurrent: tuple[Any, ...],
    field: str = "layer_types",
) -> int:
    """Return the number of attention layers; every kind is either attending or recurrent."""
    for kind in kinds:
        if kind not in attending and kind not in recurrent:
            words = ", ".join(str(one) for one in (*attending, *recurrent))
            raise ConfigError(
                f"field `{field}` of `{model.model_type}` has `{kind}`, which is not known here (known: {words})",
                field=field,
                value=kind,
            )
    return sum(kind in attending for kind in kinds)
