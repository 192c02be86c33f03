"""A worker takes epochs on the thread that owns its blocks, and a version counts as taken when it was."""

from __future__ import annotations

import threading
import time
from contextlib import ExitStack
from typing import Any

import pytest

from kvcustody.clock import MICROSECONDS, VirtualClock
from kvcustody.errors import ServiceError
from kvcustody.governance.edge.erase_epochs import (
    EpochScope,
    EpochTags,
    EraseEpochs,
    KnownEpochs,
    RaisedEpoch,
)
from kvcustody.governance.governor.governor import Governor
from kvcustody.governance.worker.follow_epochs import TakenEpochs, follow_epochs
from standins.builders import governor, policy, table

TAGS = EpochTags(bytes(32))
WAIT_SECONDS = 30


def version(number: int) -> KnownEpochs:
    given = [RaisedEpoch(each, TAGS.of(EpochScope("idp", "holder", f"p{each}"))) for each in range(1, number + 1)]
    return KnownEpochs(EraseEpochs(given, version=number), TAGS)


@pytest.fixture
def owner() -> Governor:
    return governor(table(policy(("holder",))), VirtualClock())


def heard(taken: TakenEpochs, known: KnownEpochs, until_us: int) -> threading.Thread:
    thread = threading.Thread(target=taken.take, args=(known, until_us))
    thread.start()
    return thread


def test_at_the_start_it_is_taken_at_once(owner: Governor) -> None:
    TakenEpochs(owner).take(version(3), 5)
    assert owner.epochs.known is not None and owner.epochs.known.epochs.version == 3
    assert owner.custody.until_us == 5


def test_a_new_version_is_waited_for_and_a_renewal_is_not(owner: Governor) -> None:
    taken = TakenEpochs(owner)
    taken.take(version(1), 5)
    thread = heard(taken, version(2), 7)
    thread.join(0.3)
    assert thread.is_alive(), "nobody has taken it"
    deadline = time.monotonic() + WAIT_SECONDS
    while thread.is_alive() and time.monotonic() < deadline:
        owner.step()
        thread.join(0.05)
    assert not thread.is_alive()
    assert owner.epochs.known is not None and owner.epochs.known.epochs.version == 2
    for until_us in (9, 11, 13):  # an engine that sleeps has one waiting, for the newest time
        renewal = heard(taken, version(2), until_us)
        renewal.join(WAIT_SECONDS)
        assert not renewal.is_alive()
    assert len(owner._commands) == 1
    owner.step()
    assert owner.custody.until_us == 13


def test_what_waits_ends_when_it_is_stopped(owner: Governor) -> None:
    taken = TakenEpochs(owner)
    taken.take(version(1), 5)
    thread = heard(taken, version(2), 7)
    taken.stop()
    thread.join(WAIT_SECONDS)
    assert not thread.is_alive()


class Plane:
    """A control plane that answers with one snapshot, or is away."""

    def __init__(self, known: KnownEpochs | None) -> None:
        self.known = known
        self.asked: list[int] = []
        self.released = threading.Event()

    def get(self, path: str, **query: Any) -> dict[str, Any]:
        if self.known is None:
            raise ServiceError("away", problem="unavailable")
        if self.asked:
            self.released.wait(WAIT_SECONDS)  # a question that is held open
        self.asked.append(query["known"])
        epochs = self.known.epochs
        numbers = range(query["known"] + 1, epochs.version + 1)
        raised = [[one, TAGS.of(EpochScope("idp", "holder", f"p{one}")).hex()] for one in numbers]
        return {
            "key": bytes(32).hex(),
            "version": epochs.version,
            "floor": 0,
            "digest": epochs.digest,
            "raised": raised,
            "namespace_days": 30,
        }


def test_a_worker_reuses_nothing_before_it_has_heard(owner: Governor) -> None:
    clock = owner.clock
    with ExitStack() as stack:
        assert follow_epochs(None, owner, clock, stack, lease_seconds=300) is None
        assert not owner.custody.is_over(clock.now_us()), "it keeps the ledger itself"
        plane: Any = Plane(None)
        assert follow_epochs(plane, owner, clock, stack, lease_seconds=300) is not None
        assert owner.custody.is_over(clock.now_us()) and owner.epochs.are_awaited


def test_it_begins_with_what_the_control_plane_says(owner: Governor) -> None:
    plane: Any = Plane(version(2))
    with ExitStack() as stack:
        stack.callback(plane.released.set)
        follow_epochs(plane, owner, owner.clock, stack, lease_seconds=300)
        assert owner.epochs.known is not None and owner.epochs.known.epochs.version == 2
        assert owner.custody.is_over(owner.clock.now_us()), "erasures are to be heard, too"
        owner.renew_custody("erasures", 1 << 61)
        left = owner.lease_seconds()["custody"]
        assert 240 <= left <= 360 and owner.custody.until_us < owner.clock.now_us() + 400 * MICROSECONDS
