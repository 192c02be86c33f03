"""Lines that commands print, with control characters escaped before they reach a terminal (rule 4 of `command`)."""

from __future__ import annotations

import re
from typing import Any

TURNS = "\u061c\u200e\u200f\u2028-\u202e\u2066-\u2069"  # the direction of writing, or the line
_NOT_SHOWN = re.compile(f"[\x00-\x1f\x7f-\x9f{TURNS}]")


def printable(text: str) -> str:
    """Return the text with escapes for characters that would control the terminal."""
    return _NOT_SHOWN.sub(lambda found: found[0].encode("unicode_escape").decode(), text)


def say(*texts: object, **how: Any) -> None:
    """Print a message as `print` does, with each line escaped: the only way for a command to print one."""
    print(*("\n".join(map(printable, str(text).split("\n"))) for text in texts), **how)
