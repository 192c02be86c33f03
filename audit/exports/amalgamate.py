"""Generates the stand-alone verifier `verify_kvcustody.py` from the library that `kvcustody audit verify` uses.

    python -m kvcustody.audit.exports.amalgamate > verify_kvcustody.py

1. The file holds `verify_standalone` and, of the modules below it, each top-level statement that it reaches. Each
   statement is copied byte for byte, with the modules in the order of their imports. So there is no second verifier to
   maintain.
2. It imports only the standard library: `tlog.stdlib_backend` replaces `tlog.backend`. Generation fails if anything
   else needs a package, or if two statements have one name.
3. The same sources give the same bytes, so whoever has this repository can compare the digest of a copy.
"""

from __future__ import annotations

import ast
import sys
import threading
from collections.abc import Iterator, Set
from functools import cache
from importlib.util import find_spec
from itertools import groupby
from typing import NamedTuple

ENTRY = "kvcustody.audit.verify.verify_standalone"
SUBSTITUTES = {"kvcustody.audit.tlog.backend": "kvcustody.audit.tlog.stdlib_backend"}
_PACKAGE = "kvcustody"
_making = threading.Lock()


class AmalgamationError(Exception):
    """The library cannot be made into one file of plain Python."""


class _Place(NamedTuple):
    """A top-level statement: the module, and its number there."""

    module: str
    number: int


class _Module:
    """One source file: its statements, the names that they define, and where imported names come from."""

    def __init__(self, name: str) -> None:
        spec = find_spec(name)
        source = None if spec is None or spec.loader is None else spec.loader.get_source(name)  # type: ignore[attr-defined]
        if source is None:
            raise AmalgamationError(f"the source of `{name}` is not installed")
        self.name = name
        self.lines = source.splitlines()
        tree = ast.parse(source)
        self.doc = ast.get_docstring(tree) or ""
        self.body = tree.body
        self.defined: dict[str, int] = {}
        self.imported: dict[str, tuple[str, str]] = {}  # name: (module, name there)
        self.standard: dict[str, str] = {}  # name: its import statement
        for number, node in enumerate(self.body):
            if isinstance(node, ast.ImportFrom) and (node.module or "").split(".")[0] == _PACKAGE:
                self.imported |= {alias.asname or alias.name: (str(node.module), alias.name) for alias in node.names}
            elif isinstance(node, ast.ImportFrom):
                self.standard |= {alias.name: f"from {node.module} import {alias.name}" for alias in node.names}
            elif isinstance(node, ast.Import):
                self.standard |= {alias.name.split(".")[0]: f"import {alias.name}" for alias in node.names}
            else:
                self.defined |= dict.fromkeys(_defined(node), number)

    def text(self, number: int) -> str:
        """Return a statement with its decorators and preceding comments."""
        before = self.body[number - 1].end_lineno if number else 0
        return "\n".join(self.lines[before or 0 : self.body[number].end_lineno]).strip("\n")


def standalone() -> bytes:
    """Return the bytes of `verify_kvcustody.py`, generated once; raises `AmalgamationError` (rule 2)."""
    with _making:  # two threads that parse at once can fail in `ast` (CPython's gh-106905)
        return _once()


def make_standalone() -> bytes:
    """Return the same bytes, generated now."""
    reached, imports = _reach()
    parts = [f'#!/usr/bin/env python3\n"""{_module(ENTRY).doc}\n"""\n\nfrom __future__ import annotations\n']
    parts += _import_lines(imports)
    names: dict[str, str] = {}
    for module in _order(ENTRY):
        numbers = sorted(number for name, number in reached if name == module.name)
        path = module.name.removeprefix(_PACKAGE + ".").replace(".", "/") + ".py"
        if numbers:
            parts.append(f"\n\n# --- {path}: {module.doc.splitlines()[0]}")
        for number in numbers:
            for name in _defined(module.body[number]):
                if names.setdefault(name, module.name) != module.name:
                    raise AmalgamationError(f"`{name}` is defined in `{names[name]}` and in `{module.name}`")
            parts.append(_spaced(module, number, numbers))
    return "\n".join(parts).encode() + b"\n"


