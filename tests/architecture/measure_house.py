"""What the house measures: `python tests/architecture/measure_house.py [ROOT]`. Works on any earlier tree too."""

from __future__ import annotations

import ast
import collections
import re
import sys
from pathlib import Path

sys.path.insert(0, str(Path(__file__).resolve().parents[1] / "lib"))

from standins.architecture import module_graph


def measure(root: Path) -> dict[str, object]:
    """Counts over the product's own files below `root`."""
    module_graph.ROOT = root
    named = module_graph.sources()
    texts = {name: path.read_text(encoding="utf-8") for name, path in named.items()}
    trees = {name: ast.parse(text) for name, text in texts.items()}
    folders = collections.Counter(path.parent for path in named.values() if path.name != "__init__.py")
    classes = collections.Counter(
        node.name
        for tree in trees.values()
        for node in tree.body
        if isinstance(node, ast.ClassDef) and not node.name.startswith("_")
    )
    everywhere = collections.Counter(
        word
        for path in (*named.values(), *(root / "tests").rglob("*.py"), *(root / "benchmarks").rglob("*.py"))
        for word in re.findall(r"[A-Za-z_]\w*", path.read_text(encoding="utf-8"))
    )
    public = [
        node.name
        for tree in trees.values()
        for node in tree.body
        if isinstance(node, ast.ClassDef | ast.FunctionDef) and not node.name.startswith("_")
    ]
    codes = collections.defaultdict(set)
    for name, tree in trees.items():
        for line in (ast.get_docstring(tree) or "").splitlines():
            if found := re.match(r"([A-Z]\d{1,2})[ .]", line.strip()):
                codes[found[1]].add(name)
    arrows = module_graph.graph()
    importers = collections.Counter(target for targets in arrows.values() for target in targets)
    return {
        "modules": len(named),
        "lines": sum(text.count("\n") for text in texts.values()),
        "largest folders (modules)": [count for _, count in folders.most_common(5)],
        "folders above fifteen": sum(count > 15 for count in folders.values()),
        "circles": len(module_graph.circles(arrows)),
        "class names used twice": sum(count > 1 for count in classes.values()),
        "rule codes used twice": sum(len(where) > 1 for where in codes.values()),
        "public names that nothing refers to": sum(everywhere[name] == 1 for name in public),
        "modules with one importer": sum(importers[name] == 1 for name in named),
        "modules of at most 60 lines": sum(text.count("\n") <= 60 for text in texts.values()),
    }


if __name__ == "__main__":
    root = Path(sys.argv[1]).resolve() if len(sys.argv) > 1 else module_graph.ROOT
    for what, value in measure(root).items():
        print(f"{what:40} {value}")
