"""Look-ups in a store that workers share, as the scheduler makes them: who waits, for how long, and what is found."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

import pytest

from kvcustody.clock import VirtualClock
from kvcustody.errors import KeyringError
from kvcustody.governance.decisions.access_plan import DomainLabel
from kvcustody.governance.erasure.selector import Selector
from kvcustody.governance.tiers.copies.index import CopyLimit, TierShare
from kvcustody.governance.tiers.copy_event import CopyEvent
from kvcustody.governance.tiers.tier_link import TierLink
from kvcustody.integrations.vllm.tiers.copy_directory import CopyDirectory
from kvcustody.integrations.vllm.tiers.layer_groups import ONE_GROUP, CopiedGroup
from kvcustody.integrations.vllm.tiers.shared_lookups import SharedLookups, SoughtRun
from kvcustody.integrations.vllm.tiers.tier_messages import CopyJob, CopyRule, SoughtChain, SoughtCopy

LABEL = DomainLabel("acme", "internal", 1, "tenant", None, None, None)
RULE = CopyRule(CopyLimit(1 << 40, 1), TierShare())
STEP, CHAIN, DUE_US, WAIT_US = 4, 12, 90_000_000, 500_000


def name_at(end: int) -> bytes:
    return bytes([end]) * 32


class Asking:
    """Requests of one engine whose workers answer when a test says so."""

    def __init__(self, shards: int = 1, groups: tuple[CopiedGroup, ...] = ONE_GROUP) -> None:
        self.groups = groups
        self.jobs: list[CopyJob] = []
        self.clock, self.link = VirtualClock(), TierLink()
        self.directory = CopyDirectory("remote", shards, self._send)
        self.lookups = SharedLookups("remote", self.directory, self.link, self._send, self.clock, wait_us=WAIT_US)

    def _send(self, job: CopyJob) -> int:
        self.jobs.append(job)
        return len(self.jobs)

    def ask(self, name: Any = name_at) -> Any:
        """A request that looks all of its chain up."""
        request = SimpleNamespace(looking=None)
        chains = tuple(SoughtChain(group, bytes(32 * CHAIN)) for group in self.groups)
        run = SoughtRun(LABEL, RULE, 0, 0, CHAIN, chains, lambda group, end: name(end), name_at(STEP))
        self.lookups.begin(request, [run], "faster")
        return request

    def answer(self, *by_shard: list[int]) -> None:
        """What each shard found, by where it ends, to the newest look-up."""
        number = len(self.jobs)
        for ends in by_shard:
            sought = tuple(SoughtCopy(0, end, STEP, 400 + end, 1, DUE_US) for end in ends)
            self.lookups.answered(number, sought)
        self.lookups.is_over(number)

    def found(self) -> int:
        """Blocks of the chain that can be found."""
        found = self.directory.longest(name_at, 0, CHAIN, STEP, self.clock.now_us())
        return found.ends[-1] if found.ends else 0


def test_a_request_waits_until_the_answer_and_no_longer_than_the_bound() -> None:
    asking = Asking()
    quick, slow = asking.ask(), None
    assert asking.lookups.must_wait(quick)
    asking.clock.advance(2_000)
    asking.answer([4, 8])
    assert not asking.lookups.must_wait(quick) and quick.looking.took_us == 2_000
    assert asking.found() == 8 and asking.directory.may_have(LABEL.spec) is True  # type: ignore[arg-type]
    slow = asking.ask()
    asking.clock.advance(WAIT_US - 1)
    assert asking.lookups.must_wait(slow)
    asking.clock.advance(1)
    assert not asking.lookups.must_wait(slow) and slow.looking.took_us == WAIT_US
    asking.answer([4, 8, 12])
    assert asking.found() == 12, "the next request has what came late"
    assert asking.link.looks == 2


def test_what_was_not_there_is_asked_for_again_after_a_second() -> None:
    asking = Asking()
    asking.ask()
    asking.answer([])
    assert asking.ask().looking is None and len(asking.jobs) == 1
    asking.clock.advance(1_000_000)
    assert asking.ask().looking is not None and len(asking.jobs) == 2


def test_a_group_of_which_nothing_was_found_is_asked_for_again_after_a_second() -> None:
    """What was found of the others is of no use alone."""
    asking = Asking(groups=(CopiedGroup(), CopiedGroup(1, 2)))
    asking.ask()
    asking.answer([4, 8])
    assert asking.found() == 8 and asking.ask().looking is None
    asking.clock.advance(1_000_000)
    assert asking.ask().looking is not None


def test_a_copy_that_one_shard_lacks_is_not_found() -> None:
    asking = Asking(shards=2)
    asking.ask()
    asking.answer([4, 8], [4])
    assert asking.found() == 4
    asking.ask()
    asking.answer([4, 8], [4, 8])
    assert asking.found() == 8, "control"


@pytest.mark.parametrize("overtaken", [True, False], ids=["erased", "control: erased before it began"])
def test_an_answer_that_an_erasure_overtook_is_dropped(overtaken: bool) -> None:
    asking = Asking()
    if not overtaken:
        asking.directory.erase("e", Selector("acme"), 1)
    asking.ask()
    number = len(asking.jobs)
    if overtaken:
        asking.directory.erase("e", Selector("acme"), 1)
    asking.lookups.answered(number, (SoughtCopy(0, 4, STEP, 400, 1, DUE_US),))
    asking.lookups.is_over(number)
    assert asking.found() == (0 if overtaken else 4)


def test_a_domain_whose_epoch_was_destroyed_meanwhile_finds_nothing() -> None:
    def gone(end: int) -> bytes:
        raise KeyringError("destroyed")

    asking = Asking()
    asking.ask(gone)
    asking.answer([4])
    assert asking.found() == 0


def test_what_is_borrowed_is_found_and_is_nobody_s_to_account_for_or_end_here() -> None:
    asking = Asking()
    asking.ask()
    asking.answer([4, 8])
    directory = asking.directory
    assert directory.has(name_at(4)) and len(directory) == 0
    assert not directory.objects() and not directory.index() and not directory.copies()
    jobs = len(asking.jobs)
    assert directory.forget([name_at(4)]) == 0 and len(asking.jobs) == jobs, "no scan ends it"
    directory.pass_over(name_at(8), asking.clock.now_us())
    assert asking.found() == 4, "a load did not bring it"
    own = CopyEvent("stored", name_at(4), 1, "acme", "internal", STEP, 400, 1, DUE_US)
    directory.tell([own], LABEL)
    assert len(directory) == 1 and asking.found() == 4
    directory.erase("e", Selector("acme"), 1)
    assert asking.found() == 0 and directory.may_have(LABEL.spec), "its worker has not told its end yet"  # type: ignore[arg-type]
