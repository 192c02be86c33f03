"""Whether a change of names and prose changed a program.

    python tests/lib/standins/architecture/same_program.py BEFORE [ROOM ...]

Compares every Python file of the rooms (all tracked ones without arguments) at the commit BEFORE with the one here. Two
files hold the same program where their syntax trees are equal without names, docstrings and comments, and where in each
function a name before stands for one name now and the reverse: a rename that catches a second variable is a difference.

Texts are compared too. A change of messages is shown with `--texts`, which lists them instead of failing. Exit status 1
where a file differs.
"""

from __future__ import annotations

import argparse
import ast
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

ROOT = Path(__file__).resolve().parents[4]
Names = tuple[dict[str, str], dict[str, str]]
NAMES = frozenset({"id", "arg", "attr", "name", "asname", "module", "names", "kwd_attrs", "rest"})
SCOPES = (ast.FunctionDef, ast.AsyncFunctionDef, ast.Lambda, ast.ClassDef)


class Difference(Exception):
    """Two trees that are not of one program."""


def compare(before: str, after: str) -> list[tuple[str, str]]:
    """The texts that differ between two sources.

    Returns:
        Pairs of a text before and now, in the order of the file.

    Raises:
        Difference: anything else than names, docstrings, comments and texts differs.
    """
    texts: list[tuple[str, str]] = []
    _node(ast.parse(before), ast.parse(after), ({}, {}), texts)
    return texts


def _node(old: ast.AST, new: ast.AST, names: Names, texts: list[tuple[str, str]]) -> None:
    if type(old) is not type(new):
        raise Difference(f"line {getattr(new, 'lineno', '?')}: {type(old).__name__} became {type(new).__name__}")
    inside = ({}, {}) if isinstance(old, SCOPES) else names
    for field in old._fields:
        left, right = getattr(old, field, None), getattr(new, field, None)
        if field in NAMES and isinstance(left, str) and isinstance(right, str):
            if isinstance(old, ast.Name | ast.arg):
                _renamed(left, right, inside, new)
        elif field == "value" and isinstance(old, ast.Constant) and isinstance(left, str) and isinstance(right, str):
            if left != right:
                texts.append((left, right))
        else:
            _field(left, right, inside, texts, new, docstring=field == "body" and not isinstance(old, ast.Lambda))


def _field(
    left: object,
    right: object,
    names: Names,
    texts: list[tuple[str, str]],
    where: ast.AST,
    *,
    docstring: bool,
) -> None:
    if isinstance(left, list) and isinstance(right, list):
        left, right = (_bare(left), _bare(right)) if docstring else (left, right)
        if len(left) != len(right):
            raise Difference(f"line {getattr(where, 'lineno', 1)}: {len(left)} parts became {len(right)}")
        for old, new in zip(left, right, strict=True):
            _field(old, new, names, texts, where, docstring=False)
    elif isinstance(left, ast.AST) and isinstance(right, ast.AST):
        _node(left, right, names, texts)
    elif isinstance(left, str) and isinstance(right, str):
        return  # a name in a list: `global a, b`
    elif left != right or type(left) is not type(right):
        raise Difference(f"line {getattr(where, 'lineno', 1)}: {left!r} became {right!r}")


def _bare(body: list[ast.AST]) -> list[ast.AST]:
    """A body without its docstring."""
    first = body[0] if body else None
    told = isinstance(first, ast.Expr) and isinstance(first.value, ast.Constant) and isinstance(first.value.value, str)
    return body[1:] if told else body


def _renamed(old: str, new: str, names: Names, where: ast.AST) -> None:
    forward, back = names
    if forward.setdefault(old, new) != new or back.setdefault(new, old) != old:
        line = getattr(where, "lineno", "?")
        raise Difference(f"line {line}: `{old}` became `{new}`; elsewhere `{old}` and `{new}` are other names")


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
    arguments = parser.parse_args()
    files = differ = 0
    for name, before, after in pairs(arguments.before, arguments.rooms):
        files += 1
        try:
            texts = compare(before, after)
        except Difference as difference:
            differ += 1
            print(f"{name}: {difference}")
            continue
        for old, new in texts:
            print(f"{name}: text {old!r}\n{' ' * len(name)}   is {new!r}")
        differ += bool(texts) and not arguments.texts
    print(f"{files} changed files, {differ} of another program")
    return int(bool(differ))


if __name__ == "__main__":
    sys.exit(main())
