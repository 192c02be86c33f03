"""One tier: runs of blocks go in sealed, come back where the same domain asks, and end no later than they would have.

    tier.store(run, read)                        # `read(first, count, into)` copies blocks of the run into memory
    found = tier.lookup(label, keys, depth)      # objects that go on from `depth`, one after the other
    blocks = tier.load(label, keys, depth, found, write)
    tier.expire()
    tier.erase(erasure, selector, before_us)

1. An object ends where its chain's depth is a multiple of `object_blocks`, or with its run, so that whoever has the
   keys of a prompt can name what may be there. It is opened with what the reader expects: nothing that a store says.
2. An object's ceiling is its run's, or the tier's own where that is sooner: no way through a tier prolongs anything.
3. Nothing is found any more from the moment its end is decided; then its key goes, where it is its own; then its bytes.
   What the store could not delete is asked for again, and waits until then.
4. A store that fails, is full, or lies gives misses, and so does a key that is destroyed. What does not open is ended.
5. `take_events` says what began and ended since the last call, each with its cause.

Called on the owning thread. Times are UTC in microseconds.
"""

from __future__ import annotations

from collections.abc import Callable, Collection, Mapping
from contextlib import suppress
from functools import partial
from typing import NamedTuple

import numpy as np

from kvcustody.clock import Clock
from kvcustody.errors import KeyringError, StoreError
from kvcustody.governance.decisions.access_plan import DomainLabel
from kvcustody.governance.erasure.selector import Selector, matches_label
from kvcustody.governance.erasure.tier_protocol import TierEntry, TierErased
from kvcustody.governance.identity.domain_spec import DomainSpec
from kvcustody.governance.keys.shred_keys import ShredKeys
from kvcustody.governance.tiers.seal.object_layout import NO_SHRED, ObjectFacts, object_bytes
from kvcustody.governance.tiers.seal.sealer import open_into, seal_into
from kvcustody.governance.tiers.seal_keys import SealKeys
from kvcustody.governance.tiers.staging import Staging
from kvcustody.governance.tiers.stores.store_protocol import TierStore
from kvcustody.governance.tiers.tier_index import TierIndex

KEY_BYTES = 32
_BUCKETS = 16  # in the time that a classification may keep anything
_EVICT_SHARE = 64  # of a full tier, that much leaves at once
_KNOWN_MIN = 1024  # domains and shred keys that are known before those of nothing are forgotten

Read = Callable[[int, int, memoryview], None]
Write = Callable[[int, int, memoryview], None]


class TierTerms(NamedTuple):
    """What a tier holds: objects of at most `object_blocks` blocks of `block_bytes`, of one shard of one layout.

    `absolute_us`: how long a classification's copies may be here, 0: not at all.
    """

    layout: bytes
    block_bytes: int
    block_tokens: int
    absolute_us: Callable[[str], int]
    object_blocks: int = 16
    shard: int = 0
    shards: int = 1


class PublishedRun(NamedTuple):
    """Whole published blocks of one chain: their keys, the key before the first (zeros: none), the first's depth."""

    label: DomainLabel
    keys: bytes
    parent: bytes
    depth: int
    born_us: int
    ceiling_us: int


class Found(NamedTuple):
    """An object that goes on from where the one before it ended, with so many blocks."""

    name: bytes
    blocks: int


