"""Facts of the library as the API answers them, back as what they were."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any, TypeVar

Fact = TypeVar("Fact")


def fact_of(kind: Callable[..., Fact], answer: Mapping[str, Any]) -> Fact:
    """The named tuple `kind` of what an answer says; other fields of the answer are not read."""
    return kind(*(answer[name] for name in kind._fields))  # type: ignore[attr-defined]
