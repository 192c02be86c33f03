"""The requester that a router's name stands for: the scope of its private blocks.

    named_requester(principal, ScopeKind.SUBJECT)    # the subject, else the session, else nobody

Doors name requests by it, and workers the blocks that they tell routers of: it narrows as `own_domain` does.
"""

from __future__ import annotations

from typing import NamedTuple

from kvcustody.governance.identity.domain_spec import ScopeKind, own_scope
from kvcustody.governance.identity.principal import Principal


class NamedRequester(NamedTuple):
    """A tenant, or one subject, session or session of a subject in it."""

    issuer: str
    tenant: str
    subject: str | None = None
    session: str | None = None

    @property
    def scope(self) -> ScopeKind:
        """The narrowest scope that it names."""
        if self.session is not None:
            return ScopeKind.SESSION
        return ScopeKind.TENANT if self.subject is None else ScopeKind.SUBJECT

    @property
    def whole_tenant(self) -> NamedRequester:
        """The whole tenant of this requester."""
        return NamedRequester(self.issuer, self.tenant)


def named_requester(principal: Principal, scope: ScopeKind) -> NamedRequester | None:
    """Return the requester whose name a request has under a scope; None where it shares blocks with no other
    request.
    """
    scope_or_none = own_scope(principal, scope)
    if scope_or_none is None:
        return None
    return NamedRequester(
        principal.issuer,
        principal.tenant,
        None if scope_or_none is ScopeKind.TENANT else principal.subject,
        principal.session if scope_or_none is ScopeKind.SESSION else None,
    )
