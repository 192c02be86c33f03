"""The workers' copies in one tier, as they report them, for look-ups, erasures and scans.

    directory.tell(events, label)                # as the workers' replies come
    found = directory.longest(names, depth, ...) # copies that go on from a depth of a chain
    erased = directory.erase(erasure, selector, before_us)

1. A copy is found from the moment that its shard reported it. It is no longer found once its end is reported, decided
   here, or due, whichever comes first. The first shard's copies stand for all: a load that another shard cannot do
   fails there, and its blocks are computed.
2. An erasure takes effect here before it returns. It is done when every worker has reported what it ended.
3. Scans compare the copies that workers reported (`objects`) with those that can be found (`index`). Each worker
   compares its store with its own index when a full scan asks (`order_comparison`). A copy whose end was ordered is in
   neither. It comes back into `objects` when every worker has answered that order and none has reported the end.
4. Another worker's copy in a shared store (`borrow`) is found too, but is in none of the other books: its owner ends
   it, and accounts for it.
5. A copy that a load did not bring is skipped for a while. Where a shard lacks it, a request that computes it meanwhile
   stores it again. It is no orphan: its workers have it, and it is found again.
"""

from __future__ import annotations

import heapq
from bisect import bisect_right
from collections import Counter, OrderedDict
from collections.abc import Callable, Collection, Iterable, Mapping, Sequence
from typing import NamedTuple

from kvcustody.governance.decisions.access_plan import DomainLabel
from kvcustody.governance.erasure.selector import Selector, may_hold
from kvcustody.governance.erasure.tier_protocol import CompletedErasure, HeldCopy, TierEntry, TierErased
from kvcustody.governance.identity.domain_spec import DomainSpec
from kvcustody.governance.tiers.copy_event import CopyEvent
from kvcustody.integrations.vllm.tiers.tier_messages import (
    CompareCopies,
    CopyJob,
    DestroyCopies,
    EraseCopies,
    EraseReturned,
    ExpireCopies,
)

_ERASURES_MAX = 1000  # of which is remembered what was done
_PASSED_OVER_US = 10_000_000
_BORROWED_MAX = 65_536  # the oldest are looked up again


class KnownCopy(NamedTuple):
    """A copy that a worker reported. `label` None: an earlier process stored it. `number` 0: another worker's."""

    number: int
    tenant: str
    classification: str
    blocks: int
    size: int
    since_us: int
    due_us: int
    label: DomainLabel | None


class FoundCopies(NamedTuple):
    """Consecutive copies: their names, the depth at which each ends, and each one's sealed bytes."""

    names: tuple[bytes, ...]
    ends: tuple[int, ...]
    sizes: tuple[int, ...]

    @property
    def size(self) -> int:
        """The sealed bytes of all."""
        return sum(self.sizes)

    def until(self, end: int) -> FoundCopies:
        """Return the copies that end there or before."""
        count = bisect_right(self.ends, end)
        return FoundCopies(self.names[:count], self.ends[:count], self.sizes[:count])


class TierCount(NamedTuple):
    """One tier's work since the start, over all workers."""

    tier: str
    copies: int
    bytes: int
    steps: dict[str, int]
    restored_blocks: int
    failed_loads: int
    left_alone: int


class _Erasure:
    """The workers' answers to one erasure."""

    __slots__ = ("bytes", "objects", "told", "waiting")

    def __init__(self, shards: int) -> None:
        self.told: list[TierErased | None] = [None] * shards
        self.waiting = shards

    def state(self) -> TierErased:
        """Return all answers together; a shard without an answer waits."""
        told = [one for one in self.told if one is not None]
        return TierErased(
            sum(one.objects for one in told),
            sum(one.bytes for one in told),
            sum(one.waiting for one in told) + self.waiting,
            unsure=sum(one.unsure for one in told),
        )


