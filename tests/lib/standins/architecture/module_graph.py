"""The modules and who imports whom, read from the sources: also under TYPE_CHECKING and inside functions."""

from __future__ import annotations

import ast
from pathlib import Path

from standins.architecture.parsed import parsed

ROOT = Path(__file__).resolve().parents[4]
ROOMS = (
    "kernels",
    "allocator",
    "policies",
    "audit",
    "migrations",
    "governance",
    "integrations",
    "lab",
    "console",
    "testkit",
)


def sources() -> dict[str, Path]:
    """Every module of the product by its dotted name, packages by their `__init__`."""
    paths = [path for room in ROOMS for path in (ROOT / room).rglob("*.py")]
    paths += (ROOT / "src" / "kvcustody").glob("*.py")
    named = {}
    for path in paths:
        base = ROOT / "src" / "kvcustody" if path.parent == ROOT / "src" / "kvcustody" else ROOT
        parts = path.relative_to(base).with_suffix("").parts
        parts = parts[:-1] if parts[-1] == "__init__" else parts
        named[".".join(("kvcustody", *parts))] = path
    return named


def imported(tree: ast.AST, modules: set[str]) -> set[str]:
    """The product's modules that a tree imports, wherever in the file the import stands."""
    names = set()
    for node in ast.walk(tree):
        if isinstance(node, ast.Import):
            names |= {alias.name for alias in node.names}
        elif isinstance(node, ast.ImportFrom) and node.module:
            names |= {
                name if (name := f"{node.module}.{alias.name}") in modules else node.module for alias in node.names
            }
    return names & modules


def graph() -> dict[str, set[str]]:
    """Each module with those that it imports."""
    named = sources()
    return {name: imported(parsed(path), set(named)) - {name} for name, path in named.items()}


def circles(arrows: dict[str, set[str]]) -> list[list[str]]:
    """Groups of modules that import each other (Tarjan's strongly connected components of more than one)."""
    number: dict[str, int] = {}
    low: dict[str, int] = {}
    stack: list[str] = []
    groups: list[list[str]] = []

    def visit(name: str) -> None:
        number[name] = low[name] = len(number)
        stack.append(name)
        for target in sorted(arrows[name]):
            if target not in number:
                visit(target)
                low[name] = min(low[name], low[target])
            elif target in stack:
                low[name] = min(low[name], number[target])
        if low[name] == number[name]:
            at = stack.index(name)
            group, stack[at:] = stack[at:], []
            if len(group) > 1:
                groups.append(sorted(group))

    for name in sorted(arrows):
        if name not in number:
            visit(name)
    return sorted(groups)
