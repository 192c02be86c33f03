"""Whether a change of names and prose changed a program.

    python tests/lib/standins/architecture/same_program.py BEFORE [ROOM ...]

Compares every Python file of the rooms (all tracked ones without arguments) at the commit BEFORE with the one here. Two
files hold the same program where their syntax trees are equal without docstrings, comments and local variables' names.

1. A local variable before is one local variable of the same function now, and the reverse: a rename that catches a
   second variable is a difference. Closures see the variable of the function that binds it.
2. Every other name (attribute, keyword, function, class, import, global, builtin) stays, unless `--names` lists it:
   whether that rename is whole is for mypy and the tests to say.
3. Texts stay, unless `--texts` lists them.

Exit status 1 where a file differs.
"""

from __future__ import annotations

import argparse
import ast
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import NamedTuple

ROOT = Path(__file__).resolve().parents[4]
FUNCTIONS = (ast.FunctionDef, ast.AsyncFunctionDef, ast.Lambda)
Pairs = list[tuple[str, str]]


class Difference(Exception):
    """Two trees that are not of one program."""


class Changes(NamedTuple):
    """Texts, and names that are no local variable, before and now."""

    texts: Pairs
    names: Pairs


class Scope(NamedTuple):
    """The variables that a function binds, before and now, and which has become which."""

    before: frozenset[str]
    now: frozenset[str]
    forward: dict[str, str]
    back: dict[str, str]


def compare(before: str, after: str) -> Changes:
    """Return what differs between two sources of one program.

    Raises:
        Difference: anything else than prose and names differs.
    """
    comparison = _Comparison()
    comparison.node(ast.parse(before), ast.parse(after))
    return comparison.changes


class _Comparison:
    def __init__(self) -> None:
        self.changes = Changes([], [])
        self.scopes: list[Scope] = []

    def node(self, old: ast.AST, new: ast.AST) -> None:
        if type(old) is not type(new):
            raise _different(new, type(old).__name__, type(new).__name__)
        is_function = isinstance(old, FUNCTIONS) and isinstance(new, FUNCTIONS)
        if is_function:
            self.scopes.append(Scope(_bound(old), _bound(new), {}, {}))
        for field in old._fields:
            left, right = getattr(old, field, None), getattr(new, field, None)
            if field == "body" and isinstance(left, list) and isinstance(right, list):
                left, right = _bare(left), _bare(right)
            self.value(left, right, old, new, field)
        if is_function:
            self.scopes.pop()

    def value(self, left: object, right: object, old: ast.AST, new: ast.AST, field: str) -> None:
        if isinstance(left, list) and isinstance(right, list) and len(left) == len(right):
            for one, other in zip(left, right, strict=True):
                self.value(one, other, old, new, field)
        elif isinstance(left, ast.AST) and isinstance(right, ast.AST):
            self.node(left, right)
        elif not (isinstance(left, str) and isinstance(right, str)):
            if left != right or type(left) is not type(right):
                raise _different(new, left, right)
        elif isinstance(old, ast.Constant):
            self.changes.texts.extend([(left, right)] if left != right else [])
        elif not (_is_variable(old, field) and self.is_local(left, right, new)) and left != right:
            self.changes.names.append((left, right))

    def is_local(self, left: str, right: str, new: ast.AST) -> bool:
        """Whether a name is a local variable of a function around it, and now the same one."""
        scope = next((scope for scope in reversed(self.scopes) if left in scope.before), None)
        if scope is None:
            return False
        holder = next((scope for scope in reversed(self.scopes) if right in scope.now), None)
        if holder is not scope or scope.forward.setdefault(left, right) != right:
            raise _different(new, left, right)
        if scope.back.setdefault(right, left) != left:
            raise _different(new, left, right)
        return True


def _is_variable(node: ast.AST, field: str) -> bool:
    """Whether a text in this field names a variable."""
    if isinstance(node, ast.Name | ast.arg | ast.Nonlocal):
        return True
    return field in ("name", "rest") and isinstance(
        node, ast.ExceptHandler | ast.MatchAs | ast.MatchStar | ast.MatchMapping
    )


def _bound(function: ast.AST) -> frozenset[str]:
    """The names that a function binds itself, those of its comprehensions too."""
    names: set[str] = set()
    free: set[str] = set()
    waiting = list(ast.iter_child_nodes(function))
    while waiting:
        node = waiting.pop()
        if isinstance(node, ast.Name) and not isinstance(node.ctx, ast.Load):
            names.add(node.id)
        elif isinstance(node, ast.arg):
            names.add(node.arg)
        elif isinstance(node, ast.Nonlocal | ast.Global):
            free |= set(node.names)
        elif isinstance(node, ast.alias):
            names.add((node.asname or node.name).partition(".")[0])
        elif isinstance(name := getattr(node, "name", None), str):
            names.add(name)
        if isinstance(node, FUNCTIONS):
            waiting.extend(
                [*getattr(node, "decorator_list", ()), *node.args.defaults, *filter(None, node.args.kw_defaults)]
            )
        elif not isinstance(node, ast.ClassDef):
            waiting.extend(ast.iter_child_nodes(node))
    return frozenset(names - free)


def _bare(body: list[ast.AST]) -> list[ast.AST]:
    """A body without its docstring."""
    first = body[0] if body else None
    has_docstring = (
        isinstance(first, ast.Expr) and isinstance(first.value, ast.Constant) and isinstance(first.value.value, str)
    )
    return body[1:] if has_docstring else body


def _different(where: ast.AST, old: object, new: object) -> Difference:
    return Difference(f"line {getattr(where, 'lineno', '?')}: `{old}` became `{new}`")


def pairs(commit: str, rooms: list[str]) -> Iterator[tuple[str, str, str]]:
    """The changed files: their names with their texts at a commit and here."""
    changed = subprocess.run(
        ["git", "diff", "--name-only", "--diff-filter=M", commit, "--", *(rooms or ["."])],
        cwd=ROOT, capture_output=True, text=True, check=True,
    ).stdout.split()  # fmt: skip
    for name in changed:
        if name.endswith(".py"):
            shown = subprocess.run(
                ["git", "show", f"{commit}:{name}"], cwd=ROOT, capture_output=True, text=True, check=True
            )
            yield name, shown.stdout, (ROOT / name).read_text(encoding="utf-8")


def main() -> int:
    """Compare, print what differs, and return the exit status."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("before", metavar="BEFORE", help="a commit")
    parser.add_argument("rooms", metavar="ROOM", nargs="*", help="files or folders; all without")
    parser.add_argument("--texts", action="store_true", help="list the texts that differ instead of failing on them")
    parser.add_argument("--names", action="store_true", help="list other names that differ instead of failing on them")
    arguments = parser.parse_args()
    files = differ = 0
    for name, before, after in pairs(arguments.before, arguments.rooms):
        files += 1
        try:
            changes = compare(before, after)
        except Difference as difference:
            differ += 1
            print(f"{name}: {difference}")
            continue
        for kind, pairs_of in changes._asdict().items():
            for old, new in dict.fromkeys(pairs_of):
                print(f"{name}: {kind} {old!r}\n{' ' * len(name)}    now {new!r}")
        differ += bool((changes.texts and not arguments.texts) or (changes.names and not arguments.names))
    print(f"{files} changed files, {differ} of another program")
    return int(bool(differ))


if __name__ == "__main__":
    sys.exit(main())
