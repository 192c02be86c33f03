"""The layers of docs/build/architecture.md, read from the imports: no arrow points upward, no room breaks its word."""

import ast
import subprocess
import sys
from pathlib import Path

import pytest

from standins.architecture.module_graph import sources
from standins.architecture.parsed import parsed, parsed_text

ROOT = Path(__file__).resolve().parents[2]
LAYERS: dict[str, frozenset[str]] = {
    "kernels": frozenset(),
    "allocator": frozenset({"kernels"}),
    "policies": frozenset(),
    "audit": frozenset(),
    "migrations": frozenset({"audit"}),
    "governance": frozenset({"kernels", "allocator", "policies", "audit", "migrations"}),
    "lab": frozenset({"kernels", "allocator", "policies", "audit", "migrations", "governance"}),
    "integrations": frozenset({"kernels", "allocator", "policies", "audit", "migrations", "governance", "lab"}),
    "testkit": frozenset(
        {"kernels", "allocator", "policies", "audit", "migrations", "governance", "lab", "integrations"}
    ),
    "console": frozenset({"kernels", "allocator", "policies", "audit", "migrations", "governance", "lab"}),
}
FOUNDATION = frozenset(
    {
        "_version",
        "clock",
        "deadline_clock",
        "errors",
        "extensions",
        "files",
        "guarding_thread",
        "http_exchange",
        "ids",
        "logger",
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
    arrows = []
    for name in imports(path, parsed_text(source)):
        parts = name.split(".")
        if parts[0] == "kvcustody" and len(parts) > 1:
            target = parts[1]
            if target != room and target not in LAYERS[room] and target not in FOUNDATION:
                arrows.append(f"{path.relative_to(ROOT)} imports {name}")
        elif parts[0] in LAYERS or parts[0] == "benchmarks":
            arrows.append(f"{path.relative_to(ROOT)} imports `{name}` without the kvcustody namespace")
        elif parts[0] in FORBIDDEN.get(room, ()):
            arrows.append(f"{path.relative_to(ROOT)} imports {name}")
    return arrows


def files(room: str) -> list[Path]:
    return sorted((ROOT / room).rglob("*.py"))


@pytest.mark.parametrize("room", LAYERS)
def test_no_arrow_points_upward(room: str) -> None:
    found = [line for path in files(room) for line in violations(room, path, path.read_text(encoding="utf-8"))]
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
        ("governance", "from kvcustody.lab.sizing import hf_config"),
        ("lab", "from kvcustody.console import main"),
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
import kvcustody.lab.sizing.blocks_that_fit
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
    mentions = [
        path.relative_to(ROOT).as_posix()
        for room in LAYERS
        for path in files(room)
        if "versions" not in path.parts and asks_for_the_dialect(path.read_text(encoding="utf-8"))
    ]
    assert mentions == ["audit/store/database/dialect.py"]
    assert asks_for_the_dialect('if connection.dialect.name == "sqlite":'), "void: it would not be seen"


CREDENTIALS = "kvcustody.governance.credentials."
# What is imported, or called by a name of `hmac`, and who alone may: module prefixes, each with its reason.
HOMES: dict[str, dict[str, str]] = {
    "jwt": {CREDENTIALS: "tokens are verified, and the keys of a JWKS read"},
    "yaml": {"kvcustody.policies.document.yaml_nodes": "the strict reader, and the writer of plain values"},
    "ruamel": {"kvcustody.policies.workbench.round_trip": "keeps comments of a policy that was read strictly"},
    "hmac": {
        CREDENTIALS: "digests of keys, and bindings, are compared in constant time",
        "kvcustody.audit.evidence.subjects.subject_key_store": "pseudonyms of subjects",
        "kvcustody.audit.evidence.subjects.subject_table": "pseudonyms of subjects",
        "kvcustody.audit.tlog.root_log": "names of logs",
        "kvcustody.audit.siem.sink": "signatures of webhooks",
        "kvcustody.governance.decisions.segment_matcher": "digests of declared segments",
        "kvcustody.governance.keys.locked_buffer": "HKDF",
        "kvcustody.governance.monitoring.enforcement": "the share of sessions of an order",
        "kvcustody.governance.service.page_cursor": "tags of cursors",
        "kvcustody.governance.tiers.stores.s3_requests": "AWS signatures",
        "kvcustody.governance.tiers.seal.seal_notice": "tags of sealed objects",
        "kvcustody.integrations.tensorrt_llm.derived_salt": "salts of domains",
        "kvcustody.integrations.vllm.conformance_record": "tags of conformance records",
    },
}
# Functions that a second implementation of a credential would need, and that no module beside the room defines.
PERSONS = (b"kvcustody-key", b"kvc-api-key", b"kvc-scope-token")


def strangers(name: str, tree: ast.AST) -> list[str]:
    """What a module imports, or which key's digest it makes, that is another module's to do."""
    imports = []
    for node in ast.walk(tree):
        if isinstance(node, ast.Import):
            imported = [alias.name for alias in node.names]
        elif isinstance(node, ast.ImportFrom):
            imported = [node.module or ""]
        else:
            imported = []
        for module in imported:
            homes = HOMES.get(module.split(".")[0])
            if homes is not None and not name.startswith(tuple(homes)):
                imports.append(f"{name} imports {module}")
        if isinstance(node, ast.Constant) and node.value in PERSONS and not name.startswith(CREDENTIALS):
            imports.append(f"{name} makes a digest of a key")
    return imports


def test_no_module_does_what_another_room_does() -> None:
    product = {name: path for name, path in sources().items() if not name.startswith("kvcustody.testkit.")}
    assert len(product) > 800
    assert [line for name, path in product.items() for line in strangers(name, parsed(path))] == []


@pytest.mark.parametrize("library", HOMES)
def test_every_home_is_in_use(library: str) -> None:
    """A home that imports the library no more would let a second implementation in."""
    using = {
        name
        for name, path in sources().items()
        for node in ast.walk(parsed(path))
        if (isinstance(node, ast.Import) and any(a.name.split(".")[0] == library for a in node.names))
        or (isinstance(node, ast.ImportFrom) and (node.module or "").split(".")[0] == library)
    }
    assert [home for home in HOMES[library] if not any(name.startswith(home) for name in using)] == []


@pytest.mark.parametrize(
    "source",
    [
        "import jwt",
        "from jwt import PyJWS",
        "def verify():\n    from jwt.algorithms import RSAAlgorithm",
        "import yaml",
        "from ruamel.yaml import YAML",
        "import hmac",
        "from hmac import compare_digest",
        'import hashlib\nhashlib.blake2b(b"", person=b"kvcustody-key")',
    ],
)
def test_a_second_implementation_would_be_seen(source: str) -> None:
    tree = parsed_text(source)
    assert strangers("kvcustody.governance.service.access.second", tree) != []
    assert strangers("kvcustody.integrations.identity.second", tree) != []
