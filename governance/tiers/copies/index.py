"""The index of a tier's copies: owners, and names by which they are found (`tiers.tier`, rules 1 and 5).

`rows` has every object that can be found: this worker's own copies, and other workers' (`number` 0). Times in rows are
the tier's own UTC; what goes out is boot time. All in microseconds.
"""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from typing import NamedTuple

from kvcustody.errors import KeyringError, NoKeyError, StoreError
from kvcustody.governance.decisions.access_plan import DomainLabel
from kvcustody.governance.erasure.tier_protocol import HeldCopy, TierEntry
from kvcustody.governance.identity.domain_spec import DomainSpec
from kvcustody.governance.keys.shred_keys import ShredKeys
from kvcustody.governance.tiers.copy_event import CopyEvent
from kvcustody.governance.tiers.heirs import TierHolder
from kvcustody.governance.tiers.seal.extended_nonce import TAG_BYTES
from kvcustody.governance.tiers.seal.object_layout import (
    FACTS_BYTES,
    HEADER_BYTES,
    NO_SHRED,
    ObjectFacts,
    object_bytes,
)
from kvcustody.governance.tiers.seal.sealer import read_facts
from kvcustody.governance.tiers.seal_keys import SealKeys
from kvcustody.governance.tiers.stores.store_protocol import Listed, TierStore
from kvcustody.governance.tiers.tier_clock import TierClock
from kvcustody.governance.tiers.tier_index import IndexRow, TierIndex, last_of

KEY_BYTES = 32
NEVER_US = 1 << 62
BEGINNING = HEADER_BYTES + FACTS_BYTES + TAG_BYTES  # bytes of an object that say what it is
_NAMES_MIN = 10_000  # so many names a store may list whatever its size
_CONTENT_SIZE = slice(8, 16)  # of a header


class TierShare(NamedTuple):
    """A tenant's bytes in a tier, and its limit."""

    guaranteed: float = 0.0
    cap: float = 1.0


class CopyLimit(NamedTuple):
    """How long copies may stay in a tier (0: not at all), and the width of the time buckets whose keys end them."""

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


class CopyOwner(NamedTuple):
    """The owner of one domain's copies; `label` None: an earlier process stored them, and nobody has asked yet."""

    tenant: str
    classification: str
    subject: bytes
    label: DomainLabel | None


class EndedCopy(NamedTuple):
    """An unfindable copy whose bytes may still exist."""

    number: int
    tenant: str
    classification: str
    blocks: int
    size: int
    due_us: int
    shreds: tuple[bytes, ...] = ()
    erasure: str = ""
    is_destroyed: bool = False


class PublishedRun(NamedTuple):
    """Whole published blocks of one chain: their keys, the key before the first (zeros: none), the first's depth.

    `due_us` is when what holds them lets them go, `ceiling_us` what nothing prolongs. Times are boot time; a run that
    becomes one object has the tier's.
    """

    label: DomainLabel
    keys: bytes
    parent: bytes
    depth: int
    born_us: int
    ceiling_us: int
    due_us: int


