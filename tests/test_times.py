"""Moments and spans: exact both ways, and refused where they are none."""

from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from kvcustody.times import DAY_US, iso, moment_us, readable, span

END_US = 253_402_300_800 * 1_000_000


@given(st.integers(0, END_US - 1))
def test_every_moment_comes_back_to_the_microsecond(at_us: int) -> None:
    assert moment_us(iso(at_us)) == at_us


def test_what_a_text_may_be() -> None:
    assert moment_us("1970-01-02") == DAY_US == moment_us("1970-01-02T01:00+01:00")
    assert iso(1) == "1970-01-01T00:00:00.000001Z" and iso(DAY_US) == "1970-01-02T00:00:00Z"
    assert (readable(DAY_US), readable(0), readable(None, none="")) == ("1970-01-02 00:00:00", "-", "")
    for text in ("soon", "", "2026-13-01"):
        with pytest.raises(ValueError, match=r".*"):
            moment_us(text)
    with pytest.raises(OverflowError):
        iso(END_US)


def test_a_span_is_in_the_largest_unit_that_measures_it_whole() -> None:
    given_us = {"0s": 0, "250ms": 250_000, "90m": 5_400_000_000, "7d": 7 * DAY_US, "1us": 1}
    assert {span(length) for length in given_us.values()} == given_us.keys()
    assert all(span(length) == text for text, length in given_us.items())
