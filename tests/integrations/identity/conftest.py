"""The deployment of `door_world`, fresh for each test; its signing keys once for all."""

from __future__ import annotations

import sys
from pathlib import Path

import pytest

sys.path.insert(0, str(Path(__file__).parent))
from door_world import Deployment, Signers, make_signers


@pytest.fixture(scope="session")
def signers() -> Signers:
    return make_signers()


@pytest.fixture
def deployment(tmp_path: Path, signers: Signers) -> Deployment:
    return Deployment(tmp_path, signers)
