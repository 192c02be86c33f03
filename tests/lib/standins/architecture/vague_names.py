"""Variables whose names say nothing about the value: `found`, `one`, `made`, ..., bound for more than five lines."""

from __future__ import annotations

import ast
from collections.abc import Iterator

VAGUE = frozenset({"found", "one", "made", "each", "told", "come", "said", "question", "which"})
LINES_MAX = 5
Scope = ast.FunctionDef | ast.AsyncFunctionDef | ast.Lambda | ast.ClassDef | ast.Module
SCOPES = (ast.FunctionDef, ast.AsyncFunctionDef, ast.Lambda, ast.ClassDef)


def vague_names(tree: ast.Module) -> list[tuple[str, int, int]]:
    """Each vague name that a scope binds, with the line of the binding and the line of the last use.

    Args:
        tree: a module.

    Returns:
        (name, line of the first binding, line of the last use) where the two are more than `LINES_MAX` lines apart.
        Variables of a loop or a comprehension do not count.
    """
    return sorted(
        (name, first, last)
        for scope in ast.walk(tree)
        if isinstance(scope, (*SCOPES, ast.Module))
        for name, (first, last) in _bound(scope).items()
        if last - first > LINES_MAX
    )


def _bound(scope: Scope) -> dict[str, tuple[int, int]]:
    first = {}
    if isinstance(scope, ast.FunctionDef | ast.AsyncFunctionDef | ast.Lambda):
        arguments = scope.args
        named = (*arguments.posonlyargs, *arguments.args, *arguments.kwonlyargs, arguments.vararg, arguments.kwarg)
        first = {argument.arg: argument.lineno for argument in named if argument and argument.arg in VAGUE}
    own = list(_own(scope))
    loops = {
        id(name)
        for node in own
        if isinstance(node, ast.For | ast.AsyncFor | ast.comprehension)
        for name in ast.walk(node.target)
    }
    for node in own:
        if (
            isinstance(node, ast.Name)
            and isinstance(node.ctx, ast.Store)
            and node.id in VAGUE
            and id(node) not in loops
        ):
            first[node.id] = min(first.get(node.id, node.lineno), node.lineno)
    if not first:
        return {}
    uses: dict[str, int] = dict(first)
    for node in ast.walk(scope):
        if isinstance(node, ast.Name) and node.id in first:
            uses[node.id] = max(uses[node.id], node.lineno)
    return {name: (line, uses[name]) for name, line in first.items()}


def _own(scope: Scope) -> Iterator[ast.AST]:
    """The nodes of a scope without those of the functions and classes in it."""
    waiting: list[ast.AST] = list(ast.iter_child_nodes(scope))
    while waiting:
        node = waiting.pop()
        yield node
        if not isinstance(node, SCOPES):
            waiting.extend(ast.iter_child_nodes(node))
