"""Events as canonical leaf bytes, and the reverse.

1. Emitting an event costs one record. `leaves()` turns it into canonical bytes, later and on the writer's thread.
2. A leaf is JCS (RFC 8785) for our closed schema: ASCII keys in order, no floats, integers below 2^53 (else decimal
   strings), at most 8 KiB. The bytes are the truth; every column elsewhere is derived from them.
3. Run lists too long for one leaf continue in numbered leaves (`part` of `parts`, each repeating the head and
   `blocks`, the total over all parts). A set that lacks a part is a gap.
4. A subject or session appears only as a random pseudonym. No leaf carries token ids, prompt text, a bare hash of
   either, or a key.
5. Times in events, and `*_boot_us` in leaves, are boot-time microseconds of the incarnation: all deadline arithmetic
   uses those, exactly. `at_us` in a leaf is UTC, for people and periods; `at_us - boot_us` is the incarnation's
   offset, fixed at its start, so a step of the wall clock moves no deadline. 0 means "none".
6. `trace` is the W3C trace id, 32 hexadecimal digits, that the request or act came with, where it came with one; else
   the leaf has no such key. The other party's copy of a leaf never has it.
"""

from __future__ import annotations

from kvcustody.audit.leaf.batch_encoder import leaf, leaves
from kvcustody.audit.leaf.canonical_leaf import (
    HANDOVER_BYTES_MAX,
    LEAF_BYTES_MAX,
    Context,
    Leaf,
    PseudonymSource,
    canonical,
    parse,
)
from kvcustody.audit.leaf.leaf_schema import LEAF_KEYS

__all__ = [
    "HANDOVER_BYTES_MAX",
    "LEAF_BYTES_MAX",
    "LEAF_KEYS",
    "Context",
    "Leaf",
    "PseudonymSource",
    "canonical",
    "leaf",
    "leaves",
    "parse",
]
