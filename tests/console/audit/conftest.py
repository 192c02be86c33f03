from __future__ import annotations

from pathlib import Path

import pytest

from standins.console.command_line import Run, call


@pytest.fixture
def run(place: Path) -> Run:
    """Commands in `place`."""
    return call
