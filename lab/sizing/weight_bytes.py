"""The parameters of a model, estimated from its config, for when its weights' true size is not given.

An estimate: norms, biases, adapters and quantisation metadata are left out or approximated; `parts_left_out` names
towers and layers of multi-token prediction (MTP), which are not counted either.
Give the size of the checkpoint where it matters.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from kvcustody.errors import ConfigError
from kvcustody.lab.sizing.hf_config_fields import ModelConfig

_HINT = "add it, or give the size of the weights"
# Feed-forward without a gate.
_TWO_MATRICES = frozenset((
    "bloom", "codegen", "falcon", "gpt2", "gpt_bigcode", "gpt_neox", "gptj", "mpt", "opt", "persimmon", "phi",
    "starcoder2",
))  # fmt: skip
_TOWERS = ("vision", "audio", "speech", "image", "video")
_NEXT_TOKEN_LAYERS = (
    "num_nextn_predict_layers",
    "num_mtp_layers",
    "mtp_num_hidden_layers",
    "num_mtp_modules",
)
_BITS = {"fp8": 8, "mxfp4": 4.25, "compressed-tensors": 8, "bitsandbytes": 4, "awq": 4, "gptq": 4}


def estimate_parameters(config: Mapping[str, Any]) -> int:
    """Parameters of the language model: embeddings, attention, feed-forward or experts, norms."""
    model = ModelConfig(config)
    vocabulary = model.need("vocab_size", "padded_vocab_size", hint=_HINT) * model.hidden
    head = 0 if model.raw("tie_word_embeddings") else vocabulary
    experts = model.count("n_routed_experts", "num_local_experts", "num_experts")
    dense = model.layers
    routed = 0
    if experts:
        dense = model.raw("first_k_dense_replace") or 0
        routed = (model.layers - dense) * _experts(model, experts)
    feed_forward = dense * _feed_forward(model, _intermediate(model)) if dense else 0
    norms = (2 * model.layers + 1) * model.hidden
    return vocabulary + head + model.layers * _attention(model) + feed_forward + routed + norms


def parts_left_out(config: Mapping[str, Any]) -> list[str]:
    """Which parts of the checkpoint the estimate does not count, by the config's fields."""
    model = ModelConfig(config)
    fields = [name for name in config if name.endswith("_config") and name.split("_")[0] in _TOWERS]
    fields += [name for name in _NEXT_TOKEN_LAYERS if model.raw(name)]
    return fields


def estimate_weights_bytes(config: Mapping[str, Any]) -> int:
    """Bytes of the weights at the config's dtype, or at its quantisation's bits."""
    model = ModelConfig(config)
    quantised = model.raw("quantization_config")
    method = str(quantised.get("quant_method", "")) if isinstance(quantised, Mapping) else ""
    if isinstance(quantised, Mapping) and isinstance(quantised.get("bits"), int):
        bits = float(quantised["bits"])
    elif method in _BITS:
        bits = _BITS[method]
    else:
        bits = {"float32": 32, "float16": 16, "bfloat16": 16}.get(_dtype(model), 0)
    if not bits:
        raise ConfigError(
            f"the weights' dtype `{_dtype(model) or method}` is unknown: give the size of the weights",
            field="torch_dtype",
        )
    return int(estimate_parameters(config) * bits / 8)


def _dtype(model: ModelConfig) -> str:
    return str(model.raw("torch_dtype", "dtype") or "").removeprefix("torch.")


def _attention(model: ModelConfig) -> int:
    hidden, heads = model.hidden, model.heads
    if model.latent:
        rope, nope = model.need("qk_rope_head_dim", hint=_HINT), model.need("qk_nope_head_dim", hint=_HINT)
        value, rank = model.need("v_head_dim", hint=_HINT), model.need("kv_lora_rank", hint=_HINT)
        query_rank = model.count("q_lora_rank")
        width = heads * (rope + nope)
        query = hidden * query_rank + query_rank * width if query_rank else hidden * width
        return query + hidden * (rank + rope) + rank * heads * (nope + value) + heads * value * hidden
    return hidden * model.head_dim * (2 * heads + 2 * model.kv_heads)


def _intermediate(model: ModelConfig) -> int:
    given = model.count("intermediate_size", "ffn_hidden_size", "n_inner", "ffn_dim")
    if given is None and model.model_type in _TWO_MATRICES:
        return 4 * model.hidden
    return given or model.need("intermediate_size", hint=_HINT)


def _feed_forward(model: ModelConfig, width: int) -> int:
    return (2 if model.model_type in _TWO_MATRICES else 3) * model.hidden * width


def _experts(model: ModelConfig, experts: int) -> int:
    """One layer's experts, those that always run, and the router."""
    width = model.count("moe_intermediate_size") or _intermediate(model)
    always = (model.raw("n_shared_experts") or 0) * width or model.raw("shared_expert_intermediate_size") or 0
    return _feed_forward(model, experts * width + always) + experts * model.hidden
