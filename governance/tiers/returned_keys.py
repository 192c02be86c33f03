"""Shred keys of copies that others keep: an erasure destroys them, and again where an older file put them back."""

from __future__ import annotations

from kvcustody.governance.erasure.selector import Selector
from kvcustody.governance.erasure.tier_protocol import CompletedErasure
from kvcustody.governance.keys.shred_keys import ShredKeys
from kvcustody.governance.tiers.tier import shred_name


class ReturnedKeys:
    """The keys of one file. What keeps the copies finds out by itself that a key is gone."""

    def __init__(self, shred: ShredKeys) -> None:
        self._shred = shred

    @property
    def returned_keys(self) -> int:
        """How many destroyed keys were in the file again when it was opened, by its own receipts."""
        return self._shred.returned

    def erase_returned(self, complete: CompletedErasure) -> int:
        """Destroy the keys again that an erasure destroyed, and that an older copy of their file put back; how many."""
        return self.destroy_covered(complete.selector, complete.at_us)

    def destroy_covered(self, selector: Selector, before_us: int | None = None) -> int:
        """Destroy a subject's key and that of its tenant's wider domains; without a tenant, all of them; how many.

        `before_us` (UTC): those alone that were made before then.
        """
        if selector.tenant is None:
            keys = self._shred.living()
        else:
            names = {shred_name(selector.tenant, selector.subject), shred_name(selector.tenant, None)}
            keys = [key for key in map(self._shred.find_subject, names) if key is not None]
        covered = [key for key in keys if before_us is None or key.created_us < before_us]
        for key in covered:
            self._shred.destroy(key.id)
        return len(covered)
