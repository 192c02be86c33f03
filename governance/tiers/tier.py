"""One tier: runs of blocks go in sealed, come back where the same domain asks, and end no later than they would have.

    tier.store(run, read)                        # `read(first, count, into)` copies blocks of the run into memory
    found = tier.lookup(label, keys, depth)      # objects that go on from `depth`, one after the other
    come = tier.load(label, keys, depth, found, write)
    tier.expire()
    tier.erase(erasure, selector, before_us)

1. An object ends where its chain's depth is a multiple of `object_blocks`, or with its run. So whoever has the keys of
   a prompt can name the objects that may exist. An object is opened with what the reader expects, never with what a
   store states. Of two objects with the same end, the one that begins sooner is kept.
2. A copy is due when the holders of its blocks on the device would have let them go. It is due at the tier's own
   `absolute` if that is sooner. Blocks restored from it live no longer than its ceiling: no way through a tier prolongs
   anything. A copy that is due when its load has arrived counts as not loaded.
3. A copy is not found any more from the moment its end is decided. Then its key is destroyed, if the key is its own,
   and then its bytes. An erasure of a subject ends the key of the tenant's wider domains too. If the store could not
   delete an object, the deletion stays pending and is tried again.
4. A store that fails, is full, or returns wrong data gives misses, and so does a destroyed key. An object that does not
   open is ended.
5. For objects that an earlier process left, the index is rebuilt from facts that were sealed with them. An object ends
   if it is overdue, has another layout, or its tenant is no longer known. Its owner is known when its domain first
   asks. Where that process died, or left the objects to this one as its heir (`heirs`), only an heir takes copies over.
   It takes only those that policy lets it restore.
6. A tenant never has more than its share's cap. Where there is no room, the tenant that is furthest over its share
   gives way. Its objects move, sealed as they are, to the tier below, where there is one.
7. `take_events` returns what began and ended since the last call, each with its cause.
8. In a store that workers share, another worker's object is found by its name, which only holders of the domain's
   secret can make. It is opened with its facts and this worker's own epoch. It is no copy of this worker's: only its
   owner has custody of it, ends it, and reports that. A name that was missing is not looked up again at once.
9. An object that a store's lock keeps is deleted when the lock ends. Until then the destruction of its key counts as
   its end.

Called on the owning thread. Times that come in and go out are boot time, in microseconds.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Callable, Collection, Iterable, Iterator, Mapping, Sequence
from contextlib import suppress
from functools import partial
from itertools import takewhile
from typing import NamedTuple

import numpy as np

from kvcustody.clock import Clock
from kvcustody.errors import KeyringError, KeyServiceUnavailable, NoKeyError, StoreError
from kvcustody.governance.decisions.access_plan import DomainLabel
from kvcustody.governance.erasure.selector import Selector
from kvcustody.governance.erasure.tier_protocol import CompletedErasure, HeldCopy, TierEntry, TierErased
from kvcustody.governance.identity.domain_spec import DomainSpec
from kvcustody.governance.keys.shred_keys import ShredKeys
from kvcustody.governance.tiers.copies.ends import CopyEnds
from kvcustody.governance.tiers.copies.index import (
    BEGINNING,
    KEY_BYTES,
    CopyIndex,
    CopyOwner,
    PublishedRun,
    TierTerms,
)
from kvcustody.governance.tiers.copies.others import OthersCopies
from kvcustody.governance.tiers.copy_event import CopyEvent
from kvcustody.governance.tiers.seal.object_layout import (
    object_bytes,
)
from kvcustody.governance.tiers.seal.sealer import open_into, read_facts, seal_into
from kvcustody.governance.tiers.seal_keys import SealKeys
from kvcustody.governance.tiers.staging import Staging
from kvcustody.governance.tiers.stores.store_protocol import TierStore
from kvcustody.governance.tiers.tier_clock import TierClock
from kvcustody.governance.tiers.tier_index import IndexRow, last_of

_EVICT_SHARE = 64  # of a full tier, that much leaves at once
_HAND_DOWN = 4  # objects, where another tier takes what leaves: nobody waits for more at a time

Read = Callable[[int, int, memoryview], None]
Write = Callable[[int, int, int, memoryview], None]
Staged = Callable[[int], memoryview | None]


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
        self._lower = lower
        self.staging = staging
        self._keys, self._shred, self._clock, self._terms = keys, shred, TierClock(clock), terms
        encloses = terms.encloses or store.outlives or lower is not None
        self._index = CopyIndex(store, keys, shred, self._clock, terms, encloses=encloses)
        self._rows = self._index.rows
        self._ends = CopyEnds(self._index)
        self._others = OthersCopies(self._index, self._ends)
        self._refused = 0
        self.found_at_start, self.ended_at_start = self._others.find_what_is_there()
        self._others.write_holder(is_stopped=False)

    @property
    def name(self) -> str:
        """`host`, `nvme` or `remote`, as the policy names tiers."""
        return self._index.store.kind

    @property
    def capacity_bytes(self) -> int:
        """The most that the store keeps."""
        return self._index.store.capacity_bytes

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
        return self._index.store.is_shared

    @property
    def in_flight(self) -> int:
        """How many loads are worth having on their way at a time."""
        return self._index.store.in_flight

    @property
    def ended(self) -> int:
        """Copies that nothing finds any more: as long as it stays, what was found is found again."""
        return self._ends.ended + self._index.let_go

    @property
    def counts(self) -> CopyCounts:
        """Since the start, and now."""
        waiting = [one for one in self._ends.unproven() if not one.is_destroyed]
        return CopyCounts(
            self._index.numbered,
            self._ends.ended,
            self._ends.destroyed,
            self._ends.evidence,
            self._index.copies_count,
            len(waiting),
            self._rows.size - self._index.borrowed_bytes,
            sum(one.size for one in waiting),
            self._refused,
        )

    def __len__(self) -> int:
        """Copies of this worker's that can be found."""
        return self._index.copies_count

    def __bool__(self) -> bool:
        return True

    def probe(self) -> int:
        """Read one object as a load does, and drop it; its bytes, 0 where there is none or it does not answer."""
        rows = self._rows.least_used(1)
        if not rows:
            return 0
        name = self._rows.name(rows[0])
        with suppress(StoreError):
            sealed = self._index.store.prepare_load(name)
            if sealed is not None:
                size = len(sealed)
                sealed.release()
                self._index.store.complete_load(name)
                return size
        return 0

    def store(self, run: PublishedRun, read: Read) -> int:
        """Keep copies of the run's blocks that are not here; returns how many blocks are new.

        `read(first, count, into)` copies `count` of the run's blocks from the device.
        """
        label, terms, now_us = run.label, self._terms, self._clock.now_us()
        limit = terms.limit(label.tenant, label.classification)
        due_us = min(
            self._clock.of_boot(run.due_us),
            self._clock.of_boot(run.ceiling_us),
            now_us + limit.absolute_us,
        )
        if label.spec is None or not limit.absolute_us or due_us <= now_us or terms.withholds(label):
            return 0
        stored = at = 0
        count = len(run.keys) // KEY_BYTES
        born_us, ceiling_us = (
            self._clock.of_boot(run.born_us),
            self._clock.of_boot(run.ceiling_us),
        )
        before = deque[_Sealed]()  # these are written while the next is sealed
        largest = min(count, terms.object_blocks) * terms.block_bytes
        try:
            with self.staging.take_for_many(largest) as staged:
                while at < count:
                    depth = run.depth + at
                    blocks = min(terms.object_blocks - depth % terms.object_blocks, count - at)
                    while before and not self._fits(sum(one.size for one in before), blocks, label.tenant):
                        stored += self._complete(before.popleft())  # what gives way does not wait behind it
                    part = PublishedRun(
                        label,
                        run.keys[KEY_BYTES * at : KEY_BYTES * (at + blocks)],
                        run.keys[KEY_BYTES * (at - 1) : KEY_BYTES * at] if at else run.parent,
                        depth,
                        born_us,
                        ceiling_us,
                        due_us,
                    )
                    sealed = self._seal_object(part, label.spec, limit.bucket_us, partial(read, at, blocks), staged)
                    if sealed is not None:
                        before.append(sealed)
                    if len(before) > self._index.store.in_flight or (sealed is None and before):
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
        copies: list[Found] = []
        index, spec, is_shared = self._rows, label.spec, self._index.store.is_shared and seeks
        if spec is None or not (len(index) or is_shared) or self._terms.withholds(label):
            return copies
        try:
            if not self._index.is_known(label, spec) and not is_shared:
                return copies
            name = self._index.namer(spec)
        except NoKeyError:  # an epoch that was destroyed, say: nothing of it is found
            return copies
        step, count = self._terms.object_blocks, len(keys) // KEY_BYTES
        most, domain, now_us = (
            count if most is None else most,
            self._index.domains.get(spec, -1),
            self._clock.now_us(),
        )
        while depth < most:
            first, last = depth, min(count, depth - depth % step + step)
            with suppress(NoKeyError):  # then nothing is sought, as where nobody has it
                if is_shared and self._others.seek(label, spec, keys, depth, last):
                    domain = self._index.domains[spec]
            for end in self._ends_within(keys, depth, last):
                one = name(keys[KEY_BYTES * (end - 1) : KEY_BYTES * end])
                row = index.find(one)
                if row >= 0 and index.reaches(row, domain, depth, end, now_us):
                    spare = max(0, end - most)
                    copies.append(Found(one, end - spare - depth, index.value("size", row), spare))
                    depth = end
                    break
            if depth == first:
                break
        return copies

    def _ends_within(self, keys: bytes, depth: int, last: int) -> Iterator[int]:
        """Where objects that begin at `depth` or before may end, up to `last`: most end there, so it comes first."""
        if self._rows.may_end(keys[KEY_BYTES * (last - 1) : KEY_BYTES * last]):
            yield last
        for at in reversed(self._rows.ends_among(keys[KEY_BYTES * depth : KEY_BYTES * (last - 1)])):
            yield depth + at

    def expect(self, found: Iterable[Found]) -> None:
        """Have these on their way: `load` of each follows, or `abandon`."""
        for one in found:
            self._index.store.start_load(one.name)

    def abandon(self, found: Iterable[Found]) -> None:
        """These are not wanted any more, if they were expected."""
        for one in found:
            self._index.store.abandon_load(one.name)

    def load(self, label: DomainLabel, keys: bytes, depth: int, copies: list[Found], write: Write) -> list[Restored]:
        """Bring those objects back: `write(depth, count, skip, data)` puts blocks from that depth on the device.

        `data` are the blocks of a whole object, of which the first `skip` are there already, and what is behind the
        `count` is spare. Returns what came in time, in order, those that live alike together; the first object that
        does not open ends it, and is ended.
        """
        spec, restored = label.spec, list[Restored]()
        assert spec is not None
        index = self._rows
        following: list[bytes] = []  # these are read while the one before them is opened
        lanes = self._index.store.in_flight
        ahead = lanes + lanes // 2  # a lane that is done finds the next one waiting
        whole = self._terms.object_blocks * self._terms.block_bytes
        largest = min(whole, max((one.size for one in copies), default=0))
        domain = self._index.domains.get(spec, -1)
        try:
            with self.staging.take_for_many(largest) as staged:
                for at, (name, blocks, _, spare) in enumerate(copies):
                    following = [one.name for one in copies[at + 1 : at + 1 + ahead]]
                    end, row = depth + blocks + spare, index.find(name)
                    if row < 0 or not index.reaches(row, domain, depth, end, self._clock.now_us()):
                        self._index.store.abandon_load(name)
                        break
                    known = index.row(row)
                    if ahead > 1:
                        for one in (name, *following):
                            self._index.store.start_load(one)
                    wanted = _Wanted(name, label, keys, depth, end, blocks, following)
                    if not self._load_object(wanted, row, known, write, staged):
                        break
                    index.note_use(row)
                    depth = end
                    times = (known.born_us, known.ceiling_us, known.due_us)
                    before = restored.pop().blocks if restored and restored[-1][1:] == times else 0
                    restored.append(Restored(before + blocks, *times))
        finally:
            for one in following:
                self._index.store.abandon_load(one)
        to_boot = self._clock.to_boot
        return [
            Restored(one.blocks, to_boot(one.born_us), to_boot(one.ceiling_us), to_boot(one.due_us))
            for one in in_time(restored, self._clock.now_us())
        ]

    def _seal_object(
        self,
        part: PublishedRun,
        spec: DomainSpec,
        bucket_us: int,
        read: Callable[[memoryview], None],
        staged: Staged,
    ) -> _Sealed | None:
        """Seal it into memory of the store, which writes it from then on; None: it is not kept."""
        label = part.label
        blocks = len(part.keys) // KEY_BYTES
        try:
            name = self._index.namer(spec)(part.keys[-KEY_BYTES:])
            known = self._index.is_known(label, spec)
        except NoKeyError:  # the epoch was destroyed, say
            return None
        row = self._rows.find(name) if known else -1
        if row >= 0:
            if self._rows.value("blocks", row) >= blocks:
                return None
            # It began later in the chain: whoever needs it is served by the longer one.
            self._ends.end([row], "evicted")
        if self._ends.waiting:
            self._ends.delete([])
            if name in self._ends.waiting:
                return None  # an older one has not ended yet
        content = blocks * self._terms.block_bytes
        size = object_bytes(content, enclosed=self._index.encloses, checked=False)
        try:
            subject = self._index.subject(label)
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
            facts = self._index.facts(spec, part, subject, bucket)
            enclosing = self._keys.catalogue() if self._index.encloses else None
            seal_into(self._keys.of(spec, subject, bucket), name, facts, plain, into, facts_key=enclosing)
            into.release()
            self._index.store.start_store(name)
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
            is_kept = self._index.store.complete_store(name)
        except StoreError:
            self._give_up(name)
            self._refused += 1
            return 0
        if not is_kept:  # another worker stored it before, or what came of a put of ours that was given up
            self._index.unfound_until.pop(name, None)
            if self._others.is_own_residue(name):
                self._ends.waiting.setdefault(name, None)
            return 0
        self._index.begin(
            name,
            IndexRow(
                self._index.numbered + 1,
                part.born_us,
                part.ceiling_us,
                part.due_us,
                part.due_us,
                size,
                part.depth,
                blocks,
                self._index.domain(spec, part.label),
                self._index.shred_number(subject),
                self._index.shred_number(bucket),
                last_of(part.keys[-KEY_BYTES:]),
            ),
        )
        return blocks

    def _give_up(self, name: bytes) -> None:
        """Nothing was kept, as far as is known; what the store made of it ends."""
        with suppress(StoreError):
            self._index.store.abandon_store(name)
        if not self._index.store.is_shared or self._others.is_own_residue(name):
            self._ends.waiting.setdefault(name, None)

    def _fits(self, coming: int, blocks: int, tenant: str) -> bool:
        """Whether an object of so many blocks fits, where `coming` bytes of the tenant's are no copy yet."""
        store = self._index.store
        size = object_bytes(blocks * self._terms.block_bytes, enclosed=self._index.encloses, checked=False)
        taken = store.taken(size)
        return (
            self._index.held.get(tenant, 0) + taken + store.taken(coming) <= self._most(tenant)
            and store.used_bytes + taken <= store.capacity_bytes
        )

    def _most(self, tenant: str) -> int:
        """What a tenant may have of the store."""
        return int(self._terms.share(tenant).cap * self._index.store.capacity_bytes)

    def _room(self, name: bytes, size: int, tenant: str, until_us: int) -> memoryview | None:
        """Memory of the store, where need be in place of what was used least."""
        store, most = self._index.store, self._most(tenant)
        taken = store.taken(size)
        if taken > most:
            return None
        while self._index.held.get(tenant, 0) + taken > most:
            self._evict_from(tenant)
        into = store.prepare_store(name, size, until_us)
        while into is None and self._index.copies_count:
            self._evict_from(self._furthest_over(tenant))
            into = store.prepare_store(name, size, until_us)
        return into

    def _furthest_over(self, tenant: str) -> str:
        """Whoever has most beyond its share; the asking tenant where nobody has."""
        store, best, most = self._index.store, tenant, 0
        for other, size in self._index.held.items():
            over = size - int(self._terms.share(other).guaranteed * store.capacity_bytes)
            if over > most:
                best, most = other, over
        if not self._index.held.get(best):
            best = max(self._index.held, key=self._index.held.__getitem__)
        return best

    def _evict_from(self, tenant: str) -> None:
        numbers = [number for number, owner in enumerate(self._index.owners) if owner.tenant == tenant]
        theirs = np.isin(self._rows.column("domain"), numbers) & (self._rows.column("number") > 0)
        count = max(1, len(self._rows) // _EVICT_SHARE)
        if self._lower is not None:
            count = min(count, _HAND_DOWN)
        rows = self._rows.least_used(count, theirs)
        for row in rows if self._lower is not None else ():
            self._hand_down(self._rows.name(row), self._rows.row(row))
        self._ends.end(rows, "evicted")

    def _hand_down(self, name: bytes, known: IndexRow) -> None:
        owner = self._index.owners[known.domain]
        assert self._lower is not None
        with suppress(StoreError):
            sealed = self._index.store.prepare_load(name)
            if sealed is None:
                return
            try:
                shreds = (self._index.shreds[known.subject], self._index.shreds[known.bucket])
                self._lower.take_over(name, known, owner, shreds, sealed)
            finally:
                sealed.release()
                self._index.store.complete_load(name)

    def take_over(
        self, name: bytes, known: IndexRow, owner: CopyOwner, shreds: tuple[bytes, bytes], sealed: memoryview
    ) -> bool:
        """Keep an object of another tier as it is sealed, where policy lets it be here, no longer than there."""
        label, now_us = owner.label, self._clock.now_us()
        limit = self._terms.limit(owner.tenant, owner.classification)
        due_us = min(known.due_us, now_us + limit.absolute_us)
        if label is None or label.spec is None or due_us <= now_us or name in self._ends.waiting:
            return False
        if self._rows.find(name) >= 0:
            return True
        try:
            into = self._room(name, known.size, owner.tenant, due_us)
            if into is None:
                self._refused += 1
                return False
            into[: known.size] = sealed
            into.release()
            is_kept = self._index.store.complete_store(name)
        except StoreError:
            self._give_up(name)
            self._refused += 1
            return False
        if not is_kept:  # another worker has it there
            return True
        here = known._replace(
            number=self._index.numbered + 1,
            due_us=due_us,
            domain=self._index.domain(label.spec, label),
            subject=self._index.shred_number(shreds[0]),
            bucket=self._index.shred_number(shreds[1]),
        )
        self._index.begin(name, here)
        return True

    def give(self, label: DomainLabel, keys: bytes, depth: int) -> GivenObjects:
        """A copy of each object that goes on from `depth` of the chain, sealed as it is: for another worker."""
        objects = []
        for found in self.lookup(label, keys, depth):
            try:
                sealed = self._index.store.prepare_load(found.name)
            except StoreError:
                break
            if sealed is None:
                break
            try:
                objects.append(SealedObject(found.name, bytes(sealed[: found.size])))
            finally:
                sealed.release()
                self._index.store.complete_load(found.name)
            depth += found.blocks
        return GivenObjects(tuple(objects), depth == len(keys) // KEY_BYTES)

    def receive(self, label: DomainLabel, keys: bytes, objects: Iterable[SealedObject]) -> int:
        """Keep what another worker sealed, each where it is of this chain and policy lets it be here; how many blocks.

        The copies are this tier's from now on, due no later than there. What they hold is checked when it is opened.
        """
        spec, count, blocks = label.spec, len(keys) // KEY_BYTES, 0
        if spec is None or not self._index.admits(label):
            return 0
        for name, data in objects:
            try:
                facts = read_facts(self._keys.catalogue(), name, memoryview(data)[:BEGINNING], len(data))
                end = facts.depth + facts.blocks
                if not facts.depth < end <= count:
                    continue
                if name != self._index.namer(spec)(keys[KEY_BYTES * (end - 1) : KEY_BYTES * end]):
                    continue
                if not self._others.is_of(facts, label, spec, keys, facts.depth, end):
                    continue
            except NoKeyError:
                continue
            row = self._index.row_of(0, facts, len(data), 0)
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
        subject, bucket = self._index.shreds[known.subject], self._index.shreds[known.bucket]
        part = PublishedRun(
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
            sealed = self._index.store.prepare_load(name)
            if sealed is None:
                self._ends.end([row], "lost")
                return False
            try:
                for one in following:
                    self._index.store.start_load(one)
                facts = self._index.facts(spec, part, subject, bucket)
                open_into(self._keys.of(spec, subject, bucket), name, facts, sealed, plain)
            finally:
                sealed.release()
                self._index.store.complete_load(name)
        except (StoreError, KeyServiceUnavailable):  # it may open another time
            self._refused += 1
            return False
        except KeyringError:  # it does not open, or a key of it is destroyed
            self._ends.end([row], "broken")
            return False
        if known.due_us <= self._clock.now_us():  # its time ended while it was read
            return False
        write(depth, wanted_blocks, depth - begin, plain)
        return True

    @property
    def returned_keys(self) -> int:
        """How many destroyed keys were in the file of shred keys again when it was opened."""
        return self._shred.returned

    def objects(self) -> Mapping[bytes, TierEntry]:
        """Every object that the store says it has, less those whose end waits for it; whose one is, the index tells.

        Raises `StoreError` where the store cannot be asked.
        """
        entries: dict[bytes, TierEntry] = {}
        for page in self._index.listed():
            for one in page:
                if one.name in self._ends.waiting:  # it ended, and the store is asked again to delete it
                    continue
                row = self._rows.find(one.name)
                is_ours = row >= 0 and self._index.is_ours(row)
                entries[one.name] = self._index.entry(row) if is_ours else TierEntry("", 0)
        return entries

    def known_us(self, now_us: int) -> int:
        """Copies are ended here, so all ends are known."""
        return now_us

    def within_us(self, tenant: str, classification: str) -> int:
        """How long after it is due a copy's bytes may still be here, by policy."""
        return self._terms.limit(tenant, classification).within_us

    def take_events(self) -> list[CopyEvent]:
        """What began and ended since the last call."""
        events, self._index.events = self._index.events, []
        return events

    def close(self) -> None:
        """Let the store go. What outlives the process is the next one's to find and to end; the rest ends here."""
        if not self._index.store.outlives:
            self._ends.forget_rows([row for _, row in self._rows.names()], "teardown")
            self._ends.delete_all()
        with suppress(StoreError):  # then the next one takes this one for dead
            self._others.write_holder(is_stopped=True)
        self._index.store.close()

    # -- by its parts -------------------------------------------------------------------------------------------------

    def admits(self, label: DomainLabel) -> bool:
        """Whether policy lets blocks of this domain be here, and nothing withholds them."""
        return self._index.admits(label)

    def has(self, label: DomainLabel, last: bytes) -> bool:
        """Whether a copy that ends with this block can be found."""
        return self._index.has(label, last)

    def has_run(self, label: DomainLabel, keys: bytes, depth: int) -> bool:
        """Whether every object that `store` would make of these blocks, of which the first is at `depth`, is here."""
        return self._index.has_run(label, keys, depth)

    def is_due(self, now_us: int) -> bool:
        """Whether `expire` may have something to do at this boot time."""
        return self._ends.is_due(now_us)

    def expire(self) -> int:
        """End every copy that is due or whose keys are destroyed, and the keys of buckets that are over; how many."""
        return self._ends.expire()

    def narrow(self) -> int:
        """The policy, a keyring or a file of shred keys has changed: end what may be here no longer; how many."""
        return self._ends.narrow()

    def end_tenant(self, tenant: str) -> int:
        """A tenant is not here any more: its copies make room; how many."""
        return self._ends.end_tenant(tenant)

    def erase(self, erasure: str, selector: Selector, before_us: int) -> TierErased:
        """End every copy that may be of the selector (rule 3), also what was stored after `before_us`."""
        return self._ends.erase(erasure, selector, before_us)

    def erase_returned(self, complete: CompletedErasure) -> int:
        """Carry out an erasure again where a key from before it is there; how many keys."""
        return self._ends.erase_returned(complete)

    def index(self) -> Mapping[bytes, TierEntry]:
        """Every copy of this worker's that can be found."""
        return self._index.entries()

    def copies(self) -> Sequence[HeldCopy]:
        """Every copy that can be found."""
        return self._index.copies()

    def copy(self, name: bytes) -> HeldCopy | None:
        """The copy that can be found under this name, whichever worker stored it; the number of another's is 0."""
        return self._index.copy(name)

    def destroy(self, keys: Collection[bytes]) -> int:
        """End these objects, known or not; how many the store had."""
        return self._ends.destroy(keys)

    def forget(self, keys: Collection[bytes]) -> int:
        """Drop what the index has of these; how many there were."""
        return self._ends.forget(keys)

    @property
    def sought(self) -> int:
        """Times that the store was asked what others stored."""
        return self._others.sought


class _Sealed(NamedTuple):
    """An object in the store's memory that it has not completed."""

    name: bytes
    part: PublishedRun
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
