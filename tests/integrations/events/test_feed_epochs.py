"""A feed tells its publisher of erase epochs once for each snapshot, before the events of that step."""

from __future__ import annotations

from collections.abc import Sequence

from kvcustody.governance.edge.erase_epochs import EpochTags, EraseEpochs, KnownEpochs
from kvcustody.integrations.events.block_event import BlockEvent, cleared
from kvcustody.integrations.events.feed import BlockEventFeed

TAGS = EpochTags(bytes(32))


class Listener:
    """A publisher that names requesters, and keeps what it was told in its order."""

    def __init__(self) -> None:
        self.told: list[object] = []

    def publish(self, events: Sequence[BlockEvent], /) -> int:
        self.told.append("events")
        return 0

    def take_epochs(self, known: KnownEpochs, /) -> None:
        self.told.append(known.epochs.version)


class Feed(BlockEventFeed):
    def take_pending(self) -> list[BlockEvent]:
        return [cleared(1, "start")]

    def take_last(self) -> list[BlockEvent]:
        return []


def test_each_snapshot_is_told_once_before_the_events_of_its_step() -> None:
    known: list[KnownEpochs | None] = [None]
    listener = Listener()
    feed = Feed(listener, lambda: 1, lambda *_: True, None, lambda: known[0])
    feed.publish_pending()
    for version in (3, 4):
        known[0] = KnownEpochs(EraseEpochs(version=version), TAGS)
        feed.publish_pending()
        feed.publish_pending()
    assert listener.told == ["events", 3, "events", "events", 4, "events", "events"]


def test_control_without_epochs_a_publisher_hears_of_none() -> None:
    listener = Listener()
    Feed(listener, lambda: 1, lambda *_: True).publish_pending()
    assert listener.told == ["events"]
