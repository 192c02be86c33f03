"""How many blocks a device holds, from the model's exact config instead of a universal bytes-per-token number.

    K/V memory = GPU memory x utilisation - weights - workspace - headroom

- Blocks of all groups together never need more than the K/V memory.
- Every figure is of one device (one tensor-parallel shard); `bytes_per_token_model` alone is of the whole
  model.
- Prefix caching changes none of these figures: paging decides how K/V is stored, reuse how often it is
  recomputed.
"""

from __future__ import annotations

import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from fractions import Fraction
from typing import Any

from kvcustody.errors import ConfigError
from kvcustody.lab.sizing.attention_layers import Attention
from kvcustody.lab.sizing.hf_config import KvLayout, LayerGroup, parse_config
from kvcustody.lab.sizing.hf_config_fields import ModelConfig

METADATA_BYTES_PER_BLOCK = 160  # host memory of a block's state, generation, key and index entry: the upper bound
UTILISATION = 0.9

_UNITS = {"": 1, "B": 1} | {
    f"{letter}{suffix}": base**power
    for power, letter in enumerate("KMGT", 1)
    for suffix, base in (("B", 1000), ("iB", 1024))
}


@dataclass(frozen=True, slots=True)
class GroupSizing:
    """One layer group's share of the K/V memory."""

    group: LayerGroup
    bytes_per_token: int
    bytes_per_block: int
    blocks_per_sequence: float  # mean over the context mix
    blocks: int
    bytes: int


@dataclass(frozen=True, slots=True)
class SizingReport:
    """What fits on one device; `tokens` holds for the context mix, or is blocks x size for a single group."""

    layout: KvLayout
    block_tokens: int
    context_mix: tuple[tuple[int, float], ...]  # (tokens, share), shares sum to 1
    gpu_memory_bytes: int
    utilisation: float
    usable_bytes: int
    weights_bytes: int
    weights_estimated: bool
    workspace_bytes: int
    headroom_bytes: int
    kv_bytes: int
    groups: tuple[GroupSizing, ...]
    bytes_per_token: int
    bytes_per_token_model: int
    blocks: int
    tokens: int
    sequences: float
    metadata_bytes: int  # on the host
    notes: tuple[str, ...]


