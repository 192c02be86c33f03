"""Maps the tokens of a chat prompt to its messages, exactly or not at all, for servers that render chats.

1. A span is marked only where it is exact. To find a part, the chat template is rendered once more, with a name that
   occurs nowhere in place of that part. With the contents put back in place, this must give the very same prompt. Tools
   are the one piece that the prompt loses when it is rendered without them.
2. A message reaches from the beginning of its content to the beginning of the next message's content. The first one
   begins with the prompt, and the last one ends with its content. A token that two messages share belongs to the
   earlier one.
3. A request whose messages cannot be found exactly is served as if it had no spans. The log warns of each reason the
   first time it occurs, and again at every power of two.
"""

from __future__ import annotations

import secrets
from bisect import bisect_left
from collections import Counter
from collections.abc import Awaitable, Callable, Iterable, Mapping, Sequence
from itertools import accumulate
from typing import Any, NamedTuple

from kvcustody.governance.request import KINDS_MAX
from kvcustody.logger import get_logger

TOOLS = "tools"  # beside the roles of messages
_TEXT_PARTS = ("text", "input_text", "output_text")
Message = Mapping[str, Any]
Render = Callable[[Sequence[Message], bool], Awaitable[str | None]]
"""The prompt of these messages, with or without the request's tools."""
_log = get_logger(__name__)


class TextSpan(NamedTuple):
    """The kind of the characters [first, last) of a prompt."""

    first: int
    last: int
    kind: str


async def find_messages(
    prompt: str, messages: Sequence[Message], kinds: Mapping[str, str], render: Render, *, has_tools: bool
) -> list[TextSpan]:
    """Return the spans of messages whose role has a kind, and of the tools, in order and without overlap."""
    spans = await _of_roles(prompt, messages, kinds, render)
    if has_tools and TOOLS in kinds:
        bare = await render(messages, False)
        if bare is not None:
            spans = _with_tools(prompt, bare, spans, kinds[TOOLS])
    return spans


async def _of_roles(
    prompt: str, messages: Sequence[Message], kinds: Mapping[str, str], render: Render
) -> list[TextSpan]:
    wanted = [at for at, message in enumerate(messages) if message.get("role") in kinds]
    if not wanted:
        return []
    names: list[str] = []
    texts: list[str] = []
    owners: list[int] = []
    named = list(messages)
    begins = {*wanted, *(at + 1 for at in wanted if at + 1 < len(messages))}
    for at in sorted(begins):  # of the one behind a span only where it begins is asked
        parts = _texts(messages[at])
        if parts is None:
            if at in wanted:
                return []
            continue
        first = len(names)
        for text in parts:
            names.append(f"kvc{secrets.token_hex(12)}n")
            texts.append(text)
            owners.append(at)
        named[at] = _with_texts(messages[at], names[first:])
    shown = await render(named, True)
    if shown is None or any(shown.count(name) != 1 for name in names):
        return []
    for contents in (texts, [text.strip() for text in texts]):
        found = _put_back(shown, names, contents)
        if found is not None and found[0] == prompt:
            return _spans(prompt, found[1], owners, wanted, [str(each.get("role")) for each in messages], kinds)
    return []


def _put_back(shown: str, names: list[str], contents: list[str]) -> tuple[str, list[tuple[int, int]]] | None:
    """Return the prompt with contents in place of their placeholders, and their positions; None where the order
    differs.
    """
    pieces: list[str] = []
    spans: list[tuple[int, int]] = []
    at = length = 0
    for name, text in zip(names, contents, strict=True):
        place = shown.find(name, at)
        if place < 0:
            return None
        pieces += (shown[at:place], text)
        length += place - at
        spans.append((length, length + len(text)))
        length += len(text)
        at = place + len(name)
    return "".join(pieces) + shown[at:], spans


def _spans(
    prompt: str,
    places: list[tuple[int, int]],
    owners: list[int],
    wanted: list[int],
    roles: list[str],
    kinds: Mapping[str, str],
) -> list[TextSpan]:
    begin: dict[int, int] = {}
    end: dict[int, int] = {}
    for owner, (first, last) in zip(owners, places, strict=True):
        begin.setdefault(owner, first)
        end[owner] = last
    spans: list[TextSpan] = []
    for at in wanted:
        first = 0 if at == 0 else begin[at]
        last = begin.get(at + 1, end[at])
        kind = kinds[roles[at]]
        if spans and spans[-1].kind == kind and spans[-1].last == first:
            spans[-1] = spans[-1]._replace(last=last)
        elif last > first:
            spans.append(TextSpan(first, last, kind))
    return spans


def _with_tools(prompt: str, bare: str, spans: list[TextSpan], kind: str) -> list[TextSpan]:
    """Return the span that the tools add to the prompt, where it is one piece."""
    extra = len(prompt) - len(bare)
    if extra <= 0:
        return spans
    first = _common(prompt, bare)
    if prompt[first + extra :] != bare[first:]:
        return spans
    last = first + extra
    cut = [TextSpan(first, last, kind)]
    for each in spans:
        cut += [each._replace(last=min(each.last, first)), each._replace(first=max(each.first, last))]
    return sorted(each for each in cut if each.first < each.last)


def _common(one: str, other: str) -> int:
    """Return the length of two texts' common prefix."""
    low, high = 0, min(len(one), len(other))
    while low < high:
        middle = (low + high + 1) // 2
        if one.startswith(other[:middle]):
            low = middle
        else:
            high = middle - 1
    return low


def _texts(message: Message) -> list[str] | None:
    """Return the texts of a message's content; None for other content, or none."""
    content = message.get("content")
    if isinstance(content, str):
        return [content]
    if isinstance(content, list) and content:
        texts = [part.get("text") for part in content if isinstance(part, Mapping) and part.get("type") in _TEXT_PARTS]
        if len(texts) == len(content) and all(isinstance(text, str) for text in texts):
            return [str(text) for text in texts]
    return None


def _with_texts(message: Message, texts: list[str]) -> Message:
    if isinstance(message["content"], str):
        return {**message, "content": texts[0]}
    parts = [{**part, "text": text} for part, text in zip(message["content"], texts, strict=True)]
    return {**message, "content": parts}


def token_spans(spans: Iterable[TextSpan], offsets: Sequence[tuple[int, int]]) -> list[list[Any]]:
    """Return spans in tokens, as `kv_transfer_params` carries them; a token belongs to its first character's span."""
    starts = list(accumulate((first for first, _ in offsets), max))
    found = []
    for each in spans:
        first, last = bisect_left(starts, each.first), bisect_left(starts, each.last)
        if first < last:
            found.append([first, last, each.kind])
    return found[:KINDS_MAX]


def has_something_to_mark(messages: Iterable[object], kinds: Mapping[str, str], *, has_tools: bool) -> bool:
    """Return whether a request has a message with one of these roles, or tools where tools have a kind."""
    return (has_tools and TOOLS in kinds) or any(
        isinstance(each, Mapping) and each.get("role") in kinds for each in messages
    )


_unmarked_requests: Counter[str] = Counter()  # by reason; reasons are ours, or classes of errors


def note_unmarked(reason: str) -> None:
    """Log a request that stayed unmarked, on its reason's first, second, fourth ... occurrence."""
    _unmarked_requests[reason] += 1
    count = _unmarked_requests[reason]
    if not count & (count - 1):
        _log.warning("messages not marked", reason=reason, requests=count)
