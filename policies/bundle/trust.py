"""The trust configuration: whose signatures count.

It alone says which signatures are needed and which keys may give them; what is signed has no say.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from enum import StrEnum
from typing import Protocol


class KeyRole(StrEnum):
    """What a key may sign."""

    AUTHOR = "author"
    APPROVER = "approver"
    OPERATOR = "operator"
    OWNER = "owner"
    BREAK_GLASS = "break-glass"
    ORDERS = "orders"


@dataclass(frozen=True, slots=True)
class TrustedKey:
    """A public key that the trust configuration names. `tenant`: the tenant for which an owner's key consents."""

    name: str
    public: bytes
    roles: frozenset[KeyRole]
    tenant: str | None = None


@dataclass(frozen=True, slots=True)
class Trust:
    """Who may sign what, and the audience whose policies this deployment accepts."""

    audience: str
    keys: Mapping[str, TrustedKey]
    break_glass_seconds_max: int = 4 * 3600
    needs: tuple[KeyRole, ...] = (KeyRole.AUTHOR, KeyRole.APPROVER)
    """Every bundle carries one signature in each of these roles, each by another key."""


class Signer(Protocol):
    """A private key, held in a file or by a port that wraps it."""

    @property
    def name(self) -> str:
        """The name under which the trust configuration knows the key."""

    def sign(self, message: bytes) -> bytes:
        """Return the Ed25519 signature, 64 bytes."""
