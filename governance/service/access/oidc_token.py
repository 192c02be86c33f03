"""OpenID Connect tokens: the principal, roles and tenant in a verified token's claims.

A role that the settings do not name gives nothing. Roles that nobody may hold together refuse the token.
"""

from __future__ import annotations

from typing import Any, NamedTuple

from kvcustody.clock import MICROSECONDS, Clock
from kvcustody.governance.credentials.claims import claim_at, claim_name, claim_names
from kvcustody.governance.credentials.issuer_keys import keys_at
from kvcustody.governance.credentials.json_web_token import TokenVerifier, TrustedIssuer
from kvcustody.governance.identity.principal import check_identifier, check_tenant_name
from kvcustody.governance.service.access.roles import OF_TENANTS, Role, check_roles
from kvcustody.governance.service.settings import Issuer


class VerifiedClaims(NamedTuple):
    """The claims of a verified token."""

    principal: str
    roles: frozenset[Role]
    tenant: str | None
    until_us: int  # UTC; when it expires


class OidcTokens:
    """Verifies the tokens of the configured issuers; thread-safe."""

    def __init__(self, issuers: tuple[Issuer, ...], clock: Clock) -> None:
        self._verifier = TokenVerifier(
            (
                TrustedIssuer(
                    entry.issuer,
                    entry.audience,
                    entry.algorithms,
                    entry.leeway_seconds,
                    keys_at(entry.keys, entry.name, entry.refresh_seconds, clock),
                    entry,
                )
                for entry in issuers
            ),
            clock,
        )

    def verify(self, token: str, certificate: str | None = None) -> VerifiedClaims:
        """Return what the token proves; raises `IdentityError` for one that proves nothing.

        `certificate`: the thumbprint of the client certificate that came with it.
        """
        entry, claims = self._verifier.verify(token, certificate)
        return _proven(claims, entry)


def _proven(claims: dict[str, Any], entry: Issuer) -> VerifiedClaims:
    who = check_identifier("principal", claim_at(claims, entry.principal_claim))
    roles = {entry.roles[name] for name in claim_names(claims, entry.roles_claim) if name in entry.roles}
    tenant = claim_name(claims, entry.tenant_claim) if roles & OF_TENANTS else None
    if tenant is not None:
        check_tenant_name(tenant)
    until_us = int((claims["exp"] + entry.leeway_seconds) * MICROSECONDS)
    return VerifiedClaims(f"{entry.name}:{who}", check_roles(roles, tenant), tenant, until_us)
