"""Page cursors, which only this service can write and only their caller can use.

1. A cursor is bound by HMAC-SHA256 to the operation, the principal, every filter and the checkpoint. Any change of a
   single bit, or of what it is used with, is one refusal.
2. A cursor says nothing that its caller has not been shown: it is the position of the last row.
"""

from __future__ import annotations

import base64
import binascii
import hashlib
import hmac
from typing import TYPE_CHECKING, Any, NamedTuple

import orjson

from kvcustody.governance.service.problem_details import ProblemError

if TYPE_CHECKING:
    from kvcustody.governance.credentials.service_secret import ServiceSecret

_TAG_BYTES = 32
_CHARACTERS_MAX = 1024


class CursorBinding(NamedTuple):
    """What a cursor is bound to: the operation, the caller, and every filter by name."""

    operation: str
    principal: str
    filters: dict[str, Any]


class Cursors:
    """Writes and reads cursors; stateless."""

    def __init__(self, secret: ServiceSecret) -> None:
        self._key = secret.key("cursor")

    def write(self, question: CursorBinding, position: list[Any]) -> str:
        """Return the cursor of a position: a list of JSON values."""
        data = orjson.dumps(position)
        return base64.urlsafe_b64encode(self._tag(question, data) + data).rstrip(b"=").decode()

    def read(self, binding: CursorBinding, cursor: str | None) -> list[Any] | None:
        """Return the position of a cursor, None without one; raises `cursor-invalid` unless it fits (rule 1)."""
        if cursor is None:
            return None
        if len(cursor) > _CHARACTERS_MAX:
            raise ProblemError("cursor-invalid")
        try:
            raw = base64.urlsafe_b64decode(cursor + "=" * (-len(cursor) % 4))
        except (ValueError, binascii.Error):
            raise ProblemError("cursor-invalid") from None
        tag, data = raw[:_TAG_BYTES], raw[_TAG_BYTES:]
        canonical = base64.urlsafe_b64encode(raw).rstrip(b"=").decode()
        if not hmac.compare_digest(tag, self._tag(binding, data)) or canonical != cursor:
            raise ProblemError("cursor-invalid")
        position = orjson.loads(data)
        assert isinstance(position, list)
        return position

    def _tag(self, question: CursorBinding, data: bytes) -> bytes:
        bound = orjson.dumps([question.operation, question.principal, question.filters], option=orjson.OPT_SORT_KEYS)
        return hmac.new(self._key, len(bound).to_bytes(8, "little") + bound + data, hashlib.sha256).digest()
