"""Servers of remote stores, for all of a process."""

from __future__ import annotations

from collections.abc import Callable, Iterator

import pytest

from standins.governance.store_servers import StoreServer, servers


@pytest.fixture(scope="session")
def server(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Callable[[str], StoreServer]]:
    yield from servers(tmp_path_factory)
