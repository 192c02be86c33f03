"""A policy document as numbered lines, with what is said about each line under it."""

from __future__ import annotations

from collections.abc import Iterable
from typing import NamedTuple

from kvcustody.policies.document.problems import Problem


class Line(NamedTuple):
    """A line; `mark` is "", "wrong", "doubt" or "target"."""

    number: int
    text: str
    mark: str
    says: tuple[str, ...]


def lines_of(
    document: str, problems: Iterable[Problem] = (), mark: str = "wrong", target: int = 0
) -> list[Line]:
    """The lines of a document; problems stand under theirs, those of no line under the first."""
    texts = document.split("\n")
    said: dict[int, list[str]] = {}
    for item in problems:
        place = min(max(1, item.line), len(texts))
        said.setdefault(place, []).append(f"{item.code} {item.message}; {item.hint}")
    return [
        Line(
            number,
            text,
            mark if number in said else "target" if number == target else "",
            tuple(said.get(number, ())),
        )
        for number, text in enumerate(texts, 1)
    ]
