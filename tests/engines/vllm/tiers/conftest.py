"""An engine with a host tier, shared by the tests that leave it idle."""

from __future__ import annotations

from collections.abc import Callable
from typing import TYPE_CHECKING

import pytest

if TYPE_CHECKING:
    from local_engine import LocalEngine


@pytest.fixture(scope="session")
def tiered(engines: Callable[..., LocalEngine], tmp_path_factory: pytest.TempPathFactory) -> LocalEngine:
    """A governed engine whose pool holds two prompts, with sealed copies in host memory."""
    from tier_engines import deployment_with, options

    return engines(deployment=deployment_with(tmp_path_factory.mktemp("tiered")), **options())
