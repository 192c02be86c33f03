"""The keys of copies that LMCache keeps: all that an erasure reaches of them."""

from __future__ import annotations

from collections.abc import Collection, Mapping

from kvcustody.governance.erasure.selector import Selector
from kvcustody.governance.erasure.tier_protocol import TierEntry, TierErased
from kvcustody.governance.keys.shred_keys import ShredKeys
from kvcustody.governance.tiers.returned_keys import ReturnedKeys


class KeysElsewhere(ReturnedKeys):
    """What an erasure reaches of copies that somebody else keeps: the keys without which nobody opens them.

    A `CopyStore` without objects of its own. Called on the worker's thread.
    """

    def __init__(self, tier: str, shred: ShredKeys) -> None:
        super().__init__(shred)
        self.name = tier

    def erase(self, erasure: str, selector: Selector, before_us: int) -> TierErased:
        """Destroy the subject's shred key and that of its tenant's wider domains; without a tenant, all of them."""
        self.destroy_covered(selector)
        return TierErased(0, 0)

    def objects(self) -> Mapping[bytes, TierEntry]:
        """None that can be listed."""
        return {}

    def index(self) -> Mapping[bytes, TierEntry]:
        """None."""
        return {}

    def destroy(self, keys: Collection[bytes]) -> int:
        """None is here."""
        return 0

    def forget(self, keys: Collection[bytes]) -> int:
        """None is known here."""
        return 0
