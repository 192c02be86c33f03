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
from typing import Any, NoReturn

import torch
from transformers.cache_utils import (
    DYNAMIC_LAYER_TYPE_MAPPING,
    Cache,
    DynamicCache,
    QuantizedCache,
    StaticCache,
)

from kvcustody.errors import ConfigError
from kvcustody.governance.identity.model_identity import ModelIdentity
from kvcustody.governance.identity.principal import Principal
from kvcustody.governance.request import NO_HINTS, Hints
from kvcustody.integrations.transformers.classic.buffer import Buffer, carve
from kvcustody.integrations.transformers.classic.cache_shape import CacheShape, LayerShape, shape_of
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

Open = Callable[..., CacheResidency]  # called with (device, bytes) pairs, one for each slab


class CacheKind(StrEnum):
    """Which of transformers' cache classes a governed cache stands for."""

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
        """Zero the cache and end its custody; False where it had ended already."""
        return self.residency.end(cause)

    @property
    def is_ended(self) -> bool:
        """Whether it has been zeroed: every later update raises `HandleError`."""
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
        raise ConfigError(f"device `{device}`: a scrub can wait for the streams of CPUs and CUDA devices alone")
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
    """A dynamic layer of its kind over two regions."""
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
        made: Any = (
            GovernedStaticSlidingLayer(shape.max_tokens, layer.window_tokens)
            if layer.kind == "window"
            else GovernedStaticLayer(shape.max_tokens)
        )
        made.govern(residency, *_pair(keys, values, shape.capacity(layer, is_static=True)))
        layers.append(made)
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
    """Full layers on the host with two staging areas on `device`; windowed layers stay on `device`."""
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
    """A layer without states of its own; transformers before 5.20 has no such class and no such layer type."""
    made: Any = DYNAMIC_LAYER_TYPE_MAPPING["dummy"]
    return made()


def _full_only(shape: CacheShape, kind: str) -> None:
    if any(layer.kind != "full" for layer in shape.layers):
        raise ConfigError(f"kind `{kind}` needs full attention in every layer, as transformers' own class does")


def _widest(shape: CacheShape) -> LayerShape:
    """A shape that holds any full layer's states."""
    full = [layer for layer in shape.layers if layer.kind == "full"]
    return LayerShape(
        "full",
        max(layer.heads for layer in full),
        max(layer.key_width for layer in full),
        max(layer.value_width for layer in full),
    )
