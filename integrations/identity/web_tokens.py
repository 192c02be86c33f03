"""JSON Web Tokens at the door of an engine: what the claims of a verified token say of tenant, subject and session."""

from __future__ import annotations

from pathlib import Path
from typing import Any

from kvcustody.clock import Clock
from kvcustody.errors import credential_refused as refused
from kvcustody.governance.tokens.json_web_token import TokenVerifier, TrustedIssuer, named
from kvcustody.governance.tokens.verification_keys import read_verification_keys
from kvcustody.integrations.identity.authentication import Authenticated
from kvcustody.integrations.identity.identity_document import IssuerEntry
from kvcustody.integrations.identity.watched_file import WatchedFile


class TokenAuthenticator:
    """The authenticator over the issuers of an identity document."""

    def __init__(self, issuers: tuple[IssuerEntry, ...], directory: Path, clock: Clock) -> None:
        def trusted(entry: IssuerEntry) -> TrustedIssuer[IssuerEntry]:
            file = WatchedFile(directory / entry.keys, read_verification_keys, clock)
            return TrustedIssuer(
                entry.issuer,
                entry.audience,
                entry.algorithms,
                entry.leeway_seconds,
                lambda kid: named(file.content(), kid),
                entry,
            )

        self._verifier = TokenVerifier([trusted(entry) for entry in issuers], clock)

    def accepts(self, credential: str) -> bool:
        """Whether the credential has the outer form of a signed token."""
        return credential.startswith("ey") and credential.count(".") == 2

    def authenticate(self, credential: str) -> Authenticated:
        """What the token's verified claims say; `IdentityError` for a token that proves nothing."""
        entry, claims = self._verifier.verify(credential)
        return _identity(claims, entry)


def _identity(claims: dict[str, Any], entry: IssuerEntry) -> Authenticated:
    found: dict[str, str] = {}
    for field, claim in entry.claims.named():
        value = claims.get(claim)
        if value is None:
            continue
        if type(value) is not str:
            raise refused(f"claim for `{field}` is not text")
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
