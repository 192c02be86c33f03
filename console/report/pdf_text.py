"""Words in a PDF: what its standard fonts can write.

Q3 A character that these fonts lack is written as its code point, and never dropped.
"""

from __future__ import annotations

from xml.sax.saxutils import escape

_REPLACED = {"≤": "<=", "≥": ">=", "−": "-"}  # what the standard fonts lack and we write ourselves


def plain(text: str) -> str:
    """Text in what the standard fonts have (Q3)."""
    for ours, theirs in _REPLACED.items():
        text = text.replace(ours, theirs)
    return text.encode("cp1252", "backslashreplace").decode("cp1252")


def safe(text: str) -> str:
    """The same as reportlab's markup."""
    return escape(plain(text))
