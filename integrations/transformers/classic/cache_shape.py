"""What a classic cache will hold, read from the model's config before it is opened: layers, windows, bytes.

1. A layer type without a governed form is an error, never left out.
2. Sizes are an upper bound for the states that come: a layer that would need more refuses them.
"""

from __future__ import annotations

from typing import Any, NamedTuple

import torch
from transformers.cache_utils import get_layer_types_and_kwargs

from kvcustody.errors import ConfigError
from kvcustody.integrations.transformers.classic.buffer import region_bytes
from kvcustody.lab.sizing.attention_layers import every_layer
from kvcustody.lab.sizing.hf_config_fields import ModelConfig

_USUAL_NAMES = ("num_hidden_layers", "hidden_size", "num_attention_heads", "num_key_value_heads", "head_dim")
# Cross-attention has a cache of its own; a layer with index keys is a kind without a governed form.
_ELSEWHERE = ("add_cross_attention", "index_head_dim")
_WINDOWED = ("sliding_attention", "chunked_attention")


class LayerShape(NamedTuple):
    """One layer: `kind` is `full`, `window` or `none` (it holds no states of its own). Widths are values a head."""

    kind: str
    heads: int
    key_width: int
    value_width: int
    window_tokens: int = 0


class CacheShape(NamedTuple):
    """All layers, and what they have in common."""

    layers: tuple[LayerShape, ...]
    max_tokens: int
    batch: int
    dtype: torch.dtype

    def capacity(self, layer: LayerShape, *, is_static: bool = False) -> int:
        """Tokens that a layer's buffers have room for: two windows where there is one, so that moving it is rare."""
        if layer.kind != "window":
            return self.max_tokens
        window = min(layer.window_tokens, self.max_tokens) if is_static else layer.window_tokens
        return min(self.max_tokens, 2 * window)

    def sides(self, layer: LayerShape, tokens: int, dtype: torch.dtype | None = None) -> list[int]:
        """Bytes of K and of V of a layer for so many tokens."""
        kind = dtype or self.dtype
        return [
            region_bytes(self.batch, layer.heads, tokens, width, kind) for width in (layer.key_width, layer.value_width)
        ]


def shape_of(
    config: Any,
    max_tokens: int,
    batch_size: int,
    dtype: torch.dtype | None,
    kv_shape: tuple[int, int, int] | None,
) -> CacheShape:
    """The shape of a cache for a model's config. Raises `ConfigError` where the config does not say enough."""
    if max_tokens < 1 or batch_size < 1:
        raise ConfigError(f"max_tokens `{max_tokens}` and batch_size `{batch_size}` must be at least 1")
    text = config.get_text_config(decoder=True)
    types, arguments = get_layer_types_and_kwargs(text)
    for index, name in enumerate(types):
        if name not in ("full_attention", "dummy", *_WINDOWED):
            raise ConfigError(f"layer `{index}` is `{name}`, which has no governed form", layer=index, type=name)
    widths = [kv_shape] * len(types) if kv_shape is not None else _kv_shapes(text)
    layers = []
    for name, given, width in zip(types, arguments, widths, strict=True):
        if name == "dummy" or width is None:
            layers.append(LayerShape("none", 0, 0, 0))
        elif name == "full_attention":
            layers.append(LayerShape("full", *width))
        else:
            layers.append(LayerShape("window", *width, given["sliding_window"]))
    found = dtype or getattr(text, "dtype", None) or torch.get_default_dtype()
    return CacheShape(tuple(layers), max_tokens, batch_size, found)


def _kv_shapes(text: Any) -> list[tuple[int, int, int] | None]:
    """Heads and widths of a key and a value by layer, as sizing reads them from the same config.

    A class without `num_key_value_heads` attends with all its heads; one that names a field otherwise
    (`attribute_map`) is asked by the usual name.
    """
    said = text.to_dict()
    first = text.per_layer_config[0]
    for name in _USUAL_NAMES:
        if said.get(name) is None:
            said[name] = getattr(first, name, None)
    hidden, heads = said["hidden_size"], said["num_attention_heads"]
    if not hidden or not heads:
        raise ConfigError("the config does not say how many heads of which width are cached: give `kv_shape`")
    said["num_key_value_heads"] = said["num_key_value_heads"] or heads
    said["head_dim"] = said["head_dim"] or said.get("d_kv") or hidden // heads
    model = ModelConfig(said)
    model.decided_by(*_ELSEWHERE)
    if model.latent:
        raise ConfigError("a model with latent attention does not say what it caches: give `kv_shape`")
    try:
        layers = every_layer(model)
        model.refuse_unread()
    except ConfigError as error:
        raise ConfigError(
            f"{error.message}; or give `kv_shape`: heads, key and value width", **error.operands
        ) from None
    return [layer and (layer.kv_heads, layer.key_dim, layer.value_dim) for layer in layers]
