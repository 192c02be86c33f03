"""Sizing and classic caches against what transformers itself keeps, for every causal type that is installed.

Each type's default config, with few layers, is built without weights (device `meta`) and reads 8 tokens.
Its cache is the oracle, layer by layer. What is sized differently is refused by name, or stands here with the reason.
"""

from __future__ import annotations

import contextlib
import io
import json
from collections.abc import Iterator
from typing import Any, NamedTuple

import pytest
import torch
import transformers
from transformers.models.auto.configuration_auto import CONFIG_MAPPING
from transformers.models.auto.modeling_auto import MODEL_FOR_CAUSAL_LM_MAPPING_NAMES

from kvcustody.errors import ConfigError
from kvcustody.integrations.transformers.classic.governed_cache import shape_of
from kvcustody.lab.sizing.attention_layers import Attention
from kvcustody.lab.sizing.hf_config import KvLayout, parse_config

TOKENS = 8
LAYERS = 8  # more than the longest pattern of kinds has
# transformers keeps their recurrent states in 32 bits, vLLM in the model's type: `parse_config` has a note of it.
WIDER_STATES = {
    "falcon_h1", "falcon_mamba", "jamba", "mamba", "mamba2", "qwen3_5", "qwen3_5_moe", "qwen3_5_moe_text",
    "qwen3_5_text", "qwen3_next", "zamba2",
}  # fmt: skip
OTHERWISE = {
    "minimax": "transformers keeps the states of its linear layers beside the cache",
    "cpmant": "reads 32 tokens of a prompt of its own besides",
}


class Kept(NamedTuple):
    """What a model's own cache holds after `TOKENS`: bytes of each layer; `is_plain`: of keys and values alone."""

    layers: list[int]
    is_plain: bool


def tensors_of(value: Any, seen: set[int]) -> Iterator[torch.Tensor]:
    if isinstance(value, torch.Tensor):
        if id(value) not in seen and value.dim() > 1:
            seen.add(id(value))
            yield value
    elif isinstance(value, dict):
        yield from (tensor for item in value.values() for tensor in tensors_of(item, seen))
    elif isinstance(value, (list, tuple)):
        yield from (tensor for item in value for tensor in tensors_of(item, seen))
    elif type(value).__module__.startswith("transformers") and hasattr(value, "__dict__"):
        yield from tensors_of(vars(value), seen)


def kept_by(config: Any, class_name: str) -> Kept | None:
    """None where the type does not run so: it needs pixels, a package, numbers from its weights, or has no cache."""
    model_class = getattr(transformers, class_name)
    try:
        own = config if model_class.config_class is type(config) else config.get_text_config()
        with torch.device("meta"), torch.no_grad(), contextlib.redirect_stdout(io.StringIO()):
            model = model_class(own).eval().to(torch.bfloat16)
            out = model(input_ids=torch.zeros(1, TOKENS, dtype=torch.long), use_cache=True)
    except Exception:
        return None
    layers = getattr(getattr(out, "past_key_values", None), "layers", None)
    if layers is None:
        return None
    sizes = [sum(part.numel() * part.element_size() for part in tensors_of(layer, set())) for layer in layers]
    plain = all(type(layer).__name__ in ("DynamicLayer", "DynamicSlidingWindowLayer") for layer in layers)
    return Kept(sizes, plain)


def some_layers_of(name: str) -> Any:
    """The type's default config with `LAYERS` layers, or with all where it fixes them; None where it has no default."""
    for fields in ({"num_hidden_layers": LAYERS}, {}):
        with contextlib.suppress(Exception):
            config = CONFIG_MAPPING[name](**fields)
            if not (fields and config.is_encoder_decoder):  # its number of layers is the encoder's
                return config
    return None


def as_published(config: Any) -> dict[str, Any]:
    document: dict[str, Any] = json.loads(config.to_json_string(use_diff=False))
    inner = next(
        (document[key] for key in ("text_config", "llm_config") if isinstance(document.get(key), dict)),
        document,
    )
    inner["dtype"] = inner["torch_dtype"] = "bfloat16"
    return document


def sized(layout: KvLayout) -> tuple[int, int]:
    """Bytes of keys and values of `TOKENS`, and of states; an indexer's keys in 16 bits, as transformers keeps them."""
    of_tokens = sum(
        group.layers * group.key_dim * 2 * TOKENS
        if group.attention is Attention.INDEXER
        else group.bytes_per_token * TOKENS
        for group in layout.groups
        if group.attention is not Attention.CROSS
    )
    return of_tokens, sum(group.layers * group.state_bytes for group in layout.groups)


def sizing_is_wrong(name: str, config: Any, kept: Kept) -> str | None:
    try:
        layout = parse_config(as_published(config))
    except ConfigError:
        return None
    of_tokens, states = sized(layout)
    total = sum(kept.layers)
    if name in WIDER_STATES:
        is_right = of_tokens + states < total <= of_tokens + 2 * states and any(
            "32 bits" in note for note in layout.notes
        )
    else:
        is_right = of_tokens + states == total
    return None if is_right else f"sized {of_tokens} + {states}, kept {total}"


def classic_shape_is_wrong(config: Any, kept: Kept) -> str | None:
    try:
        shape = shape_of(config, 64, 1, torch.bfloat16, None)
    except ConfigError:
        return None
    reserved = sum(layer.heads * (layer.key_width + layer.value_width) * 2 * TOKENS for layer in shape.layers)
    return None if reserved == sum(kept.layers) and kept.is_plain else f"reserves {reserved}, kept {sum(kept.layers)}"


@pytest.mark.system("a causal type of transformers is sized otherwise than its own cache")
def test_no_causal_type_is_silently_wrong() -> None:
    transformers.logging.set_verbosity_error()
    read, wrong = [], {}
    for name, class_name in sorted(MODEL_FOR_CAUSAL_LM_MAPPING_NAMES.items()):
        config = some_layers_of(name)
        if config is None:
            continue
        kept = kept_by(config, class_name if isinstance(class_name, str) else class_name[0])
        if kept is None or name in OTHERWISE:
            continue
        read.append(name)
        faults = [
            fault for fault in (sizing_is_wrong(name, config, kept), classic_shape_is_wrong(config, kept)) if fault
        ]
        if faults:
            wrong[name] = faults
    assert wrong == {}
    assert len(read) > 100
    llama = CONFIG_MAPPING["llama"](num_hidden_layers=2)
    less = Kept([1], is_plain=True)
    assert sizing_is_wrong("llama", llama, less) and classic_shape_is_wrong(llama, less), "the control"
