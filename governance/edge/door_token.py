"""Door tokens: how a door before a router tells an engine's door who sent a request.

1. A door signs with its own Ed25519 key. Workers have public keys alone, so none can make a token: not its own
   tenant's, nor another's.
2. Nothing behind the signature is read before a trusted key verified it. What is not byte for byte what `issue` wrote
   is `Rejected`, with a reason for the log.
3. A token is for one worker group and ends at its deadline, after `SECONDS_MAX` at most. It says nothing of the body:
   routers write bodies anew.
4. A token covers a number of engine requests, at each worker. A retry by the router presents it again; its uses are
   those of one request, times one more than the retries that the door's operator declared.
5. The nonce and the request id name the request's route receipt (`route_receipt`); the version says whether the door
   writes its half.
6. Several keys verify at once, so that a door's key can be replaced while its tokens are under way.

    token  := "kvd1." base64url(record, signature)
    record := version, key id, flags, uses, life (s), issued (ms), nonce, epochs, group, request id, namespace, identity
"""

from __future__ import annotations

import hashlib
import os
import re
import struct
import threading
from collections.abc import Callable, Sequence
from typing import Final, Literal, NamedTuple, TypeAlias

from cryptography.exceptions import InvalidSignature
from cryptography.hazmat.primitives.asymmetric.ed25519 import Ed25519PrivateKey, Ed25519PublicKey

from kvcustody.audit.tlog.signed_note import KeyKind, VerifierKey
from kvcustody.audit.tlog.signing_key import SigningKey
from kvcustody.clock import Clock
from kvcustody.errors import ConfigError, IdentityError
from kvcustody.governance.credentials.scope_token import FUTURE_MS_MAX, USES_MAX
from kvcustody.governance.credentials.scope_token_bytes import (
    SALTED,
    decoded,
    encoded,
    pack_identity,
    read_identity,
    read_text,
    write_text,
)
from kvcustody.governance.credentials.spent_tokens import SpentTokens
from kvcustody.governance.edge.erase_epochs import NO_EPOCHS, Epochs
from kvcustody.governance.edge.route_receipt import NONCE_BYTES, RouteReceipt
from kvcustody.governance.identity.principal import Principal, check_identifier
from kvcustody.governance.request import Hints

PREFIX: Final = "kvd1."
GROUP: Final = "default"  # of workers that are in no named group
SECONDS_MAX: Final = 60
_PLAIN, _RECEIPTED = b"\x01", b"\x02"  # versions: without and with a receipt of the door's
_REQUEST_ID = re.compile(r"[A-Za-z0-9._:-]{1,160}")  # a client's id of 128 behind its owner's tag fits
_HEAD = struct.Struct(">c4sBHHHI8s3Q")  # issued: 48 bits, high and low
_SIGNATURE_BYTES: Final = 64
_SIGNED: Final = b"kvcustody/door-token/1\x00"  # a NUL, which no note has: a signature has one meaning

Reason: TypeAlias = Literal[
    "malformed",  # not what `issue` could have written
    "other-key",  # no trusted door has this key
    "forged",
    "expired",
    "future-dated",
    "before-start",  # issued before this verifier existed, so its uses are unknown
    "other-group",
    "replayed",  # its uses are spent
    "memory-full",  # too many live tokens to remember
]


class DoorClaims(NamedTuple):
    """A door's statements about one request. `namespace` is the routers' name of the requester.

    `epochs`: of fleet, tenant and the scope of the namespace, as the door knew them (`erase_epochs`). `is_receipted`:
    the door writes its half of the request's route receipt.
    """

    principal: Principal
    hints: Hints
    namespace: str
    group: str
    request_id: str
    uses: int
    epochs: Epochs = NO_EPOCHS
    is_receipted: bool = False


class PresentedToken(NamedTuple):
    """An authentic token within its life, with no use spent yet. Times are UTC microseconds."""

    claims: DoorClaims
    door: str
    record: bytes
    issued_utc_us: int
    expires_utc_us: int
    receipt: RouteReceipt


class RejectedToken(NamedTuple):
    """A token that carries no identity: the request goes no further."""

    reason: Reason


class DoorSigner:
    """Signs under a door's present key; its file may be replaced while the door runs."""

    def __init__(self, key: Callable[[], SigningKey]) -> None:
        """Raises `ConfigError` for a key that is not Ed25519."""
        self._current = key
        self._known = key()
        self._key = _private(self._known)

    def current(self) -> tuple[bytes, Callable[[bytes], bytes]]:
        """The key's id, and its signing function."""
        key = self._current()
        if key is not self._known:
            self._known, self._key = key, _private(key)
        return key.verifier.key_id, self._key.sign


