"""What another server answers is read through `http_exchange` alone: bounded, within a deadline, never unpacked."""

from __future__ import annotations

import ast
from collections.abc import Iterator
from pathlib import Path

from standins.architecture.parsed import parsed_text

ROOT = Path(__file__).resolve().parents[2]
ROOMS = (
    "allocator",
    "audit",
    "console",
    "governance",
    "integrations",
    "kernels",
    "lab",
    "migrations",
    "policies",
    "src",
)
CLIENTS = ("aiohttp", "http.client", "httpx", "requests", "urllib.request", "urllib3")
READER = "src/kvcustody/http_exchange.py"
MAY_HOLD_A_CLIENT = {  # connections that are kept; what they answer is read by `read_bounded`
    "governance/control_plane/connection.py",
    "governance/tiers/stores/s3_requests.py",
    "console/up/vllm_worker.py",
    "integrations/key_services/openbao.py",
    "console/demo/fleet_traffic.py",
    "lab/fleet/local_processes.py",
}
PASSES_ON = {  # a proxy: what a router answers goes to the client as it comes, and is not read
    "integrations/door/reverse_proxy.py",
    "integrations/door/server.py",
}
READS = {"get", "post", "put", "patch", "delete", "head", "options", "request", "stream", "send", "urlopen"}


def _modules(tree: ast.AST) -> Iterator[str]:
    for node in ast.walk(tree):
        if isinstance(node, ast.Import):
            yield from (name.name for name in node.names)
        elif isinstance(node, ast.ImportFrom) and node.module and not node.level:
            yield node.module
            yield from (f"{node.module}.{name.name}" for name in node.names)


def problems_of(place: str, text: str) -> list[str]:
    """What a module reads past `http_exchange`."""
    tree = parsed_text(text)
    held = {name for name in _modules(tree) if name in CLIENTS or name.startswith(tuple(f"{c}." for c in CLIENTS))}
    if not held or place == READER or place in PASSES_ON:
        return []
    if place not in MAY_HOLD_A_CLIENT:
        return [f"{place} imports {', '.join(sorted(held))}"]
    return [
        f"{place}:{node.lineno} reads with `{ast.unparse(node.func)}`"
        for node in ast.walk(tree)
        if isinstance(node, ast.Call)
        and isinstance(node.func, ast.Attribute)
        and node.func.attr in READS
        and ast.unparse(node.func.value).rpartition(".")[2].lstrip("_") in ("client", "httpx")
    ]


def test_no_module_reads_an_answer_by_itself() -> None:
    places = [path for room in ROOMS for path in (ROOT / room).rglob("*.py")]
    assert len(places) > 900
    problems = [
        problem
        for path in places
        for problem in problems_of(path.relative_to(ROOT).as_posix(), path.read_text(encoding="utf-8"))
    ]
    assert problems == []


def test_a_reader_of_its_own_is_found() -> None:
    """Positive control."""
    kept = "governance/control_plane/connection.py"
    assert problems_of("audit/x.py", "import httpx\n")
    assert problems_of("audit/x.py", "def f():\n    from urllib import request\n")
    assert problems_of("audit/x.py", "from urllib.request import urlopen\n")
    assert problems_of(kept, "import httpx\nself._client.request('GET', '/')\n")
    assert problems_of(kept, "import httpx\nhttpx.get('/')\n")
    assert not problems_of("audit/x.py", "from urllib.parse import quote\nfrom starlette.requests import Request\n")
    assert all((ROOT / place).is_file() for place in (READER, *MAY_HOLD_A_CLIENT)), "void without the modules"
