"""Nothing is reused that was written before an erasure that door or worker should know of, whatever is lost or late."""

from __future__ import annotations

from typing import Any, NamedTuple

import pytest

from kvcustody.governance.decisions import access_plan
from kvcustody.governance.edge.current_namespaces import CurrentNamespaces
from kvcustody.governance.edge.custody_lease import CustodyLease
from kvcustody.governance.edge.worker_epochs import WorkerEpochs
from standins.robust.epoch_world import INTERLEAVINGS_A_WORLD, Edge, EpochWorld

ACTS = 40


class Found(NamedTuple):
    """Requests, reuses, how many of them were stale, and names of routers that stood for two states."""

    requests: int = 0
    reuses: int = 0
    stale: int = 0
    renamed: int = 0


@pytest.fixture(scope="module")
def edge(tmp_path_factory: pytest.TempPathFactory) -> Edge:
    return Edge(tmp_path_factory.mktemp("edge"))


def interleavings(count: int, edge: Edge, *, first_seed: int = 0) -> Found:
    total = Found()
    for seed in range(first_seed, first_seed + count // INTERLEAVINGS_A_WORLD):
        world = EpochWorld(seed, edge)
        for _ in range(INTERLEAVINGS_A_WORLD):
            world.interleave(ACTS)
        more = (world.requests, world.reuses, world.stale, world.renamed)
        total = Found(*(one + other for one, other in zip(total, more, strict=True)))
    return total


@pytest.mark.parametrize("count", [120, pytest.param(100_000, marks=pytest.mark.soak)])
def test_nothing_stale_is_reused(edge: Edge, count: int) -> None:
    found = interleavings(count, edge)
    assert (found.stale, found.renamed) == (0, 0), found
    assert found.reuses > count // 10, "too little is reused to show anything"
    print(f"{count} interleavings: {found}")


def test_without_the_comparison_of_epochs_something_is(edge: Edge, monkeypatch: pytest.MonkeyPatch) -> None:
    """The control: the worker takes every token as its own, and domains outlive erasures."""
    monkeypatch.setattr(WorkerEpochs, "agree", lambda *_: True)
    monkeypatch.setattr(access_plan, "epoch_salt", lambda salt, *_, **__: salt)
    assert interleavings(160, edge).stale > 0


def test_without_the_lease_something_is(edge: Edge, monkeypatch: pytest.MonkeyPatch) -> None:
    """The control: a worker that hears nothing goes on."""

    def renew(self: CustodyLease, *_: Any) -> None:
        self.until_us = 1 << 62

    monkeypatch.setattr(CustodyLease, "renew", renew)
    assert interleavings(160, edge).stale > 0


def test_without_epochs_in_the_name_one_stands_for_two_states(edge: Edge, monkeypatch: pytest.MonkeyPatch) -> None:
    """The control: doors name requesters, but by no epoch."""
    named = CurrentNamespaces.of

    def by_nothing(self: CurrentNamespaces, *whose: Any, known: object = None) -> str:
        return named(self, *whose)

    monkeypatch.setattr(CurrentNamespaces, "of", by_nothing)
    assert interleavings(160, edge).renamed > 0
