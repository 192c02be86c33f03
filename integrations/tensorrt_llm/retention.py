"""`KvCacheRetentionConfig` from our policy, and what a request asked for, narrowed to it.

    most = retention_of(policy.eviction, owed)            # priorities and durations; none longer than the ceiling
    config = to_engine(narrowed(read_retention(asked), most))

1. The engine's durations delete nothing: when one is over, the block has the default priority. A deadline is kept by
   the salt and by our tiers, never by this. Under the engine's second cache manager it has no effect at all.
2. A request may ask for less: a lower priority, a shorter time. It never gets more than policy says of that token.
3. `transfer_mode` and `directory` make the engine write KV in clear to a folder: a request with one is refused.
4. Where blocks of one request overlap, the engine takes the earlier range; so does what is read here.

Never run on TensorRT-LLM itself: written after its bindings of September 2026.
"""

from __future__ import annotations

from collections.abc import Sequence
from datetime import timedelta
from typing import Any, NamedTuple, Protocol

from kvcustody.allocator.prefix.block_priority import END, BlockPriority, disjoint
from kvcustody.errors import ConfigError
from kvcustody.policies.document.model import Eviction, SegmentRule
from kvcustody.policies.document.token_priorities import KindRange, token_priorities
from kvcustody.policies.table.obligations import Obligations

LOWEST, HIGHEST, DEFAULT = 0, 100, 35  # the engine's
_MILLISECOND_US = 1000


class RangeRetention(NamedTuple):
    """Tokens [start, end) of a prompt, `end` None: to its end; `duration_ms` None: for ever."""

    start: int
    end: int | None
    priority: int
    duration_ms: int | None


class RequestRetention(NamedTuple):
    """A request's whole retention: of its prompt, and of what it decodes."""

    ranges: tuple[RangeRetention, ...]
    decode_priority: int = DEFAULT
    decode_duration_ms: int | None = None


class EngineRange(Protocol):
    """`TokenRangeRetentionConfig`."""

    token_start: int
    token_end: int | None
    priority: int
    duration_ms: timedelta | int | None


def retention_of(
    eviction: Eviction,
    owed: Obligations,
    segment: SegmentRule | None = None,
    kinds: Sequence[KindRange] = (),
) -> RequestRetention:
    """What policy gives a request's blocks. Where nothing may be reused, the lowest priority for no time."""
    ceiling_ms = min(owed.idle_us, owed.absolute_us) // _MILLISECOND_US
    if ceiling_ms <= 0:
        return RequestRetention((RangeRetention(0, None, LOWEST, 0),), LOWEST, 0)
    ranges = tuple(
        RangeRetention(
            each.first,
            each.until,
            each.priority,
            ceiling_ms if each.for_us is None else min(ceiling_ms, each.for_us // _MILLISECOND_US),
        )
        for each in token_priorities(eviction, segment, kinds)
    )
    return RequestRetention(ranges, ranges[-1].priority, ranges[-1].duration_ms)


def narrowed(asked: RequestRetention, most: RequestRetention) -> RequestRetention:
    """What was asked, where that is less than `most`, else `most` (rule 2)."""
    edges = {0}
    for one in (*asked.ranges, *most.ranges):
        edges |= {one.start} | (set() if one.end is None else {one.end})
    starts = sorted(edges)
    ranges: list[RangeRetention] = []
    for start, end in zip(starts, [*starts[1:], None], strict=True):
        limit = _at(most, start) or RangeRetention(start, None, DEFAULT, None)
        wanted = _at(asked, start) or limit
        one = RangeRetention(
            start,
            end,
            min(limit.priority, wanted.priority),
            _shorter(limit.duration_ms, wanted.duration_ms),
        )
        if ranges and ranges[-1][2:] == one[2:]:
            ranges[-1] = ranges[-1]._replace(end=end)
        else:
            ranges.append(one)
    return RequestRetention(
        tuple(ranges),
        min(asked.decode_priority, most.decode_priority),
        _shorter(asked.decode_duration_ms, most.decode_duration_ms),
    )


def read_retention(config: Any) -> RequestRetention:
    """A `KvCacheRetentionConfig` of a request. Raises `ConfigError` for what cannot be governed, or is none."""
    directory, mode = getattr(config, "directory", None), getattr(config, "transfer_mode", None)
    if directory or (
        mode is not None and getattr(mode, "name", mode) != "DRAM"
    ):  # DRAM: the engine's default
        raise ConfigError(
            f"KvCacheRetentionConfig: `directory` is `{directory}` and `transfer_mode` is `{mode}`: the engine would "
            "write KV in clear there; leave both out",
            directory=str(directory),
        )
    ranges = [_read_range(one) for one in config.token_range_retention_configs or ()]
    decode_priority = config.decode_retention_priority
    return RequestRetention(
        tuple(ranges),
        DEFAULT if decode_priority is None else _priority(decode_priority),
        _milliseconds(config.decode_duration_ms),
    )


def block_priorities_of(retention: RequestRetention, block_tokens: int) -> tuple[BlockPriority, ...]:
    """The same in our pools' words: priorities of blocks, and for how long after their release, 0: until they end."""
    return disjoint(
        (
            one.start // block_tokens,
            END if one.end is None else -(-one.end // block_tokens),
            one.priority,
            0 if one.duration_ms is None else one.duration_ms * _MILLISECOND_US,
        )
        for one in retention.ranges
    )


def to_engine(retention: RequestRetention) -> Any:
    """The engine's own object. Needs TensorRT-LLM."""
    from tensorrt_llm.llmapi import KvCacheRetentionConfig

    made = KvCacheRetentionConfig.TokenRangeRetentionConfig
    return KvCacheRetentionConfig(
        [made(one.start, one.end, one.priority, _timedelta(one.duration_ms)) for one in retention.ranges],
        retention.decode_priority,
        _timedelta(retention.decode_duration_ms),
    )


def _at(retention: RequestRetention, token: int) -> RangeRetention | None:
    for one in retention.ranges:  # the first that has the token (rule 4)
        if one.start <= token and (one.end is None or token < one.end):
            return one
    return None


def _read_range(one: EngineRange) -> RangeRetention:
    start, end = one.token_start, one.token_end
    if type(start) is not int or start < 0 or (end is not None and (type(end) is not int or end <= start)):
        raise ConfigError(f"KvCacheRetentionConfig: `[{start}, {end})` is no range of tokens")
    return RangeRetention(start, end, _priority(one.priority), _milliseconds(one.duration_ms))


def _priority(value: object) -> int:
    if type(value) is not int or not LOWEST <= value <= HIGHEST:
        raise ConfigError(
            f"KvCacheRetentionConfig: priority `{value}` is none between {LOWEST} and {HIGHEST}"
        )
    return value


def _milliseconds(value: timedelta | int | None) -> int | None:
    if value is None:
        return None
    found = value // timedelta(milliseconds=1) if isinstance(value, timedelta) else value
    if type(found) is not int or found < 0:
        raise ConfigError(f"KvCacheRetentionConfig: duration `{value}` is no time")
    return found


def _timedelta(duration_ms: int | None) -> timedelta | None:
    return None if duration_ms is None else timedelta(milliseconds=duration_ms)


def _shorter(first: int | None, second: int | None) -> int | None:
    if first is None or second is None:
        return second if first is None else first
    return min(first, second)
