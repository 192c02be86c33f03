"""The layers of docs/build/architecture.md, read from the imports: no arrow points upward, no room breaks its word."""

import ast
import subprocess
import sys
from pathlib import Path

import pytest

from standins.architecture.parsed import parsed_text

ROOT = Path(__file__).resolve().parents[2]
LAYERS: dict[str, frozenset[str]] = {
    "kernels": frozenset(),
    "allocator": frozenset({"kernels"}),
    "policies": frozenset(),
    "audit": frozenset(),
    "migrations": frozenset({"audit"}),
    "governance": frozenset({"kernels", "allocator", "policies", "audit", "migrations"}),
    "integrations": frozenset({"kernels", "allocator", "policies", "audit", "migrations", "governance"}),
    "testkit": frozenset(
        {"kernels", "allocator", "policies", "audit", "migrations", "governance", "integrations"}
    ),
    "console": frozenset({"kernels", "allocator", "policies", "audit", "migrations", "governance"}),
}
FOUNDATION = frozenset(
    {
        "_version",
        "clock",
        "compression",
        "deadline_clock",
        "errors",
        "extensions",
        "files",
        "guarding_thread",
        "http_exchange",
        "ids",
        "plurals",
        "signed_document",
        "tenants",
        "time_zones",
        "times",
    }
)
# What a room may import from outside: the allocator knows no YAML, SQL or HTTP; kernels need torch and triton.
FORBIDDEN = {
    "kernels": {"yaml", "sqlalchemy", "alembic", "pydantic", "typer", "fastapi", "cryptography", "structlog"},
    "allocator": {
        "yaml",
        "sqlalchemy",
        "alembic",
        "pydantic",
        "typer",
        "fastapi",
        "cryptography",
        "structlog",
    },
    "policies": {"torch", "sqlalchemy", "alembic", "typer", "fastapi"},
    "audit": {"torch", "yaml", "typer", "fastapi"},
}


def imports(path: Path, tree: ast.AST) -> set[str]:
    """Every module that a file imports, absolute names only."""
    names: set[str] = set()
    for node in ast.walk(tree):
        if isinstance(node, ast.Import):
            names.update(alias.name for alias in node.names)
        elif isinstance(node, ast.ImportFrom):
            assert node.level == 0, f"{path}: relative import; import only through kvcustody.…"
            names.add(node.module or "")
            if node.module == "kvcustody":
                names.update(f"kvcustody.{alias.name}" for alias in node.names)
    return names


def violations(room: str, path: Path, source: str) -> list[str]:
    """Imports of one file that its room must not have."""
    found = []
    for name in imports(path, parsed_text(source)):
        parts = name.split(".")
        if parts[0] == "kvcustody" and len(parts) > 1:
            target = parts[1]
            if target != room and target not in LAYERS[room] and target not in FOUNDATION:
                found.append(f"{path.relative_to(ROOT)} imports {name}")
        elif parts[0] in LAYERS or parts[0] == "benchmarks":
            found.append(f"{path.relative_to(ROOT)} imports `{name}` without the kvcustody namespace")
        elif parts[0] in FORBIDDEN.get(room, ()):
            found.append(f"{path.relative_to(ROOT)} imports {name}")
    return found


def files(room: str) -> list[Path]:
    return sorted((ROOT / room).rglob("*.py"))


@pytest.mark.parametrize("room", LAYERS)
def test_no_arrow_points_upward(room: str) -> None:
    found = [
        line for path in files(room) for line in violations(room, path, path.read_text(encoding="utf-8"))
    ]
    assert files(room), f"{room} is empty"
    assert found == []


@pytest.mark.parametrize(
    ("room", "source"),
    [
        ("allocator", "from kvcustody.policies import loader"),
        ("allocator", "import sqlalchemy"),
        ("kernels", "from kvcustody.allocator.pool.pool import Pool"),
        ("policies", "from kvcustody.audit import events"),
        ("audit", "import kvcustody.governance.governor.governor"),
        ("governance", "from kvcustody.console import main"),
        ("governance", "from kvcustody.integrations.vllm import plugin"),
        ("integrations", "from kvcustody.console import main"),
        ("integrations", "from kvcustody.testkit.conformance import kit"),
        ("console", "import kvcustody.testkit.demo.command"),
        ("allocator", "import kernels"),
    ],
)
def test_an_upward_arrow_would_be_seen(room: str, source: str) -> None:
    assert violations(room, ROOT / room / "example.py", source)


def test_every_room_is_linked_once_and_has_no_init() -> None:
    package = ROOT / "src" / "kvcustody"
    links = {path.name: path.readlink() for path in package.iterdir() if path.is_symlink()}
    assert links == {room: Path("..") / ".." / room for room in LAYERS}
    assert [room for room in LAYERS if (ROOT / room / "__init__.py").exists()] == []


def test_allocator_and_kernels_import_with_numpy_torch_and_triton_alone() -> None:
    """A worker needs nothing else; here every other dependency is made unimportable."""
    program = """
import sys
class Wall:
    banned = {"yaml", "sqlalchemy", "pydantic", "cryptography", "structlog", "typer", "rich", "orjson", "jinja2"}
    def find_spec(self, name, path=None, target=None):
        if name.split(".")[0] in self.banned:
            raise ImportError(f"{name} is walled off")
sys.meta_path.insert(0, Wall())
import kvcustody.allocator.manager.block_manager, kvcustody.allocator.manager.check_invariants
import kvcustody.allocator.sizing.blocks_that_fit
import kvcustody.kernels.scrub, kvcustody.kernels.verify, kvcustody.kernels.copy
try:
    import kvcustody.governance.governor.governor
except ImportError:
    print("walled")
"""
    done = subprocess.run([sys.executable, "-c", program], capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stderr
    assert done.stdout.strip() == "walled", "the wall itself must work"


def test_control_plane_imports_without_torch() -> None:
    program = """
import sys
sys.modules["torch"] = None
sys.modules["triton"] = None
from importlib import import_module
import kvcustody.allocator.manager.block_manager, kvcustody.governance.governor.governor
from kvcustody.console.main import COMMANDS
for command in COMMANDS.values():
    import_module(command.target.partition(":")[0])
print("ok")
"""
    done = subprocess.run([sys.executable, "-c", program], capture_output=True, text=True, check=False)
    assert done.stdout.strip() == "ok", done.stderr


ASKS_FOR_THE_DIALECT = ("dialect.name",)


def asks_for_the_dialect(source: str) -> bool:
    return any(word in source for word in ASKS_FOR_THE_DIALECT)


def test_one_file_knows_which_database_it_has() -> None:
    found = [
        path.relative_to(ROOT).as_posix()
        for room in LAYERS
        for path in files(room)
        if "versions" not in path.parts and asks_for_the_dialect(path.read_text(encoding="utf-8"))
    ]
    assert found == ["audit/store/database/dialect.py"]
    assert asks_for_the_dialect('if connection.dialect.name == "sqlite":'), "void: it would not be seen"
