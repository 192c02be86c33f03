"""Epochs on their way: an erasure reaches who asks, under a lease that runs from when the question was sent."""

from __future__ import annotations

import time
from collections.abc import Callable
from typing import Any

import pytest

from kvcustody.clock import MICROSECONDS, SystemClock
from kvcustody.governance.control_plane.epoch_feed import EpochFeed
from kvcustody.governance.edge.erase_epochs import EpochScope, KnownEpochs, RaisedEpoch
from kvcustody.governance.identity.domain_spec import ScopeKind
from kvcustody.governance.release.policies_in_effect import EffectivePolicy, PoliciesInEffect
from kvcustody.governance.service.epochs import epoch_book as giving_out
from kvcustody.governance.service.epochs import scopes_in_effect
from kvcustody.governance.service.epochs.scopes_in_effect import ScopesInEffect
from kvcustody.policies.reading.load_policy import load_policy
from standins.builders import policy
from standins.service.epoch_fleet import Fleet


class MovedClock(SystemClock):
    """A clock of which boot time can be moved on."""

    moved_us = 0

    def now_us(self) -> int:
        return super().now_us() + self.moved_us


def until(holds: Callable[[], Any], seconds: float = 30.0) -> None:
    ends = time.monotonic() + seconds
    while not holds():
        assert time.monotonic() < ends, "it did not come to be"
        time.sleep(0.01)


def test_an_erasure_reaches_a_feed_that_waits(fleet: Fleet) -> None:
    with fleet.connect() as connection:
        feed = EpochFeed(connection, SystemClock(), lease_seconds=300)
        feed.start()
        first = feed.known()
        assert first is not None and first.of("corp", "acme", "ana") == (0, 0, 0), "control"
        fleet.erase()
        until(lambda: (known := feed.known()) is not None and known.of("corp", "acme", "ana").private)
        known = feed.known()
        assert known is not None and known.of("corp", "acme", "bob").private == 0
        until(lambda: (known := feed.known()) is not None and known.of("corp", "acme").private)
        [door] = [one for one in fleet.service.epochs.takers.listed() if one.name == "door"]
        assert door.role == "door"
        until(lambda: [one.state for one in fleet.service.epochs.takers.listed()] == ["current"])
        feed.stop()


def test_a_door_hears_by_which_scopes_to_name_and_a_worker_does_not(
    fleet: Fleet, monkeypatch: pytest.MonkeyPatch
) -> None:
    """What the service gives out is what the policies in effect say; a change reaches a door that waits."""
    monkeypatch.setattr(scopes_in_effect, "_SECONDS", 0.0)
    running: list[EffectivePolicy] = []
    fleet.service.name_scopes = ScopesInEffect(lambda: PoliciesInEffect(tuple(running), True))
    with fleet.connect() as connection, fleet.connect("worker") as other:
        door, worker = (EpochFeed(each, SystemClock(), lease_seconds=300) for each in (connection, other))
        door.start()

        def scope() -> ScopeKind:
            known = door.known()
            assert known is not None
            return known.scopes.of("corp", "acme")

        assert scope() is ScopeKind.SESSION, "nothing is known"
        for said in ("tenant", "subject"):
            one = load_policy(policy(("acme",), scope=said), name="p.yaml")
            running[:] = [EffectivePolicy(1, "p", "d", 0, "", ("w",), False, one, frozenset())]
            fleet.service.changed()
            until(lambda said=said: scope().value == said)
        running.append(EffectivePolicy(2, "q", "e", 0, "", ("v",), False, None, frozenset()))
        fleet.service.changed()
        until(lambda: scope() is ScopeKind.SESSION)
        worker.ask()
        told = worker.known()
        assert told is not None and not told.scopes.is_known
        door.stop()


def test_a_lease_runs_from_when_the_question_was_sent(fleet: Fleet) -> None:
    heard: list[tuple[KnownEpochs, int]] = []
    with fleet.connect() as connection:
        clock = MovedClock()
        feed = EpochFeed(connection, clock, lease_seconds=60, on_known=lambda *known: heard.append(known), spread=float)
        before_us = clock.now_us()
        get = connection.get

        def late(path: str, **query: Any) -> Any:
            answer = get(path, **query)
            clock.moved_us += 40 * MICROSECONDS  # the answer took so long, suspend included
            return answer

        connection.get = late  # type: ignore[method-assign]
        feed.ask()
        [(known, until_us)] = heard
        assert before_us <= until_us - 60 * MICROSECONDS <= before_us + 10 * MICROSECONDS
        assert feed.known() is known
        clock.moved_us += 20 * MICROSECONDS
        assert feed.known() is None and feed.last_known() is known


