"""Copies by others in a tier's place: an earlier process's, which are adopted or ended, and other workers'.

The rules are 5 and 8 of `tiers.tier`.
"""

from __future__ import annotations

from collections.abc import Mapping
from contextlib import suppress

from kvcustody.errors import StoreError
from kvcustody.governance.decisions.access_plan import DomainLabel
from kvcustody.governance.erasure.selector import may_hold
from kvcustody.governance.identity.domain_spec import DomainSpec
from kvcustody.governance.tiers.copies.ends import SEEK_AGAIN_US, CopyEnds
from kvcustody.governance.tiers.copies.index import KEY_BYTES, CopyIndex, CopyOwner, EndedCopy
from kvcustody.governance.tiers.copy_event import CopyEvent
from kvcustody.governance.tiers.heirs import ENDED, RESTORED, WorkerDeath, death_before
from kvcustody.governance.tiers.seal.object_layout import NO_SHRED, ObjectFacts, object_bytes
from kvcustody.logger import get_logger

_log = get_logger(__name__)
_CLOCKS_DIFFER_US = 5_000_000  # at most, of two workers that share or hand over
_SOUGHT_MAX, _BORROWED_MAX = 4096, 65_536
_EVICTED = 1024  # at once, where as many are borrowed as may be


class OthersCopies:
    """Finds others' copies for one tier."""

    def __init__(self, index: CopyIndex, ends: CopyEnds) -> None:
        self._index = index
        self._ends = ends
        self._rows, self._clock, self._terms, self._shred = index.rows, index.clock, index.terms, index.shred
        self.sought = 0  # times that the store was asked what others stored
        self._death = self._death_before()
        self._deaths = self._deaths_of_others()

    def seek(self, label: DomainLabel, spec: DomainSpec, keys: bytes, depth: int, end: int) -> bool:
        """Whether another worker stored an object that ends at `end` and that the index lacks (rule 8)."""
        name = self._index.namer(spec)(keys[KEY_BYTES * (end - 1) : KEY_BYTES * end])
        now_us = self._clock.now_us()
        if self._rows.find(name) >= 0 or name in self._ends.waiting or self._index.unfound_until.get(name, 0) > now_us:
            return False
        if not self._index.admits(label):
            return False
        self.sought += 1
        facts = self._index.facts_of(name, None)
        if facts is None or self.is_own(name) or not self.is_of(facts, label, spec, keys, depth, end):
            self._index.unfound_until[name] = now_us + SEEK_AGAIN_US
            self._index.unfound_until.move_to_end(name)
            if len(self._index.unfound_until) > _SOUGHT_MAX:
                self._index.unfound_until.popitem(last=False)
            return False
        self._borrow(name, facts, self._index.domain(spec, label))
        return True

    def is_of(
        self, facts: ObjectFacts, label: DomainLabel, spec: DomainSpec, keys: bytes, depth: int, end: int
    ) -> bool:
        """Whether an object's facts match this chain's blocks up to `end`, and it may still be here."""
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
            and (facts.domain, facts.model, facts.epoch) == (self._index.keys.domain(spec), spec.model, spec.key_epoch)
            and facts.classification == label.classification
            and facts.tenant == self._index.pseudonym(label.tenant)
            and (facts.layout, facts.shard, facts.shards) == (terms.layout, terms.shard, terms.shards)
            and facts.born_us <= now_us < facts.due_us <= now_us + limit_us
            and not any(
                facts.born_us <= at_us + _CLOCKS_DIFFER_US and may_hold(selector, label)
                for selector, at_us in self._ends.erasures
            )
            and all(self._shred.is_living(id_) for id_ in (facts.subject, facts.bucket) if id_ != NO_SHRED)
        )

    def _borrow(self, name: bytes, facts: ObjectFacts, domain: int) -> None:
        """Another worker's object can be found from now on; it gives way to nothing of ours."""
        if self._index.borrowed >= _BORROWED_MAX:
            others = self._rows.column("number") == 0
            self._ends.forget_rows(self._rows.least_used(_EVICTED, others), "evicted")
        size = object_bytes(facts.blocks * self._terms.block_bytes, enclosed=True, checked=False)
        self._rows.add(name, self._index.row_of(0, facts, size, domain))
        self._index.borrowed += 1
        self._index.borrowed_bytes += size
        self._index.due_us = min(self._index.due_us, facts.due_us)

    def is_own_residue(self, name: bytes) -> bool:
        """Whether the object of this name is this worker's; a scan decides for one that cannot be read now."""
        begins: bytes | None = None
        with suppress(StoreError):
            begins = self._index.store.peek(name, 1)
        return begins is not None and self.is_own(name)

    def is_own(self, name: bytes) -> bool:
        """Whether this worker stored the object whose beginning it read; without an index entry, it has ended."""
        return self._index.store.is_own(name)

    def _death_before(self) -> WorkerDeath | None:
        """Whether the process that had the tier before died."""
        holder = self._terms.holder
        if holder is None or not self._index.store.outlives:
            return None
        try:
            return death_before(self._index.store.holder(), holder)
        except StoreError:
            if not self._index.store.is_shared:
                raise
            return None  # nothing of before will be found either

    def _deaths_of_others(self) -> dict[bytes, WorkerDeath]:
        """Of workers whose heir this one is in a shared store, by the mark of what each left."""
        holder = self._terms.holder
        if holder is None:
            return {}
        deaths: dict[bytes, WorkerDeath] = {}
        try:
            left = self._index.store.inherit(lambda written: death_before(written, holder) is not None)
            for mark, written in left.items():
                death = death_before(written, holder)
                assert death is not None, "only of the dead"
                deaths[mark] = death._replace(is_heir=True)
        except StoreError as error:
            _log.error("tier does not say what others left", tier=self._index.store.kind, error=error.message)
        return deaths

    def write_holder(self, *, is_stopped: bool) -> None:
        """Write who holds the tier, and whose copies it took over.

        While a copy that must end is still there, the mark stays the one before.
        """
        if self._ends.waiting:
            return
        holder, write = self._terms.holder, self._index.store.write_holder
        if holder is None or not self._index.store.outlives:
            return
        try:
            write(holder.written(is_stopped=is_stopped))
            for mark, death in self._deaths.items():
                write(death.holder.written(is_stopped=True), mark)
            self._deaths = {}
        except StoreError as error:
            if not self._index.store.is_shared:
                raise
            _log.error("tier does not say who holds it", tier=self._index.store.kind, error=error.message)

    def _inherits(self, name: bytes, size: int, facts: ObjectFacts, tenant: str) -> bool:
        """Whether a copy of a process that died is taken over; either way it is told."""
        death = self._deaths.get(self._index.store.left_by(name), self._death)
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
        self._index.events.append(event)
        return restores

    def find_what_is_there(self) -> tuple[int, int]:
        """Index the copies that may stay, and end the rest; returns the number of each.

        A store that is shared may be away: its worker starts without it, and a scan ends what it finds later.
        """
        try:
            return self._go_through()
        except StoreError as error:
            if not self._index.store.is_shared:
                raise
            _log.error("tier is away at the start", tier=self._index.store.kind, error=error.message)
            self._deaths = {}  # what others left passes with a start that finds it
            return 0, 0

    def _go_through(self) -> tuple[int, int]:
        adopted = 0
        tenants = {self._index.pseudonym(name): name for name in self._terms.tenants}
        for page in self._index.listed():
            for one in page:
                facts = self._index.facts_of(one.name, one.size)
                if facts is None or not self._adopt(one.name, one.size, facts, tenants):
                    self._ends.waiting[one.name] = EndedCopy(0, "", "", 0, one.size, self._clock.now_us())
                else:
                    adopted += 1
        return adopted, self._ends.delete_all()

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
        number = self._index.unclaimed.get(facts.domain)
        if number is None:
            number = self._index.unclaimed[facts.domain] = len(self._index.owners)
            self._index.owners.append(CopyOwner(tenant, facts.classification, facts.subject, None))
        self._ends.adopted.add(name)
        self._index.begin(name, self._index.row_of(self._index.numbered + 1, facts, size, number))
        return True
