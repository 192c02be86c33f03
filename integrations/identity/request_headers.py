"""The headers of one request: read strictly, and forwarded without ours."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from typing import Final

from kvcustody.governance.identity.w3c_trace import TRACEPARENT, trace_of
from kvcustody.integrations.identity.identity_document import OWN_HEADERS
from kvcustody.integrations.identity.refusal import malformed

Raw = list[tuple[bytes, bytes]]
REQUEST_ID: Final = "x-request-id"
SESSION_ID: Final = "x-session-id"
WORKER_HEADER: Final = "x-kvcustody-worker"  # of an answer: whose it is, for the door before the router
_OWN: Final = OWN_HEADERS.encode("ascii")
_TRACEPARENT: Final = TRACEPARENT.encode("ascii")


class RequestHeaders:
    """Headers by lower-case name. Raises `RequestRefused` on reading one that is repeated or not UTF-8."""

    def __init__(self, raw: Iterable[tuple[bytes, bytes]]) -> None:
        self._raw = [(name.lower(), value) for name, value in raw]

    def one(self, name: str) -> str | None:
        """Return the header's value; None if it is absent. An empty text is a value."""
        wanted = name.encode("ascii")
        values = [value for found, value in self._raw if found == wanted]
        if not values:
            return None
        if len(values) > 1:
            raise malformed(name, "is given more than once")
        try:
            return values[0].decode("utf-8")
        except UnicodeDecodeError:
            raise malformed(name, "is not UTF-8") from None

    @property
    def trace(self) -> str:
        """The request's trace id; empty for none, a malformed one or two."""
        values = [value for found, value in self._raw if found == _TRACEPARENT]
        return trace_of(values[0].decode("latin-1")) if len(values) == 1 else ""

    def passed_on(self, bound: Mapping[str, str | None], body_bytes: int | None) -> Raw:
        """Return the headers for the application: without ours, with the `bound` ids (None: none), and a new body's
        length.
        """
        replaced = {name.encode("ascii") for name in bound}
        if body_bytes is not None:
            replaced |= {b"content-length", b"transfer-encoding"}
        kept = [(n, v) for n, v in self._raw if not _is_ours(n) and n.replace(b"_", b"-") not in replaced]
        kept += [(name.encode("ascii"), value.encode("ascii")) for name, value in bound.items() if value]
        if body_bytes is not None:
            kept.append((b"content-length", b"%d" % body_bytes))
        return kept


def _is_ours(name: bytes) -> bool:
    """Return whether a header is ours, or is read as ours by a server that treats `_` as `-`."""
    return name.replace(b"_", b"-").startswith(_OWN)
