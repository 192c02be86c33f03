"""One tier: runs of blocks go in sealed, come back where the same domain asks, and end no later than they would have.

    tier.store(run, read)                        # `read(first, count, into)` copies blocks of the run into memory
    found = tier.lookup(label, keys, depth)      # objects that go on from `depth`, one after the other
    come = tier.load(label, keys, depth, found, write)
    tier.expire()
    tier.erase(erasure, selector, before_us)

1. An object ends where its chain's depth is a multiple of `object_blocks`, or with its run, so that whoever has the
   keys of a prompt can name what may be there. It is opened with what the reader expects: nothing that a store says.
   Of two that end alike the one that begins sooner is kept.
2. A copy is due when what held its blocks on the device would have let them go, or at the tier's own `absolute`, where
   that is sooner. What is restored from it lives no longer than its ceiling: no way through a tier prolongs anything.
   A copy that is due when its load has arrived did not come.
3. Nothing is found any more from the moment its end is decided; then its key goes, where it is its own; then its bytes.
   An erasure of a subject ends the key of the tenant's wider domains with it. What the store could not delete is asked
   for again, and waits until then.
4. A store that fails, is full, or lies gives misses, and so does a key that is destroyed. What does not open is ended.
5. Of what an earlier process left, the index is made again from facts that were sealed with it; what is overdue, is of
   another layout, or whose tenant is not known any more ends. Whose it is shows when its domain first asks. Where that
   process died, or left it to this one as its heir (`heirs`), only an heir takes copies over, and only those that
   policy lets it restore.
6. A tenant never has more than its share's cap; where there is no room, whoever is furthest over its share gives way.
   What leaves for that goes to the tier below, where there is one, as it is sealed.
7. `take_events` says what began and ended since the last call, each with its cause.
8. In a store that workers share, an object that another stored is found by its name, which only who has the domain's
   secret can make, and is opened with what its facts and this worker's own epoch say. It is no copy of this worker's:
   its owner alone has custody of it, ends it, and says so. A name that was not there is not looked for again at once.
9. What a store's lock keeps is asked for again when the lock ends; until then the end of a key is its end.

Called on the owning thread. Times that come in and go out are boot time, in microseconds.
"""

from __future__ import annotations

from collections import OrderedDict, deque
from collections.abc import Callable, Collection, Iterable, Iterator, Mapping, Sequence
from contextlib import suppress
from functools import partial
from itertools import chain, islice, takewhile
from typing import NamedTuple

import numpy as np

from kvcustody.audit.kinds import KEY_DESTROYED
from kvcustody.clock import Clock
from kvcustody.errors import KeyringError, KeyServiceUnavailable, NoKeyError, StoreError
from kvcustody.governance.decisions.access_plan import DomainLabel
from kvcustody.governance.erasure.selector import Selector, may_hold
from kvcustody.governance.erasure.tier_protocol import CompletedErasure, HeldCopy, TierEntry, TierErased
from kvcustody.governance.identity.domain_spec import DomainSpec
from kvcustody.governance.keys.shred_keys import ShredKeys
from kvcustody.governance.tiers.copy_event import CopyEvent
from kvcustody.governance.tiers.heirs import ENDED, RESTORED, TierHolder, WorkerDeath, death_before
from kvcustody.governance.tiers.seal.extended_nonce import TAG_BYTES
from kvcustody.governance.tiers.seal.object_layout import (
    FACTS_BYTES,
    HEADER_BYTES,
    NO_SHRED,
    ObjectFacts,
    object_bytes,
)
from kvcustody.governance.tiers.seal.sealer import open_into, read_facts, seal_into
from kvcustody.governance.tiers.seal_keys import SealKeys
from kvcustody.governance.tiers.staging import Staging
from kvcustody.governance.tiers.stores.store_protocol import Listed, Locked, TierStore
from kvcustody.governance.tiers.tier_clock import TierClock
from kvcustody.governance.tiers.tier_index import IndexRow, TierIndex, last_of
from kvcustody.logger import get_logger

_log = get_logger(__name__)

KEY_BYTES = 32
_EVICT_SHARE = 64  # of a full tier, that much leaves at once
_HAND_DOWN = 4  # objects, where another tier takes what leaves: nobody waits for more at a time
_KNOWN_MIN = 1024  # domains and shred keys that are known before those of nothing are forgotten
_NEVER_US, _REMEMBERED = 1 << 62, 1000
_NAMES_MIN = 10_000  # so many names a store may list whatever its size
_ENDS, _DELETES = 2_048, 512  # copies whose key is gone, and bytes that wait: so many in one call
_UNSEEN = -1
_ASK_AGAIN_US = 100_000  # of a store that could not delete
_SEEK_AGAIN_US = 1_000_000  # of a name that nobody had stored
_CLOCKS_DIFFER_US = 5_000_000  # at most, of two workers that share or hand over
_SOUGHT_MAX, _BORROWED_MAX = 4096, 65_536
_CONTENT_SIZE = slice(8, 16)  # of a header
_BEGINNING = HEADER_BYTES + FACTS_BYTES + TAG_BYTES

Read = Callable[[int, int, memoryview], None]
Write = Callable[[int, int, int, memoryview], None]
Staged = Callable[[int], memoryview | None]


class TierShare(NamedTuple):
    """What of a tier's bytes is a tenant's own, and the most that it may have."""

    guaranteed: float = 0.0
    cap: float = 1.0


class CopyLimit(NamedTuple):
    """How long copies may be in a tier, 0: not at all; how wide the time buckets are whose keys end them."""

    absolute_us: int
    bucket_us: int
    within_us: int = 0  # how long after it is due a copy's bytes may still be there
    restores: bool = False  # whether an heir may take copies over when their worker died


class TierTerms(NamedTuple):
    """What a tier holds: objects of at most `object_blocks` blocks of `block_bytes`, of one shard of one layout.

    `limit`: what holds for copies of a tenant and classification. `tenants`: those whose copies may be found again
    after a restart. `withholds`: whether what is of a domain stays as it is, neither stored nor brought back.
    `holder`: the process that has the tier; None: nobody is asked whether the one before died. `encloses`: objects say
    what they are to who has the keys, also where the store does not outlive the process: other workers get them.
    """

    layout: bytes
    block_bytes: int
    block_tokens: int
    limit: Callable[[str, str], CopyLimit]
    share: Callable[[str], TierShare] = lambda tenant: TierShare()
    tenants: tuple[str, ...] = ()
    object_blocks: int = 16
    shard: int = 0
    shards: int = 1
    withholds: Callable[[DomainLabel], bool] = lambda label: False
    holder: TierHolder | None = None
    encloses: bool = False


class PublishedRun(NamedTuple):
    """Whole published blocks of one chain: their keys, the key before the first (zeros: none), the first's depth.

    `due_us` is when what holds them lets them go, `ceiling_us` what nothing prolongs.
    """

    label: DomainLabel
    keys: bytes
    parent: bytes
    depth: int
    born_us: int
    ceiling_us: int
    due_us: int


class Found(NamedTuple):
    """An object that goes on from where the one before it ended, with so many blocks of so many bytes, sealed.

    `spare`: so many behind those are in it too, and nobody wants them.
    """

    name: bytes
    blocks: int
    size: int
    spare: int = 0


class SealedObject(NamedTuple):
    """One object as it rests in a tier, by its name."""

    name: bytes
    data: bytes


class GivenObjects(NamedTuple):
    """Sealed objects of a chain, one behind the other; `is_whole`: they reach its end."""

    objects: tuple[SealedObject, ...] = ()
    is_whole: bool = False


class Restored(NamedTuple):
    """Blocks that came back one after the other: since when they live, and until when they may.

    `due_us`: when their copy is due. Nothing may attach them from then on.
    """

    blocks: int
    born_us: int
    ceiling_us: int
    due_us: int


