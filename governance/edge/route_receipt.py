"""The name of a route receipt, and its way from the door to the engine within signed tokens.

    receipt = RouteReceipt.of(request_id, nonce, is_asked=True)
    receipt.name.startswith(request_digest(request_id))

1. The first half of the name is a digest of the request id, so that who has the id finds its receipts. Clients choose
   ids, and may send one twice: the second half is the nonce of the door's token, which no other request has.
2. The door chooses which requests have a receipt (`is_asked`), by the policy (`policies.table.receipts`). A worker
   records, besides, what finds another tenant's blocks.
"""

from __future__ import annotations

import hashlib
from fractions import Fraction
from typing import Final, NamedTuple, Self

NONCE_BYTES: Final = 8
_DIGEST_BYTES: Final = 8
_SHARE_BITS: Final = 32
RECEIPT_BYTES: Final = 1 + _DIGEST_BYTES + NONCE_BYTES


class RouteReceipt(NamedTuple):
    """The receipt of one request: its name of 32 hexadecimal digits, and whether the door writes its half."""

    name: str
    is_asked: bool

    @classmethod
    def of(cls, request_id: str, nonce: bytes, *, is_asked: bool) -> Self:
        """Return the receipt of a request whose token has this nonce."""
        assert len(nonce) == NONCE_BYTES
        return cls(request_digest(request_id) + nonce.hex(), is_asked)

    def to_bytes(self) -> bytes:
        """Return the form that a scope token holds."""
        return bytes((self.is_asked,)) + bytes.fromhex(self.name)

    @classmethod
    def from_bytes(cls, data: bytes) -> Self:
        """Parse the form of `to_bytes`; only for authenticated bytes."""
        return cls(data[1:].hex(), bool(data[0]))


def request_digest(request_id: str) -> str:
    """Return the prefix that the names of this request id's receipts have."""
    return hashlib.blake2b(request_id.encode(), digest_size=_DIGEST_BYTES, person=b"route-receipt").hexdigest()


def is_drawn(nonce: bytes, share: Fraction) -> bool:
    """Whether a request with this nonce falls into a share of all requests."""
    return int.from_bytes(nonce[: _SHARE_BITS // 8], "big") < share * (1 << _SHARE_BITS)
