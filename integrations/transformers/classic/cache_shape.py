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
            region_bytes(self.batch, layer.heads, tokens, width, kind)
            for width in (layer.key_width, layer.value_width)
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
    layers = []
    for index, (name, given) in enumerate(zip(types, arguments, strict=True)):
        heads, key_width, value_width = kv_shape or _kv_shape(text.per_layer_config[index])
        if name == "full_attention":
            layers.append(LayerShape("full", heads, key_width, value_width))
        elif name in _WINDOWED:
            layers.append(LayerShape("window", heads, key_width, value_width, given["sliding_window"]))
        elif name == "dummy":
            layers.append(LayerShape("none", 0, 0, 0))
        else:
            raise ConfigError(
                f"layer `{index}` is `{name}`, which has no governed form", layer=index, type=name
            )
    found = dtype or getattr(text, "dtype", None) or torch.get_default_dtype()
    return CacheShape(tuple(layers), max_tokens, batch_size, found)


def _kv_shape(layer: Any) -> tuple[int, int, int]:
    if getattr(layer, "kv_lora_rank", None):
        raise ConfigError("a model with latent attention does not say what it caches: give `kv_shape`")
    heads = getattr(layer, "num_key_value_heads", None) or getattr(layer, "num_attention_heads", None)
    width = getattr(layer, "head_dim", None) or getattr(layer, "d_kv", None)
    if width is None and heads and getattr(layer, "hidden_size", None):
        width = layer.hidden_size // layer.num_attention_heads
    if not heads or not width:
        raise ConfigError("the config does not say how many heads of which width are cached: give `kv_shape`")
    return heads, width, width