class CopyIndex:
    """The index of one tier, with the store, keys, clock and terms of all of its parts."""

    def __init__(
        self,
        store: TierStore,
        keys: SealKeys,
        shred: ShredKeys,
        clock: TierClock,
        terms: TierTerms,
        *,
        encloses: bool,
    ) -> None:
        """`encloses`: objects say what they are to who has the keys."""
        self.store = store
        self.keys = keys
        self.shred = shred
        self.clock = clock
        self.terms = terms
        self.encloses = encloses
        self.rows = TierIndex()
        self.owners: list[CopyOwner] = []
        self.domains: dict[DomainSpec, int] = {}
        self.unclaimed: dict[bytes, int] = {}  # by domain digest
        self.shreds: list[bytes] = [NO_SHRED]
        self.shred_numbers: dict[bytes, int] = {NO_SHRED: 0}
        self.events: list[CopyEvent] = []
        self.unfound_until: OrderedDict[bytes, int] = OrderedDict()  # names that nobody had, and how long that holds
        self.borrowed = self.borrowed_bytes = self.let_go = 0  # others' objects that can be found, and ended
        self.held: dict[str, int] = {}  # bytes of the store by tenant
        self.pseudonyms: dict[str, bytes] = {}
        self.numbered = 0
        self.due_us = NEVER_US  # nothing is due before

    @property
    def copies_count(self) -> int:
        """The number of this worker's findable copies."""
        return len(self.rows) - self.borrowed

    def admits(self, label: DomainLabel) -> bool:
        """Whether the policy permits this domain's blocks here, and nothing withholds them."""
        terms = self.terms
        return (
            label.spec is not None
            and terms.limit(label.tenant, label.classification).absolute_us > 0
            and not terms.withholds(label)
        )

    def has_each(self, label: DomainLabel, lasts: Iterable[bytes]) -> bool:
        """Return for each block whether an object of the domain ends with it."""
        spec = label.spec
        if spec is None or spec not in self.domains or self.terms.withholds(label):
            return False
        try:
            name = self.namer(spec)
        except NoKeyError:
            return False
        return all(self.rows.find(name(last)) >= 0 for last in lasts)

    def has(self, label: DomainLabel, last: bytes) -> bool:
        """Whether a findable copy ends with this block."""
        return self.rows.may_end(last) and self.has_each(label, (last,))

    def has_run(self, label: DomainLabel, keys: bytes, depth: int) -> bool:
        """Whether the tier has every object that `store` would make of these blocks, the first at `depth`."""
        step, may_end = self.terms.object_blocks, self.rows.may_end
        ends = range(KEY_BYTES * (step - depth % step), len(keys), KEY_BYTES * step)
        lasts = [keys[-KEY_BYTES:], *[keys[end - KEY_BYTES : end] for end in ends]]
        return all(map(may_end, lasts)) and self.has_each(label, lasts)

    def namer(self, spec: DomainSpec) -> Callable[[bytes], bytes]:
        """Return the function that names a domain's objects by their last block's key."""
        return self.keys.namer(spec, shard=self.terms.shard, layout=self.terms.layout)

    def facts(self, spec: DomainSpec, part: PublishedRun, subject: bytes, bucket: bytes) -> ObjectFacts:
        """Return the facts that are sealed with the object of `part`."""
        terms, blocks = self.terms, len(part.keys) // KEY_BYTES
        return ObjectFacts(
            self.keys.domain(spec),
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
            self.pseudonym(part.label.tenant),
        )

    def facts_of(self, name: bytes, size: int | None) -> ObjectFacts | None:
        """Open the facts of an object of `size` bytes (None: of its stated length); None where it does not open."""
        if not self.store.outlives:
            return None
        try:
            begins = self.store.peek(name, BEGINNING)
            if begins is None:
                return None
            if size is None:
                content = int.from_bytes(begins[_CONTENT_SIZE], "little")
                size = object_bytes(content, enclosed=True, checked=False)
            return read_facts(self.keys.catalogue(), name, memoryview(begins), size)
        except (StoreError, KeyringError):
            return None

    def pseudonym(self, tenant: str) -> bytes:
        """Return a tenant's pseudonym in sealed facts."""
        known = self.pseudonyms.get(tenant)
        if known is None:
            known = self.pseudonyms[tenant] = self.shred.pseudonym(tenant.encode())
        return known

    def is_known(self, label: DomainLabel, spec: DomainSpec) -> bool:
        """Whether the tier may have copies of the domain; those of an earlier process get their label."""
        if spec in self.domains:
            return True
        if not self.unclaimed:
            return False
        number = self.unclaimed.pop(self.keys.domain(spec), None)
        if number is None:
            return False
        self.domains[spec] = number
        self.owners[number] = self.owners[number]._replace(label=label)
        return True

    def domain(self, spec: DomainSpec, label: DomainLabel) -> int:
        """Return the domain's number, a new one if needed."""
        number = self.domains.get(spec)
        if number is None:
            number = self.domains[spec] = len(self.owners)
            subject = self.subject(label)
            self.owners.append(CopyOwner(label.tenant, label.classification, subject, label))
        return number

    def subject(self, label: DomainLabel) -> bytes:
        """Return the shred key of a domain: its subject's, or the one for all of its tenant's people."""
        return self.shred.of_subject(shred_name(label.tenant, label.subject), label.tenant).id

    def shred_number(self, id_: bytes) -> int:
        """Return the shred key's number, a new one if needed."""
        number = self.shred_numbers.get(id_)
        if number is None:
            number = self.shred_numbers[id_] = len(self.shreds)
            self.shreds.append(id_)
        return number

    def row_of(self, number: int, facts: ObjectFacts, size: int, domain: int) -> IndexRow:
        """Return the index row of an object by its facts."""
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
            self.shred_number(facts.subject),
            self.shred_number(facts.bucket),
            last_of(facts.last),
        )

    def begin(self, name: bytes, row: IndexRow) -> None:
        """Add a copy."""
        owner = self.owners[row.domain]
        self.numbered = row.number
        self.rows.add(name, row)
        self.due_us = min(self.due_us, row.due_us)
        self.held[owner.tenant] = self.held.get(owner.tenant, 0) + self.store.taken(row.size)
        copy = EndedCopy(row.number, owner.tenant, owner.classification, row.blocks, row.size, row.due_us)
        self.tell("stored", name, copy)

    def tell(self, step: str, name: bytes, what: EndedCopy, cause: str = "") -> None:
        """Add a copy's step to the events."""
        number, tenant, classification, blocks, size, due_us, _, erasure, _ = what
        at_us, due_us = self.clock.boot_us(), self.clock.to_boot(due_us)
        self.events.append(
            CopyEvent(step, name, number, tenant, classification, blocks, size, at_us, due_us, cause, erasure)
        )

    def entry(self, row: int) -> TierEntry:
        """Return the owner and age of the object in this row."""
        owner = self.owners[self.rows.value("domain", row)]
        return TierEntry(owner.tenant, self.clock.to_boot(self.rows.value("born_us", row)))

    def is_ours(self, row: int) -> bool:
        """Whether it is this worker's own copy."""
        return self.rows.value("number", row) > 0

    def held_copy(self, name: bytes, row: int) -> HeldCopy:
        """Return the copy in this row."""
        known = self.rows.row(row)
        owner = self.owners[known.domain]
        since_us, due_us = self.clock.to_boot(known.born_us), self.clock.to_boot(known.due_us)
        whose = (owner.tenant, owner.classification)
        return HeldCopy(name, known.number, *whose, known.blocks, known.size, since_us, due_us)

    def entries(self) -> Mapping[bytes, TierEntry]:
        """Every findable copy of this worker."""
        return {name: self.entry(row) for name, row in self.rows.names() if self.is_ours(row)}

    def copies(self) -> Sequence[HeldCopy]:
        """Every findable copy."""
        return [self.held_copy(name, row) for name, row in self.rows.names() if self.is_ours(row)]

    def copy(self, name: bytes) -> HeldCopy | None:
        """Return the findable copy of this name, of any worker; another worker's has number 0."""
        row = self.rows.find(name)
        return None if row < 0 else self.held_copy(name, row)

    def listed(self) -> Iterator[list[Listed]]:
        """List the store's objects, page by page.

        Raises `StoreError` for a store of others' that lists more than twice what its quota has room for: each name
        that it invents would take memory here.
        """
        least = object_bytes(self.terms.block_bytes, enclosed=self.encloses, checked=False)
        left, after = 2 * self.store.capacity_bytes // least + _NAMES_MIN, b""
        while page := self.store.page(after, 1000):
            left -= len(page)
            if left < 0 and self.store.is_shared:
                raise StoreError(f"{self.store.kind} tier: lists more than it has room for")
            yield page
            after = page[-1].name

    def forget_unused(self) -> None:
        """Remove domains and shred keys without copies."""
        self.pseudonyms.clear()
        old = self.rows.renumber("domain")
        self.owners = [self.owners[number] for number in old]
        new = {number: at for at, number in enumerate(old)}
        self.unclaimed = {digest: new[at] for digest, at in self.unclaimed.items() if at in new}
        self.domains = {
            owner.label.spec: at
            for at, owner in enumerate(self.owners)
            if owner.label is not None and owner.label.spec is not None
        }
        self.shreds = [self.shreds[number] for number in self.rows.renumber("subject", "bucket", first=0)]
        self.shred_numbers = {id_: number for number, id_ in enumerate(self.shreds)}


def shred_name(tenant: str, subject: str | None) -> bytes:
    """Return the unique name of a subject's shred key; None: of the one for all of the tenant's people."""
    return tenant.encode() if subject is None else f"{tenant}\0{subject}".encode()
