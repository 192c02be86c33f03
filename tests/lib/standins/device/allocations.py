"""What an engine keeps in tensors of its own beside the cache: read from its source, so that nothing is missed.

`kept(root, folders)` names every attribute of `self` that is made by a call which makes a tensor or a buffer. A release
that adds one is seen, and has to be sorted (`docs/build/outside-blocks.json`) before the test passes again.
"""

from __future__ import annotations

import ast
import json
from collections.abc import Iterable, Iterator
from importlib import metadata
from importlib.util import find_spec
from pathlib import Path

from standins.architecture.parsed import parsed

LIST = Path(__file__).parents[4] / "docs" / "build" / "outside-blocks.json"

MAKERS = {
    "empty", "zeros", "ones", "full", "empty_like", "zeros_like", "tensor", "arange", "rand", "randn",
    "CpuGpuBuffer", "_make_buffer", "UvaBackedTensor", "make_tensor", "StagedWriteTensor", "UvaBufferPool",
}  # fmt: skip


def kept(root: Path, folders: Iterable[str]) -> dict[str, list[str]]:
    """Attribute -> the files in which it is made, for every file under these folders of a package."""
    places: dict[str, set[str]] = {}
    for folder in folders:
        start = root / folder
        for path in sorted(start.rglob("*.py") if start.is_dir() else [start]):
            for name in _attributes(parsed(path)):
                places.setdefault(name, set()).add(str(path.relative_to(root)))
    return {name: sorted(files) for name, files in sorted(places.items())}


def _attributes(tree: ast.AST) -> Iterator[str]:
    for node in ast.walk(tree):
        if not isinstance(node, (ast.Assign, ast.AnnAssign)) or node.value is None:
            continue
        targets = node.targets if isinstance(node, ast.Assign) else [node.target]
        calls = [call.func for call in ast.walk(node.value) if isinstance(call, ast.Call)]
        names = {func.attr if isinstance(func, ast.Attribute) else getattr(func, "id", "") for func in calls}
        if names & MAKERS:
            yield from (
                target.attr
                for target in targets
                if isinstance(target, ast.Attribute) and getattr(target.value, "id", "") == "self"
            )


def compared(package: str, distribution: str) -> tuple[dict[str, list[str]], set[str]] | None:
    """What the installed release makes and the list lacks, and the reverse; None where it is of another release."""
    listed = json.loads(LIST.read_text(encoding="utf-8"))
    engine = listed[package]
    names = [name for kind in engine["kinds"].values() for name in kind]
    assert len(names) == len(set(names)), "a name has two kinds"
    assert set(engine["kinds"]) <= set(listed["what"])
    try:
        installed = metadata.version(distribution)
    except metadata.PackageNotFoundError:  # under the name that its own project gives it
        installed = metadata.version(package)
    if not installed.startswith(engine["release"] + "."):
        return None
    spec = find_spec(package)
    assert spec is not None and spec.origin is not None
    made = kept(Path(spec.origin).parent, engine["read"])
    return {name: files for name, files in made.items() if name not in names}, set(names) - set(made)
