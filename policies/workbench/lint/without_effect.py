"""Fields of a policy that are sound and do nothing, anywhere yet or beside one engine: lint and every start say so.

A field that begins to work leaves this module in the same change; a test holds every field of the model against what
reads it.
"""

from __future__ import annotations

from collections.abc import Iterator
from enum import StrEnum

from kvcustody.policies.document.model import Offload, Policy, Tier
from kvcustody.policies.document.problems import quote
from kvcustody.policies.workbench.lint.dead_rules import Finding

_CODE = "KVP761"


class PoolOwner(StrEnum):
    """Whose blocks a policy is to govern."""

    KVCUSTODY = "transformers"  # our own pools
    ENGINE = "vllm"  # an engine that allocates by itself


def without_effect(policy: Policy, owner: PoolOwner | None = None) -> Iterator[Finding]:
    """What does nothing: beside any engine, and with `owner` what does nothing there."""
    names = policy.classifications
    for level, offload in enumerate(policy.offload):
        yield from _tiers(offload, f"offload of {quote(names[level])}", owner)
    for tenant in policy.tenants:
        for level, own in tenant.offload:
            yield from _tiers(own, f"tenant {quote(tenant.id)}: offload of {quote(names[level])}", owner)


def _tiers(offload: Offload, what: str, owner: PoolOwner | None) -> Iterator[Finding]:
    """Only the caches of transformers offload, to plain host memory."""
    idle = [
        tier.value
        for tier in offload.tiers
        if tier is not Tier.HOST or offload.encrypt or owner is PoolOwner.ENGINE
    ]
    if idle:
        how = ", encrypted" if offload.encrypt else ""
        where = " beside vLLM" if owner is PoolOwner.ENGINE and not offload.encrypt else " yet"
        yield (
            offload.mark,
            _CODE,
            f"{what}: nothing is offloaded to {', '.join(map(quote, idle))}{how}{where}",
        )
