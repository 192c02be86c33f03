"""What the scheduler knows of workers' copies: nothing that is on its way is an orphan, and what is one is ended."""

from __future__ import annotations

from collections.abc import Sequence

import pytest

from kvcustody.governance.decisions.access_plan import DomainLabel
from kvcustody.governance.erasure.selector import Selector
from kvcustody.governance.erasure.tier_protocol import TierErased
from kvcustody.governance.orphans.scans import PAST_CEILING, tier_findings
from kvcustody.governance.tiers.copy_event import CopyEvent
from kvcustody.integrations.vllm.tiers.copy_directory import CopyDirectory
from kvcustody.integrations.vllm.tiers.tier_messages import CopyJob, DestroyCopies, EraseCopies

LABEL = DomainLabel("acme", "internal", 1, "tenant", None, None, None)
DUE_US, SECOND = 100_000_000, 1_000_000
X, Y, Z = (bytes([number]) * 32 for number in (1, 2, 3))
STEP = 4


class Told:
    """A directory, the jobs that it sent, and workers that tell what a test lets them tell."""

    def __init__(self, shards: int = 1) -> None:
        self.jobs: list[CopyJob] = []
        self.directory = CopyDirectory("host", shards, self._send)
        self.numbers = 0

    def _send(self, job: CopyJob) -> int:
        self.jobs.append(job)
        return len(self.jobs)

    def stored(self, *names: bytes) -> None:
        for name in names:
            self.numbers += 1
            copy = (name, self.numbers, "acme", "internal", STEP, 400)
            self.directory.tell([CopyEvent("stored", *copy, SECOND, DUE_US)], LABEL)

    def ended(self, *names: bytes) -> None:
        for name in names:
            event = CopyEvent("ended", name, 1, "acme", "internal", STEP, 400, SECOND, DUE_US, "orphan")
            self.directory.tell([event], None)

    def scan(self, now_us: int = 2 * SECOND) -> list[str]:
        """What a scan finds; it ends each."""
        found = tier_findings([self.directory], now_us)
        for trouble in found:
            trouble.repair()
        return [trouble.finding.orphan for trouble in found]

    def found(self, names: Sequence[bytes], now_us: int = 2 * SECOND) -> int:
        """How many blocks of a chain a look-up finds."""
        ends = {STEP * at: name for at, name in enumerate(names, 1)}
        name_at = lambda end: ends.get(end, bytes(32))  # noqa: E731
        found = self.directory.longest(name_at, 0, STEP * len(names), STEP, now_us)
        return found.ends[-1] if found.ends else 0


def test_what_a_load_did_not_bring_is_no_orphan_and_is_found_again() -> None:
    world = Told()
    world.stored(X, Y, Z)
    assert world.found((X, Y, Z)) == 3 * STEP
    world.directory.pass_over(Y, 2 * SECOND)
    assert world.found((X, Y, Z)) == STEP, "the next request does not fail on it too"
    assert not world.directory.has(Y, 2 * SECOND) and world.directory.has(Z, 2 * SECOND)
    assert world.scan() == [] and world.jobs == []
    assert world.found((X, Y, Z), 13 * SECOND) == 3 * STEP
    world.directory.pass_over(Y, 2 * SECOND)
    world.ended(Y)
    world.stored(Y)
    assert world.found((X, Y, Z)) == 3 * STEP, "a new copy of that name"


@pytest.mark.parametrize("way", ["destroyed", "erased"])
def test_an_end_that_is_on_its_way_is_no_orphan(way: str) -> None:
    world = Told()
    world.stored(X, Y)
    if way == "destroyed":
        assert world.directory.destroy([X]) == 1
    else:
        assert not world.directory.erase("e1", Selector(tenant="acme"), SECOND).done
    assert world.found((X, Y)) == 0
    assert world.scan() == [] and len(world.jobs) == 1
    world.stored(X)  # made by the worker before the order reached it
    assert world.found((X,)) == 0, "the order ends it"
    assert world.scan() == []
    world.ended(X)
    world.directory.job_is_over(1)
    assert X not in world.directory.objects()


def test_a_copy_made_after_its_end_is_no_orphan_while_another_shard_has_not_answered() -> None:
    world = Told(shards=2)
    world.stored(X)
    world.directory.destroy([X])
    world.ended(X)  # the first shard; the other has its own part of that order to do
    world.stored(X)
    assert world.scan() == [] and world.directory.has(X)
    world.directory.job_is_over(1)
    assert world.scan() == [] and world.directory.has(X)


def test_a_copy_that_every_worker_was_told_to_end_and_none_has_is_found_and_ended() -> None:
    """The control: what nothing can find and a worker still has is an orphan."""
    world = Told()
    world.stored(X, Y)
    world.directory.erase("e1", Selector(tenant="acme"), SECOND)
    world.ended(X)
    world.directory.answered(1, 0, TierErased(1, 400))
    world.directory.job_is_over(1)
    assert isinstance(world.jobs[0], EraseCopies)
    assert world.scan() == ["tier object without index"]
    assert world.jobs[1:] == [DestroyCopies(0, "host", (Y,))]
    assert world.scan() == [], "that end is on its way"
    world.ended(Y)
    world.directory.job_is_over(2)
    assert world.scan() == [] and len(world.directory) == 0


def test_a_copy_past_its_ceiling_is_one_whose_end_the_workers_would_have_told() -> None:
    world = Told()
    world.stored(X)
    late_us = DUE_US + 10 * SECOND
    assert world.scan(late_us) == [], "the worker ended it in time; no step has fetched what it says"
    world.directory.expire(late_us)
    assert world.scan(late_us + SECOND) == []
    world.directory.job_is_over(1)
    assert world.scan(late_us + SECOND) == [PAST_CEILING], "they were asked, have answered, and it is there"
    world.ended(X)
    assert world.scan(late_us + SECOND) == []
