"""The share of requests for which a door writes route receipts, by tenant and classification of one policy.

    receipts = ReceiptShares.of(policy)
    receipts.share("acme", level)        # Fraction(1, 10)

1. A policy that says nothing means `UNSAID_RECEIPTS` of every tenant's requests.
2. Every request of a tenant that a grant or a segment opens to others, or others to it, has a receipt.
3. `data` and `from_data` carry what decides, and no more: a door acts by it without the policy.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from fractions import Fraction
from typing import Any, NamedTuple, Self

from kvcustody.policies.document.model import UNSAID_RECEIPTS, Policy, TenantPolicy

EVERY_REQUEST = Fraction(1)


class ReceiptShares(NamedTuple):
    """Shares by level: those of single `tenants`, and those of all `others`; none: rule 1.

    `opened`: the tenants of rule 2; None: every one.
    """

    others: tuple[Fraction, ...] = ()
    tenants: Mapping[str, tuple[Fraction, ...]] = {}
    opened: frozenset[str] | None = frozenset()

    @classmethod
    def of(cls, policy: Policy) -> Self:
        """Return the shares of a policy."""
        others = shares_of(policy, policy.default)
        each = {tenant.id: shares_of(policy, tenant) for tenant in policy.tenants}
        tenants = {name: shares for name, shares in each.items() if shares != others}
        is_said = tenants or {*others} != {UNSAID_RECEIPTS}
        return cls(others if is_said else (), tenants, policy.opened_tenants())

    @property
    def says_anything(self) -> bool:
        """Whether any request's share differs from that of an empty policy."""
        return self != type(self)()

    def is_opened(self, tenant: str) -> bool:
        """Return whether a grant or a segment opens this tenant to others, or others to it (rule 2)."""
        return self.opened is None or tenant in self.opened

    def share(self, tenant: str, level: int) -> Fraction:
        """Return the share of a tenant's requests of this level for which a door writes its half."""
        if self.is_opened(tenant):
            return EVERY_REQUEST
        shares = self.tenants.get(tenant, self.others)
        return shares[level] if shares else UNSAID_RECEIPTS

    def data(self) -> dict[str, Any]:
        """Return the shares as JSON data, written `n/d`."""
        return {
            "others": _said(self.others),
            "tenants": {name: _said(shares) for name, shares in sorted(self.tenants.items())},
            "opened": None if self.opened is None else sorted(self.opened),
        }

    @classmethod
    def from_data(cls, data: Mapping[str, Any], levels: int) -> Self:
        """Return the shares from JSON data for a policy with `levels` classifications; raises `ValueError` and
        others.
        """
        opened = data["opened"]
        receipts = cls(
            _read(data["others"]),
            {str(name): _read(shares) for name, shares in data["tenants"].items()},
            None if opened is None else frozenset(map(str, opened)),
        )
        for shares in (receipts.others, *receipts.tenants.values()):
            if len(shares) not in (0, levels) or not all(0 <= share <= 1 for share in shares):
                raise ValueError("one share a classification, 0 to 1")
        return receipts


def shares_of(policy: Policy, entry: TenantPolicy | None) -> tuple[Fraction, ...]:
    """Return a policy's shares for a tenant with this entry, by level; without rule 2."""
    own = {} if entry is None else dict(entry.route_receipts)
    every = policy.route_receipts or (UNSAID_RECEIPTS,) * len(policy.classifications)
    return tuple(own.get(level, share) for level, share in enumerate(every))


def _said(shares: Iterable[Fraction]) -> list[str]:
    return [f"{share.numerator}/{share.denominator}" for share in shares]


def _read(shares: Iterable[str]) -> tuple[Fraction, ...]:
    return tuple(map(Fraction, shares))


def share_text(share: Fraction) -> str:
    """Return a share in the form that policies use."""
    return str(share) if share.denominator > 1 else ("none", "all")[share.numerator]
