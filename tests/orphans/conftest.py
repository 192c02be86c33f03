"""As in the tests of erasures, a line an act is too much."""

from __future__ import annotations

import pytest
import structlog


@pytest.fixture(autouse=True)
def quiet(unconfigured_logs: None) -> None:
    """A line an erasure would be most of what these tests do."""
    structlog.configure(wrapper_class=structlog.make_filtering_bound_logger(40))
