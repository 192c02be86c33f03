"""Engines with one tier, shared by the tests that leave them idle."""

from __future__ import annotations

from collections.abc import Callable
from typing import TYPE_CHECKING

import pytest

if TYPE_CHECKING:
    from standins.engines.vllm.local_engine import LocalEngine


@pytest.fixture(scope="session", params=["host", "nvme"])
def tiered(
    request: pytest.FixtureRequest,
    engines: Callable[..., LocalEngine],
    tmp_path_factory: pytest.TempPathFactory,
) -> LocalEngine:
    """A governed engine whose pool holds two prompts, with sealed copies in host memory or in files."""
    from standins.engines.vllm.tier_engines import deployment_with, nvme, options

    folder = tmp_path_factory.mktemp("tiered")
    settings = nvme(folder / "tier") if request.param == "nvme" else {}
    return engines(deployment=deployment_with(folder), **options(**settings))