def in_time(restored: Iterable[Restored], now_us: int) -> list[Restored]:
    """The leading blocks whose copies are not due yet: asked after every wait between a load and its attach."""
    return list(takewhile(lambda one: now_us < one.due_us, restored))


class CopyCounts(NamedTuple):
    """What a tier did and has, by its own books: copies, and sealed bytes.

    `evidence` counts every piece of it, of which a copy may have two; `waiting` ended and have none yet.
    """

    stored: int
    ended: int
    destroyed: int
    evidence: int
    living: int
    waiting: int
    living_bytes: int
    waiting_bytes: int
    refused: int


class _Ended(NamedTuple):
    """A copy that nothing finds any more and whose bytes may still be there."""

    number: int
    tenant: str
    classification: str
    blocks: int
    size: int
    due_us: int
    shreds: tuple[bytes, ...] = ()
    erasure: str = ""
    is_destroyed: bool = False


class CopyOwner(NamedTuple):
    """Whose the copies of one domain are; `label` None: an earlier process stored them, and nobody asked yet."""

    tenant: str
    classification: str
    subject: bytes
    label: DomainLabel | None


class SealedTier:
    """Copies in one store."""

    def __init__(
        self,
        store: TierStore,
        keys: SealKeys,
        shred: ShredKeys,
        staging: Staging,
        clock: Clock,
        terms: TierTerms,
        lower: SealedTier | None = None,
    ) -> None:
        """`lower`: the tier that takes what this one has no room for, as it is sealed."""
        self._store = store
        self._lower = lower
        self._encloses = terms.encloses or store.outlives or lower is not None
        self._keys = keys
        self._shred = shred
        self.staging = staging
        self._clock = TierClock(clock)
        self._terms = terms
        self._index = TierIndex()
        self._owners: list[CopyOwner] = []
        self._domains: dict[DomainSpec, int] = {}
        self._unclaimed: dict[bytes, int] = {}  # by domain digest
        self._shreds: list[bytes] = [NO_SHRED]
        self._shred_numbers: dict[bytes, int] = {NO_SHRED: 0}
        self._events: list[CopyEvent] = []
        self._waiting: dict[bytes, _Ended | None] = {}  # not found any more, and still in the store
        self._lost: dict[
            bytes, _Ended
        ] = {}  # nor in the store: the end of a key will prove that nobody opens them
        self._adopted: set[bytes] = set()  # of what is here, what an earlier process stored
        self._erased: OrderedDict[str, tuple[int, int]] = OrderedDict()
        self._unanswered: set[bytes] = set()  # of what waits, what a delete was asked for that did not answer
        self._locked: dict[bytes, int] = {}  # of what waits, until when the store keeps it (UTC)
        self._sought: OrderedDict[bytes, int] = (
            OrderedDict()
        )  # names that nobody had, and until when that holds
        self._borrowed = self._borrowed_bytes = self._let_go = (
            0  # other workers' objects that can be found, and ended
        )
        self.sought = 0  # times that the store was asked what others stored
        self._ends_before = deque[tuple[Selector, int]](
            maxlen=_REMEMBERED
        )  # erasures, and when (UTC) they came
        self._held: dict[str, int] = {}  # bytes of the store by tenant
        self._pseudonyms: dict[str, bytes] = {}
        self._numbered = self._ended = self._destroyed = self._evidence = 0
        self._refused = 0
        self._has_more = False  # of what waits than one call deletes
        self._keyless: set[int] = set()  # domains whose epoch is destroyed, with copies that are to be ended
        self._due_us, self._ask_again_us, self._shreds_seen = _NEVER_US, 0, shred.changes()
        self._death = self._death_before()
        self._deaths = self._deaths_of_others()
        self.found_at_start, self.ended_at_start = self._find_what_is_there()
        self._write_holder(is_stopped=False)

    @property
    def name(self) -> str:
        """`host`, `nvme` or `remote`, as the policy names tiers."""
        return self._store.kind

    @property
    def capacity_bytes(self) -> int:
        """The most that the store keeps."""
        return self._store.capacity_bytes

    @property
    def object_blocks(self) -> int:
        """The most that an object has; one ends at each multiple of it."""
        return self._terms.object_blocks

    @property
    def block_bytes(self) -> int:
        """Of one block, on the device."""
        return self._terms.block_bytes

    @property
    def is_shared(self) -> bool:
        """Whether other workers' objects may be found."""
        return self._store.is_shared

    @property
    def in_flight(self) -> int:
        """How many loads are worth having on their way at a time."""
        return self._store.in_flight

    @property
    def ended(self) -> int:
        """Copies that nothing finds any more: as long as it stays, what was found is found again."""
        return self._ended + self._let_go

    @property
    def counts(self) -> CopyCounts:
        """Since the start, and now."""
        waiting = [one for one in self._unproven() if not one.is_destroyed]
        return CopyCounts(
            self._numbered,
            self._ended,
            self._destroyed,
            self._evidence,
            len(self),
            len(waiting),
            self._index.size - self._borrowed_bytes,
            sum(one.size for one in waiting),
            self._refused,
        )

    def _unproven(self) -> Iterator[_Ended]:
        """Copies that ended, and whose bytes the store may have or has lost."""
        for ended in chain(self._waiting.values(), self._lost.values()):
            if ended is not None and ended.number:
                yield ended

    def __len__(self) -> int:
        """Copies of this worker's that can be found."""
        return len(self._index) - self._borrowed

    def __bool__(self) -> bool:
        return True

    def admits(self, label: DomainLabel) -> bool:
        """Whether policy lets blocks of this domain be here, and nothing withholds them."""
        terms = self._terms
        return (
            label.spec is not None
            and terms.limit(label.tenant, label.classification).absolute_us > 0
            and not terms.withholds(label)
        )

    def has(self, label: DomainLabel, last: bytes) -> bool:
        """Whether a copy that ends with this block can be found."""
        return self._index.may_end(last) and self._has_each(label, (last,))

    def has_run(self, label: DomainLabel, keys: bytes, depth: int) -> bool:
        """Whether every object that `store` would make of these blocks, of which the first is at `depth`, is here."""
        step, may_end = self._terms.object_blocks, self._index.may_end
        ends = range(KEY_BYTES * (step - depth % step), len(keys), KEY_BYTES * step)
        lasts = [keys[-KEY_BYTES:], *[keys[end - KEY_BYTES : end] for end in ends]]
        return all(map(may_end, lasts)) and self._has_each(label, lasts)

    def _has_each(self, label: DomainLabel, lasts: Iterable[bytes]) -> bool:
        spec = label.spec
        if spec is None or spec not in self._domains or self._terms.withholds(label):
            return False
        try:
            name = self._namer(spec)
        except NoKeyError:
            return False
        return all(self._index.find(name(last)) >= 0 for last in lasts)

    def probe(self) -> int:
        """Read one object as a load does, and drop it; its bytes, 0 where there is none or it does not answer."""
        rows = self._index.least_used(1)
        if not rows:
            return 0
        name = self._index.name(rows[0])
        with suppress(StoreError):
            sealed = self._store.prepare_load(name)
            if sealed is not None:
                size = len(sealed)
                sealed.release()
                self._store.complete_load(name)
                return size
        return 0

    # -- in and out -----------------------------------------------------------------------------------------------

    def store(self, run: PublishedRun, read: Read) -> int:
        """Keep copies of the run's blocks that are not here; returns how many blocks are new.

        `read(first, count, into)` copies `count` of the run's blocks from the device.
        """
        label, terms, now_us = run.label, self._terms, self._clock.now_us()
        limit = terms.limit(label.tenant, label.classification)
        due_us = min(
            self._clock.of_boot(run.due_us), self._clock.of_boot(run.ceiling_us), now_us + limit.absolute_us
        )
        if label.spec is None or not limit.absolute_us or due_us <= now_us or terms.withholds(label):
            return 0
        stored = at = 0
        count = len(run.keys) // KEY_BYTES
        born_us, ceiling_us = self._clock.of_boot(run.born_us), self._clock.of_boot(run.ceiling_us)
        before = deque[_Sealed]()  # these are written while the next is sealed
        largest = min(count, terms.object_blocks) * terms.block_bytes
        try:
            with self.staging.take_for_many(largest) as staged:
                while at < count:
                    depth = run.depth + at
                    blocks = min(terms.object_blocks - depth % terms.object_blocks, count - at)
                    while before and not self._fits(sum(one.size for one in before), blocks, label.tenant):
                        stored += self._complete(before.popleft())  # what gives way does not wait behind it
                    part = _Part(
                        label,
                        run.keys[KEY_BYTES * at : KEY_BYTES * (at + blocks)],
                        run.keys[KEY_BYTES * (at - 1) : KEY_BYTES * at] if at else run.parent,
                        depth,
                        born_us,
                        ceiling_us,
                        due_us,
                    )
                    sealed = self._seal_object(
                        part, label.spec, limit.bucket_us, partial(read, at, blocks), staged
                    )
                    if sealed is not None:
                        before.append(sealed)
                    if len(before) > self._store.in_flight or (sealed is None and before):
                        stored += self._complete(before.popleft())
                    at += blocks
        finally:
            while before:
                stored += self._complete(before.popleft())
        return stored

    def lookup(
        self, label: DomainLabel, keys: bytes, depth: int, most: int | None = None, *, seeks: bool = True
    ) -> list[Found]:
        """Each object that goes on from `depth`; the sum of their blocks is how far a load would come.

        `keys` are those of the whole prompt, from depth 0 of the chain; `most`: how many of its blocks are wanted.
        `seeks`: whether a store that others share is asked for what the index does not have.
        """
        found: list[Found] = []
        index, spec, is_shared = self._index, label.spec, self._store.is_shared and seeks
        if spec is None or not (len(index) or is_shared) or self._terms.withholds(label):
            return found
        try:
            if not self._is_known(label, spec) and not is_shared:
                return found
            name = self._namer(spec)
        except NoKeyError:  # an epoch that was destroyed, say: nothing of it is found
            return found
        step, count = self._terms.object_blocks, len(keys) // KEY_BYTES
        most, domain, now_us = (
            count if most is None else most,
            self._domains.get(spec, -1),
            self._clock.now_us(),
        )
        while depth < most:
            first, last = depth, min(count, depth - depth % step + step)
            with suppress(NoKeyError):  # then nothing is sought, as where nobody has it
                if is_shared and self._seek(label, spec, keys, depth, last):
                    domain = self._domains[spec]
            for end in self._ends(keys, depth, last):
                one = name(keys[KEY_BYTES * (end - 1) : KEY_BYTES * end])
                row = index.find(one)
                if row >= 0 and index.reaches(row, domain, depth, end, now_us):
                    spare = max(0, end - most)
                    found.append(Found(one, end - spare - depth, index.value("size", row), spare))
                    depth = end
                    break
            if depth == first:
                break
        return found

    def _ends(self, keys: bytes, depth: int, last: int) -> Iterator[int]:
        """Where objects that begin at `depth` or before may end, up to `last`: most end there, so it comes first."""
        if self._index.may_end(keys[KEY_BYTES * (last - 1) : KEY_BYTES * last]):
            yield last
        for at in reversed(self._index.ends_among(keys[KEY_BYTES * depth : KEY_BYTES * (last - 1)])):
            yield depth + at

    def _seek(self, label: DomainLabel, spec: DomainSpec, keys: bytes, depth: int, end: int) -> bool:
        """Whether another worker stored an object that ends at `end`, which the index did not have (rule 8)."""
        name = self._namer(spec)(keys[KEY_BYTES * (end - 1) : KEY_BYTES * end])
        now_us = self._clock.now_us()
        if self._index.find(name) >= 0 or name in self._waiting or self._sought.get(name, 0) > now_us:
            return False
        if not self.admits(label):
            return False
        self.sought += 1
        facts = self._facts_of(name, None)
        if facts is None or self._is_own(name) or not self._is_of(facts, label, spec, keys, depth, end):
            self._sought[name] = now_us + _SEEK_AGAIN_US
            self._sought.move_to_end(name)
            if len(self._sought) > _SOUGHT_MAX:
                self._sought.popitem(last=False)
            return False
        self._borrow(name, facts, self._domain(spec, label))
        return True

    def _is_of(
        self, facts: ObjectFacts, label: DomainLabel, spec: DomainSpec, keys: bytes, depth: int, end: int
    ) -> bool:
        """Whether an object's facts are those of this chain's blocks that end at `end`, and it may be here still."""
        begin, terms, now_us = facts.depth, self._terms, self._clock.now_us()
        parent = keys[KEY_BYTES * (begin - 1) : KEY_BYTES * begin] if begin else bytes(KEY_BYTES)
        limit_us = terms.limit(label.tenant, label.classification).absolute_us
        return (
            begin <= depth
            and begin + facts.blocks == end
            and (facts.parent, facts.first, facts.last)
            == (
                parent,
                keys[KEY_BYTES * begin : KEY_BYTES * (begin + 1)],
                keys[KEY_BYTES * (end - 1) : KEY_BYTES * end],
            )
            and (facts.domain, facts.model, facts.epoch)
            == (self._keys.domain(spec), spec.model, spec.key_epoch)
            and facts.classification == label.classification
            and facts.tenant == self._pseudonym(label.tenant)
            and (facts.layout, facts.shard, facts.shards) == (terms.layout, terms.shard, terms.shards)
            and facts.born_us <= now_us < facts.due_us <= now_us + limit_us
            and not any(
                facts.born_us <= at_us + _CLOCKS_DIFFER_US and may_hold(selector, label)
                for selector, at_us in self._ends_before
            )
            and all(self._shred.is_living(id_) for id_ in (facts.subject, facts.bucket) if id_ != NO_SHRED)
        )

    def _borrow(self, name: bytes, facts: ObjectFacts, domain: int) -> None:
        """Another worker's object can be found from now on; it gives way to nothing of ours."""
        if self._borrowed >= _BORROWED_MAX:
            others = self._index.column("number") == 0
            self._forget_rows(self._index.least_used(_BORROWED_MAX // _EVICT_SHARE, others), "evicted")
        size = object_bytes(facts.blocks * self._terms.block_bytes, enclosed=True, checked=False)
        self._index.add(name, self._row_of(0, facts, size, domain))
        self._borrowed += 1
        self._borrowed_bytes += size
        self._due_us = min(self._due_us, facts.due_us)

    def expect(self, found: Iterable[Found]) -> None:
        """Have these on their way: `load` of each follows, or `abandon`."""
        for one in found:
            self._store.start_load(one.name)

    def abandon(self, found: Iterable[Found]) -> None:
        """These are not wanted any more, if they were expected."""
        for one in found:
            self._store.abandon_load(one.name)

    def load(
        self, label: DomainLabel, keys: bytes, depth: int, found: list[Found], write: Write
    ) -> list[Restored]:
        """Bring those objects back: `write(depth, count, skip, data)` puts blocks from that depth on the device.

        `data` are the blocks of a whole object, of which the first `skip` are there already, and what is behind the
        `count` is spare. Returns what came in time, in order, those that live alike together; the first object that
        does not open ends it, and is ended.
        """
        spec, come = label.spec, list[Restored]()
        assert spec is not None
        index = self._index
        following: list[bytes] = []  # these are read while the one before them is opened
        lanes = self._store.in_flight
        ahead = lanes + lanes // 2  # a lane that is done finds the next one waiting
        whole = self._terms.object_blocks * self._terms.block_bytes
        largest = min(whole, max((one.size for one in found), default=0))
        domain = self._domains.get(spec, -1)
        try:
            with self.staging.take_for_many(largest) as staged:
                for at, (name, blocks, _, spare) in enumerate(found):
                    following = [one.name for one in found[at + 1 : at + 1 + ahead]]
                    end, row = depth + blocks + spare, index.find(name)
                    if row < 0 or not index.reaches(row, domain, depth, end, self._clock.now_us()):
                        self._store.abandon_load(name)
                        break
                    known = index.row(row)
                    if ahead > 1:
                        for one in (name, *following):
                            self._store.start_load(one)
                    wanted = _Wanted(name, label, keys, depth, end, blocks, following)
                    if not self._load_object(wanted, row, known, write, staged):
                        break
                    index.note_use(row)
                    depth = end
                    times = (known.born_us, known.ceiling_us, known.due_us)
                    before = come.pop().blocks if come and come[-1][1:] == times else 0
                    come.append(Restored(before + blocks, *times))
        finally:
            for one in following:
                self._store.abandon_load(one)
        to_boot = self._clock.to_boot
        return [
            Restored(one.blocks, to_boot(one.born_us), to_boot(one.ceiling_us), to_boot(one.due_us))
            for one in in_time(come, self._clock.now_us())
        ]

    def _seal_object(
        self,
        part: _Part,
        spec: DomainSpec,
        bucket_us: int,
        read: Callable[[memoryview], None],
        staged: Staged,
    ) -> _Sealed | None:
        """Seal it into memory of the store, which writes it from then on; None: it is not kept."""
        label = part.label
        blocks = len(part.keys) // KEY_BYTES
        try:
            name = self._namer(spec)(part.keys[-KEY_BYTES:])
            known = self._is_known(label, spec)
        except NoKeyError:  # the epoch was destroyed, say
            return None
        row = self._index.find(name) if known else -1
        if row >= 0:
            if self._index.value("blocks", row) >= blocks:
                return None
            # It began later in the chain: whoever needs it is served by the longer one.
            self._end([row], "evicted")
        if self._waiting:
            self._delete([])
            if name in self._waiting:
                return None  # an older one has not ended yet
        content = blocks * self._terms.block_bytes
        size = object_bytes(content, enclosed=self._encloses, checked=False)
        try:
            subject = self._subject(label)
            bucket = self._shred.of_bucket(label.classification, part.due_us, bucket_us).id
        except KeyringError:  # no room for another key
            self._refused += 1
            return None
        plain = staged(content)
        if plain is None:
            self._refused += 1
            return None
        try:
            into = self._room(name, size, label.tenant, part.due_us)
            if into is None:
                self._refused += 1
                return None
            read(plain)
            facts = self._facts(spec, part, subject, bucket)
            enclosing = self._keys.catalogue() if self._encloses else None
            seal_into(self._keys.of(spec, subject, bucket), name, facts, plain, into, facts_key=enclosing)
            into.release()
            self._store.start_store(name)
        except (StoreError, NoKeyError):
            self._give_up(name)
            self._refused += 1
            return None
        except Exception:  # of the device: nothing of it is kept, and it is not ours to hide
            self._give_up(name)
            raise
        return _Sealed(name, part, size, blocks, subject, bucket)

    def _complete(self, sealed: _Sealed) -> int:
        """What was sealed is a copy once the store has it; how many blocks it is."""
        name, part, size, blocks, subject, bucket = sealed
        spec = part.label.spec
        assert spec is not None
        try:
            is_kept = self._store.complete_store(name)
        except StoreError:
            self._give_up(name)
            self._refused += 1
            return 0
        if not is_kept:  # another worker stored it before, or what came of a put of ours that was given up
            self._sought.pop(name, None)
            if self._is_own_residue(name):
                self._waiting.setdefault(name, None)
            return 0
        self._begin(
            name,
            IndexRow(
                self._numbered + 1,
                part.born_us,
                part.ceiling_us,
                part.due_us,
                part.due_us,
                size,
                part.depth,
                blocks,
                self._domain(spec, part.label),
                self._shred_number(subject),
                self._shred_number(bucket),
                last_of(part.keys[-KEY_BYTES:]),
            ),
        )
        return blocks

    def _begin(self, name: bytes, row: IndexRow) -> None:
        """A copy is here from now on."""
        owner = self._owners[row.domain]
        self._numbered = row.number
        self._index.add(name, row)
        self._due_us = min(self._due_us, row.due_us)
        self._held[owner.tenant] = self._held.get(owner.tenant, 0) + self._store.taken(row.size)
        copy = _Ended(row.number, owner.tenant, owner.classification, row.blocks, row.size, row.due_us)
        self._tell("stored", name, copy)

    def _tell(self, step: str, name: bytes, what: _Ended, cause: str = "") -> None:
        number, tenant, classification, blocks, size, due_us, _, erasure, _ = what
        at_us, due_us = self._clock.boot_us(), self._clock.to_boot(due_us)
        self._events.append(
            CopyEvent(step, name, number, tenant, classification, blocks, size, at_us, due_us, cause, erasure)
        )

    def _give_up(self, name: bytes) -> None:
        """Nothing was kept, as far as is known; what the store made of it ends."""
        with suppress(StoreError):
            self._store.abandon_store(name)
        if not self._store.is_shared or self._is_own_residue(name):
            self._waiting.setdefault(name, None)

    def _is_own_residue(self, name: bytes) -> bool:
        """Whether what is under this name is this worker's: of what cannot be read now a scan finds whose it is."""
        begins: bytes | None = None
        with suppress(StoreError):
            begins = self._store.peek(name, 1)
        return begins is not None and self._is_own(name)

    def _is_own(self, name: bytes) -> bool:
        """Whether this worker stored what it has read the beginning of: not in the index, it has ended."""
        is_own: Callable[[bytes], bool] | None = getattr(self._store, "is_own", None)
        return is_own is None or is_own(name)

    def _fits(self, coming: int, blocks: int, tenant: str) -> bool:
        """Whether an object of so many blocks fits, where `coming` bytes of the tenant's are no copy yet."""
        store = self._store
        size = object_bytes(blocks * self._terms.block_bytes, enclosed=self._encloses, checked=False)
        taken = store.taken(size)
        return (
            self._held.get(tenant, 0) + taken + store.taken(coming) <= self._most(tenant)
            and store.used_bytes + taken <= store.capacity_bytes
        )

    def _most(self, tenant: str) -> int:
        """What a tenant may have of the store."""
        return int(self._terms.share(tenant).cap * self._store.capacity_bytes)

    def _room(self, name: bytes, size: int, tenant: str, until_us: int) -> memoryview | None:
        """Memory of the store, where need be in place of what was used least."""
        store, most = self._store, self._most(tenant)
        taken = store.taken(size)
        if taken > most:
            return None
        while self._held.get(tenant, 0) + taken > most:
            self._evict_from(tenant)
        into = store.prepare_store(name, size, until_us)
        while into is None and len(self):
            self._evict_from(self._furthest_over(tenant))
            into = store.prepare_store(name, size, until_us)
        return into

    def _furthest_over(self, tenant: str) -> str:
        """Whoever has most beyond its share; the asking tenant where nobody has."""
        store, best, most = self._store, tenant, 0
        for other, size in self._held.items():
            over = size - int(self._terms.share(other).guaranteed * store.capacity_bytes)
            if over > most:
                best, most = other, over
        if not self._held.get(best):
            best = max(self._held, key=self._held.__getitem__)
        return best

    def _evict_from(self, tenant: str) -> None:
        numbers = [number for number, owner in enumerate(self._owners) if owner.tenant == tenant]
        theirs = np.isin(self._index.column("domain"), numbers) & (self._index.column("number") > 0)
        count = max(1, len(self._index) // _EVICT_SHARE)
        if self._lower is not None:
            count = min(count, _HAND_DOWN)
        rows = self._index.least_used(count, theirs)
        for row in rows if self._lower is not None else ():
            self._hand_down(self._index.name(row), self._index.row(row))
        self._end(rows, "evicted")

    def _hand_down(self, name: bytes, known: IndexRow) -> None:
        owner = self._owners[known.domain]
        assert self._lower is not None
        with suppress(StoreError):
            sealed = self._store.prepare_load(name)
            if sealed is None:
                return
            try:
                shreds = (self._shreds[known.subject], self._shreds[known.bucket])
                self._lower.take_over(name, known, owner, shreds, sealed)
            finally:
                sealed.release()
                self._store.complete_load(name)

    def take_over(
        self, name: bytes, known: IndexRow, owner: CopyOwner, shreds: tuple[bytes, bytes], sealed: memoryview
    ) -> bool:
        """Keep an object of another tier as it is sealed, where policy lets it be here, no longer than there."""
        label, now_us = owner.label, self._clock.now_us()
        limit = self._terms.limit(owner.tenant, owner.classification)
        due_us = min(known.due_us, now_us + limit.absolute_us)
        if label is None or label.spec is None or due_us <= now_us or name in self._waiting:
            return False
        if self._index.find(name) >= 0:
            return True
        try:
            into = self._room(name, known.size, owner.tenant, due_us)
            if into is None:
                self._refused += 1
                return False
            into[: known.size] = sealed
            into.release()
            is_kept = self._store.complete_store(name)
        except StoreError:
            self._give_up(name)
            self._refused += 1
            return False
        if not is_kept:  # another worker has it there
            return True
        here = known._replace(
            number=self._numbered + 1,
            due_us=due_us,
            domain=self._domain(label.spec, label),
            subject=self._shred_number(shreds[0]),
            bucket=self._shred_number(shreds[1]),
        )
        self._begin(name, here)
        return True

    def give(self, label: DomainLabel, keys: bytes, depth: int) -> GivenObjects:
        """A copy of each object that goes on from `depth` of the chain, sealed as it is: for another worker."""
        objects = []
        for found in self.lookup(label, keys, depth):
            try:
                sealed = self._store.prepare_load(found.name)
            except StoreError:
                break
            if sealed is None:
                break
            try:
                objects.append(SealedObject(found.name, bytes(sealed[: found.size])))
            finally:
                sealed.release()
                self._store.complete_load(found.name)
            depth += found.blocks
        return GivenObjects(tuple(objects), depth == len(keys) // KEY_BYTES)

    def receive(self, label: DomainLabel, keys: bytes, objects: Iterable[SealedObject]) -> int:
        """Keep what another worker sealed, each where it is of this chain and policy lets it be here; how many blocks.

        The copies are this tier's from now on, due no later than there. What they hold is checked when it is opened.
        """
        spec, count, blocks = label.spec, len(keys) // KEY_BYTES, 0
        if spec is None or not self.admits(label):
            return 0
        for name, data in objects:
            try:
                facts = read_facts(self._keys.catalogue(), name, memoryview(data)[:_BEGINNING], len(data))
                end = facts.depth + facts.blocks
                if not facts.depth < end <= count:
                    continue
                if name != self._namer(spec)(keys[KEY_BYTES * (end - 1) : KEY_BYTES * end]):
                    continue
                if not self._is_of(facts, label, spec, keys, facts.depth, end):
                    continue
            except NoKeyError:
                continue
            row = self._row_of(0, facts, len(data), 0)
            owner = CopyOwner(label.tenant, label.classification, facts.subject, label)
            if self.take_over(name, row, owner, (facts.subject, facts.bucket), memoryview(data)):
                blocks += facts.blocks
        return blocks

    def _load_object(
        self,
        wanted: _Wanted,
        row: int,
        known: IndexRow,
        write: Write,
        staged: Staged,
    ) -> bool:
        name, label, keys, depth, end, wanted_blocks, following = wanted
        spec = label.spec
        assert spec is not None
        begin, blocks = known.depth, known.blocks
        subject, bucket = self._shreds[known.subject], self._shreds[known.bucket]
        part = _Part(
            label,
            keys[KEY_BYTES * begin : KEY_BYTES * end],
            keys[KEY_BYTES * (begin - 1) : KEY_BYTES * begin] if begin else bytes(KEY_BYTES),
            begin,
            known.born_us,
            known.ceiling_us,
            known.sealed_due_us,
        )
        plain = staged(blocks * self._terms.block_bytes)
        if plain is None:
            self._refused += 1
            return False
        try:
            sealed = self._store.prepare_load(name)
            if sealed is None:
                self._end([row], "lost")
                return False
            try:
                for one in following:
                    self._store.start_load(one)
                facts = self._facts(spec, part, subject, bucket)
                open_into(self._keys.of(spec, subject, bucket), name, facts, sealed, plain)
            finally:
                sealed.release()
                self._store.complete_load(name)
        except (StoreError, KeyServiceUnavailable):  # it may open another time
            self._refused += 1
            return False
        except KeyringError:  # it does not open, or a key of it is destroyed
            self._end([row], "broken")
            return False
        if known.due_us <= self._clock.now_us():  # its time ended while it was read
            return False
        write(depth, wanted_blocks, depth - begin, plain)
        return True

    # -- ends -----------------------------------------------------------------------------------------------------

    def is_due(self, now_us: int) -> bool:
        """Whether `expire` may have something to do at this boot time."""
        return (
            self._clock.of_boot(now_us) >= self._due_us
            or self._shred.changes() != self._shreds_seen
            or bool(self._keyless)
            or (bool(self._waiting) and now_us >= self._ask_again_us)
        )

    def expire(self) -> int:
        """End every copy that is due or whose keys are destroyed, and the keys of buckets that are over; how many."""
        now_us, index = self._clock.now_us(), self._index
        rows = index.rows(index.column("due_us") <= now_us)
        self._end(rows, "ceiling")
        gone = {receipt.key.id for receipt in self._shred.destroy_due(now_us)}
        living = self._shred.living()
        self._shreds_seen = self._shred.changes()
        ids = {key.id for key in living} | {NO_SHRED}
        dead = [number for number, id_ in enumerate(self._shreds) if id_ not in ids]
        ended = 0
        if dead:  # by an erasure elsewhere, or by whoever has the file
            theirs = np.isin(index.column("subject"), dead) | np.isin(index.column("bucket"), dead)
            rows_left = index.rows(theirs)
            ended = self._end_with_key(rows_left)
            if ended < len(rows_left):
                self._shreds_seen = _UNSEEN
        ended += self._end_keyless()
        if gone:
            self._tell_destroyed(gone)
        self._keys.drop_gone()
        self._delete([])
        self._ask_again_us = self._next_ask_us()
        due = index.column("due_us")[index.column("living") > 0]
        self._due_us = min(
            int(due.min(initial=_NEVER_US)), *(key.until_us for key in living if key.until_us), _NEVER_US
        )
        if len(self._owners) + len(self._shreds) > _KNOWN_MIN + 4 * len(index) and not self._keyless:
            self._forget_unused()
        return len(rows) + ended

    def _end_keyless(self) -> int:
        """End some of what is of destroyed epochs, whose copies nobody finds or opens; how many."""
        if not self._keyless:
            return 0
        rows = self._index.rows(np.isin(self._index.column("domain"), list(self._keyless)))
        ended = self._end_with_key(rows)
        if ended == len(rows):
            self._keyless.clear()
        return ended

    def _next_ask_us(self) -> int:
        """When what waits is asked for again, in boot time: soon, but for what is locked; at once, where more does."""
        if self._has_more:
            return self._clock.boot_us()
        if len(self._locked) < len(self._waiting) or not self._locked:
            return self._clock.boot_us() + _ASK_AGAIN_US
        return max(self._clock.boot_us() + _ASK_AGAIN_US, self._clock.to_boot(min(self._locked.values())))

    def narrow(self) -> int:
        """The policy, a keyring or a file of shred keys has changed: end what may be here no longer; how many.

        What may stay is due no later than the tier's present `absolute`, counted from now.
        """
        now_us, ended = self._clock.now_us(), 0
        self._keys.drop_gone()
        for number, owner in enumerate(self._owners):
            theirs = self._index.column("domain") == number
            if not theirs.any():
                continue
            label = owner.label
            if label is not None and label.spec is not None and not self._keys.has_epoch(label.spec):
                self._keyless.add(number)
                continue
            absolute_us = self._terms.limit(owner.tenant, owner.classification).absolute_us
            if not absolute_us:
                rows = self._index.rows(theirs)
                self._end(rows, "policy")
                ended += len(rows)
                continue
            for row in self._index.rows(theirs & (self._index.column("due_us") > now_us + absolute_us)):
                self._index.shorten(row, now_us + absolute_us)
                self._due_us = min(self._due_us, now_us + absolute_us)
        return ended + self._end_keyless()

    def end_tenant(self, tenant: str) -> int:
        """A tenant is not here any more: its copies make room; how many."""
        numbers = [number for number, owner in enumerate(self._owners) if owner.tenant == tenant]
        rows = self._index.rows(np.isin(self._index.column("domain"), numbers))
        self._end(rows, "evicted")
        return len(rows)

    def _end_with_key(self, rows: list[int]) -> int:
        """A key was destroyed: nobody opens these, whatever becomes of their bytes. The first `_ENDS`; how many."""
        rows = rows[:_ENDS]
        names = self._forget_rows(rows, KEY_DESTROYED)
        for name in names:
            ended = self._waiting[name]
            assert ended is not None
            self._waiting[name] = self._destroyed_of(name, ended, KEY_DESTROYED)
        self._delete([])
        return len(rows)

    def _forget_unused(self) -> None:
        """Domains and shred keys of which nothing is here any more are not kept."""
        self._pseudonyms.clear()
        old = self._index.renumber("domain")
        self._owners = [self._owners[number] for number in old]
        new = {number: at for at, number in enumerate(old)}
        self._unclaimed = {digest: new[at] for digest, at in self._unclaimed.items() if at in new}
        self._domains = {
            owner.label.spec: at
            for at, owner in enumerate(self._owners)
            if owner.label is not None and owner.label.spec is not None
        }
        self._shreds = [self._shreds[number] for number in self._index.renumber("subject", "bucket", first=0)]
        self._shred_numbers = {id_: number for number, id_ in enumerate(self._shreds)}

    def erase(self, erasure: str, selector: Selector, before_us: int) -> TierErased:
        """End every copy that may be of the selector: the index first, then its subjects' keys, then the bytes.

        Copies that were stored after `before_us` end too: a cache may always be emptied sooner. So do those of wider
        domains of the tenant: who wrote a block of them is known to the ledger, not to a tier.
        """
        ids = self._subject_keys(selector)
        chosen = [number for number, owner in enumerate(self._owners) if _may_be_of(owner, selector, ids)]
        rows = self._index.rows(np.isin(self._index.column("domain"), chosen))
        own = [row for row in rows if self._index.value("number", row)]
        objects, size = self._erased.get(erasure, (0, 0))
        objects += len(own)
        size += sum(self._index.value("size", row) for row in own)
        self._erased[erasure] = (objects, size)
        self._erased.move_to_end(erasure)
        while len(self._erased) > _REMEMBERED:
            self._erased.popitem(last=False)
        # What others stored before is not found again, whether they have ended it or not, nor taken when it comes.
        self._ends_before.append((selector, self._clock.now_us()))
        ids = {self._owners[number].subject for number in chosen} if ids is None else ids
        self._forget_rows(rows, "erased", erasure)
        if selector.ends_keys:
            living = {id_ for id_ in ids if self._shred.is_living(id_)}
            for id_ in living:
                self._shred.destroy(id_)
            self._tell_destroyed(living)
        self._keys.drop_gone()
        self._delete([])
        return self._erased_so_far(erasure, selector, objects, size)

    @property
    def returned_keys(self) -> int:
        """How many destroyed keys were in the file of shred keys again when it was opened."""
        return self._shred.returned

    def erase_returned(self, complete: CompletedErasure) -> int:
        """Carry out an erasure again where a key from before it is there; how many keys.

        It destroyed every such key: one that is there was put back with an older copy of the file.
        """
        erasure, selector, at_us = complete
        ids = self._subject_keys(selector)
        if ids is None and selector == Selector(tenant=selector.tenant):
            ids = {owner.subject for owner in self._owners if _may_be_of(owner, selector, None)}
        older = {key.id for key in self._shred.living() if key.created_us < at_us}
        if returned := older & (ids or set()):
            self.erase(erasure, selector, self._clock.to_boot(at_us))
        return len(returned)

    def _subject_keys(self, selector: Selector) -> set[bytes] | None:
        """Of the keys that what may be the selector's is sealed under; None: it names no subject."""
        if selector.subject is None or selector.tenant is None:
            return None
        names = (shred_name(selector.tenant, selector.subject), shred_name(selector.tenant, None))
        return {key.id for key in map(self._shred.find_subject, names) if key is not None}

    def _erased_so_far(self, erasure: str, selector: Selector, objects: int, size: int) -> TierErased:
        """Of the copies that an erasure ended, those whose bytes the store may still have wait."""
        waiting = waiting_bytes = unsure = 0
        for ended in chain(self._waiting.values(), self._lost.values()):
            if ended is not None and ended.erasure == erasure:
                waiting, waiting_bytes = waiting + 1, waiting_bytes + ended.size
            elif ended is None or not ended.tenant or selector.tenant in (None, ended.tenant):
                unsure += 1
        return TierErased(objects - waiting, size - waiting_bytes, waiting, unsure=unsure)

    def objects(self) -> Mapping[bytes, TierEntry]:
        """Every object that the store says it has, less those whose end waits for it; whose one is, the index tells.

        Raises `StoreError` where the store cannot be asked.
        """
        found: dict[bytes, TierEntry] = {}
        for page in self._listed():
            for one in page:
                if one.name in self._waiting:  # it ended, and the store is asked again to delete it
                    continue
                row = self._index.find(one.name)
                is_ours = row >= 0 and self._is_ours(row)
                found[one.name] = self._entry(row) if is_ours else TierEntry("", 0)
        return found

    def _listed(self) -> Iterator[list[Listed]]:
        """All that the store says it has, page by page.

        Raises `StoreError` for a store of others' that lists more than twice what its quota has room for: each name
        that it invents would take memory here.
        """
        least = object_bytes(self._terms.block_bytes, enclosed=self._encloses, checked=False)
        left, after = 2 * self._store.capacity_bytes // least + _NAMES_MIN, b""
        while page := self._store.page(after, 1000):
            left -= len(page)
            if left < 0 and self._store.is_shared:
                raise StoreError(f"{self.name} tier: lists more than it has room for")
            yield page
            after = page[-1].name

    def index(self) -> Mapping[bytes, TierEntry]:
        """Every copy of this worker's that can be found."""
        return {name: self._entry(row) for name, row in self._index.names() if self._is_ours(row)}

    def _is_ours(self, row: int) -> bool:
        return self._index.value("number", row) > 0

    def copies(self) -> Sequence[HeldCopy]:
        """Every copy that can be found."""
        return [self._held_copy(name, row) for name, row in self._index.names() if self._is_ours(row)]

    def copy(self, name: bytes) -> HeldCopy | None:
        """The copy that can be found under this name, whichever worker stored it; the number of another's is 0."""
        row = self._index.find(name)
        return None if row < 0 else self._held_copy(name, row)

    def _held_copy(self, name: bytes, row: int) -> HeldCopy:
        known = self._index.row(row)
        owner = self._owners[known.domain]
        since_us, due_us = self._clock.to_boot(known.born_us), self._clock.to_boot(known.due_us)
        whose = (owner.tenant, owner.classification)
        return HeldCopy(name, known.number, *whose, known.blocks, known.size, since_us, due_us)

    def known_us(self, now_us: int) -> int:
        """Copies are ended here, so all ends are known."""
        return now_us

    def within_us(self, tenant: str, classification: str) -> int:
        """How long after it is due a copy's bytes may still be here, by policy."""
        return self._terms.limit(tenant, classification).within_us

    def destroy(self, keys: Collection[bytes]) -> int:
        """End these objects, known or not; how many the store had."""
        rows = [row for row in map(self._index.find, keys) if row >= 0]
        self._forget_rows(rows, "orphan")
        return self._delete(keys)

    def forget(self, keys: Collection[bytes]) -> int:
        """Drop what the index has of these; how many there were."""
        rows = [row for row in map(self._index.find, keys) if row >= 0]
        self._forget_rows(rows, "orphan")
        self._delete([])
        return len(rows)

    def take_events(self) -> list[CopyEvent]:
        """What began and ended since the last call."""
        events, self._events = self._events, []
        return events

    def close(self) -> None:
        """Let the store go. What outlives the process is the next one's to find and to end; the rest ends here."""
        if not self._store.outlives:
            self._forget_rows([row for _, row in self._index.names()], "teardown")
            self._delete_all()
        with suppress(StoreError):  # then the next one takes this one for dead
            self._write_holder(is_stopped=True)
        self._store.close()

    def _end(self, rows: list[int], cause: str) -> None:
        self._forget_rows(rows, cause)
        self._delete([])

    def _forget_rows(self, rows: list[int], cause: str, erasure: str = "") -> list[bytes]:
        """Nothing finds these any more; their bytes wait for the store."""
        names, index = [], self._index
        for row in rows:
            name, known = index.name(row), index.row(row)
            if not known.number:  # another worker's: its owner ends it
                index.remove(row)
                self._sought[name] = self._clock.now_us() + _SEEK_AGAIN_US
                self._borrowed, self._borrowed_bytes = self._borrowed - 1, self._borrowed_bytes - known.size
                self._let_go += 1
                continue
            owner = self._owners[known.domain]
            shreds = (self._shreds[known.subject], self._shreds[known.bucket])
            ended = _Ended(
                known.number,
                owner.tenant,
                owner.classification,
                known.blocks,
                known.size,
                known.due_us if self._may_wait(cause) else min(known.due_us, self._clock.now_us()),
                shreds,
                erasure,
            )
            self._tell("ended", name, ended, cause)
            self._ended += 1
            self._held[owner.tenant] -= self._store.taken(known.size)
            self._waiting[name] = ended
            index.remove(row)
            names.append(name)
        return names

    def _may_wait(self, cause: str) -> bool:
        """Whether the end of a copy's key, in its own time, is the first that proves its end, and early enough."""
        return self._store.ends_by == KEY_DESTROYED and cause == "evicted"

    def _delete(self, names: Iterable[bytes]) -> int:
        """Delete these and some of what waits, at most `_DELETES` more; what fails waits on, behind the others."""
        asked = list(names)
        for name in asked:
            self._waiting.setdefault(name, None)
        now_us, chosen = self._clock.now_us(), set(asked)
        others = (
            name for name in self._waiting if name not in chosen and self._locked.get(name, 0) <= now_us
        )
        asked += islice(others, _DELETES)
        self._has_more = False
        if not asked:
            return 0
        try:
            gone = self._store.delete(asked)
        except StoreError:
            if self._store.is_shared:  # what is absent when it answers again, this may have ended
                self._unanswered.update(asked)
            return 0
        for one in gone.locked:
            self._note_lock(one)
        absent, stays = set(gone.absent), {*gone.failed, *(one.name for one in gone.locked)}
        for name in [name for name in asked if name not in stays]:
            self._locked.pop(name, None)
            ended = self._waiting.pop(name)
            if ended is None:
                self._unanswered.discard(name)
                continue
            was_ended = name not in absent or name in self._unanswered
            self._unanswered.discard(name)
            if was_ended and self._store.ends_by != KEY_DESTROYED:
                self._destroyed_of(name, ended, self._store.ends_by)
            elif not ended.is_destroyed:
                self._lost[name] = ended
        for name in stays:
            self._waiting[name] = self._waiting.pop(name)
        self._has_more = len(asked) > len(stays) and len(self._waiting) > len(stays)
        return gone.objects

    def _delete_all(self) -> int:
        """Delete what waits, as far as the store does it now."""
        count = self._delete([])
        while self._has_more:
            count += self._delete([])
        return count

    def _note_lock(self, locked: Locked) -> None:
        """The store keeps what ended until then: told once for each date."""
        name, until_us = locked
        ended = self._waiting.get(name)
        if self._locked.get(name) != until_us and ended is not None and ended.number:
            self._tell("locked", name, ended._replace(due_us=until_us))
        self._locked[name] = until_us

    def _tell_destroyed(self, shreds: set[bytes]) -> None:
        """Keys are destroyed: what waits under them cannot be opened by anybody any more."""
        for where in (self._waiting, self._lost):
            for name, ended in list(where.items()):
                if ended is not None and not shreds.isdisjoint(ended.shreds) and not ended.is_destroyed:
                    where[name] = self._destroyed_of(name, ended, KEY_DESTROYED)
        self._lost = {name: ended for name, ended in self._lost.items() if not ended.is_destroyed}

    def _destroyed_of(self, name: bytes, ended: _Ended, evidence: str) -> _Ended:
        self._tell("destroyed", name, ended, evidence)
        if ended.number:
            self._evidence += 1
            self._destroyed += not ended.is_destroyed
            if name in self._adopted:  # what the process before stored under this name is proved with it
                self._tell("destroyed", name, ended._replace(number=0), evidence)
                if evidence == self._store.ends_by:
                    self._adopted.discard(name)
        return ended._replace(is_destroyed=True)

    # -- what an earlier process left -----------------------------------------------------------------------------

    def _death_before(self) -> WorkerDeath | None:
        """Whether the process that had the tier before died."""
        holder = self._terms.holder
        read: Callable[[], bytes] | None = getattr(self._store, "holder", None)
        if holder is None or read is None or not self._store.outlives:
            return None
        try:
            return death_before(read(), holder)
        except StoreError:
            if not self._store.is_shared:
                raise
            return None  # nothing of before will be found either

    def _deaths_of_others(self) -> dict[bytes, WorkerDeath]:
        """Of workers whose heir this one is in a shared store, by the mark of what each left."""
        holder = self._terms.holder
        inherit: Callable[[Callable[[bytes], bool]], dict[bytes, bytes]] | None
        inherit = getattr(self._store, "inherit", None)
        if holder is None or inherit is None:
            return {}
        deaths: dict[bytes, WorkerDeath] = {}
        try:
            for mark, written in inherit(lambda written: death_before(written, holder) is not None).items():
                death = death_before(written, holder)
                assert death is not None, "only of the dead"
                deaths[mark] = death._replace(is_heir=True)
        except StoreError as error:
            _log.error("tier does not say what others left", tier=self.name, error=error.message)
        return deaths

    def _write_holder(self, *, is_stopped: bool) -> None:
        """Say who has the tier, and of whom it took copies over that they have passed.

        While a copy that must end is still there, the mark stays the one before.
        """
        if self._waiting:
            return
        holder = self._terms.holder
        write: Callable[..., None] | None = getattr(self._store, "write_holder", None)
        if holder is None or write is None or not self._store.outlives:
            return
        try:
            write(holder.written(is_stopped=is_stopped))
            for mark, death in self._deaths.items():
                write(death.holder.written(is_stopped=True), mark)
            self._deaths = {}
        except StoreError as error:
            if not self._store.is_shared:
                raise
            _log.error("tier does not say who holds it", tier=self.name, error=error.message)

    def _inherits(self, name: bytes, size: int, facts: ObjectFacts, tenant: str) -> bool:
        """Whether a copy of a process that died is taken over; either way it is told."""
        left_by: Callable[[bytes], bytes] | None = getattr(self._store, "left_by", None)
        death = self._death if left_by is None else self._deaths.get(left_by(name), self._death)
        if death is None:
            return True
        restores = death.is_heir and self._terms.limit(tenant, facts.classification).restores
        due_us = self._clock.to_boot(facts.due_us)
        event = CopyEvent(
            "inherited",
            name,
            0,
            tenant,
            facts.classification,
            facts.blocks,
            size,
            self._clock.boot_us(),
            due_us,
            RESTORED if restores else ENDED,
            heir_of=death.holder,
        )
        self._events.append(event)
        return restores

    def _find_what_is_there(self) -> tuple[int, int]:
        """Index what may stay, end the rest; how many of each.

        A store that is shared may be away: its worker starts without it, and a scan ends what it finds later.
        """
        try:
            return self._go_through()
        except StoreError as error:
            if not self._store.is_shared:
                raise
            _log.error("tier is away at the start", tier=self.name, error=error.message)
            self._deaths = {}  # what others left passes with a start that finds it
            return 0, 0

    def _go_through(self) -> tuple[int, int]:
        found = 0
        tenants = {self._pseudonym(name): name for name in self._terms.tenants}
        for page in self._listed():
            for one in page:
                facts = self._facts_of(one.name, one.size)
                if facts is None or not self._adopt(one.name, one.size, facts, tenants):
                    self._waiting[one.name] = _Ended(0, "", "", 0, one.size, self._clock.now_us())
                else:
                    found += 1
        return found, self._delete_all()

    def _facts_of(self, name: bytes, size: int | None) -> ObjectFacts | None:
        """What is enclosed in an object of `size` bytes, None: as long as it says itself; None: it does not open."""
        if not self._store.outlives:
            return None
        try:
            begins = self._store.peek(name, _BEGINNING)
            if begins is None:
                return None
            if size is None:
                content = int.from_bytes(begins[_CONTENT_SIZE], "little")
                size = object_bytes(content, enclosed=True, checked=False)
            return read_facts(self._keys.catalogue(), name, memoryview(begins), size)
        except (StoreError, KeyringError):
            return None

    def _adopt(self, name: bytes, size: int, facts: ObjectFacts, tenants: Mapping[bytes, str]) -> bool:
        terms, tenant, now_us = self._terms, tenants.get(facts.tenant), self._clock.now_us()
        content = facts.blocks * terms.block_bytes
        if (
            tenant is None
            or (facts.layout, facts.shard, facts.shards) != (terms.layout, terms.shard, terms.shards)
            or size != object_bytes(content, enclosed=True, checked=False)
            or not facts.born_us <= now_us < facts.due_us
            or facts.due_us > now_us + terms.limit(tenant, facts.classification).absolute_us
            or not all(self._shred.is_living(id_) for id_ in (facts.subject, facts.bucket) if id_ != NO_SHRED)
            or not self._inherits(name, size, facts, tenant)
        ):
            return False
        number = self._unclaimed.get(facts.domain)
        if number is None:
            number = self._unclaimed[facts.domain] = len(self._owners)
            self._owners.append(CopyOwner(tenant, facts.classification, facts.subject, None))
        self._adopted.add(name)
        self._begin(name, self._row_of(self._numbered + 1, facts, size, number))
        return True

    def _row_of(self, number: int, facts: ObjectFacts, size: int, domain: int) -> IndexRow:
        """What the index keeps of an object by its facts."""
        return IndexRow(
            number,
            facts.born_us,
            facts.ceiling_us,
            facts.due_us,
            facts.due_us,
            size,
            facts.depth,
            facts.blocks,
            domain,
            self._shred_number(facts.subject),
            self._shred_number(facts.bucket),
            last_of(facts.last),
        )

    # -- what things are called -----------------------------------------------------------------------------------

    def _namer(self, spec: DomainSpec) -> Callable[[bytes], bytes]:
        return self._keys.namer(spec, shard=self._terms.shard, layout=self._terms.layout)

    def _facts(self, spec: DomainSpec, part: _Part, subject: bytes, bucket: bytes) -> ObjectFacts:
        terms, blocks = self._terms, len(part.keys) // KEY_BYTES
        return ObjectFacts(
            self._keys.domain(spec),
            part.label.classification,
            spec.model,
            terms.layout,
            part.parent,
            part.keys[:KEY_BYTES],
            part.keys[-KEY_BYTES:],
            terms.shard,
            terms.shards,
            part.depth,
            blocks,
            blocks * terms.block_tokens,
            part.born_us,
            part.ceiling_us,
            spec.key_epoch,
            subject,
            bucket,
            part.due_us,
            self._pseudonym(part.label.tenant),
        )

    def _pseudonym(self, tenant: str) -> bytes:
        known = self._pseudonyms.get(tenant)
        if known is None:
            known = self._pseudonyms[tenant] = self._shred.pseudonym(tenant.encode())
        return known

    def _is_known(self, label: DomainLabel, spec: DomainSpec) -> bool:
        """Whether copies of the domain may be here; those of an earlier process get their label."""
        if spec in self._domains:
            return True
        if not self._unclaimed:
            return False
        number = self._unclaimed.pop(self._keys.domain(spec), None)
        if number is None:
            return False
        self._domains[spec] = number
        self._owners[number] = self._owners[number]._replace(label=label)
        return True

    def _domain(self, spec: DomainSpec, label: DomainLabel) -> int:
        number = self._domains.get(spec)
        if number is None:
            number = self._domains[spec] = len(self._owners)
            subject = self._subject(label)
            self._owners.append(CopyOwner(label.tenant, label.classification, subject, label))
        return number

    def _subject(self, label: DomainLabel) -> bytes:
        """The shred key of whose the domain is: its subject's, or one of all its tenant's people together."""
        return self._shred.of_subject(shred_name(label.tenant, label.subject), label.tenant).id

    def _shred_number(self, id_: bytes) -> int:
        number = self._shred_numbers.get(id_)
        if number is None:
            number = self._shred_numbers[id_] = len(self._shreds)
            self._shreds.append(id_)
        return number

    def _entry(self, row: int) -> TierEntry:
        owner = self._owners[self._index.value("domain", row)]
        return TierEntry(owner.tenant, self._clock.to_boot(self._index.value("born_us", row)))


class _Part(NamedTuple):
    """A run that becomes one object; times are the tier's."""

    label: DomainLabel
    keys: bytes
    parent: bytes
    depth: int
    born_us: int
    ceiling_us: int
    due_us: int


class _Sealed(NamedTuple):
    """An object in the store's memory that it has not completed."""

    name: bytes
    part: _Part
    size: int
    blocks: int
    subject: bytes
    bucket: bytes


class _Wanted(NamedTuple):
    """An object that ends at `end`, of which `blocks` from `depth` on are wanted, and names of the next."""

    name: bytes
    label: DomainLabel
    keys: bytes
    depth: int
    end: int
    blocks: int
    following: Sequence[bytes]


def shred_name(tenant: str, subject: str | None) -> bytes:
    """What a subject's shred key is found by, among all tenants'; None: that of all of the tenant's together."""
    return tenant.encode() if subject is None else f"{tenant}\0{subject}".encode()


def _may_be_of(owner: CopyOwner, selector: Selector, keys: set[bytes] | None) -> bool:
    """Whether copies of a domain may have what somebody inside the selector wrote.

    Of one that an earlier process stored only its tenant and its shred key are known: `keys` are the selector's.
    """
    if owner.label is not None:
        return may_hold(selector, owner.label)
    return (selector.tenant is None or selector.tenant == owner.tenant) and (
        keys is None or owner.subject in keys
    )