def test_leases_of_many_feeds_end_at_different_times() -> None:
    leases = {EpochFeed(None, SystemClock(), lease_seconds=300).lease_us for _ in range(50)}  # type: ignore[arg-type]
    assert len(leases) > 40 and 240e6 <= min(leases) < max(leases) <= 360e6


def test_pages_are_one_snapshot_and_acknowledged_once(fleet: Fleet, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(giving_out, "PAGE_RAISES", 2)
    for number in range(5):
        fleet.erase(f"subject-{number}")
    asked: list[dict[str, Any]] = []
    with fleet.connect() as connection:
        get = connection.get
        connection.get = lambda path, **query: (asked.append(query), get(path, **query))[1]  # type: ignore[method-assign,func-returns-value]
        feed = EpochFeed(connection, SystemClock(), lease_seconds=60)
        feed.ask()
        known = feed.known()
    assert known is not None and all(known.of("corp", "acme", f"subject-{number}").private for number in range(5))
    assert len(asked) >= 3 and {query["known"] for query in asked} == {0}


def test_what_does_not_fit_its_digest_is_asked_for_anew(fleet: Fleet) -> None:
    fleet.erase()
    with fleet.connect() as connection:
        feed = EpochFeed(connection, SystemClock(), lease_seconds=60)
        feed.ask()
        heard = feed._heard
        assert heard is not None
        raised = heard.known.epochs.after(0, 100)
        tag = heard.known.tags.of(EpochScope("corp", "acme", "somebody"))
        lost = type(heard.known.epochs)([raised[0]._replace(tag=tag), *raised[1:]], version=heard.known.epochs.version)
        feed._heard = heard._replace(known=heard.known._replace(epochs=lost))
        assert feed.known().of("corp", "acme", "ana").private == 0  # type: ignore[union-attr]
        feed.ask()
        found = feed.known()
        assert found is not None and found.of("corp", "acme", "ana").private == raised[0].number
        assert found.of("corp", "acme", "ana").fleet > lost.version, "what it knew was nowhere: every name ends"


def test_a_raise_that_the_control_plane_lacks_ends_every_name(fleet: Fleet) -> None:
    fleet.erase()
    with fleet.connect() as connection:
        feed = EpochFeed(connection, SystemClock(), lease_seconds=60)
        feed.ask()
        heard = feed._heard
        assert heard is not None
        ahead = heard.known.epochs.extended(
            [RaisedEpoch(heard.known.epochs.version + 1, b"t" * 16)],
            version=heard.known.epochs.version + 1,
            floor=heard.known.epochs.floor,
        )
        feed._heard = heard._replace(known=heard.known._replace(epochs=ahead))
        feed.ask()
        assert feed.last_known().of("corp", "acme", "bob").fleet > ahead.version  # type: ignore[union-attr]


def test_a_changed_key_ends_every_name(fleet: Fleet) -> None:
    fleet.erase()
    with fleet.connect() as connection:
        feed = EpochFeed(connection, SystemClock(), lease_seconds=60)
        feed.ask()
        before = feed.known()
        service = fleet.service
        service.epochs = giving_out.EpochBook(
            service.engine,
            service.clock,
            b"o" * 32,
            ceiling_us=lambda: 0,
            epoch_minutes=240,
            namespace_days=30,
        )
        feed.ask()
        after = feed.known()
    assert before is not None and after is not None
    assert before.of("corp", "acme", "bob").fleet == 0 < after.of("corp", "acme", "bob").fleet


def test_an_answer_without_news_gives_the_same_snapshot_and_the_services_days(fleet: Fleet) -> None:
    with fleet.connect() as connection:
        feed = EpochFeed(connection, SystemClock(), lease_seconds=60)
        fleet.erase()
        feed.ask()
        first = feed.known()
        assert first is not None and first.namespace_days == fleet.service.settings.namespace_days
        feed.ask()
        assert feed.known() is first
        fleet.erase("bo")
        feed.ask()
        assert feed.known() is not first
