"""Governed classic caches: transformers' dynamic, static, quantised and offloaded caches as residencies.

    with governed_cache(custodian, principal, identity, config=model.config, max_tokens=2048) as cache:
        model.generate(**inputs, past_key_values=cache)

1. All memory of a cache is its residency's slabs, reserved when it is opened; nothing grows.
2. The end of the `with` block, an exception in it, collection, and every deadline zero all of it.
3. A cache cannot be copied or pickled: a copy would be outside custody.
"""

from __future__ import annotations

import weakref
from collections.abc import Callable
from enum import StrEnum
from types import TracebackType
from typing import Any, NamedTuple, NoReturn

import torch
from transformers.cache_utils import (
    DYNAMIC_LAYER_TYPE_MAPPING,
    Cache,
    DynamicCache,
    QuantizedCache,
    StaticCache,
    get_layer_types_and_kwargs,
)

from kvcustody.errors import ConfigError
from kvcustody.governance.identity.model_identity import ModelIdentity
from kvcustody.governance.identity.principal import Principal
from kvcustody.governance.request import NO_HINTS, Hints
from kvcustody.integrations.transformers.classic.buffer import Buffer, carve, region_bytes
from kvcustody.integrations.transformers.classic.custodian import Custodian
from kvcustody.integrations.transformers.classic.dynamic_static_layers import (
    GovernedDynamicLayer,
    GovernedLayer,
    GovernedStaticLayer,
)
from kvcustody.integrations.transformers.classic.offloaded_layers import (
    GovernedOffloadedLayer,
    OffloadStaging,
)
from kvcustody.integrations.transformers.classic.quantized_layers import (
    FP8,
    SCALES_BYTES,
    GovernedFp8Layer,
    WorkArea,
)
from kvcustody.integrations.transformers.classic.residency import CacheResidency
from kvcustody.integrations.transformers.classic.sliding_window_layers import (
    GovernedDynamicSlidingLayer,
    GovernedStaticSlidingLayer,
)
from kvcustody.lab.sizing.attention_layers import every_layer
from kvcustody.lab.sizing.hf_config_fields import ModelConfig

Open = Callable[..., CacheResidency]  # called with (device, bytes) pairs, one for each slab


class CacheKind(StrEnum):
    """The class of transformers that a governed cache replaces."""

    DYNAMIC = "dynamic"
    STATIC = "static"
    QUANTIZED = "quantized"
    OFFLOADED = "offloaded"


class GovernedCache(Cache):
    """A cache in custody. A context manager; its memory is zero when `end` returns."""

    residency: CacheResidency

    def __init__(self, residency: CacheResidency, layers: list[Any]) -> None:
        Cache.__init__(self, layers=layers)
        self.residency = residency
        end = weakref.WeakMethod(self._drop_layers)
        residency.on_end = lambda: None if (known := end()) is None else known()

    def end(self, cause: str = "finished") -> bool:
        """Zero the cache and end its custody; return False where it had ended already."""
        return self.residency.end(cause)

    @property
    def is_ended(self) -> bool:
        """Whether it has been zeroed; every later update raises `HandleError`."""
        return self.residency.ended_by is not None or not self.residency.is_running()

    def _drop_layers(self) -> None:
        for layer in self.layers:
            if isinstance(layer, GovernedLayer):
                layer.drop_tensors()

    def __enter__(self) -> GovernedCache:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.end("finished" if error is None else "aborted")

    def __reduce_ex__(self, protocol: object) -> NoReturn:
        raise ConfigError("a governed cache cannot be copied or pickled: open another and compute the prompt again")


class GovernedDynamicCache(GovernedCache, DynamicCache):
    """`DynamicCache`, also with sliding-window layers and with its full layers offloaded."""


class GovernedStaticCache(GovernedCache, StaticCache):
    """`StaticCache`, whose updates are never compiled."""


class GovernedQuantizedCache(GovernedCache, QuantizedCache):
    """`QuantizedCache` with the `fp8` backend."""


