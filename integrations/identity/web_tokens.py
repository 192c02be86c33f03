"""JSON Web Tokens: which issuer signed one, and what its claims say of tenant, subject and session.

1. An issuer's keys, audience and algorithms come from the identity document alone. Nothing in a token chooses them:
   `jwk`, `jku` and `x5u` are not read, and a token with `crit` is refused.
2. Only asymmetric algorithms exist here. A JWKS with a symmetric or private key is refused when it is read, and a key
   verifies with the algorithms of its own kind only.
3. Expiry is required; times are compared with our own clock.
"""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any, NamedTuple

import jwt
from cryptography.exceptions import UnsupportedAlgorithm
from cryptography.hazmat.primitives.asymmetric.ec import SECP256R1, EllipticCurvePublicKey
from cryptography.hazmat.primitives.asymmetric.ed25519 import Ed25519PublicKey
from cryptography.hazmat.primitives.asymmetric.rsa import RSAPublicKey
from cryptography.hazmat.primitives.serialization import load_pem_public_key

from kvcustody.clock import MICROSECONDS, Clock
from kvcustody.errors import ConfigError
from kvcustody.integrations.identity.authentication import Authenticated, refused
from kvcustody.integrations.identity.identity_document import IssuerEntry
from kvcustody.integrations.identity.watched_file import WatchedFile

CHARACTERS_MAX = 8_192
FILE_BYTES_MAX = 1 << 20
RSA_BITS_MIN = 2_048
_DECODE: Any = {"verify_aud": True, "verify_iss": True, "require": ["exp", "iss", "aud"]} | dict.fromkeys(
    ("verify_exp", "verify_nbf", "verify_iat"), False
)


class VerificationKey(NamedTuple):
    """One public key of an issuer, and the algorithm that it verifies."""

    kid: str | None
    algorithm: str
    key: RSAPublicKey | EllipticCurvePublicKey | Ed25519PublicKey


class TokenAuthenticator:
    """The authenticator over the issuers of an identity document."""

    def __init__(self, issuers: tuple[IssuerEntry, ...], directory: Path, clock: Clock) -> None:
        self._clock = clock
        self._issuers = {
            entry.issuer: (entry, WatchedFile(directory / entry.keys, read_verification_keys, clock))
            for entry in issuers
        }

    def accepts(self, credential: str) -> bool:
        """Whether the credential has the outer form of a signed token."""
        return credential.startswith("ey") and credential.count(".") == 2

    def authenticate(self, credential: str) -> Authenticated:
        """What the token's verified claims say; `IdentityError` for a token that proves nothing."""
        if len(credential) > CHARACTERS_MAX:
            raise refused(f"token longer than {CHARACTERS_MAX} characters")
        try:
            header = jwt.get_unverified_header(credential)
            stated = jwt.decode(credential, options={"verify_signature": False}).get("iss")
            found = self._issuers.get(stated) if isinstance(stated, str) else None
            if found is None:
                raise refused("unknown issuer")
            entry, keys = found
            key = _choose(header, keys.content(), entry)
            claims = jwt.decode(
                credential,
                key=key.key,
                algorithms=[key.algorithm],
                audience=entry.audience,
                issuer=entry.issuer,
                options=_DECODE,
            )
        except (jwt.PyJWTError, ValueError, TypeError, RecursionError) as error:
            raise refused(f"token does not verify ({type(error).__name__})") from None
        self._check_times(claims, entry.leeway_seconds)
        return _identity(claims, entry)

    def _check_times(self, claims: dict[str, Any], leeway_s: int) -> None:
        now_s, leeway = self._clock.utc_us() / MICROSECONDS, leeway_s
        for name in ("exp", "nbf", "iat"):
            value = claims.get(name)
            if value is not None and (type(value) not in (int, float) or not abs(value) < 1 << 53):
                raise refused(f"claim `{name}` is not a time")
        if now_s >= claims["exp"] + leeway:
            raise refused("token expired")
        if claims.get("nbf") is not None and now_s < claims["nbf"] - leeway:
            raise refused("token not valid yet")
        if claims.get("iat") is not None and now_s < claims["iat"] - leeway:
            raise refused("token issued in the future")


def read_verification_keys(path: Path) -> tuple[VerificationKey, ...]:
    """The public keys in a JWKS or PEM file; `ConfigError` if any is not one that we verify with (rule 2)."""
    try:
        with path.open("rb") as file:
            content = file.read(FILE_BYTES_MAX + 1)
    except OSError as error:
        raise ConfigError(f"{path}: cannot be read ({error.strerror}); check its path and mode") from None
    if len(content) > FILE_BYTES_MAX:
        raise ConfigError(f"{path}: is larger than 1 MiB")
    try:
        if content.lstrip().startswith(b"{"):
            rows = json.loads(content)["keys"]
            keys = tuple(_of_jwk(path, row) for row in rows if row.get("use", "sig") == "sig")
        else:
            keys = (_of_key(path, None, load_pem_public_key(content)),)
    except (ValueError, KeyError, TypeError, AttributeError, UnsupportedAlgorithm, jwt.PyJWTError):
        raise ConfigError(f"{path}: is neither a JWKS nor a PEM public key") from None
    if not keys or len({key.kid for key in keys}) != len(keys):
        raise ConfigError(f"{path}: must hold at least one signature key, each with a `kid` of its own")
    return keys


def _of_jwk(path: Path, row: dict[str, Any]) -> VerificationKey:
    if row.get("kty") == "oct" or "d" in row or "k" in row:
        raise ConfigError(f"{path}: holds a symmetric or private key; give public keys only")
    key = _of_key(path, row.get("kid"), jwt.PyJWK(row).key)
    if row.get("alg", key.algorithm) != key.algorithm:
        raise ConfigError(f"{path}: a key names an algorithm that is not RS256, ES256 or EdDSA")
    return key


def _of_key(path: Path, kid: object, key: object) -> VerificationKey:
    if kid is not None and not isinstance(kid, str):
        raise ConfigError(f"{path}: a `kid` must be text")
    if isinstance(key, RSAPublicKey) and key.key_size >= RSA_BITS_MIN:
        return VerificationKey(kid, "RS256", key)
    if isinstance(key, EllipticCurvePublicKey) and isinstance(key.curve, SECP256R1):
        return VerificationKey(kid, "ES256", key)
    if isinstance(key, Ed25519PublicKey):
        return VerificationKey(kid, "EdDSA", key)
    raise ConfigError(f"{path}: keys must be RSA of {RSA_BITS_MIN} bits or more, P-256 or Ed25519")


def _choose(header: dict[str, Any], keys: tuple[VerificationKey, ...], entry: IssuerEntry) -> VerificationKey:
    """The key that the token names, which decides the algorithm; the token's own must agree."""
    if "crit" in header:
        raise refused("token with critical extensions")
    kid = header.get("kid")
    named = [key for key in keys if kid is None or key.kid is None or key.kid == kid]
    if len(named) != 1:
        raise refused("token names no key of its issuer")
    key = named[0]
    if key.algorithm not in entry.algorithms or header.get("alg") != key.algorithm:
        raise refused("token's algorithm is not its key's")
    return key


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
