"""Valid fields of a policy that have no effect beside one engine or at one worker; lint and every start report them.

A field that begins to work leaves this module in the same change; a test holds every field of the model against what
reads it.
"""

from __future__ import annotations

from collections.abc import Collection, Iterator
from enum import StrEnum

from kvcustody.policies.document.model import Offload, Policy, Tier
from kvcustody.policies.document.problems import quote
from kvcustody.policies.workbench.lint.dead_rules import Finding

_CODE, _NO_STORE = "KVP761", "KVP775"
_SETTINGS = {Tier.HOST: "host_tier_bytes", Tier.NVME: "nvme_tier_path", Tier.REMOTE: "remote_tier_url"}


class PoolOwner(StrEnum):
    """The engine or pool whose blocks a policy governs."""

    KVCUSTODY = "transformers"  # our own pools
    ENGINE = "vllm"  # an engine that allocates by itself


def needs_store(policy: Policy) -> Iterator[Finding]:
    """Yield each classification whose copies may only go to a remote store; a worker without one does not start."""
    for offload, what in _offloads(policy):
        if offload.tiers == (Tier.REMOTE,):
            message = (
                f"{what}: copies may only go to `remote`, and no store is configured "
                f"(set {quote(_SETTINGS[Tier.REMOTE])}): a worker does not start with it"
            )
            yield offload.mark, _NO_STORE, message


def _offloads(policy: Policy) -> Iterator[tuple[Offload, str]]:
    """What the policy says of copies, for everybody and for tenants, and how messages call it."""
    names = policy.classifications
    for level, offload in enumerate(policy.offload):
        yield offload, f"offload of {quote(names[level])}"
    for tenant in (*policy.tenants, *((policy.default,) if policy.default else ())):
        for level, own in tenant.offload:
            yield own, f"tenant {quote(tenant.id)}: offload of {quote(names[level])}"


def without_effect(
    policy: Policy, owner: PoolOwner | None = None, tiers: Collection[str] | None = None
) -> Iterator[Finding]:
    """Yield fields without effect: at any worker, with `owner` beside that engine, with `tiers` if these are
    configured.
    """
    for offload, what in _offloads(policy):
        if offload.tiers != (Tier.REMOTE,):  # `needs_store` says it
            yield from _idle(offload, what, owner, tiers)
    for level, offload in enumerate(policy.offload):
        if offload.tiers and not policy.retention[level].absolute_us:
            what = f"offload of {quote(policy.classifications[level])}"
            message = f"{what}: no block outlives its request, so only running requests are offloaded"
            yield offload.mark, _CODE, message
    if tiers is not None and Tier.REMOTE not in tiers:
        yield from needs_store(policy)


def _idle(offload: Offload, what: str, owner: PoolOwner | None, tiers: Collection[str] | None) -> Iterator[Finding]:
    """Yield offload fields without a usable tier: copies need a configured tier, except plain ones in transformers'
    caches.
    """
    beside_engine = owner is PoolOwner.ENGINE
    if tiers is None and not beside_engine:
        return  # nothing is known of workers
    absent = [tier for tier in offload.tiers if tier not in (tiers or ())]
    if not offload.encrypt and not beside_engine:
        absent = [tier for tier in absent if tier.must_encrypt]
    if absent:
        which = ", ".join(map(quote, absent))
        where = " beside this engine" if beside_engine else ""
        settings = ", ".join(quote(_SETTINGS[tier]) for tier in absent if tier in _SETTINGS)
        why = "no such tier is configured" + (f" (set {settings})" if settings else "")
        yield offload.mark, _CODE, f"{what}: nothing is offloaded to {which}{where}: {why}"
