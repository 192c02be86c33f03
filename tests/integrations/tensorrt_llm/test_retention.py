"""Priorities and durations: from policy to the engine, of a request narrowed to policy, and back."""

from __future__ import annotations

import sys
from collections.abc import Iterator
from datetime import timedelta

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from kvcustody.errors import ConfigError
from kvcustody.integrations.tensorrt_llm.retention import (
    DEFAULT,
    RangeRetention,
    RequestRetention,
    block_priorities_of,
    narrowed,
    read_retention,
    retention_of,
    to_engine,
)
from kvcustody.policies.reading.load_policy import load_policy
from kvcustody.policies.table.compile import compile_policy
from standins.integrations.stand_in_engine import KvCacheRetentionConfig, modules, uninstall

POLICY = """\
schema: kvcustody/policy@1
name: retention
profile: shared
scope: tenant
classifications: [internal, restricted]
classify: [{tenant: "*", as: internal}, {tenant: secret, as: restricted}]
tenants:
  secret: {quota: {guaranteed: 0%, cap: 100%, borrow: true}}
  default: {quota: {guaranteed: 0%, cap: 100%, borrow: true}}
rules:
  - {id: own-scope, effect: permit, action: reuse, when: {reader: owner}}
retention:
  internal:   {idle: 10m, absolute: 1h, active_max: 1h}
  restricted: {idle: 0s, absolute: 0s, active_max: 1m}
scrub: {default: {within: 1s, verify: all}}
offload: {internal: never, restricted: never}
audit: {on_outage: {decisions: deny, lifecycle: spill, own_hits: aggregate}}
eviction:
  policy: priority
  priority: 40
  ranges: [{from: 0, to: 64, priority: 90, for: 30s}, {from: 64, to: 100, priority: 10, for: 2h}]
"""

CEILING_MS = 600_000  # the idle time, which is shorter


@pytest.fixture
def installed() -> Iterator[None]:
    sys.modules.update(modules())
    yield
    uninstall()


def of_policy(tenant: str) -> RequestRetention:
    table = compile_policy(load_policy(POLICY, name="retention.yaml"), revision=1)
    level = table.classify(tenant, None, None, None)
    return retention_of(table.policy.eviction, table.obligations(tenant, level))


def test_policy_s_ranges_become_the_engine_s_and_none_is_longer_than_the_ceiling() -> None:
    made = of_policy("acme")
    assert made.ranges == (
        RangeRetention(0, 64, 90, 30_000),
        RangeRetention(64, 100, 10, CEILING_MS),  # two hours, says the range
        RangeRetention(100, None, 40, CEILING_MS),
    )
    assert (made.decode_priority, made.decode_duration_ms) == (40, CEILING_MS)


def test_what_may_not_be_reused_leaves_first() -> None:
    assert of_policy("secret") == RequestRetention((RangeRetention(0, None, 0, 0),), 0, 0)


def test_a_request_gets_less_where_it_asks_for_less_and_never_more() -> None:
    most = of_policy("acme")
    asked = RequestRetention((RangeRetention(0, 32, 100, None), RangeRetention(32, 80, 20, 5_000)), 100, None)
    assert narrowed(asked, most) == RequestRetention(
        (
            RangeRetention(0, 32, 90, 30_000),
            RangeRetention(32, 64, 20, 5_000),
            RangeRetention(64, 80, 10, 5_000),
            RangeRetention(80, 100, 10, CEILING_MS),
            RangeRetention(100, None, 40, CEILING_MS),
        ),
        40,
        CEILING_MS,
    )
    assert narrowed(RequestRetention((), 100, None), most) == most, (
        "who asks for nothing has what policy says"
    )


_ranges = st.lists(
    st.tuples(
        st.integers(0, 200), st.one_of(st.none(), st.integers(1, 100)), st.integers(0, 100),
        st.one_of(st.none(), st.integers(0, 1_000_000)),
    ),
    max_size=5,
).map(
    lambda found: tuple(
        RangeRetention(start, None if size is None else start + size, priority, duration)
        for start, size, priority, duration in found
    )
)  # fmt: skip


@settings(max_examples=200, deadline=None)
@given(_ranges, st.integers(0, 100), st.integers(0, 300))
def test_no_token_ever_gets_more_than_policy(
    asked: tuple[RangeRetention, ...], decode: int, token: int
) -> None:
    most = of_policy("acme")

    def at(retention: RequestRetention) -> RangeRetention:
        return next(
            one for one in retention.ranges if one.start <= token and (one.end is None or token < one.end)
        )

    made = narrowed(RequestRetention(asked, decode, None), most)
    limit, got = at(most), at(made)
    assert got.priority <= limit.priority
    assert got.duration_ms is not None and limit.duration_ms is not None
    assert got.duration_ms <= limit.duration_ms <= CEILING_MS
    assert made.decode_duration_ms == CEILING_MS


def test_it_goes_to_the_engine_and_comes_back(installed: None) -> None:
    most = of_policy("acme")
    config = to_engine(most)
    assert type(config) is KvCacheRetentionConfig
    assert config.token_range_retention_configs[0].duration_ms == timedelta(seconds=30)
    assert read_retention(config) == most


def test_it_is_what_our_pools_order_by() -> None:
    blocks = block_priorities_of(of_policy("acme"), 16)
    assert [(one.first, one.last, one.priority, one.duration_us) for one in blocks[:2]] == [
        (0, 4, 90, 30_000_000),
        (4, 7, 10, CEILING_MS * 1000),
    ]
    assert blocks[2].first == 7 and blocks[2].priority == 40


def one_range(
    *, start: object = 0, end: object = None, priority: object = 35, duration: object = None
) -> object:
    made = KvCacheRetentionConfig.TokenRangeRetentionConfig
    return KvCacheRetentionConfig([made(start, end, priority, duration)])  # type: ignore[arg-type]


@pytest.mark.parametrize(
    "config",
    [
        one_range(start=-1),
        one_range(start=4, end=4),
        one_range(priority=101),
        one_range(priority=True),
        one_range(duration=-1),
        one_range(duration="long"),
    ],
)
def test_what_is_no_retention_is_refused(config: object) -> None:
    assert read_retention(one_range()).ranges == (RangeRetention(0, None, DEFAULT, None),), "control"
    with pytest.raises(ConfigError, match="KvCacheRetentionConfig"):
        read_retention(config)


@pytest.mark.parametrize("named", [{"directory": "/tmp/kv"}, {"transfer_mode": "GDS"}])
def test_a_folder_for_clear_bytes_is_refused(named: dict[str, str]) -> None:
    with pytest.raises(ConfigError, match="in clear"):
        read_retention(KvCacheRetentionConfig([], **named))  # type: ignore[arg-type]