def size_pool(
    config: Mapping[str, Any],
    *,
    gpu_memory_bytes: int,
    utilisation: float = UTILISATION,
    weights_bytes: int | None = None,
    workspace_bytes: int = 0,
    headroom_bytes: int = 0,
    block_tokens: int = 16,
    kv_dtype: str | None = None,
    tensor_parallel: int = 1,
    context_mix: Sequence[tuple[int, float]] | None = None,
) -> SizingReport:
    """Size the pool of one device for the model of `config` (a parsed Hugging Face `config.json`).

    weights_bytes: of one device; None estimates them from the config, split over the shards. context_mix:
    (tokens, weight) pairs; by default one context of the model's longest. Raises `ConfigError` where the
    config or the numbers do not work out.
    """
    if not 0 < utilisation <= 1:
        raise ConfigError(f"utilisation `{utilisation}` is outside 0..1", utilisation=utilisation)
    if block_tokens < 1:
        raise ConfigError(f"block size `{block_tokens}` is not positive", block_tokens=block_tokens)
    given = {"GPU memory": gpu_memory_bytes, "weights": weights_bytes or 0}
    _check_not_negative(given | {"workspace": workspace_bytes, "headroom": headroom_bytes})
    layout = parse_config(config, kv_dtype=kv_dtype, tensor_parallel=tensor_parallel)
    notes = list(layout.notes)
    estimated = weights_bytes is None
    if weights_bytes is None:
        weights_bytes = -(-estimate_weights_bytes(config) // tensor_parallel)
        notes.append("the weights are an estimate from the config: give their size for an exact answer")
        if parts := parts_left_out(config):
            notes.append(f"the estimate leaves out what `{'`, `'.join(parts)}` describes")
    usable = int(gpu_memory_bytes * Fraction(str(utilisation)))
    kv_bytes = usable - weights_bytes - workspace_bytes - headroom_bytes
    if kv_bytes <= 0:
        raise ConfigError(
            f"no memory is left for K/V: `{usable}` usable bytes, `{weights_bytes}` of weights, "
            f"`{workspace_bytes}` of workspace, `{headroom_bytes}` of headroom; "
            "use more memory, more shards or smaller weights",
            usable_bytes=usable,
            weights_bytes=weights_bytes,
        )
    mix = _mix(context_mix, layout, block_tokens, notes)
    groups, sequences = _fill(layout, mix, block_tokens, kv_bytes)
    blocks = sum(group.blocks for group in groups)
    if not all(group.blocks for group in groups):
        raise ConfigError(
            f"`{kv_bytes}` bytes hold no block of each layer group "
            f"(a block needs `{sum(group.bytes_per_block for group in groups)}`)",
            kv_bytes=kv_bytes,
        )
    mean_tokens = sum(share * tokens for tokens, share in mix)
    alone = len(groups) == 1 and layout.groups[0].attention is not Attention.RECURRENT
    tokens = groups[0].blocks * block_tokens if alone else int(sequences * mean_tokens)
    return SizingReport(
        layout=layout,
        block_tokens=block_tokens,
        context_mix=tuple((tokens, float(share)) for tokens, share in mix),
        gpu_memory_bytes=gpu_memory_bytes,
        utilisation=utilisation,
        usable_bytes=usable,
        weights_bytes=weights_bytes,
        weights_estimated=estimated,
        workspace_bytes=workspace_bytes,
        headroom_bytes=headroom_bytes,
        kv_bytes=kv_bytes,
        groups=groups,
        bytes_per_token=layout.bytes_per_token,
        bytes_per_token_model=parse_config(config, kv_dtype=kv_dtype).bytes_per_token,
        blocks=blocks,
        tokens=tokens,
        sequences=float(sequences),
        metadata_bytes=blocks * METADATA_BYTES_PER_BLOCK,
        notes=tuple(notes),
    )


def parse_bytes(text: str) -> int:
    """Parse `80GiB`, `80GB`, `512MiB`, `1.5 GiB`, `4096B` or `0` as bytes.

    Raises:
        ConfigError: the text is none of these.
    """
    found = re.fullmatch(r"\s*(\d+(?:\.\d+)?)\s*([A-Za-z]*)\s*", text)
    if found is None or found[2] not in _UNITS:
        raise ConfigError(f"`{text}` is not a size: write 80GiB, 80GB or 512MiB", value=text)
    if not found[2] and float(found[1]):
        raise ConfigError(f"`{text}` has no unit: write {found[1]}GiB, {found[1]}GB or {found[1]}B", value=text)
    return int(Fraction(found[1]) * _UNITS[found[2]])


def format_bytes(count: int) -> str:
    """Format bytes in binary units, with two decimals."""
    size = float(count)
    for unit in ("B", "KiB", "MiB", "GiB"):
        if abs(size) < 1024:
            return f"{count} B" if unit == "B" else f"{size:.2f} {unit}"
        size /= 1024
    return f"{size:.2f} TiB"


def _check_not_negative(given: Mapping[str, int]) -> None:
    for name, value in given.items():
        if value < 0:
            raise ConfigError(f"{name} of `{value}` bytes is negative", name=name, value=value)


def _mix(
    given: Sequence[tuple[int, float]] | None, layout: KvLayout, block_tokens: int, notes: list[str]
) -> list[tuple[int, Fraction]]:
    """Return the contexts to plan for, with shares that sum to exactly 1."""
    if given is None:
        longest = layout.context_tokens_max or block_tokens
        if len(layout.groups) > 1 or layout.groups[0].window_tokens:
            notes.append(f"planned for contexts of {longest} tokens; give a context mix for others")
        return [(longest, Fraction(1))]
    total = sum(Fraction(str(weight)) for _, weight in given)
    if not given or total <= 0 or any(tokens < 1 or weight < 0 for tokens, weight in given):
        raise ConfigError(f"context mix `{list(given)}` needs positive tokens and weights", context_mix=given)
    return [(tokens, Fraction(str(weight)) / total) for tokens, weight in given]


def _fill(
    layout: KvLayout, mix: Sequence[tuple[int, Fraction]], block_tokens: int, kv_bytes: int
) -> tuple[tuple[GroupSizing, ...], Fraction]:
    """Return as many mean sequences as fit, each group in proportion to what such a sequence holds."""
    needs = [
        sum((share * group.blocks_for(tokens, block_tokens) for tokens, share in mix), Fraction(0))
        for group in layout.groups
    ]
    sizes = [group.bytes_per_block(block_tokens) for group in layout.groups]
    sequences = kv_bytes / sum((need * size for need, size in zip(needs, sizes, strict=True)), Fraction(0))
    groups = []
    for group, need, size in zip(layout.groups, needs, sizes, strict=True):
        blocks = int(sequences * need)
        groups.append(GroupSizing(group, group.bytes_per_token, size, float(need), blocks, blocks * size))
    return tuple(groups), sequences


# A model's number of parameters, estimated from its config where the weights' true size is not given.
#
# The estimate omits or approximates norms, biases, adapters and quantisation metadata. It also omits towers and
# layers of multi-token prediction (MTP), which `parts_left_out` names. Give the checkpoint's size where precision
# matters.

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
    """Return the language model's parameters: embeddings, attention, feed-forward or experts, norms."""
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
    """Return the parts of the checkpoint that the estimate does not count, as the config names them."""
    model = ModelConfig(config)
    fields = [name for name in config if name.endswith("_config") and name.split("_")[0] in _TOWERS]
    fields += [name for name in _NEXT_TOKEN_LAYERS if model.raw(name)]
    return fields


def estimate_weights_bytes(config: Mapping[str, Any]) -> int:
    """Return the bytes of the weights at the config's dtype, or at its quantisation's bits."""
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
    """Return the parameters of one layer's experts, its shared experts and its router."""
    width = model.count("moe_intermediate_size") or _intermediate(model)
    always = (model.raw("n_shared_experts") or 0) * width or model.raw("shared_expert_intermediate_size") or 0
    return _feed_forward(model, experts * width + always) + experts * model.hidden
