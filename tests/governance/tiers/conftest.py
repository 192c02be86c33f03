"""A deployment's keys for each test."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

import pytest

from standins.governance.sealed_objects import World


@pytest.fixture
def world(tmp_path: Path) -> Iterator[World]:
    made = World(tmp_path)
    yield made
    made.close()