_once = cache(make_standalone)


def _reach() -> tuple[set[_Place], set[str]]:
    """Every statement that the entry needs, and the imports of the standard library (rule 1)."""
    waiting = [_Place(ENTRY, number) for number, node in enumerate(_module(ENTRY).body) if _is_code(node)]
    reached: set[_Place] = set()
    imports: set[str] = set()
    while waiting:
        place = waiting.pop()
        if place in reached:
            continue
        reached.add(place)
        module = _module(place.module)
        for node in ast.walk(module.body[place.number]):
            _check_inner_import(node, module.name)
            target = _resolve(module, node.id) if isinstance(node, ast.Name) else None
            if isinstance(target, _Place):
                body, after = _module(target.module).body, target.number + 1
                is_documented = after < len(body) and _is_text(body[after])  # as a constant is, below it
                waiting += [target, *([_Place(target.module, after)] if is_documented else [])]
            elif target is not None:
                _check_standard(target, module.name)
                imports.add(target)
    return reached, imports


def _import_lines(imports: Set[str]) -> list[str]:
    """Import statements, those from one module in one line."""
    plain = sorted(each for each in imports if each.startswith("import "))
    parts = sorted((each.split()[1], each.split()[3]) for each in imports if each.startswith("from "))
    groups = groupby(parts, key=lambda part: part[0])
    return plain + [f"from {module} import {', '.join(name for _, name in each)}" for module, each in groups]


def _resolve(module: _Module, name: str) -> _Place | str | None:
    """Where a name comes from: a statement, or an import of the standard library; None for builtins and locals."""
    while name in module.imported:
        source, name = module.imported[name]
        module = _module(SUBSTITUTES.get(source, source))
    if name in module.defined:
        return _Place(module.name, module.defined[name])
    return module.standard.get(name)


def _order(name: str) -> Iterator[_Module]:
    """Return the modules that one imports, dependencies first, itself last."""
    seen: set[str] = set()

    def visit(name: str) -> Iterator[_Module]:
        name = SUBSTITUTES.get(name, name)
        if name in seen:
            return
        seen.add(name)
        module = _module(name)
        for source, _ in module.imported.values():
            yield from visit(source)
        yield module

    return visit(name)


@cache
def _module(name: str) -> _Module:
    return _Module(name)


def _defined(node: ast.stmt) -> set[str]:
    if isinstance(node, ast.FunctionDef | ast.ClassDef):
        return {node.name}
    targets = node.targets if isinstance(node, ast.Assign) else [getattr(node, "target", None)]
    return {leaf.id for target in targets if target for leaf in ast.walk(target) if isinstance(leaf, ast.Name)}


def _spaced(module: _Module, number: int, numbers: list[int]) -> str:
    """Return a statement with the empty lines that belong before it."""
    before = [each for each in numbers if each < number][-1:]
    blocks = any(isinstance(module.body[each], ast.FunctionDef | ast.ClassDef | ast.If) for each in (number, *before))
    return ("\n\n" if blocks else "" if before else "\n") + module.text(number)


def _check_inner_import(node: ast.AST, module: str) -> None:
    for alias in node.names if isinstance(node, ast.Import) else ():
        _check_standard(f"import {alias.name}", module)
    if isinstance(node, ast.ImportFrom):
        _check_standard(f"import {node.module}", module)


def _check_standard(statement: str, module: str) -> None:
    root = statement.split()[1].split(".", maxsplit=1)[0]
    if root not in sys.stdlib_module_names:
        raise AmalgamationError(f"`{module}` needs `{root}` for verifying; only `tlog.backend` may take packages")


def _is_code(node: ast.stmt) -> bool:
    return not isinstance(node, ast.Import | ast.ImportFrom) and not _is_text(node)


def _is_text(node: ast.stmt) -> bool:
    return isinstance(node, ast.Expr) and isinstance(node.value, ast.Constant)


if __name__ == "__main__":
    sys.stdout.buffer.write(standalone())
