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
    made: list[CustodyWorld] = []

    def build(**options: Any) -> CustodyWorld:
        made.append(CustodyWorld(options.pop("engine", store), tmp_path, **options))
        return made[-1]

    yield build
    for world in made:
        world.writer.close(5.0)
