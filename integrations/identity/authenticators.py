"""Credentials at an engine's door: what verified claims, an API key's entry, or another door's token prove."""

from __future__ import annotations

from pathlib import Path
from typing import Any

from kvcustody.audit.tlog.signed_note import KeyKind, NoteError, VerifierKey, parse_vkey
from kvcustody.clock import Clock
from kvcustody.errors import ConfigError
from kvcustody.errors import credential_refused as refused
from kvcustody.governance.credentials.api_key_file import EngineKeys
from kvcustody.governance.credentials.claims import claim_text
from kvcustody.governance.credentials.issuer_keys import keys_in_file
from kvcustody.governance.credentials.json_web_token import TokenVerifier, TrustedIssuer
from kvcustody.governance.credentials.watched_file import WatchedFile
from kvcustody.governance.edge.door_token import PREFIX, DoorTokens, RejectedToken
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
        """Return whether the credential has the outer form of a signed token."""
        return credential.startswith("ey") and credential.count(".") == 2

    def authenticate(self, credential: str) -> Authenticated:
        """Return the token's verified claims.

        Raises:
            IdentityError: the token proves nothing.
        """
        entry, claims = self._verifier.verify(credential)
        return _identity(claims, entry)


class ApiKeyAuthenticator:
    """The authenticator over one file of API keys."""

    def __init__(self, path: Path, asserted: Asserted, clock: Clock) -> None:
        self._keys = EngineKeys(path, clock)
        self._asserted = asserted

    def accepts(self, credential: str) -> bool:
        """Return True: every credential may be a key, so ask this authenticator last."""
        return True

    def authenticate(self, credential: str) -> Authenticated:
        """Return the key's principal.

        Raises:
            IdentityError: it is unknown, malformed or past its date.
        """
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


class DoorTokenAuthenticator:
    """The authenticator over the public keys of doors in front of a router."""

    def __init__(self, path: Path, clock: Clock, *, group: str) -> None:
        """Read the keys. `path`: a file with one public key per line.

        Raises:
            ConfigError: it holds none.
        """
        self.tokens = DoorTokens(WatchedFile(path, read_door_keys, clock).content, clock, group=group)

    def accepts(self, credential: str) -> bool:
        """Return whether the credential has the outer form of a door's token."""
        return credential.startswith(PREFIX)

    def authenticate(self, credential: str) -> Authenticated:
        """Return the principal that the door vouches for.

        Raises:
            IdentityError: the token proves nothing.
        """
        found = self.tokens.present(credential)
        if isinstance(found, RejectedToken):
            raise refused(f"door token: {found.reason}")
        of = found.claims.principal
        return Authenticated(of.issuer, of.tenant, of.subject, of.session, of.classification, of.route, token=found)


def read_door_keys(path: Path) -> tuple[VerifierKey, ...]:
    """Return the public keys of doors in a file, one per line; `#` begins a comment.

    Raises:
        ConfigError: the file is wrong.
    """
    try:
        lines = [line.strip() for line in path.read_text(encoding="utf-8").splitlines()]
    except (OSError, UnicodeDecodeError) as error:
        raise ConfigError(f"{path}: cannot be read ({error}); check its path and mode", path=path) from None
    keys = []
    for number, line in enumerate(lines, 1):
        if line and not line.startswith("#"):
            try:
                key = parse_vkey(line)
            except NoteError as error:
                raise ConfigError(f"{path}:{number}: {error.message}", path=path) from None
            if key.kind is not KeyKind.ED25519:
                raise ConfigError(f"{path}:{number}: a door's key must be an Ed25519 key", path=path)
            keys.append(key)
    if not keys:
        raise ConfigError(f"{path}: holds no door's public key; `kvcustody door key` prints one", path=path)
    return tuple(keys)


def _identity(claims: dict[str, Any], entry: IssuerEntry) -> Authenticated:
    fields: dict[str, str] = {}
    for field, claim in entry.claims.named():
        value = claim_text(claims, claim)
        if value is not None:
            fields[field] = value
    if "tenant" not in fields:
        raise refused("token without a tenant")
    if entry.tenants is not None and fields["tenant"] not in entry.tenants:
        raise refused("issuer may not speak for the tenant")
    return Authenticated(
        entry.called,
        fields["tenant"],
        fields.get("subject"),
        fields.get("session"),
        fields.get("classification"),
        fields.get("route"),
        entry.asserted.subject,
        entry.asserted.session,
    )