class CopyDirectory:
    """The copies in one tier; a `CopyStore` for erasures and scans. Called on the engine's thread.

    send: has a job done by every worker, and gives it its number.
    """

    def __init__(self, tier: str, shards: int, send: Callable[[CopyJob], int], *, returned_keys: int = 0) -> None:
        """Prepare the directory. `returned_keys`: destroyed keys that this process found in their file again, by its
        receipts.
        """
        self._tier = tier
        self.returned_keys = returned_keys
        self._shards = shards
        self._send = send
        self._copies: dict[bytes, KnownCopy] = {}
        self._borrowed: OrderedDict[bytes, KnownCopy] = OrderedDict()
        self.ends = 0  # what was borrowed before one of these is looked up again
        self._hidden: set[bytes] = set()  # told of, and not found any more
        self._ending: dict[bytes, int] = {}  # by name, the last job that is to end it
        self._orders: set[int] = set()  # those jobs
        self._passed_over: dict[bytes, int] = {}  # until when
        self._expiring: dict[int, int] = {}  # by job, when it was sent
        self._known_us = 0
        self._domains: Counter[DomainSpec | None] = Counter()
        self._pairs: Counter[tuple[str, str]] = Counter()
        self._due: list[tuple[int, bytes]] = []
        self._erasures: dict[str, _Erasure] = {}
        self._erasure_jobs: dict[int, str] = {}

    @property
    def name(self) -> str:
        """`host` or `nvme`, as the policy names tiers."""
        return self._tier

    def __len__(self) -> int:
        """Return the number of the workers' objects, over all shards."""
        return len(self._copies)

    def __bool__(self) -> bool:
        return True

    @property
    def size(self) -> int:
        """The sealed bytes that the workers have."""
        return sum(one.size for one in self._copies.values())

    @property
    def pairs(self) -> list[tuple[str, str]]:
        """The tenants and classifications of all copies here."""
        return list(self._pairs)

    # -- what the workers tell ------------------------------------------------------------------------------------

    def tell(self, events: Iterable[CopyEvent], label: DomainLabel | None) -> None:
        """Take what happened to a worker's copies. `label`: the owner of stored ones."""
        for event in events:
            if event.step == "stored":
                self._drop(event.name)
                self._return(event.name)
                if event.name not in self._ending:  # else that order ends this one too
                    self._hidden.discard(event.name)
                copy = KnownCopy(
                    event.number,
                    event.tenant,
                    event.classification,
                    event.blocks,
                    event.size,
                    event.at_us,
                    event.due_us,
                    label,
                )
                self._copies[event.name] = copy
                self._count_domain(copy, 1)
                self._pairs[copy.tenant, copy.classification] += 1
                heapq.heappush(self._due, (copy.due_us, event.name))
            elif event.step == "ended":
                self._drop(event.name)
                self._hidden.discard(event.name)
                self._ending.pop(event.name, None)

    def borrow(self, name: bytes, copy: KnownCopy) -> None:
        """Make another worker's copy findable from now on (rule 4)."""
        if name in self._copies:
            return
        self._return(name)
        self._borrowed[name] = copy
        self._count_domain(copy, 1)
        if len(self._borrowed) > _BORROWED_MAX:
            self._return(next(iter(self._borrowed)))

    def return_borrowed(self, selector: Selector) -> None:
        """Hide all of the selector's copies by other workers until they are looked up again."""
        self.ends += 1
        for name in [name for name, copy in self._borrowed.items() if _may_be_of(copy, selector)]:
            self._return(name)

    def _return(self, name: bytes) -> None:
        copy = self._borrowed.pop(name, None)
        if copy is not None:
            self._count_domain(copy, -1)

    def answered(self, number: int, shard: int, erased: TierErased | None) -> None:
        """Take note that a worker has done its part of an erasure."""
        erasure = self._erasures.get(self._erasure_jobs.get(number, ""))
        if erasure is None:
            return
        if erased is not None:
            erasure.waiting -= erasure.told[shard] is None
            erasure.told[shard] = erased

    def job_is_over(self, number: int) -> None:
        """Take note that every worker has answered."""
        self._erasure_jobs.pop(number, None)
        self._known_us = max(self._known_us, self._expiring.pop(number, 0))
        if number in self._orders:
            self._orders.discard(number)
            self._ending = {name: job for name, job in self._ending.items() if job != number}

    # -- look-up --------------------------------------------------------------------------------------------------

    def may_have(self, spec: DomainSpec) -> bool:
        """Return whether any copy in this domain may be found."""
        return bool(self._domains.get(spec) or self._domains.get(None))

    def longest(self, name_at: Callable[[int], bytes], depth: int, whole: int, step: int, now_us: int) -> FoundCopies:
        """Return copies that continue from `depth`, up to `whole`; `name_at(end)` names the one that ends there.

        Objects end where the depth is a multiple of `step`, or sooner.
        """
        names: list[bytes] = []
        ends: list[int] = []
        sizes: list[int] = []
        while depth < whole:
            for end in range(min(whole, depth - depth % step + step), depth, -1):
                name = name_at(end)
                copy = self._find(name)
                if copy is None or name in self._hidden or copy.due_us <= now_us:
                    continue
                if end - copy.blocks <= depth and not self._is_passed_over(name, now_us):
                    names.append(name)
                    ends.append(end)
                    depth = end
                    sizes.append(copy.size)
                    break
            else:
                break
        return FoundCopies(tuple(names), tuple(ends), tuple(sizes))

    def has(self, name: bytes, now_us: int = 0, blocks: int = 0) -> bool:
        """Return whether this object can be found, with that many blocks before its end."""
        copy = self._find(name)
        if copy is None or copy.blocks < blocks or name in self._hidden:
            return False
        return not self._is_passed_over(name, now_us)

    def pass_over(self, name: bytes, now_us: int) -> None:
        """Skip a copy that a load did not bring (rule 5)."""
        self._return(name)
        if name in self._copies:
            self._passed_over[name] = now_us + _PASSED_OVER_US

    def _find(self, name: bytes) -> KnownCopy | None:
        return self._copies.get(name) or self._borrowed.get(name)

    def _is_passed_over(self, name: bytes, now_us: int) -> bool:
        until_us = self._passed_over.get(name)
        if until_us is not None and until_us <= now_us:
            del self._passed_over[name]
        return until_us is not None and until_us > now_us

    def _end(self, names: Collection[bytes], job: CopyJob) -> int:
        """Hide these copies; `job` ends them. Return its number."""
        self._hidden.update(name for name in names if name in self._copies)
        number = self._send(job)
        if names:
            self._orders.add(number)
            self._ending |= dict.fromkeys(names, number)
        return number

    # -- ends -----------------------------------------------------------------------------------------------------

    def next_due_us(self) -> int | None:
        """Return when a copy is due next, in boot time."""
        due = self._due
        while due and (due[0][1] not in self._copies or self._copies[due[0][1]].due_us != due[0][0]):
            heapq.heappop(due)
        return due[0][0] if due else None

    def erase(self, erasure: str, selector: Selector, before_us: int) -> TierErased:
        """End every copy that may match the selector; a repeated call returns the progress (rule 2)."""
        self.return_borrowed(selector)
        known = self._erasures.get(erasure)
        if known is None:
            if len(self._erasures) >= _ERASURES_MAX:
                del self._erasures[next(iter(self._erasures))]
            known = self._erasures[erasure] = _Erasure(self._shards)
        state = known.state()
        if not state.done and erasure not in self._erasure_jobs.values():
            names = frozenset(name for name, copy in self._copies.items() if _may_be_of(copy, selector))
            number = self._end(names, EraseCopies(0, self._tier, erasure, selector, before_us))
            self._erasure_jobs[number] = erasure
        return state

    def erase_returned(self, complete: CompletedErasure) -> int:
        """Have the workers erase again, before every later load: only they know the keys of all a tenant's subjects.

        Returns 0; `CopyReply.returned_keys` says later how many keys there were.
        """
        self._send(EraseReturned(0, self._tier, complete))
        return 0

    def expire(self, now_us: int) -> None:
        """Have the workers end due copies and report it."""
        self._expiring[self._send(ExpireCopies(0, self._tier))] = now_us

    def known_us(self, now_us: int) -> int:
        """Return the time up to which all due copies are reported as ended; `now_us` or earlier."""
        return min(now_us, self._known_us)

    def order_comparison(self) -> None:
        """Have every worker compare its store with its own index, after its earlier jobs."""
        self._send(CompareCopies(0, self._tier))

    def objects(self) -> Mapping[bytes, TierEntry]:
        """Return the workers' objects, without those that are ending (rule 3)."""
        return self._entries(self._ending)

    def index(self) -> Mapping[bytes, TierEntry]:
        """Return the findable copies."""
        return self._entries(self._hidden)

    def copies(self) -> Sequence[HeldCopy]:
        """Return every copy whose end no worker has reported yet."""
        return [HeldCopy(name, *copy[:-1]) for name, copy in self._copies.items()]

    def _entries(self, without: Collection[bytes]) -> Mapping[bytes, TierEntry]:
        return {
            name: TierEntry(copy.tenant, copy.since_us) for name, copy in self._copies.items() if name not in without
        }

    def destroy(self, keys: Collection[bytes]) -> int:
        """Have the workers end these; return how many they had."""
        names = tuple(keys)
        if names:
            self._end(names, DestroyCopies(0, self._tier, names))
        return sum(name in self._copies for name in names)

    def forget(self, keys: Collection[bytes]) -> int:
        """Hide these; return how many could be found."""
        known = [name for name in keys if name in self._copies and self.has(name)]
        self.destroy(known)
        return len(known)

    def _drop(self, name: bytes) -> None:
        copy = self._copies.pop(name, None)
        self._passed_over.pop(name, None)
        if copy is None:
            return
        pair = (copy.tenant, copy.classification)
        self._count_domain(copy, -1)
        self._pairs[pair] -= 1
        if not self._pairs[pair]:
            del self._pairs[pair]

    def _count_domain(self, copy: KnownCopy, count: int) -> None:
        self._domains[_spec(copy)] += count
        if not self._domains[_spec(copy)]:
            del self._domains[_spec(copy)]


def _spec(copy: KnownCopy) -> DomainSpec | None:
    return None if copy.label is None else copy.label.spec


def _may_be_of(copy: KnownCopy, selector: Selector) -> bool:
    """Return whether a copy may hold data of the selector; for an unknown domain, only its tenant decides."""
    if copy.label is not None:
        return may_hold(selector, copy.label)
    return selector.tenant is None or selector.tenant == copy.tenant