class DoorTokenIssuer:
    """Signs door tokens under a door's present key."""

    def __init__(self, key: Callable[[], SigningKey], clock: Clock) -> None:
        """Raises `ConfigError` for a key that is not Ed25519."""
        self._signer = DoorSigner(key)
        self._clock = clock

    def issue(self, claims: DoorClaims, *, ttl_seconds: int = 30, salt: bytes = b"", nonce: bytes = b"") -> str:
        """Return a token for these claims; `salt`: the keyed digest of the client's own salt, or empty.

        `nonce`: `NONCE_BYTES` that no other token has; made here where none are given.

        Raises `ConfigError` for uses or a life out of bounds, `IdentityError` for a malformed name.
        """
        if not 1 <= claims.uses <= USES_MAX:
            raise ConfigError(f"door token: uses `{claims.uses}` must be 1 to {USES_MAX}", uses=claims.uses)
        if not 1 <= ttl_seconds <= SECONDS_MAX:
            raise ConfigError(
                f"door token: a life of `{ttl_seconds}` s must be 1 to {SECONDS_MAX}", ttl_seconds=ttl_seconds
            )
        names = (claims.group, claims.request_id, claims.namespace)
        check_identifier("group", claims.group)
        check_identifier("namespace", claims.namespace)
        if _REQUEST_ID.fullmatch(claims.request_id) is None:
            raise IdentityError("request_id: is malformed", field="request_id", reason="is malformed")
        hint = claims.hints.classification
        if hint is not None:
            check_identifier("classification", hint)
        principal = claims.principal
        flags, identity = pack_identity(principal, principal.route, hint)
        flags |= SALTED * bool(salt)
        key_id, sign = self._signer.current()
        issued_ms = self._clock.utc_us() // 1000
        issued = (issued_ms >> 32, issued_ms & 0xFFFFFFFF)
        head = _HEAD.pack(
            _RECEIPTED if claims.is_receipted else _PLAIN,
            key_id,
            flags,
            claims.uses,
            ttl_seconds,
            *issued,
            nonce or os.urandom(NONCE_BYTES),
            *claims.epochs,
        )
        record = head + b"".join(map(write_text, names)) + identity + salt
        return PREFIX + encoded(record + sign(_SIGNED + record))


def _private(key: SigningKey) -> Ed25519PrivateKey:
    if key.kind is not KeyKind.ED25519:
        raise ConfigError(f"door key `{key.name}`: must be an Ed25519 key", name=key.name)
    return Ed25519PrivateKey.from_private_bytes(key.seed)


class DoorTokens:
    """Verifies tokens by doors' present keys, and counts their uses. `present` and `spend` are thread-safe."""

    def __init__(
        self,
        keys: Callable[[], Sequence[VerifierKey]],
        clock: Clock,
        *,
        group: str = GROUP,
        remembered_max: int = 131_072,
    ) -> None:
        self._keys = keys
        self._clock = clock
        self._group = group
        self._latest_ms = self._started_ms = clock.utc_us() // 1000
        self._spent = SpentTokens(remembered_max, max(1, remembered_max // 4))
        self._lock = threading.Lock()

    def present(self, token: str) -> PresentedToken | RejectedToken:
        """Return whom a token speaks for, if it is authentic and in time; spends no use."""
        data = decoded(token.removeprefix(PREFIX)) if token.startswith(PREFIX) else None
        if data is None or len(data) < _HEAD.size + _SIGNATURE_BYTES or data[:1] not in (_PLAIN, _RECEIPTED):
            return RejectedToken("malformed")
        record, signature = data[:-_SIGNATURE_BYTES], data[-_SIGNATURE_BYTES:]
        door = next((key for key in self._keys() if key.key_id == record[1:5]), None)
        if door is None:
            return RejectedToken("other-key")
        try:
            Ed25519PublicKey.from_public_bytes(door.public).verify(signature, _SIGNED + record)
        except InvalidSignature:
            return RejectedToken("forged")
        return self._read(record, door.name)

    def _read(self, record: bytes, door: str) -> PresentedToken | RejectedToken:
        """What an authentic record says, if it is in time and for this group."""
        version, _, flags, uses, life_s, high, low, nonce, *epochs = _HEAD.unpack_from(record)
        is_receipted = version == _RECEIPTED
        issued_ms = high << 32 | low
        expires_ms = issued_ms + 1000 * life_s
        now_ms = self._now_ms()
        if now_ms >= expires_ms:
            return RejectedToken("expired")
        if issued_ms > now_ms + FUTURE_MS_MAX:
            return RejectedToken("future-dated")
        if issued_ms < self._started_ms:
            return RejectedToken("before-start")
        at, names = _HEAD.size, []
        for _ in range(3):
            text, at = read_text(record, at)
            names.append(text)
        group, request_id, namespace = names
        if group != self._group:
            return RejectedToken("other-group")
        principal, hints = read_identity(flags, record[at:])
        claims = DoorClaims(principal, hints, namespace, group, request_id, uses, Epochs(*epochs), is_receipted)
        receipt = RouteReceipt.of(request_id, nonce, is_asked=is_receipted)
        return PresentedToken(claims, door, record, 1000 * issued_ms, 1000 * expires_ms, receipt)

    def spend(self, token: PresentedToken, uses: int) -> RejectedToken | None:
        """Spend `uses` of a presented token; returns None, or why they are not available."""
        claims, now_ms = token.claims, self._now_ms()
        expires_ms = token.expires_utc_us // 1000
        if now_ms >= expires_ms:
            return RejectedToken("expired")
        owner = (claims.principal.issuer, claims.principal.tenant)
        tag = hashlib.sha256(token.record).digest()[:16]
        with self._lock:
            left = self._spent.spend(tag, claims.uses, owner, expires_ms, now_ms, count=uses)
        return None if isinstance(left, int) else RejectedToken(left)

    def _now_ms(self) -> int:
        """UTC, which never runs back here: a stepped clock revives no token."""
        with self._lock:
            self._latest_ms = max(self._latest_ms, self._clock.utc_us() // 1000)
            return self._latest_ms
