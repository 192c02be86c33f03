"""What erasures and scans need of a tier off the device: its objects, its index, and deletion.

- `erase` takes effect at once for look-ups: from its return on, nothing of the selector is found in the tier.
- It may be asked again, with the same erasure, until it says that it is done; it changes nothing it did before.
- `objects` and `index` are two sources: what is there, and what the tier believes is there. What is on its way into one
  of them, or out of it, is in neither alone.
"""

from __future__ import annotations

from collections.abc import Collection, Mapping, Sequence
from typing import NamedTuple, Protocol, runtime_checkable

from kvcustody.governance.erasure.selector import Selector


class TierErased(NamedTuple):
    """A tier's progress with one erasure: objects and bytes destroyed, and those still waiting.

    `remaining` objects stay for other lawful holders. `unsure` ones ended for another reason, or nobody knows whose
    they are, and the store may still have them: they are awaited as well, and are no part of what the erasure covered.
    """

    objects: int
    bytes: int
    waiting: int = 0
    remaining: int = 0
    unsure: int = 0

    @property
    def done(self) -> bool:
        """Whether nothing of the selector waits any more."""
        return self.waiting == self.unsure == 0


class TierEntry(NamedTuple):
    """One object or index entry: its owner and its age, in boot-time microseconds of this process."""

    tenant: str
    since_us: int


class HeldCopy(NamedTuple):
    """A findable copy in a tier, by its number in events. Times are boot times."""

    name: bytes
    number: int
    tenant: str
    classification: str
    blocks: int
    size: int
    since_us: int
    due_us: int


@runtime_checkable
class CopyCustody(Protocol):
    """A tier whose copies have their own custody in the ledger. Called on the owning thread."""

    def copies(self) -> Sequence[HeldCopy]:
        """Return every findable copy; call it after taking the events."""

    def known_us(self, now_us: int) -> int:
        """Until when the ends of these copies are known here, in boot time; `now_us` where they end here."""


@runtime_checkable
class ComparedElsewhere(Protocol):
    """A tier whose stores are in other processes; each compares its own index with its store."""

    def order_comparison(self) -> None:
        """Have each process compare its store with its index and end differences; findings are recorded later."""


class CompletedErasure(NamedTuple):
    """An erasure that destroyed every key that its selector covers from before `at_us` (UTC)."""

    erasure: str
    selector: Selector
    at_us: int


@runtime_checkable
class RemembersErasures(Protocol):
    """A tier whose keys may come back with an older copy of their file, which it shares with its process's others."""

    @property
    def returned_keys(self) -> int:
        """How many keys were there again by the file's own receipts; they are destroyed again."""

    def erase_returned(self, complete: CompletedErasure) -> int:
        """Carry out an erasure again where a key from before it is there; how many keys, where that is known now."""


class CopyStore(Protocol):
    """Blocks' copies outside the device, by key. Called on the owning thread."""

    @property
    def name(self) -> str:
        """`host`, `nvme` or `remote`, as the policy names tiers."""

    def erase(self, erasure: str, selector: Selector, before_us: int) -> TierErased:
        """End every object of the selector that was stored before `before_us`."""

    def objects(self) -> Mapping[bytes, TierEntry]:
        """Every object that is there. Raises `StoreError` where that cannot be said now: a scan goes on without it."""

    def index(self) -> Mapping[bytes, TierEntry]:
        """Every object that the index names."""

    def destroy(self, keys: Collection[bytes]) -> int:
        """Destroy objects, indexed or not; returns how many were there."""

    def forget(self, keys: Collection[bytes]) -> int:
        """Drop index entries; returns how many there were."""
