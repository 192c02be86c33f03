"""Private keys of an issuer of JSON Web Tokens, each with the public half that its key set shows."""

from __future__ import annotations

import json
from typing import Any, NamedTuple

import jwt
from cryptography.hazmat.primitives.asymmetric import ec, ed25519, rsa

_TO_JWK: dict[str, Any] = {
    "RS256": jwt.algorithms.RSAAlgorithm.to_jwk,
    "ES256": jwt.algorithms.ECAlgorithm.to_jwk,
    "EdDSA": jwt.algorithms.OKPAlgorithm.to_jwk,
}


class Signer(NamedTuple):
    """A private key under the name that its issuer gives it."""

    kid: str
    algorithm: str
    key: Any

    def jwk(self, *, private: bool = False) -> dict[str, Any]:
        """The key in a key set."""
        key = self.key if private else self.key.public_key()
        return {**_TO_JWK[self.algorithm](key, as_dict=True), "kid": self.kid}

    def sign(self, claims: object, **header: Any) -> str:
        """A token of these claims; a header given as `...` is left out."""
        whole = {"kid": self.kid, "alg": self.algorithm, **header}
        whole = {name: value for name, value in whole.items() if value is not ...}
        algorithm = whole.pop("alg")
        return jwt.PyJWS().encode(json.dumps(claims).encode(), self.key, algorithm, headers=whole)


def rsa_signer(kid: str, bits: int = 2048) -> Signer:
    return Signer(kid, "RS256", rsa.generate_private_key(65537, bits))


def ec_signer(kid: str, curve: ec.EllipticCurve | None = None) -> Signer:
    return Signer(kid, "ES256", ec.generate_private_key(curve or ec.SECP256R1()))


def ed25519_signer(kid: str) -> Signer:
    return Signer(kid, "EdDSA", ed25519.Ed25519PrivateKey.generate())
