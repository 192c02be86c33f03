"""Windowed tokens: salt and token in one, for front ends that pass by an engine's Python door.

    issuer = WindowedTokenIssuer(key, clock, window_seconds=3600)
    cache_salt = issuer.issue(claims, salt=b"")          # the same text for this scope until the window ends
    WindowedTokens(keys, clock, window_seconds=3600).verify(cache_salt)

1. It is signed by a door's Ed25519 key, and has no nonce: equal claims in one window give one text, by which a router
   finds the requester's own prompts. Workers have public keys alone.
2. The running window and the one before it are accepted. What was known of erasures is in it: under an older epoch
   nothing is found, as with a door's other tokens (`worker_epochs`).
3. Whoever has the text is its requester until then, as often as it likes. So it is for engines that only their front
   end reaches, by mTLS or a Unix socket, and off unless a deployment sets it. Events have the namespace, which does
   not tell it.
4. A request's salt and classification hint are in it, so they narrow as elsewhere.

    token  := "kvw1." base64url(record, signature)
    record := version, key id, flags, window (s), number of the window, epochs, group, namespace, identity
"""

from __future__ import annotations

import struct
import threading
from collections.abc import Callable, Sequence
from typing import Final, NamedTuple

from cryptography.exceptions import InvalidSignature
from cryptography.hazmat.primitives.asymmetric.ed25519 import Ed25519PublicKey

from kvcustody.audit.tlog.signed_note import VerifierKey
from kvcustody.audit.tlog.signing_key import SigningKey
from kvcustody.clock import Clock
from kvcustody.errors import ConfigError, IdentityError
from kvcustody.governance.credentials.scope_token import Rejected, VerifiedToken
from kvcustody.governance.credentials.scope_token_bytes import (
    SALTED,
    decoded,
    encoded,
    pack_identity,
    read_identity,
    read_text,
    write_text,
)
from kvcustody.governance.edge.door_token import GROUP, DoorSigner
from kvcustody.governance.edge.erase_epochs import Epochs
from kvcustody.governance.identity.principal import Principal, check_identifier
from kvcustody.times import SECOND_US

PREFIX: Final = "kvw1."
SECONDS_MIN, SECONDS_MAX = 60, 86_400
_AHEAD_US: Final = 5 * SECOND_US  # how far the door's clock may be ahead
_VERSION: Final = b"\x01"
_HEAD = struct.Struct(">c4sBIQ3Q")
_SIGNATURE_BYTES: Final = 64
_SIGNED: Final = b"kvcustody/windowed-token/1\x00"


class WindowedClaims(NamedTuple):
    """The statements of a windowed token; `hint` can only raise the classification."""

    principal: Principal
    hint: str | None
    namespace: str
    group: str
    epochs: Epochs


def check_window(seconds: int) -> int:
    """Return the length of a window; raises `ConfigError` for one out of bounds."""
    if not SECONDS_MIN <= seconds <= SECONDS_MAX:
        raise ConfigError(f"a window of `{seconds}` s must be {SECONDS_MIN} to {SECONDS_MAX} s", seconds=seconds)
    return seconds


class WindowedTokenIssuer:
    """Signs windowed tokens under a door's present key."""

    def __init__(self, key: Callable[[], SigningKey], clock: Clock, *, window_seconds: int) -> None:
        """Raises `ConfigError` for a key that is not Ed25519, and for a window out of bounds."""
        self._signer = DoorSigner(key)
        self._clock = clock
        self._seconds = check_window(window_seconds)

    def issue(self, claims: WindowedClaims, *, salt: bytes = b"") -> str:
        """Return the text for these claims in the present window; `salt`: the keyed digest of the client's own, or
        empty.
        """
        check_identifier("namespace", claims.namespace)
        if claims.hint is not None:
            check_identifier("classification", claims.hint)
        principal = claims.principal
        flags, identity = pack_identity(principal, principal.route, claims.hint)
        flags |= SALTED * bool(salt)
        number = self._clock.utc_us() // (self._seconds * SECOND_US)
        key_id, sign = self._signer.current()
        head = _HEAD.pack(_VERSION, key_id, flags, self._seconds, number, *claims.epochs)
        record = head + write_text(claims.group) + write_text(claims.namespace) + identity + salt
        return PREFIX + encoded(record + sign(_SIGNED + record))


class WindowedTokens:
    """Verifies by doors' present keys. Any thread may call `verify`."""

    def __init__(
        self,
        keys: Callable[[], Sequence[VerifierKey]],
        clock: Clock,
        *,
        window_seconds: int,
        group: str = GROUP,
    ) -> None:
        self._keys = keys
        self._clock = clock
        self._seconds = check_window(window_seconds)
        self._group = group
        self._latest_us = 0
        self._lock = threading.Lock()

    def verify(self, cache_salt: str) -> VerifiedToken | Rejected:
        """Return who sent a request."""
        data = decoded(cache_salt.removeprefix(PREFIX)) if cache_salt.startswith(PREFIX) else None
        if data is None or len(data) < _HEAD.size + _SIGNATURE_BYTES or data[:1] != _VERSION:
            return Rejected("malformed")
        record, signature = data[:-_SIGNATURE_BYTES], data[-_SIGNATURE_BYTES:]
        try:
            door = next((key for key in self._keys() if key.key_id == record[1:5]), None)
        except IdentityError:  # the file of keys is unreadable
            door = None
        if door is None:
            return Rejected("other-key")
        try:
            Ed25519PublicKey.from_public_bytes(door.public).verify(signature, _SIGNED + record)
        except InvalidSignature:
            return Rejected("forged")
        _, _, flags, seconds, number, *epochs = _HEAD.unpack_from(record)
        with self._lock:  # a stepped clock revives none
            self._latest_us = now_us = max(self._latest_us, self._clock.utc_us())
        window_us = self._seconds * SECOND_US
        if seconds != self._seconds or number < now_us // window_us - 1:
            return Rejected("expired")
        if number > (now_us + _AHEAD_US) // window_us:
            return Rejected("future-dated")
        group, at = read_text(record, _HEAD.size)
        _, at = read_text(record, at)
        if group != self._group:
            return Rejected("other-group")
        principal, hints = read_identity(flags, record[at:])
        begins_us = number * window_us
        return VerifiedToken(principal, hints._replace(epochs=Epochs(*epochs)), 1, begins_us, begins_us + 2 * window_us)
