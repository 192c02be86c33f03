"""A deployment's keys for each test, and servers of remote stores for all of a process."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from pathlib import Path

import pytest

from standins.governance.sealed_objects import World
from standins.governance.store_servers import StoreServer, absent, open_server

Server = Callable[[str], StoreServer]


@pytest.fixture
def world(tmp_path: Path) -> Iterator[World]:
    made = World(tmp_path)
    yield made
    made.close()


@pytest.fixture(scope="session")
def server(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Server]:
    """`server(kind)`: a running one, the same for every test; skips where it is not installed."""
    running: dict[str, StoreServer] = {}

    def of(kind: str) -> StoreServer:
        if why := absent(kind):
            pytest.skip(why)
        if kind not in running:
            made = open_server(kind, tmp_path_factory.mktemp(kind))
            assert made is not None
            running[kind] = made
        return running[kind]

    yield of
    for made in running.values():
        made.close()
