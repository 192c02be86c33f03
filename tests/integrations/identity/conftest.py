"""The deployment of `door_world`, fresh for each test; its signing keys once for all."""

from __future__ import annotations

from pathlib import Path

import pytest

from standins.integrations.door_world import Deployment, Signers, make_signers


@pytest.fixture(scope="session")
def signers() -> Signers:
    return make_signers()


@pytest.fixture
def deployment(tmp_path: Path, signers: Signers) -> Deployment:
    return Deployment(tmp_path, signers)
