"""A policy document as numbered lines, with the problems of each line, and the difference of two documents."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from difflib import SequenceMatcher
from typing import NamedTuple

from kvcustody.policies.document.problems import Problem


class Line(NamedTuple):
    """A line; `mark` is "", "wrong", "doubt" or "target"."""

    number: int
    text: str
    mark: str
    says: tuple[str, ...]


def lines_of(document: str, problems: Iterable[Problem] = (), mark: str = "wrong", target: int = 0) -> list[Line]:
    """Return a document's lines; problems stand under their line, those without a line under the first."""
    texts = document.split("\n")
    problems_by_line: dict[int, list[str]] = {}
    for item in problems:
        place = min(max(1, item.line), len(texts))
        problems_by_line.setdefault(place, []).append(f"{item.code} {item.message}; {item.hint}")
    return [
        Line(
            number,
            text,
            mark if number in problems_by_line else "target" if number == target else "",
            tuple(problems_by_line.get(number, ())),
        )
        for number, text in enumerate(texts, 1)
    ]


def marked(lines: Sequence[Line]) -> list[Line]:
    """Return the marked lines of a document with some context."""
    near = {place + step for place, line in enumerate(lines) if line.mark for step in range(-_AROUND, _AROUND + 1)}
    return [line for place, line in enumerate(lines) if place in near]


_COMPARED_MAX = 5_000  # lines of either document, less what both begin and end with
_AROUND = 2


class DiffLine(NamedTuple):
    """A line of a comparison; `mark` is "", "added", "removed" or "skipped" (equal lines)."""

    mark: str
    text: str


def text_diff(old: str, new: str) -> list[DiffLine] | None:
    """Return removed and added lines with some context; empty for equal documents, None for too long ones."""
    before, after = old.split("\n"), new.split("\n")
    if before == after:
        return []
    first = next(
        (place for place, pair in enumerate(zip(before, after, strict=False)) if pair[0] != pair[1]),
        min(len(before), len(after)),
    )
    if max(len(before), len(after)) - first > _COMPARED_MAX:
        return None
    diff_lines: list[DiffLine] = []
    matcher = SequenceMatcher(None, before, after, autojunk=False)
    for group in matcher.get_grouped_opcodes(_AROUND):
        if diff_lines or group[0][1] > 0:
            diff_lines.append(DiffLine("skipped", f"line {group[0][3] + 1}"))
        for tag, low, high, start, end in group:
            if tag == "equal":
                diff_lines += [DiffLine("", text) for text in before[low:high]]
                continue
            diff_lines += [DiffLine("removed", text) for text in before[low:high]]
            diff_lines += [DiffLine("added", text) for text in after[start:end]]
    return diff_lines
