"""The keys of copies that LMCache keeps, which are all that an erasure can reach."""

from __future__ import annotations

from collections.abc import Collection, Mapping

from kvcustody.governance.erasure.selector import Selector
from kvcustody.governance.erasure.tier_protocol import CompletedErasure, TierEntry, TierErased
from kvcustody.governance.keys.shred_keys import ShredKeys
from kvcustody.governance.tiers.copies.index import shred_name


class KeysElsewhere:
    """The keys of copies that another system keeps: without them nobody can open the copies.

    A `CopyStore` without objects of its own. Called on the worker's thread.
    """

    def __init__(self, tier: str, shred: ShredKeys) -> None:
        self.name = tier
        self._shred = shred

    def erase(self, erasure: str, selector: Selector, before_us: int) -> TierErased:
        """Destroy the keys that the erasure covers. The copies are not counted, because another system keeps them."""
        self.destroy_covered(selector)
        return TierErased(0, 0)

    @property
    def returned_keys(self) -> int:
        """How many destroyed keys were in the file again when it was opened, by its own receipts."""
        return self._shred.returned

    def erase_returned(self, complete: CompletedErasure) -> int:
        """Destroy erased keys again that an older copy of their file restored; return their number."""
        return self.destroy_covered(complete.selector, complete.at_us)

    def destroy_covered(self, selector: Selector, before_us: int | None = None) -> int:
        """Destroy the keys that an erasure covers; return their number.

        Of a subject: its own, and that of its tenant's wider domains. Of a tenant: those of all its subjects too.
        Without a tenant: all keys, buckets' included.

        `before_us` (UTC): those alone that were made before then.
        """
        if selector.tenant is None:
            keys = self._shred.living()
        elif selector.subject is None:
            keys = self._shred.of_tenant(selector.tenant)
        else:
            names = {shred_name(selector.tenant, selector.subject), shred_name(selector.tenant, None)}
            keys = [key for key in map(self._shred.find_subject, names) if key is not None]
        covered = [key for key in keys if before_us is None or key.created_us < before_us]
        for key in covered:
            self._shred.destroy(key.id)
        return len(covered)

    def objects(self) -> Mapping[bytes, TierEntry]:
        """Return nothing: no object can be listed."""
        return {}

    def index(self) -> Mapping[bytes, TierEntry]:
        """Return nothing: there is no index."""
        return {}

    def destroy(self, keys: Collection[bytes]) -> int:
        """Return nothing: no object is here."""
        return 0

    def forget(self, keys: Collection[bytes]) -> int:
        """Return nothing: no object is known here."""
        return 0
