"""Whose signature counts: the trust configuration, as data.

1. It alone says which signatures are needed and which keys may give them; what is signed has no say.
2. A signature by a key that it does not name, or that does not fit, is an error, not something to skip.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from enum import StrEnum
from typing import Protocol

from cryptography.exceptions import InvalidSignature
from cryptography.hazmat.primitives.asymmetric.ed25519 import Ed25519PublicKey

from kvcustody.policies.bundle.canonical_json import BundleRejected
from kvcustody.policies.bundle.manifest import BundleSignature


class KeyRole(StrEnum):
    """What a key may sign."""

    AUTHOR = "author"
    APPROVER = "approver"
    OPERATOR = "operator"
    OWNER = "owner"
    BREAK_GLASS = "break-glass"


@dataclass(frozen=True, slots=True)
class TrustedKey:
    """A public key that the trust configuration names. `tenant` is whose consent an owner's key gives."""

    name: str
    public: bytes
    roles: frozenset[KeyRole]
    tenant: str | None = None


@dataclass(frozen=True, slots=True)
class Trust:
    """Who may sign what, and for which audience this deployment takes a policy."""

    audience: str
    keys: Mapping[str, TrustedKey]
    break_glass_seconds_max: int = 4 * 3600
    needs: tuple[KeyRole, ...] = (KeyRole.AUTHOR, KeyRole.APPROVER)
    """Every bundle carries one signature in each of these roles, each by another key."""


class Signer(Protocol):
    """Holds a private key: a file, or a wrapping port's."""

    @property
    def name(self) -> str:
        """The name under which the trust configuration knows the key."""

    def sign(self, message: bytes) -> bytes:
        """The Ed25519 signature, 64 bytes."""


def check_signature(trust: Trust, signature: BundleSignature, message: bytes, what: str) -> TrustedKey:
    """The trusted key that made this signature of `message`; raises `BundleRejected`."""
    key = trust.keys.get(signature.key)
    if key is None:
        raise BundleRejected(
            f"{what} is signed by `{signature.key}`, which the trust configuration does not name"
        )
    try:
        Ed25519PublicKey.from_public_bytes(key.public).verify(signature.data, message)
    except (InvalidSignature, ValueError):
        raise BundleRejected(
            f"{what} is not signed by `{signature.key}`: the signature does not fit"
        ) from None
    return key
