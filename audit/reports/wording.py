"""Words that a report may not use, because they claim more than evidence can show.

1. "zeroized" is said of memory we own, "crypto-erased" of media, "evidence supporting" of controls.
"""

from __future__ import annotations

import re

REFUSED: dict[str, str] = {
    r"\bcomplian(t|ce)\b": "say `evidence supporting <control>`",
    r"\bcompl(y|ies|ied|ying)\b": "say `evidence supporting <control>`",
    r"\bcertifie[ds]\b": "nobody certified anything here",
    r"\bsecure(ly)? (deleted?|erased?|wiped?)\b": "say `zeroized` (memory we own) or `crypto-erased` (media)",
    r"\bunrecoverable\b": "say how it was overwritten and verified",
    r"\bconstant (latency|time) (of|for) requests\b": "no such promise is made",
    r"\bconstant latency\b": "no such promise is made",
    r"\bguarantee[ds]?\b": "say what was measured, or proved, and of what",
    r"\b(fully|completely|100 ?%) (secure|safe|isolated)\b": "say what was shown",
    r"\btamper-?proof\b": "say `tamper-evident`, and until when",
    r"\bimpossible\b": "say what was tried",
}


def refused_words(text: str) -> list[str]:
    """What a text says that it may not, each with what to say instead."""
    return [
        f"`{found.group(0)}`: {instead}"
        for pattern, instead in REFUSED.items()
        for found in re.finditer(pattern, text, re.IGNORECASE)
    ]
