"""The canonical form of a policy and its digest, which approvers sign and the ledger names.

1. The digest depends on what a policy says, not on how it is written: marks, file name, order of sections, of entries
   and of set-like lists do not enter it.
2. A section or field that came after the first schema and that is not written, or says its defaults, does not enter it.
3. The canonical form is JSON with sorted ASCII keys, no floats, and integers below 2^53 (fractions as "n/d").
"""

from __future__ import annotations

import hashlib
import json
from dataclasses import fields, is_dataclass, replace
from enum import Enum
from fractions import Fraction
from typing import Any

from kvcustody.policies.document.model import (
    SCHEMA,
    UNSAID_DEATH,
    ErasureDuty,
    Offload,
    Policy,
    TenantPolicy,
)
from kvcustody.policies.document.offload_defaults import default_limit, default_match

_SORTED = frozenset(
    {
        "classify",
        "tenants",
        "groups",
        "segments",
        "grants",
        "rules",
        "readers",
        "owners",
        "actions",
        "via",
        "kinds",
        "signals",
        "crosses",
        "placement",
    }
)
_BY_DEFAULT = ("*",)
_LATER: dict[str, Any] = {
    "affinity": "private",
    "kinds": [],
    "content": None,
    "crosses": [],
    "signals": [],
    "learned": None,
    "limits": [],
    "match": list(_BY_DEFAULT),
    "route_receipts": [],
}  # fields that came after the first schema, and their defaults


def digest(policy: Policy) -> str:
    """Return `sha256:` and the hex digest of the canonical form."""
    return "sha256:" + hashlib.sha256(canonical(policy)).hexdigest()


def canonical(policy: Policy) -> bytes:
    """Return the canonical form of a policy."""
    form = {"schema": SCHEMA, **_form(_without_defaults(policy))}
    if policy.erasure == ErasureDuty():
        del form["erasure"]
    if not policy.checks_integrity:
        del form["integrity"]
    if not policy.issuers:
        del form["issuers"]
    if not policy.placement:
        del form["placement"]
    if set(policy.on_worker_death) <= {UNSAID_DEATH}:
        del form["on_worker_death"]
    return json.dumps(form, sort_keys=True, separators=(",", ":"), ensure_ascii=True).encode()


def _without_defaults(policy: Policy) -> Policy:
    """Return the policy with offload entries marked where they only repeat the defaults."""
    labels = tuple(name for name, _ in policy.labels)
    absolute_limits_us = [retention.absolute_us for retention in policy.retention]

    def tenant_marked(tenant: TenantPolicy) -> TenantPolicy:
        own = {level: retention.absolute_us for level, retention in tenant.retention}
        entries = (
            (level, _marked(entry, own.get(level, absolute_limits_us[level]), labels, policy.offload[level]))
            for level, entry in tenant.offload
        )
        return replace(tenant, offload=tuple(entries))

    return replace(
        policy,
        offload=tuple(_marked(entry, absolute_limits_us[at], labels) for at, entry in enumerate(policy.offload)),
        tenants=tuple(map(tenant_marked, policy.tenants)),
        default=None if policy.default is None else tenant_marked(policy.default),
    )


def _marked(entry: Offload, absolute_us: int, labels: tuple[str, ...], wide: Offload | None = None) -> Offload:
    limits = tuple(default_limit(tier, absolute_us, wide) for tier in entry.tiers)
    bound = entry.match == default_match(entry.tiers, labels, wide)
    return replace(
        entry,
        limits=() if entry.limits == limits else entry.limits,
        match=_BY_DEFAULT if bound else entry.match,
    )


def _form(value: Any) -> Any:
    if isinstance(value, Enum):
        return value.name.lower()
    if isinstance(value, Fraction):
        return f"{value.numerator}/{value.denominator}"
    if is_dataclass(value):
        names = [field.name for field in fields(value) if field.compare]
        form = {name: _part(name, getattr(value, name)) for name in names}
        if isinstance(value, TenantPolicy) and not value.integrity:
            del form["integrity"]
        return {name: part for name, part in form.items() if name not in _LATER or part != _LATER[name]}
    if isinstance(value, tuple):
        return [_form(item) for item in value]
    return value


def _part(name: str, value: Any) -> Any:
    form = _form(value)
    if name in _SORTED and isinstance(form, list):
        return sorted(form, key=lambda item: json.dumps(item, sort_keys=True))
    return form