def governed_cache(
    custodian: Custodian,
    principal: Principal,
    model: ModelIdentity,
    *,
    config: Any,
    max_tokens: int,
    kind: CacheKind | str = CacheKind.DYNAMIC,
    batch_size: int = 1,
    dtype: torch.dtype | None = None,
    device: torch.device | str = "cpu",
    kv_shape: tuple[int, int, int] | None = None,
    route: str | None = None,
    hints: Hints = NO_HINTS,
) -> GovernedCache:
    """Open a cache of `kind` for at most `max_tokens` tokens in each of `batch_size` rows (beams count as rows).

    `dtype`: of the states, by default the config's. `kv_shape`: (heads, key width, value width) of a layer, where the
    config does not say. Raises `AdmissionError` where policy, quota, pool or ledger do not admit it, `ConfigError` for
    a layer type without a governed form, `DeviceError` where a device has no room.
    """
    try:
        kind = CacheKind(kind)
    except ValueError as error:
        raise ConfigError(f"unknown kind of cache `{kind}`: use one of {', '.join(CacheKind)}") from error
    shape = shape_of(config, max_tokens, batch_size, dtype, kv_shape)
    place = torch.device(device)
    if place.type not in ("cpu", "cuda"):
        raise ConfigError(f"device `{device}`: scrubs support only CPUs and CUDA devices")
    if place.type == "cuda" and place.index is None:
        place = torch.device("cuda", torch.cuda.current_device())
    build = {
        CacheKind.DYNAMIC: _dynamic,
        CacheKind.STATIC: _static,
        CacheKind.QUANTIZED: _quantized,
        CacheKind.OFFLOADED: _offloaded,
    }[kind]

    def open_residency(*devices: tuple[torch.device, int]) -> CacheResidency:
        return custodian.open(
            principal,
            model,
            devices,
            used_by=place,
            route=route,
            hints=hints,
            offloads=kind is CacheKind.OFFLOADED,
        )

    cache = build(shape, place, open_residency)
    custodian.watch(cache.residency, cache)
    return cache


def _dynamic(shape: CacheShape, device: torch.device, open_residency: Open) -> GovernedCache:
    counts = [count for layer in shape.layers for count in shape.sides(layer, shape.capacity(layer))]
    residency = open_residency((device, sum(counts)))
    regions = iter(carve(residency.slabs[0], counts))
    layers = [_layer(shape, one, residency, next(regions), next(regions)) for one in shape.layers]
    return GovernedDynamicCache(residency, layers)


def _layer(
    shape: CacheShape, layer: LayerShape, residency: CacheResidency, keys: torch.Tensor, values: torch.Tensor
) -> Any:
    """Return a dynamic layer of the right kind over two regions."""
    if layer.kind == "none":
        return _holds_nothing()
    make: Any = GovernedDynamicLayer
    made = GovernedDynamicSlidingLayer(layer.window_tokens) if layer.kind == "window" else make()
    made.govern(residency, *_pair(keys, values, shape.capacity(layer)))
    return made


def _pair(keys: torch.Tensor, values: torch.Tensor, tokens: int, *, token_major: bool = False) -> tuple[Buffer, Buffer]:
    return Buffer(keys, tokens, token_major=token_major), Buffer(values, tokens, token_major=token_major)


def _static(shape: CacheShape, device: torch.device, open_residency: Open) -> GovernedCache:
    counts = [count for layer in shape.layers for count in shape.sides(layer, shape.capacity(layer, is_static=True))]
    residency = open_residency((device, sum(counts)))
    regions = iter(carve(residency.slabs[0], counts))
    layers: list[Any] = []
    for layer in shape.layers:
        keys, values = next(regions), next(regions)
        if layer.kind == "none":
            layers.append(_holds_nothing())
            continue
        layer_cache: Any = (
            GovernedStaticSlidingLayer(shape.max_tokens, layer.window_tokens)
            if layer.kind == "window"
            else GovernedStaticLayer(shape.max_tokens)
        )
        layer_cache.govern(residency, *_pair(keys, values, shape.capacity(layer, is_static=True)))
        layers.append(layer_cache)
    return GovernedStaticCache(residency, layers)


def _quantized(shape: CacheShape, device: torch.device, open_residency: Open) -> GovernedCache:
    _full_only(shape, "quantized")
    tokens, widest = shape.max_tokens, _widest(shape)
    is_float32 = shape.dtype == torch.float32
    wide = shape.sides(widest, tokens, torch.float32)
    work = wide if is_float32 else [max(wide), *shape.sides(widest, tokens)]
    counts = [count for layer in shape.layers for count in (*shape.sides(layer, tokens, FP8), SCALES_BYTES)]
    residency = open_residency((device, sum(work) + sum(counts)))
    regions = [*carve(residency.slabs[0], [*work, *counts])]
    areas = [Buffer(regions.pop(0), tokens) for _ in work]
    area = WorkArea(areas, []) if is_float32 else WorkArea(areas[:1], areas[1:])
    layers = []
    for _ in shape.layers:
        keys, values, scales = (regions.pop(0) for _ in range(3))
        made = GovernedFp8Layer()  # type: ignore[no-untyped-call]
        made.govern_quantized(residency, *_pair(keys, values, tokens), scales, area)
        layers.append(made)
    return GovernedQuantizedCache(residency, layers)


