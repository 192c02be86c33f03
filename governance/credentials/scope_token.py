"""Signed scope tokens, by which the authenticating process tells the engine's process who owns a request.

- A token is a fixed record under a keyed BLAKE2b-128 tag. The tag is compared, in constant time, before anything behind
  it is read, so no byte that a stranger chose is ever interpreted.
- `verify` never raises on hostile input and repairs nothing. Input that is not byte for byte what `issue` wrote is
  `Rejected`, with a reason for the log. A rejected request may run, but reuses nothing.
- A token covers as many engine requests as its `uses` state, within its life, at one verifier. Used tokens are
  remembered until they expire. When that memory is full, for all or for one tenant, tokens are rejected, not trusted.
- Time never runs back here: a verifier keeps the latest UTC that it saw. It also rejects tokens issued before it
  started. So neither a stepped clock nor a restart revives a token.
- The client's own salt travels as a keyed digest. It can only narrow.
- A door before a router puts two more things in the token: the erase epochs that it knew (`edge.erase_epochs`), and the
  name of the request's route receipt.

    token := base64url(head, receipt?, epochs?, identity, tag)      epochs, identity: scope_token_bytes
    head  := version, key id, flags, uses, life (s), issued (ms), nonce

A whole token that fits in 128 characters is vLLM's `cache_salt`; a longer one travels beside a reference to its tag
(`carry`).
"""

from __future__ import annotations

import hmac
import os
import struct
import threading
from typing import Final, Literal, NamedTuple, TypeAlias

from kvcustody.clock import Clock
from kvcustody.errors import ConfigError, IdentityError
from kvcustody.governance.credentials.owner_tags import OwnerTags
from kvcustody.governance.credentials.scope_token_bytes import (
    SALT_DIGEST_BYTES,
    SALTED,
    decoded,
    encoded,
    pack_identity,
    read_epochs,
    read_identity,
    write_epochs,
)
from kvcustody.governance.credentials.scope_token_secret import keyed_state
from kvcustody.governance.credentials.spent_tokens import SpentTokens
from kvcustody.governance.edge.erase_epochs import Epochs
from kvcustody.governance.edge.route_receipt import RECEIPT_BYTES, RouteReceipt
from kvcustody.governance.identity.principal import Principal, check_identifier
from kvcustody.governance.keys.locked_buffer import KeyBuffer
from kvcustody.governance.request import Hints

SALT_CHARACTERS_MAX: Final = 128  # of vLLM's `cache_salt`, and of a client's own
USES_MAX: Final = 65_535
TTL_SECONDS_MAX: Final = 3_600
FUTURE_MS_MAX: Final = 5_000  # how far the issuing machine's clock may be ahead

_WHOLE, _REFERENCE, _OF_A_DOOR, _RECEIPTED = b"\x01", b"\x02", b"\x03", b"\x04"
# The third is a whole one with epochs, the last one with a receipt before them.
_WHOLES = (_WHOLE, _OF_A_DOOR, _RECEIPTED)
_HEAD = struct.Struct(">c2sBHHHI8s")  # issued: 48 bits, high and low
_TAG_BYTES = 16
_IDENTITIES_MAX = 4_096

Reason: TypeAlias = Literal[
    "missing",  # there is no token
    "malformed",  # not what `issue` could have written
    "incomplete",  # a reference without its token, or a token that the reference does not name
    "other-key",
    "forged",
    "expired",
    "future-dated",
    "before-start",  # issued before this verifier existed, so its uses are unknown
    "replayed",
    "memory-full",  # too many live tokens to remember
    "other-group",  # a windowed token of other workers
]


class VerifiedToken(NamedTuple):
    """An authentic token, one use of which is now spent; `uses_left` remain."""

    principal: Principal
    hints: Hints
    uses_left: int
    issued_utc_us: int
    expires_utc_us: int


class Rejected(NamedTuple):
    """No identity: the request must neither reuse nor publish anything."""

    reason: Reason


