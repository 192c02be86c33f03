"""What a script under `benchmarks/` takes from another script, or from the tests' library, is there.

Scripts are neither type-checked nor imported by other tests, so a name that moved would fail at the next measurement.
"""

from __future__ import annotations

import ast
from collections.abc import Iterator
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parents[2]
SCRIPTS = sorted((ROOT / "benchmarks").rglob("*.py"))
PACKAGES = {"kvcustody": ROOT / "src" / "kvcustody", "standins": ROOT / "tests" / "lib" / "standins"}


def files_of(module: str) -> list[Path]:
    """Where a module of ours may be, none for any other."""
    first, *rest = module.split(".")
    if first in PACKAGES:
        base = PACKAGES[first].joinpath(*rest)
        return [one for one in (base.with_suffix(".py"), base / "__init__.py") if one.exists()]
    return [one for one in SCRIPTS if one.stem == module]


def names_in(source: str) -> set[str]:
    """What a module's top level defines, in branches too."""
    names = set[str]()
    for node in ast.walk(ast.parse(source)):
        if isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef | ast.ClassDef):
            names.add(node.name)
        elif isinstance(node, ast.Import | ast.ImportFrom):
            names |= {one.asname or one.name.partition(".")[0] for one in node.names}
        elif isinstance(node, ast.Name) and isinstance(node.ctx, ast.Store):
            names.add(node.id)
    return names


def missing(source: str) -> Iterator[str]:
    """What it imports of ours and nobody defines."""
    for node in ast.walk(ast.parse(source)):
        if not isinstance(node, ast.ImportFrom) or node.module is None or node.level:
            continue
        files = files_of(node.module)
        if not files and node.module.partition(".")[0] not in PACKAGES:
            continue
        folder = PACKAGES.get(node.module.partition(".")[0])
        there = set[str]()
        for file in files:
            there |= names_in(file.read_text())
        for name in (one.name for one in node.names):
            below = folder is not None and files_of(f"{node.module}.{name}")
            if name not in there and not below:
                yield f"{node.module}.{name}"


def test_scripts_import_what_is_there() -> None:
    lacking = {str(one.relative_to(ROOT)): [*missing(one.read_text())] for one in SCRIPTS}
    assert {file: names for file, names in lacking.items() if names} == {}


@pytest.mark.parametrize(
    "line",
    [
        "from running_router import _command",
        "from kvcustody.plurals import nothing",
        "from standins.waiting import nothing",
    ],
)
def test_a_name_that_moved_is_found(line: str) -> None:
    assert [*missing(line)]
