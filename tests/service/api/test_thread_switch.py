"""Threads of a process that serves take short turns, and as long ones afterwards as before."""

from __future__ import annotations

import sys
from typing import Any

import pytest

from kvcustody.governance.api.http.server import short_switch_interval


def test_turns_are_as_long_as_before_afterwards() -> None:
    before = sys.getswitchinterval()
    with short_switch_interval():
        assert sys.getswitchinterval() < before
    assert sys.getswitchinterval() == pytest.approx(before)


@pytest.mark.system("a serving process keeps long thread switches")
def test_a_process_that_serves_has_short_ones(plane: Any) -> None:
    assert sys.getswitchinterval() == pytest.approx(0.0005)
