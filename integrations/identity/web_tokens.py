"""JSON Web Tokens at the door of an engine: what the claims of a verified token say of tenant, subject and session."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import structlog

from kvcustody.clock import Clock
from kvcustody.errors import credential_refused as refused
from kvcustody.governance.tokens.claims import claim_at
from kvcustody.governance.tokens.json_web_token import TokenVerifier, TrustedIssuer, named
from kvcustody.governance.tokens.verification_keys import IssuerKeys, read_verification_keys
from kvcustody.integrations.identity.authentication import Authenticated
from kvcustody.integrations.identity.identity_document import IssuerEntry
from kvcustody.integrations.identity.watched_file import WatchedFile

_log = structlog.get_logger("kvcustody.identity")


class TokenAuthenticator:
    """The authenticator over the issuers of an identity document."""

    def __init__(self, issuers: tuple[IssuerEntry, ...], directory: Path, clock: Clock) -> None:
        def trusted(entry: IssuerEntry) -> TrustedIssuer[IssuerEntry]:
            file = WatchedFile(directory / entry.keys, _issuer_keys, clock)
            return TrustedIssuer(
                entry.issuer,
                entry.audience,
                entry.algorithms,
                entry.leeway_seconds,
                lambda kid: named(file.content().keys, kid),
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


def _issuer_keys(path: Path) -> IssuerKeys:
    issuer_keys = read_verification_keys(path)
    if issuer_keys.left_out:
        _log.warning("issuer's keys left out", path=path, keys=issuer_keys.left_out)
    return issuer_keys


def _identity(claims: dict[str, Any], entry: IssuerEntry) -> Authenticated:
    found: dict[str, str] = {}
    for field, claim in entry.claims.named():
        value = claim_at(claims, claim)
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
