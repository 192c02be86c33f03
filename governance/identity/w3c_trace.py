"""W3C Trace Context, as far as custody needs it: a request's trace id (www.w3.org/TR/trace-context).

- A trace id is 32 lowercase hexadecimal digits, not all zero. Nothing else is kept, compared or recorded as one.
- It is the caller's word: it decides nothing, widens nothing, and only finds what was recorded under it.
- A `traceparent` that is malformed is as good as none, as the standard wants it: it refuses no request.
"""

from __future__ import annotations

import re
from collections.abc import Mapping
from typing import Final

from kvcustody.errors import IdentityError

TRACEPARENT: Final = "traceparent"
PATTERN: Final = "^[0-9a-f]*[1-9a-f][0-9a-f]*$"  # of a trace id, whose length is `CHARACTERS`
CHARACTERS: Final = 32
_TRACE = re.compile(r"(?!0{32})[0-9a-f]{32}")
_PARENT = re.compile(
    r"(?P<version>(?!ff)[0-9a-f]{2})-(?P<trace>(?!0{32})[0-9a-f]{32})-(?!0{16})[0-9a-f]{16}-[0-9a-f]{2}(?P<rest>-.*)?"
)
_CHARACTERS_MAX = 512


def is_trace(value: object) -> bool:
    """Whether `value` is a trace id."""
    return type(value) is str and _TRACE.fullmatch(value) is not None


def check_trace(value: object) -> str:
    """Return a trace id unchanged; raises an `IdentityError` that does not quote a bad one."""
    if type(value) is not str or _TRACE.fullmatch(value) is None:
        reason = "must be 32 lowercase hexadecimal digits, not all zero"
        raise IdentityError(f"trace: {reason}", field="trace", reason=reason)
    return value


def trace_of(traceparent: object) -> str:
    """Return the trace id of a `traceparent`; empty without one, or with a malformed one."""
    if type(traceparent) is not str or len(traceparent) > _CHARACTERS_MAX:
        return ""
    found = _PARENT.fullmatch(traceparent)
    if found is None or (found["version"] == "00" and found["rest"] is not None):
        return ""
    return found["trace"]


def trace_in(headers: Mapping[str, str] | None) -> str:
    """Return the trace id of headers by lower-case name; empty without one."""
    return "" if not headers else trace_of(headers.get(TRACEPARENT))
