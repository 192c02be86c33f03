"""Real vLLM engines for the tests beside it. Without vLLM none of them is collected (`make test-engines`)."""

from __future__ import annotations

import importlib.util
import os
from collections.abc import Callable, Iterator
from contextlib import ExitStack
from pathlib import Path
from typing import TYPE_CHECKING, Any

import pytest

from standins.engines.releases.tried_release import widen

widen("vllm")
os.environ.setdefault("VLLM_NO_USAGE_STATS", "1")
os.environ.setdefault("VLLM_LOGGING_LEVEL", "WARNING")
os.environ.setdefault("HF_HUB_OFFLINE", "1")

collect_ignore_glob = [] if importlib.util.find_spec("vllm") else ["*test_*.py"]

if TYPE_CHECKING:
    from standins.engines.vllm.deployment import Deployment
    from standins.engines.vllm.local_engine import LocalEngine
    from standins.engines.vllm.scheduler_rig import Rig


@pytest.fixture(scope="session")
def site(tmp_path_factory: pytest.TempPathFactory) -> list[str]:
    """PYTHONPATH entries of the engines' processes, in use here too."""
    from standins.engines.vllm.engine_site import enter_site, make_site

    entries = make_site(tmp_path_factory.mktemp("site"))
    enter_site(entries)
    return entries


@pytest.fixture(scope="session")
def model(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The tiny model of full attention."""
    from standins.engines.vllm.tiny_model import save_model

    return save_model(tmp_path_factory.mktemp("model"))


@pytest.fixture(scope="session")
def windowed_model(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The tiny model whose layers form two groups: full attention and a sliding window."""
    from standins.engines.vllm.tiny_model import save_model

    return save_model(tmp_path_factory.mktemp("windowed"), kind="windowed")


@pytest.fixture(scope="session")
def new_deployment(tmp_path_factory: pytest.TempPathFactory) -> Callable[..., Deployment]:
    """Makes a deployment in a folder of its own."""
    from standins.engines.vllm.deployment import Deployment

    return lambda **named: Deployment(tmp_path_factory.mktemp("deployment"), **named)


@pytest.fixture(scope="session")
def engines(model: Path, site: list[str]) -> Iterator[Callable[..., LocalEngine]]:
    """Starts engines that live as long as the run."""
    yield from _engines(model, site)


@pytest.fixture
def rig(model: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[Callable[..., Rig]]:
    """Makes rigs, whose timers end with the test."""
    from standins.engines.vllm.scheduler_rig import Rig

    with ExitStack() as stack:

        def make(**named: object) -> Rig:
            rig = Rig(model, monkeypatch, **named)
            if rig.worker is not None:
                stack.callback(rig.side.timer.close)
            return rig

        yield make


@pytest.fixture
def start(model: Path, site: list[str]) -> Iterator[Callable[..., LocalEngine]]:
    """Starts engines that live as long as the test."""
    yield from _engines(model, site)


def _engines(model: Path, site: list[str]) -> Iterator[Callable[..., LocalEngine]]:
    from standins.engines.vllm.local_engine import LocalEngine

    running: list[LocalEngine] = []

    def start(which: Path = model, **named: Any) -> LocalEngine:
        running.append(LocalEngine(which, site, **named))
        return running[-1]

    yield start
    for engine in running:
        engine.close()


@pytest.fixture(scope="session")
def plain(engines: Callable[..., LocalEngine]) -> LocalEngine:
    """vLLM as it is: the positive control. Every test leaves it idle."""
    return engines()


@pytest.fixture(scope="session")
def governed(engines: Callable[..., LocalEngine], new_deployment: Callable[..., Deployment]) -> LocalEngine:
    """The same engine, governed. Every test leaves it idle and uses tenants of its own."""
    return engines(deployment=new_deployment())
