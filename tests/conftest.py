"""What every test finds: structlog as it is without us, whatever a command configured in the test before."""

from __future__ import annotations

import sys
from collections.abc import Iterator

import pytest


@pytest.fixture(autouse=True)
def unconfigured_logs() -> Iterator[None]:
    yield
    structlog = sys.modules.get("structlog")
    if structlog is not None:
        structlog.reset_defaults()
