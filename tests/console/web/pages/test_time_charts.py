"""Buckets fit the period; what is not known is no zero; and the last of many tenants are added up."""

from __future__ import annotations

import pytest

from kvcustody.console.render.time_chart import Buckets, summed
from kvcustody.times import DAY_US, HOUR_US, MINUTE_US, SECOND_US

NOW_US = 1_780_000_000_000_000


@pytest.mark.parametrize(
    ("period_us", "width_us"),
    [
        (40 * SECOND_US, SECOND_US),
        (30 * MINUTE_US, 30 * SECOND_US),
        (HOUR_US, MINUTE_US),
        (DAY_US, 30 * MINUTE_US),
        (7 * DAY_US, 3 * HOUR_US),
        (30 * DAY_US, 12 * HOUR_US),
        (365 * DAY_US, 7 * DAY_US),
        (10 * 365 * DAY_US, 91 * DAY_US),
    ],
)
def test_buckets_fit_the_period(period_us: int, width_us: int) -> None:
    buckets = Buckets.of(NOW_US - period_us, NOW_US)
    assert buckets.width_us == width_us and 20 <= len(buckets.starts_us) <= 63
    assert buckets.starts_us[0] <= NOW_US - period_us and buckets.starts_us[-1] < NOW_US
    assert Buckets.of(NOW_US - period_us, NOW_US, least_us=HOUR_US).width_us == max(HOUR_US, width_us)


def test_no_data_is_none_and_small_tenants_are_one_series() -> None:
    buckets = Buckets.of(NOW_US - 10 * HOUR_US, NOW_US, least_us=HOUR_US)
    first, second, *_ = buckets.starts_us
    sums = [(f"tenant-{number}", first + 5, 100 - number) for number in range(12)]
    series = summed(buckets, sums, [first, second])
    assert [one.name for one in series] == [*(f"tenant-{number}" for number in range(7)), "5 others"]
    assert series[-1].values[0] == sum(100 - number for number in range(7, 12))
    assert [one.values[1] for one in series] == [0] * 8 and {one.values[2] for one in series} == {None}
