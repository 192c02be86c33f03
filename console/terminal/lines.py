"""Lines that commands say, and what of a text never reaches a terminal as a command to it (rule 4 of `command`)."""

from __future__ import annotations

import re
from typing import Any

TURNS = "\u061c\u200e\u200f\u2028-\u202e\u2066-\u2069"  # the direction of writing, or the line
_NOT_SHOWN = re.compile(f"[\x00-\x1f\x7f-\x9f{TURNS}]")


def printable(text: str) -> str:
    """The text with escapes for what would command the terminal that shows it."""
    return _NOT_SHOWN.sub(lambda found: found[0].encode("unicode_escape").decode(), text)


def say(*texts: object, **how: Any) -> None:
    """Print as `print` does, each line as it is to be shown: the one way in which a command says something."""
    print(*("\n".join(map(printable, str(text).split("\n"))) for text in texts), **how)
