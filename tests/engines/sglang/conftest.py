"""Real SGLang engines for the tests beside it. Without SGLang none of them is collected (`make test-engines`)."""

from __future__ import annotations

import importlib.util
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import TYPE_CHECKING, Any

import pytest

from standins import LIBRARY
from standins.engines.releases.tried_release import widen

widen("sglang")
collect_ignore_glob = [] if importlib.util.find_spec("sglang") else ["engine/*", "hicache/*", "server/*"]

if TYPE_CHECKING:
    from standins.engines.sglang.sglang_engine import SglangEngine
    from standins.engines.vllm.deployment import Deployment


@pytest.fixture(scope="session")
def site(tmp_path_factory: pytest.TempPathFactory) -> list[str]:
    """PYTHONPATH entries of the engines' processes: the probe, as a plugin that each of them loads."""
    from standins.engines.vllm.engine_site import add_distribution, enter_site

    folder = tmp_path_factory.mktemp("site")
    add_distribution(
        folder,
        "sglang-probe",
        "0",
        "[sglang.srt.plugins]\nprobe = standins.engines.sglang.sglang_probe:register\n",
    )
    entries = [str(folder), str(LIBRARY)]
    enter_site(entries)  # spawned processes begin with this one's path
    return entries


@pytest.fixture(scope="session")
def model(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The tiny model of full attention."""
    from standins.engines.vllm.tiny_model import save_model

    return save_model(tmp_path_factory.mktemp("model"))


@pytest.fixture(scope="session")
def new_deployment(tmp_path_factory: pytest.TempPathFactory) -> Callable[..., Deployment]:
    """Makes a deployment in a folder of its own."""
    from standins.engines.vllm.deployment import Deployment

    return lambda **named: Deployment(tmp_path_factory.mktemp("deployment"), **named)


@pytest.fixture
def start(model: Path, site: list[str]) -> Iterator[Callable[..., SglangEngine]]:
    """Starts engines that live as long as the test."""
    from standins.engines.sglang.sglang_engine import SglangEngine

    started: list[SglangEngine] = []

    def one(**named: Any) -> SglangEngine:
        started.append(SglangEngine(model, site, **named))
        return started[-1]

    yield one
    for engine in started:
        engine.close()


@pytest.fixture(scope="module")
def governed(model: Path, site: list[str], new_deployment: Callable[..., Deployment]) -> Iterator[Any]:
    """A governed engine with a page size of one, for a module's tests with tenants of their own."""
    from standins.engines.sglang.sglang_engine import SglangEngine

    engine = SglangEngine(model, site, deployment=new_deployment())
    yield engine
    engine.close()
