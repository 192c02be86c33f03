"""Nothing is reused that was written before an erasure that door or worker should know of, whatever is lost or late."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

from kvcustody.audit.tlog.signing_key import SigningKey, create_signing_key
from kvcustody.governance.decisions import access_plan
from kvcustody.governance.edge.custody_lease import CustodyLease
from kvcustody.governance.edge.worker_epochs import WorkerEpochs
from standins.robust.epoch_world import INTERLEAVINGS_A_WORLD, EpochWorld

ACTS = 40


@pytest.fixture
def key(tmp_path: Path) -> SigningKey:
    return create_signing_key(tmp_path / "door.key", "door-1.example.org")


def interleavings(count: int, key: SigningKey, *, first_seed: int = 0) -> tuple[int, int]:
    """Reuses, and how many of them were stale."""
    reuses = stale = 0
    for seed in range(first_seed, first_seed + count // INTERLEAVINGS_A_WORLD):
        world = EpochWorld(seed, key)
        for _ in range(INTERLEAVINGS_A_WORLD):
            world.interleave(ACTS)
        reuses, stale = reuses + world.reuses, stale + world.stale
    return reuses, stale


@pytest.mark.parametrize("count", [2_000, pytest.param(100_000, marks=pytest.mark.soak)])
def test_nothing_stale_is_reused(key: SigningKey, count: int) -> None:
    reuses, stale = interleavings(count, key)
    assert stale == 0
    assert reuses > count // 10, "too little is reused to show anything"


def test_without_the_comparison_of_epochs_something_is(
    key: SigningKey, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The control: the worker takes every token as its own, and domains outlive erasures."""
    monkeypatch.setattr(WorkerEpochs, "agree", lambda *_: True)
    monkeypatch.setattr(access_plan, "epoch_salt", lambda salt, *_, **__: salt)
    assert interleavings(400, key)[1] > 0


def test_without_the_lease_something_is(key: SigningKey, monkeypatch: pytest.MonkeyPatch) -> None:
    """The control: a worker that hears nothing goes on."""

    def renew(self: CustodyLease, *_: Any) -> None:
        self.until_us = 1 << 62

    monkeypatch.setattr(CustodyLease, "renew", renew)
    assert interleavings(400, key)[1] > 0
