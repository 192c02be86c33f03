"""The syntax tree of a module, made once in a process: many tests walk the whole product."""

from __future__ import annotations

import ast
from functools import cache
from pathlib import Path


@cache
def parsed_text(source: str) -> ast.Module:
    """The tree of a module's text; all share it, so nobody changes it."""
    return ast.parse(source)


def parsed(path: Path) -> ast.Module:
    """The tree of a Python file."""
    return parsed_text(path.read_text(encoding="utf-8"))
