"""The public keys of an issuer of JSON Web Tokens, from a JWKS or a PEM file; what is no such key is refused.

1. Only public keys that we verify with are taken: RSA of 2,048 bits or more, P-256 and Ed25519. A set with a symmetric
   or private key is refused whole; a key that its issuer uses with another algorithm is left out.
2. A key verifies with the algorithms of its own kind alone, and of those with the one that its set states, if any.
"""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any, NamedTuple

from cryptography.exceptions import UnsupportedAlgorithm
from cryptography.hazmat.primitives.asymmetric.ec import SECP256R1, EllipticCurvePublicKey
from cryptography.hazmat.primitives.asymmetric.ed25519 import Ed25519PublicKey
from cryptography.hazmat.primitives.asymmetric.rsa import RSAPublicKey
from cryptography.hazmat.primitives.serialization import load_pem_public_key

from kvcustody.errors import ConfigError

FILE_BYTES_MAX = 1 << 20
RSA_BITS_MIN = 2_048


class VerificationKey(NamedTuple):
    """One public key of an issuer, and the algorithms that it verifies."""

    kid: str | None
    algorithms: frozenset[str]
    key: RSAPublicKey | EllipticCurvePublicKey | Ed25519PublicKey


def read_verification_keys(path: Path) -> tuple[VerificationKey, ...]:
    """The public keys in a file; `ConfigError` where it cannot be read or any is not one (rule 1)."""
    try:
        with path.open("rb") as file:
            content = file.read(FILE_BYTES_MAX + 1)
    except OSError as error:
        raise ConfigError(f"{path}: cannot be read ({error.strerror}); check its path and mode") from None
    if len(content) > FILE_BYTES_MAX:
        raise ConfigError(f"{path}: is larger than 1 MiB")
    return parse_verification_keys(content, str(path))


def parse_verification_keys(content: bytes, place: str) -> tuple[VerificationKey, ...]:
    """The public keys in a JWKS (RFC 7517) or a PEM; `place` is what errors name."""
    import jwt  # here: commands load this module without it

    try:
        if content.lstrip().startswith(b"{"):
            rows = json.loads(content)["keys"]
            found = [_of_jwk(place, row) for row in rows if row.get("use", "sig") == "sig"]
        else:
            found = [_of_key(place, None, load_pem_public_key(content))]
    except (ValueError, KeyError, TypeError, AttributeError, UnsupportedAlgorithm, jwt.PyJWTError):
        raise ConfigError(f"{place}: is neither a JSON Web Key Set nor a PEM public key") from None
    keys = tuple(key for key in found if key.algorithms)
    if not keys or len({key.kid for key in keys}) != len(keys):
        raise ConfigError(
            f"{place}: must hold at least one signature key (RS256, PS256, ES256, EdDSA), each with a `kid` of its own"
        )
    return keys


def _of_jwk(place: str, row: dict[str, Any]) -> VerificationKey:
    if row.get("kty") == "oct" or "d" in row or "k" in row:
        raise ConfigError(f"{place}: holds a symmetric or private key; give public keys only")
    from jwt import PyJWK

    key = _of_key(place, row.get("kid"), PyJWK({**row, "alg": None}).key)
    stated = row.get("alg")
    return key if stated is None else key._replace(algorithms=key.algorithms & {stated})


def _of_key(place: str, kid: object, key: object) -> VerificationKey:
    if kid is not None and not isinstance(kid, str):
        raise ConfigError(f"{place}: a `kid` must be text")
    if isinstance(key, RSAPublicKey) and key.key_size >= RSA_BITS_MIN:
        return VerificationKey(kid, frozenset({"RS256", "PS256"}), key)
    if isinstance(key, EllipticCurvePublicKey) and isinstance(key.curve, SECP256R1):
        return VerificationKey(kid, frozenset({"ES256"}), key)
    if isinstance(key, Ed25519PublicKey):
        return VerificationKey(kid, frozenset({"EdDSA"}), key)
    raise ConfigError(f"{place}: keys must be RSA of {RSA_BITS_MIN} bits or more, P-256 or Ed25519")
