"""The scheduler's half of look-ups in a shared store: a request waits once for other workers' copies.

    lookups.must_wait(governed, wanted, keys)     # whether its look-up is not over; begins it
    lookups.answered(number, sought)              # as workers answer, shard by shard
    lookups.is_over(number)                       # all have answered

1. A look-up begins where a request's blocks behind its hit are in no tier that this engine knows, once for a request.
   It is the worker that asks the store: it alone can open what an object says of itself.
2. A request waits for it no longer than `wait_us`; an answer that comes later serves the next request.
3. What every shard found is put into the directory as borrowed, and is found and loaded from there like a copy of its
   own. An answer that an erasure or another policy overtook is dropped.
4. What was not found, of any layer group, is not asked for again for a second.
"""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Callable, Sequence
from contextlib import suppress
from typing import TYPE_CHECKING, NamedTuple

from kvcustody.clock import Clock
from kvcustody.errors import NoKeyError
from kvcustody.governance.decisions.access_plan import DomainLabel
from kvcustody.integrations.vllm.tiers.copy_directory import CopyDirectory, KnownCopy
from kvcustody.integrations.vllm.tiers.copy_plans import SharedLookup
from kvcustody.integrations.vllm.tiers.tier_messages import (
    CopyJob,
    CopyRule,
    SeekCopies,
    SoughtChain,
    SoughtCopy,
)

if TYPE_CHECKING:
    from kvcustody.governance.tiers.tier_link import TierLink
    from kvcustody.integrations.vllm.scheduler.governed_request import GovernedRequest

_AGAIN_US = 1_000_000
_ABSENT_MAX = 4096


class SoughtRun(NamedTuple):
    """Blocks from `depth` on in one domain's chain that no tier here is known to have completely; a hit ends by `last`.

    `chains`: by layer group, from block `first` on. `name_at`: what the object of a group is called that ends there; it
    raises `NoKeyError` where the domain's key cannot be had. `next_name`: of the next whole object, which is sought
    first.
    """

    label: DomainLabel
    rule: CopyRule
    first: int
    depth: int
    last: int
    chains: tuple[SoughtChain, ...]
    name_at: Callable[[int, int], bytes]
    next_name: bytes


class _Asked(NamedTuple):
    lookup: SharedLookup
    run: SoughtRun
    ends: int
    by_shard: list[tuple[SoughtCopy, ...]]


class SharedLookups:
    """One engine's look-ups in its shared store. Called on the engine's thread."""

    def __init__(
        self,
        tier: str,
        directory: CopyDirectory,
        link: TierLink,
        send: Callable[[CopyJob], int],
        clock: Clock,
        *,
        wait_us: int,
    ) -> None:
        self.tier = tier
        self._directory, self._link, self._send, self._clock = directory, link, send, clock
        self._wait_us = wait_us
        self._asked: dict[int, _Asked] = {}  # by job
        self._absent: OrderedDict[bytes, int] = OrderedDict()  # by name, until when it is not asked for again

    def must_wait(self, governed: GovernedRequest) -> bool:
        """Return whether the request's look-up is running (rule 2)."""
        lookup = governed.looking
        if lookup is None:
            return False
        now_us = self._clock.now_us()
        if lookup.jobs and now_us < lookup.until_us:
            return True
        if not lookup.took_us:
            lookup.took_us = max(1, now_us - lookup.began_us)
        return False

    def begin(self, governed: GovernedRequest, runs: Sequence[SoughtRun], reason: str) -> None:
        """Look these up, without those known to be absent."""
        now_us = self._clock.now_us()
        runs = [run for run in runs if self._absent.get(run.next_name, 0) <= now_us]
        if not runs:
            return
        expected_us = int(self._link.look_us)
        lookup = governed.looking = SharedLookup(reason, now_us, now_us + self._wait_us, expected_us)
        for run in runs:
            job = SeekCopies(0, self.tier, run.label, run.first, run.chains, run.depth, run.last, run.rule)
            number = self._send(job)
            lookup.jobs.add(number)
            self._asked[number] = _Asked(lookup, run, self._directory.ends, [])

    def answered(self, number: int, sought: tuple[SoughtCopy, ...]) -> None:
        """Take one shard's answer."""
        asked = self._asked.get(number)
        if asked is not None:
            asked.by_shard.append(sought)

    def is_over(self, number: int) -> None:
        """Make what all shards found findable (rule 3), after every shard has answered."""
        asked = self._asked.pop(number, None)
        if asked is None:
            return
        lookup, run, ends, by_shard = asked
        lookup.jobs.discard(number)
        now_us = self._clock.now_us()
        if not lookup.jobs:
            lookup.took_us = now_us - lookup.began_us
            self._link.looked(lookup.took_us)
        copies = _of_all(by_shard)
        if ends != self._directory.ends:
            return
        with suppress(NoKeyError):  # the epoch was destroyed meanwhile, say: nobody finds them
            for one in copies:
                whose = (run.label.tenant, run.label.classification)
                copy = KnownCopy(0, *whose, one.blocks, one.size, one.since_us, one.due_us, run.label)
                self._directory.borrow(run.name_at(one.group, one.end), copy)
        if {one.group for one in copies} < {chain.group.number for chain in run.chains}:
            self._note_absent(run.next_name, now_us + _AGAIN_US)

    def _note_absent(self, name: bytes, until_us: int) -> None:
        self._absent[name] = until_us
        self._absent.move_to_end(name)
        if len(self._absent) > _ABSENT_MAX:
            self._absent.popitem(last=False)


def _of_all(by_shard: Sequence[tuple[SoughtCopy, ...]]) -> list[SoughtCopy]:
    """Return what every shard found, with the smallest extent, age and due time that any reports."""
    places = [{(one.group, one.end): one for one in sought} for sought in by_shard]
    copies: list[SoughtCopy] = []
    for place in places[0] if places else ():
        if not all(place in shard for shard in places):
            continue
        alike = [shard[place] for shard in places]
        blocks = min(one.blocks for one in alike)
        size = max(one.size for one in alike)
        since_us = min(one.since_us for one in alike)
        copies.append(SoughtCopy(*place, blocks, size, since_us, min(one.due_us for one in alike)))
    return copies
