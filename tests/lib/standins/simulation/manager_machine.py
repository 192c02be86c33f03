"""Drawn operations on a block manager beside a model of it."""

from __future__ import annotations

from hypothesis import HealthCheck, settings
from hypothesis import strategies as st

QUICK = settings(
    max_examples=30,
    stateful_step_count=40,
    deadline=None,
    derandomize=True,
    database=None,
    suppress_health_check=list(HealthCheck),
)


DEEP = settings(QUICK, max_examples=1500, stateful_step_count=120, derandomize=False)


some = st.integers(0, 1 << 16)


causes = st.sampled_from(("finished", "aborted", "preempted", "timeout"))


def machine(of: type, how: settings) -> type:
    test = of.TestCase
    test.settings = how
    return test
