"""`import kvcustody` gives the public names: listed, documented, imported when they are used, and no others."""

from __future__ import annotations

import ast
import inspect
import subprocess
import sys
from pathlib import Path

import pytest

import kvcustody

ROOT = Path(__file__).resolve().parents[2]
STABLE = (ROOT / "tests" / "architecture" / "public_names.txt").read_text().split()


def test_the_public_names_are_those_that_were_promised() -> None:
    """A name that goes breaks somebody; one that comes is added to the list with its change."""
    assert sorted(kvcustody.__all__) == sorted(STABLE)


@pytest.mark.parametrize("name", [name for name in STABLE if name != "__version__"])
def test_a_public_name_is_there_with_a_docstring(name: str) -> None:
    found = getattr(kvcustody, name)
    assert found.__name__ == name and len((inspect.getdoc(found) or "").split()) > 3
    assert found.__module__ == kvcustody._HOMES[name]


def test_the_page_lists_them() -> None:
    page = (ROOT / "docs" / "reference" / "python.md").read_text()
    assert [name for name in STABLE if f"`{name}`" not in page and name != "__version__"] == []


def test_type_checkers_see_what_is_imported() -> None:
    tree = ast.parse((ROOT / "src" / "kvcustody" / "__init__.py").read_text())
    typed = {
        alias.name: node.module
        for block in tree.body
        if isinstance(block, ast.If)
        for node in block.body
        if isinstance(node, ast.ImportFrom)
        for alias in node.names
    }
    assert typed == kvcustody._HOMES


def test_other_names_are_refused_and_the_door_itself_costs_nothing() -> None:
    with pytest.raises(AttributeError, match="no public name `Gouvernor`"):
        kvcustody.Gouvernor  # noqa: B018
    program = "import sys, kvcustody; print({'numpy', 'torch', 'sqlalchemy'} & set(sys.modules))"
    done = subprocess.run([sys.executable, "-c", program], capture_output=True, text=True, check=True)
    assert done.stdout.strip() == "set()"