class CopyEvent(NamedTuple):
    """A copy began (`cause` empty) or ended. `due_us` is when it had to have ended."""

    name: bytes
    tenant: str
    classification: str
    blocks: int
    size: int
    at_us: int
    due_us: int
    cause: str = ""


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
    ) -> None:
        self._store = store
        self._keys = keys
        self._shred = shred
        self._staging = staging
        self._clock = clock
        self._terms = terms
        self._index = TierIndex()
        self._labels: list[DomainLabel] = []
        self._domains: dict[DomainSpec, int] = {}
        self._shreds: list[bytes] = [NO_SHRED]
        self._shred_numbers: dict[bytes, int] = {NO_SHRED: 0}
        self._events: list[CopyEvent] = []
        self._waiting: list[bytes] = []  # not found any more, and still in the store
        self._erased: dict[str, tuple[int, int]] = {}
        self.ended_at_start = self._end_what_is_there()

    @property
    def name(self) -> str:
        """`host`, `nvme` or `remote`, as the policy names tiers."""
        return self._store.kind

    def __len__(self) -> int:
        """Copies that can be found."""
        return len(self._index)

    # -- in and out -----------------------------------------------------------------------------------------------

    def store(self, run: PublishedRun, read: Read) -> int:
        """Keep copies of the run's blocks that are not here; returns how many blocks are new.

        `read(first, count, into)` copies `count` of the run's blocks from the device.
        """
        spec, terms, now_us = run.label.spec, self._terms, self._clock.utc_us()
        absolute_us = terms.absolute_us(run.label.classification)
        ceiling_us = min(run.ceiling_us, now_us + absolute_us)
        if spec is None or not absolute_us or ceiling_us <= now_us:
            return 0
        stored = at = 0
        count = len(run.keys) // KEY_BYTES
        while at < count:
            depth = run.depth + at
            blocks = min(terms.object_blocks - depth % terms.object_blocks, count - at)
            part = run._replace(
                keys=run.keys[KEY_BYTES * at : KEY_BYTES * (at + blocks)],
                parent=run.keys[KEY_BYTES * (at - 1) : KEY_BYTES * at] if at else run.parent,
                depth=depth,
                ceiling_us=ceiling_us,
            )
            if self._store_object(part, spec, absolute_us, partial(read, at, blocks)):
                stored += blocks
            at += blocks
        return stored

    def lookup(self, label: DomainLabel, keys: bytes, depth: int) -> list[Found]:
        """Each object that goes on from `depth`; the sum of their blocks is how far a load would come.

        `keys` are those of the whole prompt, from depth 0 of the chain.
        """
        found: list[Found] = []
        count, step = len(keys) // KEY_BYTES, self._terms.object_blocks
        if label.spec not in self._domains:
            return found
        with suppress(KeyringError):  # an epoch that was destroyed: nothing of it is found
            while depth < count:
                one = self._farthest(label.spec, keys, depth, min(count, depth - depth % step + step))
                if one is None:
                    break
                found.append(one)
                depth += one.blocks
        return found

    def _farthest(self, spec: DomainSpec, keys: bytes, depth: int, end: int) -> Found | None:
        now_us = self._clock.utc_us()
        for at in range(end, depth, -1):
            name = self._name(spec, keys[KEY_BYTES * (at - 1) : KEY_BYTES * at])
            row = self._index.find(name)
            if row >= 0 and self._is_usable(row, spec, depth, at, now_us):
                return Found(name, at - depth)
        return None

    def load(self, label: DomainLabel, keys: bytes, depth: int, found: list[Found], write: Write) -> int:
        """Bring those objects back: `write(first, count, data)` puts blocks from that depth on the device.

        Returns how many blocks came, in order; the first object that does not open ends it, and is ended.
        """
        spec, come = label.spec, 0
        assert spec is not None
        for name, blocks in found:
            end = depth + blocks
            row = self._index.find(name)
            if row < 0 or not self._is_usable(row, spec, depth, end, self._clock.utc_us()):
                break
            if not self._load_object(name, row, label, keys, depth, end, write):
                break
            self._index.note_use(row)
            come += blocks
            depth = end
        return come

    def _store_object(
        self, part: PublishedRun, spec: DomainSpec, absolute_us: int, read: Callable[[memoryview], None]
    ) -> bool:
        blocks = len(part.keys) // KEY_BYTES
        try:
            name = self._name(spec, part.keys[-KEY_BYTES:])
        except KeyringError:  # the epoch was destroyed
            return False
        if self._index.find(name) >= 0:
            return False
        if self._waiting:
            self._delete([])
            if name in self._waiting:
                return False  # an older one has not ended yet
        content = blocks * self._terms.block_bytes
        size = object_bytes(content, enclosed=False, checked=False)
        subject = self._subject(part.label)
        bucket = self._shred.of_bucket(
            part.label.classification, part.ceiling_us, max(1, absolute_us // _BUCKETS)
        ).id
        with self._staging.take(content) as plain:
            if plain is None:
                return False
            try:
                into = self._room(name, size)
                if into is None:
                    return False
                read(plain)
                facts = self._facts(spec, part, subject, bucket)
                seal_into(self._keys.of(spec, subject, bucket), name, facts, plain, into)
                into.release()
                self._store.complete_store(name)
            except (StoreError, KeyringError):
                self._give_up(name)
                return False
            except Exception:  # of the device: nothing of it is kept, and it is not ours to hide
                self._give_up(name)
                raise
        self._index.add(
            name,
            size=size,
            domain=self._domain(spec, part.label),
            subject=self._shred_number(subject),
            bucket=self._shred_number(bucket),
            born_us=part.born_us,
            ceiling_us=part.ceiling_us,
            depth=part.depth,
            blocks=blocks,
        )
        self._events.append(
            CopyEvent(
                name,
                part.label.tenant,
                part.label.classification,
                blocks,
                size,
                self._clock.utc_us(),
                part.ceiling_us,
            )
        )
        return True

    def _give_up(self, name: bytes) -> None:
        """Nothing was kept, as far as is known; what the store made of it ends."""
        with suppress(StoreError):
            self._store.abandon_store(name)
        self._waiting.append(name)

    def _room(self, name: bytes, size: int) -> memoryview | None:
        """Memory of the store, where need be in place of what was used least."""
        into = self._store.prepare_store(name, size)
        if into is None and size <= self._store.capacity_bytes:
            count = max(1, len(self._index) // _EVICT_SHARE)
            while into is None and len(self._index):
                self._end(self._index.least_used(count), "evicted")
                into = self._store.prepare_store(name, size)
        return into

    def _load_object(
        self,
        name: bytes,
        row: int,
        label: DomainLabel,
        keys: bytes,
        depth: int,
        end: int,
        write: Write,
    ) -> bool:
        index, spec = self._index, label.spec
        assert spec is not None
        begin, blocks = index.value("depth", row), index.value("blocks", row)
        subject, bucket = (self._shreds[index.value(which, row)] for which in ("subject", "bucket"))
        part = PublishedRun(
            label,
            keys[KEY_BYTES * begin : KEY_BYTES * end],
            keys[KEY_BYTES * (begin - 1) : KEY_BYTES * begin] if begin else bytes(KEY_BYTES),
            begin,
            index.value("born_us", row),
            index.value("ceiling_us", row),
        )
        with self._staging.take(blocks * self._terms.block_bytes) as plain:
            if plain is None:
                return False
            try:
                sealed = self._store.prepare_load(name)
                if sealed is None:
                    self._end([row], "lost")
                    return False
                try:
                    facts = self._facts(spec, part, subject, bucket)
                    open_into(self._keys.of(spec, subject, bucket), name, facts, sealed, plain)
                finally:
                    sealed.release()
                    self._store.complete_load(name)
            except KeyringError:  # it does not open, or a key of it is destroyed
                self._end([row], "broken")
                return False
            except StoreError:
                return False
            skip = (depth - begin) * self._terms.block_bytes
            write(depth, end - depth, plain[skip:])
        return True

    # -- ends -----------------------------------------------------------------------------------------------------

    def expire(self) -> int:
        """End every copy whose ceiling has passed, and the keys of buckets that are over; how many copies."""
        now_us = self._clock.utc_us()
        rows = self._index.rows(self._index.column("ceiling_us") <= now_us)
        self._end(rows, "ceiling")
        self._shred.destroy_due(now_us)
        self._keys.look()
        self._delete([])
        if len(self._labels) + len(self._shreds) > _KNOWN_MIN + 4 * len(self._index):
            self._forget_unused()
        return len(rows)

    def _forget_unused(self) -> None:
        """Domains and shred keys of which nothing is here any more are not kept."""
        domains = self._index.renumber("domain")
        self._labels = [self._labels[number] for number in domains]
        self._domains = {label.spec: at for at, label in enumerate(self._labels) if label.spec is not None}
        self._shreds = [self._shreds[number] for number in self._index.renumber("subject", "bucket", first=0)]
        self._shred_numbers = {id_: number for number, id_ in enumerate(self._shreds)}

    def erase(self, erasure: str, selector: Selector, before_us: int) -> TierErased:
        """End every copy of the selector: the index first, then the keys of its subjects, then the bytes.

        Copies that were stored after `before_us` end too: a cache may always be emptied sooner.
        """
        chosen = [number for number, label in enumerate(self._labels) if matches_label(selector, label)]
        rows = self._index.rows(np.isin(self._index.column("domain"), chosen))
        objects, size = self._erased.get(erasure, (0, 0))
        objects += len(rows)
        size += sum(self._index.value("size", row) for row in rows)
        self._erased[erasure] = (objects, size)
        names = self._forget_rows(rows, "erased")
        if selector.kind in ("subject", "tenant"):
            for whose in {_whose(label) for label in map(self._labels.__getitem__, chosen) if label.subject}:
                key = self._shred.find_subject(whose)
                if key is not None:
                    self._shred.destroy(key.id)
        self._keys.look()
        self._delete(names)
        return TierErased(objects, size, waiting=len(self._waiting))

    def objects(self) -> Mapping[bytes, TierEntry]:
        """Every object that the store says it has; whose an unknown one is, nothing tells."""
        found: dict[bytes, TierEntry] = {}
        after = b""
        while page := self._store.page(after, 1000):
            for one in page:
                row = self._index.find(one.name)
                found[one.name] = self._entry(row) if row >= 0 else TierEntry("", 0)
            after = page[-1].name
        return found

    def index(self) -> Mapping[bytes, TierEntry]:
        """Every copy that can be found."""
        return {name: self._entry(row) for name, row in self._index.names()}

    def destroy(self, keys: Collection[bytes]) -> int:
        """End these objects, known or not; how many the store had."""
        rows = [row for row in map(self._index.find, keys) if row >= 0]
        self._forget_rows(rows, "orphan")
        return self._delete(list(keys))

    def forget(self, keys: Collection[bytes]) -> int:
        """Drop what the index has of these; how many there were."""
        rows = [row for row in map(self._index.find, keys) if row >= 0]
        self._forget_rows(rows, "orphan")
        return len(rows)

    def take_events(self) -> list[CopyEvent]:
        """What began and ended since the last call."""
        events, self._events = self._events, []
        return events

    def close(self) -> None:
        """End every copy here, and let the store go."""
        self._end([row for _, row in self._index.names()], "teardown")
        self._store.close()

    def _end(self, rows: list[int], cause: str) -> None:
        self._delete(self._forget_rows(rows, cause))

    def _forget_rows(self, rows: list[int], cause: str) -> list[bytes]:
        names, now_us, index = [], self._clock.utc_us(), self._index
        for row in rows:
            name, label = index.name(row), self._labels[index.value("domain", row)]
            names.append(name)
            due_us = min(index.value("ceiling_us", row), now_us)
            self._events.append(
                CopyEvent(
                    name,
                    label.tenant,
                    label.classification,
                    index.value("blocks", row),
                    index.value("size", row),
                    now_us,
                    due_us,
                    cause,
                )
            )
            index.remove(row)
        return names

    def _delete(self, names: list[bytes]) -> int:
        """Delete these and what waits; what fails waits on."""
        asked = [*self._waiting, *names]
        if not asked:
            return 0
        try:
            gone = self._store.delete(asked)
        except StoreError:
            self._waiting = asked
            return 0
        self._waiting = list(gone.failed)
        return gone.objects

    def _end_what_is_there(self) -> int:
        """What a process before left: its index is gone, so nothing of it can be found, and it ends."""
        count = 0
        while page := self._store.page(b"", 1000):
            gone = self._delete([one.name for one in page])
            count += gone
            if not gone:
                break
        return count

    # -- what things are called -----------------------------------------------------------------------------------

    def _name(self, spec: DomainSpec, last: bytes) -> bytes:
        return self._keys.name(spec, last, shard=self._terms.shard, layout=self._terms.layout)

    def _facts(self, spec: DomainSpec, part: PublishedRun, subject: bytes, bucket: bytes) -> ObjectFacts:
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
        )

    def _is_usable(self, row: int, spec: DomainSpec, depth: int, end: int, now_us: int) -> bool:
        index = self._index
        begin = index.value("depth", row)
        return (
            index.value("ceiling_us", row) > now_us
            and index.value("domain", row) == self._domains.get(spec, -1)
            and begin <= depth
            and begin + index.value("blocks", row) == end
        )

    def _domain(self, spec: DomainSpec, label: DomainLabel) -> int:
        number = self._domains.get(spec)
        if number is None:
            number = self._domains[spec] = len(self._labels)
            self._labels.append(label)
        return number

    def _subject(self, label: DomainLabel) -> bytes:
        return NO_SHRED if label.subject is None else self._shred.of_subject(_whose(label)).id

    def _shred_number(self, id_: bytes) -> int:
        number = self._shred_numbers.get(id_)
        if number is None:
            number = self._shred_numbers[id_] = len(self._shreds)
            self._shreds.append(id_)
        return number

    def _entry(self, row: int) -> TierEntry:
        label = self._labels[self._index.value("domain", row)]
        boot_us = self._clock.now_us() - self._clock.utc_us()
        return TierEntry(label.tenant, self._index.value("born_us", row) + boot_us)


def _whose(label: DomainLabel) -> bytes:
    """A subject's name among all tenants' of all issuers."""
    spec = label.spec
    assert spec is not None
    return f"{spec.issuer}\0{spec.tenant}\0{label.subject}".encode()
