"""Can a client choose a salt that is another tenant's namespace in LMCache behind SGLang?

    python lmcache_sglang.py namespace-alias        # needs: lmcache

The function is taken out of its module and run as it stands, since the module imports SGLang.
"""

from __future__ import annotations

import ast
import hashlib
import importlib.util
import json
import sys
import textwrap
from pathlib import Path
from typing import Any, Optional


def main(case: str) -> dict[str, Any]:
    """Return what was seen."""
    assert case == "namespace-alias"
    spec = importlib.util.find_spec("lmcache")
    assert spec is not None and spec.origin is not None
    module = Path(spec.origin).parent / "integration" / "sglang" / "unified_lmcache_mp_connector.py"
    source = module.read_text()
    found = [
        node
        for node in ast.walk(ast.parse(source))
        if isinstance(node, ast.FunctionDef) and node.name == "build_cache_salt"
    ]
    text = textwrap.dedent("\n".join(source.splitlines()[found[0].lineno - 1 : found[0].end_lineno]))
    scope: dict[str, Any] = {"hashlib": hashlib, "Optional": Optional}
    exec(text, scope)  # noqa: S102 - the function as it is installed
    build = scope["build_cache_salt"]
    victims = build("acme", "lora-7")
    chosen = hashlib.sha256(b"acme\0lora-7").hexdigest()
    return {
        "found": build(chosen, None) == victims and build("a\0b", "c") == build("a", "b\0c"),
        "evidence": f"salt `{chosen[:12]}…` without an extra key makes the namespace of (`acme`, `lora-7`)",
    }


if __name__ == "__main__":
    print(json.dumps(main(sys.argv[1])))
