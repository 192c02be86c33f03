"""Waits of tests: for a condition, and for no longer than a bound."""

from __future__ import annotations

import time
from collections.abc import Callable
from typing import TypeVar

Told = TypeVar("Told")
_PAUSE_SECONDS = 0.01


def until(
    condition: Callable[[], Told], seconds: float = 60.0, *, meanwhile: Callable[[], object] = lambda: None
) -> Told:
    """What `condition` says as soon as that is true; `meanwhile` is called before each look but the first.

    Raises `AssertionError` where it never is within `seconds`.
    """
    end = time.monotonic() + seconds
    while not (found := condition()):
        assert time.monotonic() < end, f"not within {seconds:g} seconds: {found!r}"
        meanwhile()
        time.sleep(_PAUSE_SECONDS)
    return found
