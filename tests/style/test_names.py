"""A name says what the value is: no room binds a vague name for more than five lines."""

from __future__ import annotations

import ast
from pathlib import Path

import pytest

from standins.architecture.module_graph import ROOMS, ROOT
from standins.architecture.parsed import parsed_if_named
from standins.architecture.vague_names import VAGUE, vague_names

MORE = (
    "benchmarks",
    "docs",
    "examples",
    "packaging",
    "tests/benchmarks",
    "tests/console",
    "tests/docs",
    "tests/engines",
    "tests/extensions",
    "tests/governance",
    "tests/integrations",
    "tests/lab",
    "tests/lib",
    "tests/redteam",
    "tests/release",
    "tests/robust",
    "tests/service",
    "tests/simulation",
    "tests/testkit",
)


@pytest.mark.parametrize("room", (*ROOMS, *MORE))
def test_no_vague_name_is_bound_for_more_than_five_lines(room: str) -> None:
    files = [path for path in (ROOT / room).rglob("*.py") if "__pycache__" not in path.parts]
    assert files
    assert [
        f"{path.relative_to(ROOT)}:{first} `{name}` is used until line {last}"
        for path in files
        for name, first, last in vague_names(parsed_if_named(path, VAGUE))
    ] == []


@pytest.mark.parametrize(
    ("text", "names"),
    [
        ("def f(x):\n    found = x\n\n\n\n\n\n    return found\n", ["found"]),
        ("def f(x):\n    found = x\n    return found\n", []),
        ("def f(made):\n\n\n\n\n\n\n    return made\n", ["made"]),
        ("def f(*said, **told):\n\n\n\n\n\n\n    return said, told\n", ["said", "told"]),
        ("def f(x):\n    with x as one:\n\n\n\n\n\n        return lambda: one\n", ["one"]),
        ("def f(x):\n    for one in x:\n\n\n\n\n\n        print(one)\n", []),
        ("each = 1\n\n\n\n\n\n\nprint(each)\n", ["each"]),
        ("def f(x):\n    if (found := x):\n\n\n\n\n\n        return found\n", ["found"]),
    ],
)
def test_control_a_vague_name_is_seen(text: str, names: list[str]) -> None:
    assert [name for name, _, _ in vague_names(ast.parse(text))] == names


def test_the_rooms_that_are_checked_exist() -> None:
    assert all(Path(ROOT / room).is_dir() for room in (*ROOMS, *MORE))
