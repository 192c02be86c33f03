"""Add a declared segment to a policy. Its digest comes from the keyring; its text is not needed.

1. The result is sound and says what the source said, and the segment: everything else stays, comments included.
2. A segment's id is new: an entry is never replaced in place, because its blocks belong to what was declared.
"""

from __future__ import annotations

from typing import Any

from kvcustody.errors import PolicyError
from kvcustody.policies.document.problems import quote
from kvcustody.policies.reading.load_policy import load_policy
from kvcustody.policies.workbench.format import fmt
from kvcustody.policies.workbench.round_trip import LayoutErrors, block, lines, one_line, read, write

Entry = dict[str, Any]


def add_segment(text: str, entry: Entry, *, name: str) -> str:
    """Return the policy with one more segment, laid out as `fmt` does.

    `entry` has the fields of `segments` in the language. Raises `PolicyRejected` where source or result is not sound,
    and `PolicyError` for an id that is taken or a document that cannot be laid out safely.
    """
    policy = load_policy(text, name=name)
    if any(segment.id == entry["id"] for segment in policy.segments):
        raise PolicyError(f"segment {quote(entry['id'])} exists; give the new one another id", id=entry["id"])
    laid_out = fmt(text, name=name)
    if laid_out.left:
        raise PolicyError(f"policy `{name}` is unchanged: {laid_out.left}; add the entry by hand")
    result = fmt(_with(laid_out.text, entry), name=name)
    after = load_policy(result.text, name=name)
    assert len(after.segments) == len(policy.segments) + 1
    return result.text


def _with(text: str, entry: Entry) -> str:
    try:
        document = read(text)
        if not document.get("segments"):
            document.pop("segments", None)
            document.insert(list(document).index("tenants") + 1, "segments", lines())
        values = {key: one_line(value) if isinstance(value, list) else value for key, value in entry.items()}
        document["segments"].append(block(values))
        return write(document)
    except LayoutErrors as error:
        message = f"segment cannot be written into the document ({type(error).__name__}); add the entry by hand"
        raise PolicyError(message) from error
