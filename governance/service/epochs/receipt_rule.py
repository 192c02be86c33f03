"""Which requests have a route receipt: what doors are told, from the settings and the policies in effect."""

from __future__ import annotations

from collections.abc import Iterable

from kvcustody.governance.edge.erase_epochs import EpochScope, EpochTags
from kvcustody.governance.edge.route_receipt import ReceiptRule
from kvcustody.policies.document.model import Grant, Policy
from kvcustody.tenants import Issuers


def receipt_rule(policies: Iterable[Policy], issuers: Issuers, key: bytes, share: float) -> ReceiptRule:
    """A share of all requests, and every one of tenants that these policies open to others."""
    tags, names = EpochTags(key), set[str]().union(*map(opened_tenants, policies))
    return ReceiptRule(share, frozenset(tags.of(EpochScope(*issuers.parts(name))) for name in names))


def opened_tenants(policy: Policy) -> set[str]:
    """The tenants of a policy that a grant or a segment opens to others, and those others."""
    made, every = set[str](), tuple(tenant.id for tenant in policy.tenants)
    for opening in policy.openings():
        if isinstance(opening, Grant):
            readers = {opening.reader}
        else:
            readers = set(every if opening.tenants is None else opening.tenants)
        if readers - {opening.owner}:
            made |= {opening.owner, *readers}
    return made
