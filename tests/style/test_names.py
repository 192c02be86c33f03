"""A name says what the value is: no room binds a vague name for more than five lines."""

from __future__ import annotations

import ast

import pytest

from standins.architecture.module_graph import ROOMS, ROOT
from standins.architecture.parsed import parsed_if_named
from standins.architecture.vague_names import VAGUE, vague_names

TESTS = sorted(f"tests/{path.name}" for path in (ROOT / "tests").iterdir() if path.is_dir() and path.name[0] != "_")
FOLDERS = (*ROOMS, "benchmarks", "docs", "examples", "packaging", "src/kvcustody", *TESTS)


@pytest.mark.parametrize("folder", FOLDERS)
def test_no_vague_name_is_bound_for_more_than_five_lines(folder: str) -> None:
    files = [path for path in (ROOT / folder).rglob("*.py") if "__pycache__" not in path.parts]
    assert files or folder == "tests/vectors"
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
