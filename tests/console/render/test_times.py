"""Times and periods as documents write them."""

from __future__ import annotations

import pytest

from kvcustody.console.render.number_format import local, minute, period_length
from kvcustody.times import moment_us


@pytest.mark.parametrize(
    ("since", "until", "zone", "said"),
    [
        ("2023-11-14T22:13:21Z", "2023-11-14T22:13:46Z", "UTC", "25 s"),
        ("2026-01-01T00:00:00Z", "2026-04-01T00:00:00Z", "UTC", "3 months"),
        ("2025-12-31T23:00:00Z", "2026-03-31T22:00:00Z", "Europe/Berlin", "3 months"),
        ("2025-12-31T23:00:00Z", "2026-03-31T22:00:00Z", "UTC", "89.9 d"),
        ("2026-01-01T00:00:00Z", "2026-01-08T00:00:00Z", "UTC", "7 days"),
        ("2026-03-28T23:00:00Z", "2026-03-29T22:00:00Z", "Europe/Berlin", "1 day"),
        ("2026-01-31T00:00:00Z", "2026-02-28T00:00:00Z", "UTC", "28 days"),
        ("2026-01-01T00:00:00Z", "2026-02-01T00:00:01Z", "UTC", "31 d"),
    ],
)
def test_a_period_has_the_length_that_its_calendar_gives(since: str, until: str, zone: str, said: str) -> None:
    assert period_length(moment_us(since), moment_us(until), zone) == said


def test_a_time_beside_utc_has_its_seconds_and_utc_its_mark() -> None:
    at_us = moment_us("2026-07-01T12:00:07Z")
    assert local(at_us, "Europe/Berlin") == "2026-07-01 14:00:07 CEST" and local(at_us, "UTC") == ""
    assert minute(at_us) == "2026-07-01T12:00Z"
