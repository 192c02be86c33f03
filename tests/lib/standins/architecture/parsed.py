"""The syntax tree of a module, made once in a process: many tests walk the whole product."""

from __future__ import annotations

import ast
from collections.abc import Iterable
from functools import cache
from pathlib import Path


@cache
def parsed_text(source: str) -> ast.Module:
    """The tree of a module's text; all share it, so nobody changes it."""
    return ast.parse(source)


def parsed(path: Path) -> ast.Module:
    """The tree of a Python file."""
    return parsed_text(path.read_text(encoding="utf-8"))


def parsed_if_named(path: Path, names: Iterable[str]) -> ast.Module:
    """The tree of a Python file whose text has one of these names; an empty one for any other, which is not parsed."""
    source = path.read_text(encoding="utf-8")
    return parsed_text(source if any(name in source for name in names) else "")
