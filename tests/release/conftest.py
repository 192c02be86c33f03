"""Lets the tests of this folder import the small release they share, and gives them one on the machine's clock."""

from __future__ import annotations

import os
from pathlib import Path
from typing import TYPE_CHECKING

import pytest

from kvcustody.audit.tlog.signing_key import create_signing_key
from kvcustody.clock import SystemClock
from kvcustody.governance.release.release_desk import ReleaseWorkflow
from kvcustody.governance.release.trust import write_trust

if TYPE_CHECKING:
    from standins.release.release_world import Release


@pytest.fixture(autouse=True)
def _clean_environment(monkeypatch: pytest.MonkeyPatch) -> None:
    for name in list(os.environ):
        if name.upper().startswith("KVCUSTODY_"):
            monkeypatch.delenv(name)


@pytest.fixture
def release(tmp_path: Path) -> Release:
    """A release on the machine's own clock, with its trust file beside it."""
    from standins.release.release_world import Release

    release = Release(tmp_path)
    release.desk = ReleaseWorkflow(release.store, release.people.trust, clock=SystemClock(), ledger=release.ledger)
    people = release.people
    keys = [
        (str(signer.key.verifier), role, tenant)
        for signer, role, tenant in (
            (people.ada, "author", None),
            (people.grace, "approver", None),
            (people.holger, "owner", "holder"),
            (people.brock, "break-glass", None),
        )
    ]
    keys.append((str(create_signing_key(tmp_path / "orders.key", "orders").verifier), "orders", None))
    (tmp_path / "trust.toml").write_text(write_trust("prod", keys))
    return release
