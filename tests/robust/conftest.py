"""Custody from end to end for the cases here, each world's writer closed behind it."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
from sqlalchemy import Engine

from standins.robust.custody_world import CustodyWorld


@pytest.fixture
def make(store: Engine, tmp_path: Path) -> Iterator[Callable[..., CustodyWorld]]:
    worlds: list[CustodyWorld] = []

    def build(**options: Any) -> CustodyWorld:
        worlds.append(CustodyWorld(options.pop("engine", store), tmp_path, **options))
        return worlds[-1]

    yield build
    for world in worlds:
        world.writer.close(5.0)
