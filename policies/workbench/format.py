"""Format a policy document: one layout, every comment kept, no meaning changed.

1. The result means what the source means: it loads to a policy of the same digest, or the source is given back as it
   was, with the reason.
2. Formatting what was formatted changes nothing.
"""

from __future__ import annotations

from typing import NamedTuple

from kvcustody.policies.document.digest import digest
from kvcustody.policies.document.problems import PolicyRejected
from kvcustody.policies.reading.load_policy import load_policy
from kvcustody.policies.workbench.round_trip import LayoutErrors, read, write

_ROUNDS = 4


class Formatted(NamedTuple):
    """The text, whether it differs from the source, and why the source was left unchanged (else empty)."""

    text: str
    changed: bool
    left: str = ""


def fmt(text: str, *, name: str) -> Formatted:
    """Return the document in the standard layout. Raises `PolicyRejected` for an invalid document."""
    before = digest(load_policy(text, name=name))
    try:
        result = _settle(text)
    except LayoutErrors as error:
        return Formatted(text, False, f"it cannot be formatted: {type(error).__name__}")
    if result is None:
        return Formatted(text, False, "formatting it twice gives different texts")
    try:
        after = digest(load_policy(result, name=name))
    except PolicyRejected as rejected:
        return Formatted(text, False, f"its formatted text would be rejected: {rejected.problems[0].code}")
    if result.count("#") < text.count("#"):
        return Formatted(text, False, "a comment would be lost")
    if after != before:
        return Formatted(text, False, "its formatted text would have another meaning")
    return Formatted(result, result != text)


def _settle(text: str) -> str | None:
    """Lay out until nothing changes any more; None where that does not happen."""
    for _ in range(_ROUNDS):
        result = _lay_out(text)
        if result == text:
            return result
        text = result
    return None


def _lay_out(text: str) -> str:
    laid_out = write(read(text.removeprefix("\ufeff")))
    lines = [line.rstrip() for line in laid_out.split("\n")]
    return "\n".join(lines).strip("\n") + "\n"