def _offloaded(shape: CacheShape, device: torch.device, open_residency: Open) -> GovernedCache:
    """Return full layers on the host with two staging areas on `device`; windowed layers stay on `device`."""
    full = [layer for layer in shape.layers if layer.kind == "full"]
    near = [layer for layer in shape.layers if layer.kind == "window"]
    if not full:
        raise ConfigError("no layer has full attention, so there is nothing to offload: use kind `dynamic`")
    # A layer without states may read another layer's, later than those stay staged.
    if any(layer.kind == "none" for layer in shape.layers):
        raise ConfigError("a layer holds no states of its own, and may share another's: use kind `dynamic`")
    home = [count for layer in full for count in shape.sides(layer, shape.max_tokens)]
    staged = 2 * shape.sides(_widest(shape), shape.max_tokens)
    close = [count for layer in near for count in shape.sides(layer, shape.capacity(layer))]
    residency = open_residency((torch.device("cpu"), sum(home)), (device, sum(staged) + sum(close)))
    on_host = iter(carve(residency.slabs[0], home))
    on_device = iter(carve(residency.slabs[1], [*staged, *close]))
    areas = [_pair(next(on_device), next(on_device), shape.max_tokens, token_major=True) for _ in range(2)]
    staging = OffloadStaging(areas, device)
    layers: list[Any] = []
    for layer in shape.layers:
        if layer.kind != "full":
            layers.append(_layer(shape, layer, residency, next(on_device), next(on_device)))
            continue
        made = GovernedOffloadedLayer()  # type: ignore[no-untyped-call]
        made.govern(residency, *_pair(next(on_host), next(on_host), shape.max_tokens, token_major=True))
        made.stage(staging)
        layers.append(made)
    offloaded = [layer for layer in layers if isinstance(layer, GovernedOffloadedLayer)]
    for one, following in zip(offloaded, [*offloaded[1:], offloaded[0]], strict=True):
        one.follow(following)
    return GovernedDynamicCache(residency, layers)


def _holds_nothing() -> Any:
    """Return a layer without states. Transformers before 5.20 has no such class and no such layer type."""
    made: Any = DYNAMIC_LAYER_TYPE_MAPPING["dummy"]
    return made()


def _full_only(shape: CacheShape, kind: str) -> None:
    if any(layer.kind != "full" for layer in shape.layers):
        raise ConfigError(f"kind `{kind}` needs full attention in every layer, as transformers' own class does")


def _widest(shape: CacheShape) -> LayerShape:
    """Return a shape that holds any full layer's states."""
    full = [layer for layer in shape.layers if layer.kind == "full"]
    return LayerShape(
        "full",
        max(layer.heads for layer in full),
        max(layer.key_width for layer in full),
        max(layer.value_width for layer in full),
    )


# What a classic cache will hold, read from the model's config before it is opened: layers, windows, bytes.
#
# Rules of this section:
# 1. A layer type without a governed form is an error and is never left out.
# 2. Sizes are upper bounds for the states; a layer refuses states beyond its bound.

_USUAL_NAMES = ("num_hidden_layers", "hidden_size", "num_attention_heads", "num_key_value_heads", "head_dim")
# Cross-attention has a cache of its own; a layer with index keys is a kind without a governed form.
_ELSEWHERE = ("add_cross_attention", "index_head_dim")
_WINDOWED = ("sliding_attention", "chunked_attention")


class LayerShape(NamedTuple):
    """One layer: `kind` is `full`, `window` or `none` (without states). Widths are values per head."""

    kind: str
    heads: int
    key_width: int
    value_width: int
    window_tokens: int = 0


class CacheShape(NamedTuple):
    """All layers, and their common facts."""

    layers: tuple[LayerShape, ...]
    max_tokens: int
    batch: int
    dtype: torch.dtype

    def capacity(self, layer: LayerShape, *, is_static: bool = False) -> int:
        """Return the tokens that a layer's buffers hold: two windows for a windowed layer, so that moves are rare."""
        if layer.kind != "window":
            return self.max_tokens
        window = min(layer.window_tokens, self.max_tokens) if is_static else layer.window_tokens
        return min(self.max_tokens, 2 * window)

    def sides(self, layer: LayerShape, tokens: int, dtype: torch.dtype | None = None) -> list[int]:
        """Return the bytes of a layer's K and V for that many tokens."""
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
    """Return the shape of a model's cache.

    Raises:
        ConfigError: the config does not say enough.
    """
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
    """Return heads and widths of keys and values by layer, as sizing reads them from the same config.

    A class without `num_key_value_heads` attends with all its heads; one that names a field otherwise
    (`attribute_map`) is asked by the usual name.
    """
    fields = text.to_dict()
    first = text.per_layer_config[0]
    for name in _USUAL_NAMES:
        if fields.get(name) is None:
            fields[name] = getattr(first, name, None)
    hidden, heads = fields["hidden_size"], fields["num_attention_heads"]
    if not hidden or not heads:
        raise ConfigError("the config does not say how many heads of which width are cached: give `kv_shape`")
    fields["num_key_value_heads"] = fields["num_key_value_heads"] or heads
    fields["head_dim"] = fields["head_dim"] or fields.get("d_kv") or hidden // heads
    model = ModelConfig(fields)
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