class Carried(NamedTuple):
    """How a token travels in a request: `cache_salt` alone, or a reference there and the token in `transfer`."""

    cache_salt: str
    transfer: str | None


class ScopeTokens:
    """Issues and verifies scope tokens under one 32-byte secret, shared by the processes of one deployment.

    `verify` may be called from any thread. The secret is only read here; its owner wipes it.
    """

    def __init__(
        self,
        secret: KeyBuffer,
        clock: Clock,
        *,
        remembered_max: int = 131_072,
        remembered_per_tenant_max: int | None = None,
    ) -> None:
        self._clock = clock
        self.owners = OwnerTags(secret)
        self._tagger = keyed_state(secret, "tag", _TAG_BYTES)
        self._salts = SaltDigests(secret)
        self._key_id = keyed_state(secret, "key-id", 2).digest()
        self._latest_ms = self._started_ms = clock.utc_us() // 1000
        self._spent = SpentTokens(remembered_max, remembered_per_tenant_max or max(1, remembered_max // 4))
        self._identities: dict[bytes, tuple[Principal, Hints]] = {}
        self._lock = threading.Lock()

    def issue(
        self,
        principal: Principal,
        *,
        route: str | None = None,
        classification: str | None = None,
        client_salt: str | None = None,
        uses: int = 1,
        ttl_seconds: int = 60,
        epochs: Epochs | None = None,
        receipt: RouteReceipt | None = None,
    ) -> str:
        """A token for `uses` engine requests of `principal`, verifiable for `ttl_seconds`.

        `route` stands in for the principal's, `classification` is a hint that can only raise. Raises `IdentityError`
        for a malformed one and for a client salt that is empty, longer than 128 characters or not printable;
        `ConfigError` for uses or a life out of bounds.
        """
        if not 1 <= uses <= USES_MAX:
            raise ConfigError(f"scope token: uses `{uses}` must be 1 to {USES_MAX}", uses=uses)
        if not 1 <= ttl_seconds <= TTL_SECONDS_MAX:
            raise ConfigError(
                f"scope token: a life of `{ttl_seconds}` s must be 1 to {TTL_SECONDS_MAX}",
                ttl_seconds=ttl_seconds,
            )
        if classification is not None:
            check_identifier("classification", classification)
        if route is not None and not check_identifier("route", route).startswith("/"):
            raise IdentityError("route: must begin with `/`", field="route", reason="must begin with `/`")
        flags, texts = pack_identity(principal, route or principal.route, classification)
        if client_salt is not None:
            flags |= SALTED
            texts += self._salts.of(client_salt)
        issued_ms = self._clock.utc_us() // 1000
        issued = (issued_ms >> 32, issued_ms & 0xFFFFFFFF)
        version = _WHOLE
        if epochs is not None:
            version, texts = _OF_A_DOOR, write_epochs(epochs) + texts
            if receipt is not None:
                version, texts = _RECEIPTED, receipt.to_bytes() + texts
        head = _HEAD.pack(version, self._key_id, flags, uses, ttl_seconds, *issued, os.urandom(8))
        return encoded(head + texts + self._tag(head + texts))

    def carry(self, token: str) -> Carried:
        """How `token`, fresh from `issue`, travels in a request."""
        if len(token) <= SALT_CHARACTERS_MAX:
            return Carried(token, None)
        data = decoded(token)
        assert data is not None, "`carry` is for what `issue` wrote"
        return Carried(encoded(_REFERENCE + self._key_id + data[-_TAG_BYTES:]), token)

    def verify(self, cache_salt: object, transfer: object = None) -> VerifiedToken | Rejected:
        """Who a request is from, and one use spent; call it once for each engine request.

        `cache_salt` is the request's, `transfer` what its `kv_transfer_params` hold under `kvcustody`, if anything.
        """
        if cache_salt is None:
            return Rejected("missing")
        data = decoded(cache_salt)
        if data is None:
            return Rejected("malformed")
        if data[:1] == _REFERENCE:
            whole = decoded(transfer)
            if whole is None or not hmac.compare_digest(data[3:], whole[-_TAG_BYTES:]) or data[1:3] != whole[1:3]:
                return Rejected("incomplete")
            data = whole
        elif transfer is not None:
            return Rejected("malformed")
        return self._verify(data)

    def _verify(self, data: bytes) -> VerifiedToken | Rejected:
        if len(data) < _HEAD.size + _TAG_BYTES or data[:1] not in _WHOLES:
            return Rejected("malformed")
        if data[1:3] != self._key_id:
            return Rejected("other-key")
        signed, tag = data[:-_TAG_BYTES], data[-_TAG_BYTES:]
        if not hmac.compare_digest(self._tag(signed), tag):
            return Rejected("forged")
        _, _, flags, uses, life_s, issued_high, issued_low, _ = _HEAD.unpack_from(data)
        issued_ms = issued_high << 32 | issued_low
        expires_ms = issued_ms + 1000 * life_s
        identity = self._identity(flags, signed)
        with self._lock:
            self._latest_ms = now_ms = max(self._latest_ms, self._clock.utc_us() // 1000)
            if now_ms >= expires_ms:
                return Rejected("expired")
            if issued_ms > now_ms + FUTURE_MS_MAX:
                return Rejected("future-dated")
            if issued_ms < self._started_ms:
                return Rejected("before-start")
            principal, hints = identity
            left = self._spent.spend(tag, uses, (principal.issuer, principal.tenant), expires_ms, now_ms)
        if not isinstance(left, int):
            return Rejected(left)
        return VerifiedToken(principal, hints, left, 1000 * issued_ms, 1000 * expires_ms)

    def _identity(self, flags: int, signed: bytes) -> tuple[Principal, Hints]:
        """The principal and hints of an authentic record; those of recent ones are kept."""
        receipt, at = None, _HEAD.size
        if signed[:1] == _RECEIPTED:
            receipt, at = RouteReceipt.from_bytes(signed[at : at + RECEIPT_BYTES]), at + RECEIPT_BYTES
        record = signed[at:]
        key = signed[:1] + signed[3:4] + record
        known = self._identities.get(key)
        if known is None:
            epochs, at = read_epochs(record) if signed[:1] != _WHOLE else (None, 0)
            principal, hints = read_identity(flags, record[at:])
            known = principal, hints._replace(epochs=epochs)
            if len(self._identities) >= _IDENTITIES_MAX:
                self._identities.clear()
            self._identities[key] = known
        return known if receipt is None else (known[0], known[1]._replace(receipt=receipt))

    def _tag(self, signed: bytes) -> bytes:
        state = self._tagger.copy()
        state.update(signed)
        return state.digest()


class SaltDigests:
    """Keyed digests of clients' own salts under one scope token secret: equal in every process that has it."""

    def __init__(self, secret: KeyBuffer) -> None:
        self._state = keyed_state(secret, "client-salt", SALT_DIGEST_BYTES)

    def of(self, client_salt: object) -> bytes:
        """The digest, of `SALT_DIGEST_BYTES`; raises as `check_client_salt`."""
        state = self._state.copy()
        state.update(check_client_salt(client_salt).encode("utf-8"))
        return state.digest()


def check_client_salt(value: object) -> str:
    """`value` unchanged if a client may send it as its salt, else `IdentityError` that does not quote it."""
    reason = None
    if type(value) is not str:
        reason = f"must be text, not `{type(value).__name__}`"
    elif not value:
        reason = "is empty"
    elif len(value) > SALT_CHARACTERS_MAX:
        reason = f"is longer than {SALT_CHARACTERS_MAX} characters"
    elif not value.isprintable():
        reason = "has a character that is not printable"
    if reason is not None:
        raise IdentityError(f"cache_salt: {reason}", field="cache_salt", reason=reason)
    assert type(value) is str
    return value
