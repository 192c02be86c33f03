"""Hints that epochs were raised: they hasten a question, and nothing that they say is acted by."""

from __future__ import annotations

import threading
from typing import Any

import pytest

from kvcustody.clock import SystemClock
from kvcustody.governance.control_plane import epoch_feed
from kvcustody.governance.control_plane.epoch_feed import EpochFeed, ask_at_once
from kvcustody.governance.edge.erase_epochs import EpochScope, EpochTags, EraseEpochs, RaisedEpoch
from standins.waiting import until

KEY = bytes(32)
ANA = EpochTags(KEY).of(EpochScope("corp", "acme", "ana"))


class HeldPlane:
    """Holds open every question that waits, as a replica does that has not seen what another one raised."""

    def __init__(self) -> None:
        self.raised: list[RaisedEpoch] = []
        self.held, self.over = threading.Event(), threading.Event()
        self.at_once = 0
        self.acknowledged: list[int] = []

    def get(self, path: str, **query: Any) -> dict[str, Any]:
        raised = list(self.raised)
        self.acknowledged.append(query["known"])
        if query["wait"]:
            self.held.set()
            self.over.wait(60)
        else:
            self.at_once += 1
        version = len(raised)
        return {
            "key": KEY.hex(),
            "version": version,
            "floor": 0,
            "digest": EraseEpochs(raised, version=version).digest,
            "raised": [[one.number, one.tag.hex()] for one in raised[query["after"] :]],
            "namespace_days": 30,
        }


def private(feed: EpochFeed) -> int:
    known = feed.known()
    assert known is not None
    return known.of("corp", "acme", "ana").private


@pytest.fixture
def plane(monkeypatch: pytest.MonkeyPatch) -> HeldPlane:
    monkeypatch.setattr(epoch_feed, "HINTS_APART_SECONDS", 0.05)
    return HeldPlane()


def test_a_hint_hastens_a_question_and_what_it_says_is_not_acted_by(plane: HeldPlane) -> None:
    feed = EpochFeed(plane, SystemClock(), lease_seconds=300)  # type: ignore[arg-type]
    feed.start()
    try:
        assert plane.held.wait(60) and plane.at_once == 1
        for _ in range(1000):  # forged, or repeated: nothing was raised
            ask_at_once()
        until(lambda: plane.at_once >= 2)
        assert private(feed) == 0 and plane.at_once < 100, "many hints are one question"
        plane.raised.append(RaisedEpoch(1, ANA))
        assert private(feed) == 0, "no hint: the open question is still held"
        ask_at_once()
        until(lambda: private(feed) == 1)
        plane.over.set()  # its answer is older than what is known now
        until(lambda: plane.acknowledged.count(1) > 1)
        assert private(feed) == 1
    finally:
        plane.over.set()
        feed.stop()
    before = plane.at_once
    ask_at_once()
    assert plane.at_once == before, "a feed that ended asks nothing"


def test_a_lost_hint_costs_time_alone(plane: HeldPlane) -> None:
    plane.over.set()
    feed = EpochFeed(plane, SystemClock(), lease_seconds=300)  # type: ignore[arg-type]
    feed.start()
    try:
        plane.raised.append(RaisedEpoch(1, ANA))
        until(lambda: private(feed) == 1)
    finally:
        feed.stop()


def test_a_version_is_acknowledged_once_it_is_acted_by(plane: HeldPlane) -> None:
    """A question that a hint sends while the owner has not taken a version does not acknowledge it."""
    gate, begun = threading.Event(), threading.Event()

    def take(known: Any, _until_us: int) -> None:
        if known.epochs.version:
            begun.set()
            assert gate.wait(60)

    feed = EpochFeed(plane, SystemClock(), lease_seconds=300, on_known=take)  # type: ignore[arg-type]
    feed.start()
    try:
        assert plane.held.wait(60)
        plane.raised.append(RaisedEpoch(1, ANA))
        ask_at_once()
        assert begun.wait(60)
        plane.over.set()  # the open question is answered, and waits for its turn
        assert set(plane.acknowledged) == {0}
        gate.set()
        until(lambda: 1 in plane.acknowledged)
    finally:
        gate.set()
        feed.stop()
