"""A tier's objects against its index."""

from __future__ import annotations

from collections.abc import Callable, Iterable

from kvcustody.governance.erasure.tier_protocol import CopyStore
from kvcustody.governance.orphans.finding import Finding, Trouble


def tier_troubles(tiers: Iterable[CopyStore], now_us: int) -> list[Trouble]:
    """Objects that no index names, and index entries without an object."""
    made: list[Trouble] = []
    for tier in tiers:
        objects, index = tier.objects(), tier.index()
        pairs = (
            ("tier object without index", objects, index, tier.destroy, "destroyed"),
            ("index without tier object", index, objects, tier.forget, "forgotten"),
        )
        for orphan, one, other, repair, action in pairs:
            for key in one.keys() - other.keys():
                age_us = max(0, now_us - one[key].since_us)
                finding = Finding(orphan, one[key].tenant, f"in tier `{tier.name}`", (), age_us)
                made.append(Trouble(finding, _TierRepair(repair, key, action)))
    return made


class _TierRepair:
    """Destroys or forgets one key."""

    def __init__(self, repair: Callable[[list[bytes]], int], key: bytes, action: str) -> None:
        self.repair = repair
        self.key = key
        self.action = action

    def __call__(self) -> tuple[str, str]:
        return self.action, "recovered" if self.repair([self.key]) else "gone before"
