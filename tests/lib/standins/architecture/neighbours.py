"""Modules that serve one neighbour alone: candidates for joining it."""

from __future__ import annotations

import ast
from collections import defaultdict
from pathlib import Path

from standins.architecture.module_graph import imported, sources
from standins.architecture.parsed import parsed

LINES_MAX = 900
FUNCTIONS = (ast.FunctionDef, ast.AsyncFunctionDef, ast.Lambda)


def serve_one_neighbour() -> dict[str, str]:
    """Modules with one importer, which is in their folder, at the top of the file, and not too large to take them.

    Returns:
        The module's dotted name and its importer's. A package's `__init__` is neither. The two files together have at
        most `LINES_MAX` lines.
    """
    named = sources()
    modules = set(named)
    importers: dict[str, set[str]] = defaultdict(set)
    late: set[str] = set()
    for name, path in named.items():
        tree = parsed(path)
        targets = imported(tree, modules) - {name}
        for target in targets:
            importers[target].add(name)
        if targets - imported(_outside_functions(tree), modules):
            late |= {
                target for node in ast.walk(tree) if isinstance(node, FUNCTIONS) for target in imported(node, modules)
            }
    return {
        name: importer
        for name, path in named.items()
        if name not in late and len(importers[name]) == 1
        for importer in importers[name]
        if _joinable(path, named[importer])
    }


def _outside_functions(tree: ast.Module) -> ast.Module:
    """The statements of a module that run when it is imported, those under `if` and `try` too."""
    statements: list[ast.stmt] = []
    waiting: list[ast.AST] = list(tree.body)
    while waiting:
        node = waiting.pop()
        if isinstance(node, ast.Import | ast.ImportFrom):
            statements.append(node)
        elif not isinstance(node, FUNCTIONS):
            waiting.extend(ast.iter_child_nodes(node))
    return ast.Module(statements, [])


def _joinable(module: Path, importer: Path) -> bool:
    if module.parent != importer.parent or "__init__.py" in (module.name, importer.name):
        return False
    return sum(path.read_text(encoding="utf-8").count("\n") for path in (module, importer)) <= LINES_MAX
