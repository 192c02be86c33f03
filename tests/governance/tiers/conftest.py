"""A deployment's keys for each test, and servers of remote stores for all of a process."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from pathlib import Path

import pytest

from standins.governance.sealed_objects import World
from standins.governance.store_servers import StoreServer, servers


@pytest.fixture
def world(tmp_path: Path) -> Iterator[World]:
    made = World(tmp_path)
    yield made
    made.close()


@pytest.fixture(scope="session")
def server(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Callable[[str], StoreServer]]:
    yield from servers(tmp_path_factory)
