"""The public keys of an issuer of JSON Web Tokens, from a JWKS or a PEM file.

1. Only public keys that we verify with are taken: RSA of 2,048 bits or more, P-256 and Ed25519. An issuer adds keys of
   other kinds to its set at any time: they are left out and named, and the others keep their meaning.
2. A set with a symmetric or private key is refused whole: its issuer has published a secret.
3. A key verifies with the algorithms of its own kind, and of those only with the one that its set states, if any. Two
   different keys with one `kid` and one algorithm are both left out: a token names exactly one key.
"""

from __future__ import annotations

import codecs
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
_SHOWN_CHARACTERS = 64  # characters of what a set says of itself, in a message


class VerificationKey(NamedTuple):
    """One public key of an issuer, and the algorithms that it verifies."""

    kid: str | None
    algorithms: frozenset[str]
    key: RSAPublicKey | EllipticCurvePublicKey | Ed25519PublicKey


class IssuerKeys(NamedTuple):
    """The keys of a set that verify tokens, and a line for each key that was left out (rules 1 and 3)."""

    keys: tuple[VerificationKey, ...] = ()
    left_out: tuple[str, ...] = ()


class _LeftOutError(Exception):
    """A key that we do not verify with; the text says why."""


def read_verification_keys(path: Path) -> IssuerKeys:
    """Read the public keys in a file; raises `ConfigError` where it is unreadable or holds none."""
    try:
        with path.open("rb") as file:
            content = file.read(FILE_BYTES_MAX + 1)
    except OSError as error:
        raise ConfigError(f"{path}: cannot be read ({error.strerror}); check its path and mode") from None
    if len(content) > FILE_BYTES_MAX:
        raise ConfigError(f"{path}: is larger than 1 MiB")
    return parse_verification_keys(content, str(path))


def parse_verification_keys(content: bytes, place: str) -> IssuerKeys:
    """Parse the public keys in a JWKS (RFC 7517) or a PEM; errors name `place`."""
    content = content.removeprefix(codecs.BOM_UTF8)
    try:
        if content.lstrip().startswith(b"{"):
            rows = json.loads(content)["keys"]
            if not isinstance(rows, list):
                raise TypeError
            keys, left_out = _of_set(place, rows)
        else:
            keys, left_out = [_of_key(None, load_pem_public_key(content))], []
    except (ValueError, KeyError, TypeError, RecursionError, UnsupportedAlgorithm):
        raise ConfigError(f"{place}: is neither a JSON Web Key Set nor a PEM public key") from None
    except _LeftOutError as error:
        raise ConfigError(f"{place}: {error}; give RSA of {RSA_BITS_MIN} bits or more, P-256 or Ed25519") from None
    if not keys:
        reasons = f" ({'; '.join(left_out)})" if left_out else ""
        raise ConfigError(
            f"{place}: holds no signature key that is understood: RSA of {RSA_BITS_MIN} bits or more, P-256 or "
            f"Ed25519, each with a `kid` of its own{reasons}"
        )
    return IssuerKeys(tuple(keys), tuple(left_out))


def _of_set(place: str, rows: list[Any]) -> tuple[list[VerificationKey], list[str]]:
    parsed: list[VerificationKey] = []
    left_out: list[str] = []
    for row in rows:
        if isinstance(row, dict) and (row.get("kty") == "oct" or {"d", "k", "priv"} & row.keys()):
            raise ConfigError(f"{place}: holds a symmetric or private key; give public keys only")
        if isinstance(row, dict) and row.get("use", "sig") != "sig":
            continue
        try:
            key = _of_jwk(row)
        except _LeftOutError as error:
            kid = row.get("kid") if isinstance(row, dict) else None
            left_out.append(f"key {_quoted(kid)}: {error}")
        else:
            if key not in parsed:  # an issuer that names one key twice means one key
                parsed.append(key)
    doubled = [key for key in parsed if any(_ambiguous(key, other) for other in parsed)]
    left_out.extend(
        f"key {_quoted(kid)}: several different keys have this `kid`"
        for kid in dict.fromkeys(key.kid for key in doubled)
    )
    return [key for key in parsed if key not in doubled], left_out


def _ambiguous(key: VerificationKey, other: VerificationKey) -> bool:
    return key is not other and key.kid == other.kid and bool(key.algorithms & other.algorithms)


def _quoted(value: object) -> str:
    return "without a `kid`" if value is None else f"`{str(value)[:_SHOWN_CHARACTERS]}`"


def _of_jwk(row: Any) -> VerificationKey:
    import jwt  # here: commands load this module without it

    if not isinstance(row, dict):
        raise _LeftOutError("is no JSON object")
    try:
        public = jwt.PyJWK({**row, "alg": None}).key
    except (ValueError, KeyError, TypeError, AttributeError, UnsupportedAlgorithm, jwt.PyJWTError):
        names = "/".join(str(row[name])[:_SHOWN_CHARACTERS] for name in ("kty", "crv", "alg") if name in row)
        raise _LeftOutError(f"{names or 'no `kty`'} is not understood") from None
    key = _of_key(row.get("kid"), public)
    stated = row.get("alg")
    if stated is None:
        return key
    if stated not in key.algorithms:
        raise _LeftOutError(f"algorithm `{str(stated)[:_SHOWN_CHARACTERS]}` is not verified here")
    return key._replace(algorithms=frozenset({stated}))


def _of_key(kid: object, key: object) -> VerificationKey:
    if kid is not None and not isinstance(kid, str):
        raise _LeftOutError("a `kid` must be text")
    if isinstance(key, RSAPublicKey):
        if key.key_size >= RSA_BITS_MIN:
            return VerificationKey(kid, frozenset({"RS256", "PS256"}), key)
        raise _LeftOutError(f"RSA of {key.key_size} bits is too short")
    if isinstance(key, EllipticCurvePublicKey):
        if isinstance(key.curve, SECP256R1):
            return VerificationKey(kid, frozenset({"ES256"}), key)
        raise _LeftOutError(f"curve {key.curve.name} is not verified here")
    if isinstance(key, Ed25519PublicKey):
        return VerificationKey(kid, frozenset({"EdDSA"}), key)
    raise _LeftOutError(f"{type(key).__name__.lstrip('_')} is not verified here")
