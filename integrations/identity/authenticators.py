"""Credentials at an engine's door: what the claims of a verified token, or the entry of an API key, prove."""

from __future__ import annotations

from pathlib import Path
from typing import Any

from kvcustody.clock import Clock
from kvcustody.errors import credential_refused as refused
from kvcustody.governance.credentials.api_key_file import EngineKeys
from kvcustody.governance.credentials.claims import claim_text
from kvcustody.governance.credentials.issuer_keys import keys_in_file
from kvcustody.governance.credentials.json_web_token import TokenVerifier, TrustedIssuer
from kvcustody.integrations.identity.authentication import Authenticated
from kvcustody.integrations.identity.identity_document import Asserted, IssuerEntry


class TokenAuthenticator:
    """The authenticator over the issuers of an identity document."""

    def __init__(self, issuers: tuple[IssuerEntry, ...], directory: Path, clock: Clock) -> None:
        self._verifier = TokenVerifier(
            (
                TrustedIssuer(
                    entry.issuer,
                    entry.audience,
                    entry.algorithms,
                    entry.leeway_seconds,
                    keys_in_file(directory / entry.keys, clock),
                    entry,
                )
                for entry in issuers
            ),
            clock,
        )

    def accepts(self, credential: str) -> bool:
        """Whether the credential has the outer form of a signed token."""
        return credential.startswith("ey") and credential.count(".") == 2

    def authenticate(self, credential: str) -> Authenticated:
        """What the token's verified claims say; `IdentityError` for a token that proves nothing."""
        entry, claims = self._verifier.verify(credential)
        return _identity(claims, entry)


class ApiKeyAuthenticator:
    """The authenticator over one file of API keys."""

    def __init__(self, path: Path, asserted: Asserted, clock: Clock) -> None:
        self._keys = EngineKeys(path, clock)
        self._asserted = asserted

    def accepts(self, credential: str) -> bool:
        """Every credential is taken for a key: ask this authenticator last."""
        return True

    def authenticate(self, credential: str) -> Authenticated:
        """Whom the key speaks for; `IdentityError` if it is unknown, malformed or past its date."""
        entry = self._keys.find(credential)
        return Authenticated(
            entry.issuer,
            entry.tenant,
            entry.subject,
            None,
            entry.classification,
            entry.route,
            self._asserted.subject,
            self._asserted.session,
            entry.operator,
        )


def _identity(claims: dict[str, Any], entry: IssuerEntry) -> Authenticated:
    found: dict[str, str] = {}
    for field, claim in entry.claims.named():
        value = claim_text(claims, claim)
        if value is not None:
            found[field] = value
    if "tenant" not in found:
        raise refused("token without a tenant")
    if entry.tenants is not None and found["tenant"] not in entry.tenants:
        raise refused("issuer may not speak for the tenant")
    return Authenticated(
        entry.called,
        found["tenant"],
        found.get("subject"),
        found.get("session"),
        found.get("classification"),
        found.get("route"),
        entry.asserted.subject,
        entry.asserted.session,
    )
