"""The retention priority of each token of a prompt under a policy's `eviction`, and the entry that sets it.

    for each in token_priorities(policy.eviction, segment, (KindRange(1024, 4096, "pasted_log"),)):
        print(each.first, each.until, each.priority, each.because)

1. A token has the priority of the first of these that applies:
   - its segment's kind;
   - the kind that the door marked it with;
   - the range that names its position; of several, the one that begins first;
   - the base.
2. A kind that a caller states for its request can only lower the policy's priority. A kind that the policy does not
   declare has no effect. The spans that the door marked share no token.
3. The ranges are in order, share no token and leave none out. Neighbours with the same priority for the same reason are
   one range.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import NamedTuple

from kvcustody.policies.document.model import ContentKind, Eviction, SegmentRule

BASE = 35  # where the policy gives none


class KindRange(NamedTuple):
    """Tokens [first, last) of a prompt hold content of this kind, as stated by the caller or marked by the door."""

    first: int
    last: int
    kind: str
    is_marked: bool = False  # by the door, by what the operator says of a role


class TokenPriority(NamedTuple):
    """Tokens [first, until) and their priority. `until` None: the end of the prompt; `for_us` None: no limit."""

    first: int
    until: int | None
    priority: int
    for_us: int | None
    because: str
    line: int  # of the policy document


def token_priorities(
    eviction: Eviction, segment: SegmentRule | None = None, kinds: Sequence[KindRange] = ()
) -> tuple[TokenPriority, ...]:
    """Return the priorities of one request's prompt. `segment`: the segment it begins with; `kinds`: the request's
    kinds.
    """
    declared = {kind.id: kind for kind in eviction.kinds}
    known = [each for each in kinds if each.kind in declared]
    marks = {each.first: each for each in known if each.is_marked}
    ranges = [each for each in known if not each.is_marked]
    edges = {0}
    for span in eviction.ranges:
        edges |= {span.start, *(() if span.until is None else (span.until,))}
    for each in known:
        edges |= {each.first, each.last}
    if segment is not None:
        edges.add(segment.tokens)
    priorities: list[TokenPriority] = []
    starts = sorted(edges)
    marked: KindRange | None = None
    for first, until in zip(starts, [*starts[1:], None], strict=True):
        marked = marks.get(first, marked if marked is not None and first < marked.last else None)
        kind = None if marked is None else declared[marked.kind]
        priority = _policys(eviction, segment, kind, first)._replace(until=until)
        for each in ranges:
            lower = declared[each.kind]
            if each.first <= first < each.last and lower.priority < priority.priority:
                because = f"the request's kind `{lower.id}`, which lowers"
                priority = priority._replace(
                    priority=lower.priority, for_us=None, because=because, line=lower.mark.line
                )
        if priorities and priorities[-1][2:] == priority[2:]:
            priorities[-1] = priorities[-1]._replace(until=until)
        else:
            priorities.append(priority)
    return tuple(priorities)


def _policys(eviction: Eviction, segment: SegmentRule | None, marked: ContentKind | None, token: int) -> TokenPriority:
    """What the policy says of a token that the door may have marked (rule 1)."""
    if segment is not None and segment.content is not None and token < segment.tokens:
        for kind in eviction.kinds:
            if kind.id == segment.content:
                because = f"kind `{kind.id}` of segment `{segment.id}`"
                return TokenPriority(token, None, kind.priority, None, because, kind.mark.line)
    if marked is not None:
        because = f"kind `{marked.id}`, which the door marked"
        return TokenPriority(token, None, marked.priority, None, because, marked.mark.line)
    over = [span for span in eviction.ranges if span.start <= token and (span.until is None or token < span.until)]
    if over:
        span = min(over, key=lambda each: each.start)
        return TokenPriority(token, None, span.priority, span.for_us, f"the range from {span.start}", span.mark.line)
    base = BASE if eviction.priority is None else eviction.priority
    because = "the default" if eviction.priority is None else "the base `priority`"
    return TokenPriority(token, None, base, None, because, eviction.mark.line)
