"""One-time sign-in links, from this machine only, for a service that was started by hand.

1. A link holds 256 random bits; what is kept is their digest, in memory: no link outlives the process.
2. It is good for `LINK_SECONDS`, once. Whoever uses it second finds nothing, as with one that never was.
3. Only a connection from this machine, with nobody in between, takes one; elsewhere it stays unspent.
"""

from __future__ import annotations

import hashlib
import ipaddress
import secrets
import threading
from typing import NamedTuple

from kvcustody.clock import MICROSECONDS, Clock

LINK_SECONDS = 60
LINKS_MAX = 16
_TOKEN_CHARACTERS = 43


class SignInLink(NamedTuple):
    """A new link: its token goes into the address. `expires_us` is boot time."""

    token: str
    expires_us: int


class TakenLink(NamedTuple):
    """The principal that a link signs in, and its creation (UTC): what narrows the principal afterwards ends
    the link.
    """

    principal: str
    made_us: int


class _Waiting(NamedTuple):
    link: TakenLink
    expires_us: int


class SignInLinks:
    """Makes and takes links; thread-safe. Beyond `LINKS_MAX` waiting links, the oldest is dropped."""

    def __init__(self, clock: Clock) -> None:
        self._clock = clock
        self._waiting: dict[bytes, _Waiting] = {}
        self._lock = threading.Lock()

    def make(self, principal: str) -> SignInLink:
        """Return a link that signs this principal in."""
        token, expires_us = secrets.token_urlsafe(32), self._clock.now_us() + LINK_SECONDS * MICROSECONDS
        with self._lock:
            while len(self._waiting) >= LINKS_MAX:
                del self._waiting[next(iter(self._waiting))]
            self._waiting[_digest(token)] = _Waiting(TakenLink(principal, self._clock.utc_us()), expires_us)
        return SignInLink(token, expires_us)

    def take(self, token: str, *, direct: bool) -> TakenLink | None:
        """Use a link up, and return whom it signs in, or None. `direct`: see `is_direct`."""
        if not direct or len(token) != _TOKEN_CHARACTERS:
            return None
        with self._lock:
            found = self._waiting.pop(_digest(token), None)
        return None if found is None or self._clock.now_us() >= found.expires_us else found.link


def is_direct(peer: str | None, host: str, *, forwarded: bool) -> bool:
    """Whether a request comes from this machine by its own address, without any proxy's header (rule 3)."""
    name = host.rpartition(":")[0] if host.rpartition(":")[2].isdecimal() else host
    return not forwarded and _loopback(peer or "") and (name == "localhost" or _loopback(name.strip("[]")))


def _loopback(text: str) -> bool:
    try:
        return ipaddress.ip_address(text).is_loopback
    except ValueError:
        return False


def _digest(token: str) -> bytes:
    return hashlib.sha256(token.encode("utf-8", "surrogatepass")).digest()
