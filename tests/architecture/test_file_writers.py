"""One way to write a file under its final name: `kvcustody.files`. Read from the source, so a new writer is seen."""

import ast
from collections.abc import Iterator
from functools import cache
from pathlib import Path

import pytest

from standins.architecture.parsed import parsed_if_named

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
    "testkit",
)
# Who opens a file for writing by itself, and why nothing is replaced or half there.
_SCRIPTS = "testkit/conform/scripts/"
_MODEL, _ATTACK = (
    "in a temporary folder, read afterwards",
    "an attacker who changes what a store holds, on purpose",
)
ALLOWED = {
    (_SCRIPTS + "engines/sglang_hicache.py", "_revisions"): _MODEL,
    (_SCRIPTS + "engines/sglang_hicache.py", "_two_tenants"): _MODEL,
    (_SCRIPTS + "engines/vllm_events.py", "heard"): _MODEL,
    (_SCRIPTS + "engines/vllm_example.py", "main"): _MODEL,
    (_SCRIPTS + "engines/vllm_tiers.py", "_look"): _ATTACK,
    (_SCRIPTS + "engines/vllm_tiers.py", "configured"): _MODEL,
    (_SCRIPTS + "engines/vllm_transfer.py", "scheduler"): _MODEL,
    (_SCRIPTS + "layers/kv_cache_runner.py", "_write"): _ATTACK,
    (_SCRIPTS + "layers/lmcache_in_process.py", "main"): _MODEL,
    (_SCRIPTS + "layers/mooncake_store.py", "_master"): _MODEL,
    (_SCRIPTS + "layers/routers.py", "start"): "a child's log, written while it runs",
    (_SCRIPTS + "ours/kvcustody_router.py", "with_door"): _MODEL,
    (_SCRIPTS + "ours/kvcustody_hicache.py", "_look"): _ATTACK,
    (_SCRIPTS + "ours/kvcustody_lmcache.py", "_adapter"): _ATTACK,
    (_SCRIPTS + "ours/kvcustody_tier.py", "_look"): _ATTACK,
    ("audit/tlog/checkpoint_signer.py", "_locked"): "a lock without content",
    ("console/up/vllm_worker.py", "_launch"): "the engine's own log, which grows while it runs",
    ("audit/tlog/checkpoint_signer.py", "_running"): "a lock without content",
    (
        "audit/tlog/tiles.py",
        "_write",
    ): "in a draft folder, which `publish_folder` syncs and puts in its place",
    (
        "audit/exports/export_writer.py",
        "_write_plain",
    ): "in a draft folder, which `publish_folder` syncs and puts in its place",
    (
        "audit/tlog/witness/state.py",
        "__init__",
    ): "claims the name for SQLite, which makes its own content durable",
    (
        "audit/write/spill_file.py",
        "_make",
    ): "a locked segment that is appended to, fsynced, and takes a torn end",
    ("audit/write/spill_file.py", "retire"): "sets a segment aside under another name",
    ("audit/write/spill_file.py", "spill_again"): "gives a segment its first name back",
    ("audit/write/spill_file.py", "lock_worker_name"): "a lock without content",
    (
        "governance/keys/checkpoint_signing_key.py",
        "take_over",
    ): "one of two whole files takes over, durably",
    (
        "governance/service/processes/policy_work.py",
        "_be_nice",
    ): "a setting of the kernel's, which is no file",
    (
        "governance/tiers/seal/seal_notice.py",
        "__init__",
    ): "read while it is locked alone; one that is not whole says nothing",
    (
        "governance/keys/shred_keys.py",
        "open",
    ): "fixed records, changed in place and synced: a torn one has no key",
    (
        "governance/keys/shred_keys.py",
        "_replace",
    ): "blanks the file that was replaced, on purpose",
    (
        "governance/keys/shred_receipts.py",
        "_append",
    ): "records with checksums, appended and synced: a torn one is cut off",
    (
        "governance/tiers/stores/file_store.py",
        "_claim",
    ): "a lock without content, which marks the folder as ours",
    (
        "governance/tiers/stores/file_store.py",
        "complete_store",
    ): "sealed: an object that a crash cut short does not open, and is a miss",
    ("governance/keys/root_key_wrapping.py", "destroy"): "wipes a key in its place, on purpose",
    (
        "governance/keys/wrapped_key_store.py",
        "_open_if_exists",
    ): "blanks the file that was replaced, on purpose",
    ("governance/keys/wrapped_key_store.py", "exclusive"): "a lock without content",
    ("governance/service/ingest/reader_processes.py", "main"): "a pipe of the parent's",
    ("governance/service/processes/policy_work.py", "main"): "a pipe of the parent's",
    ("lab/fleet/local_processes.py", "start"): "a child's log, written while it runs",
    (
        "console/demo/fleet_processes.py",
        "replace_key",
    ): "a door's new key over the old one, as an operator moves it",
    ("testkit/demo/vllm_engine.py", "launch"): "a child's log, written while it runs",
    ("governance/credentials/api_key_file.py", "_changing"): "a lock without content",
    ("governance/service/access/local_administration.py", "local_turn"): "a lock without content",
    ("testkit/demo/vllm_process.py", ""): "a pipe of the parent's",
    ("testkit/lmcache/server.py", "__init__"): "a child's log, written while it runs",
}
PATH_CALLS = {"write_text", "write_bytes", "touch", "symlink_to", "hardlink_to"}
OS_CALLS = {"replace", "rename", "renames", "link", "symlink", "truncate", "mkfifo"}
OS_FLAGS = {"O_WRONLY", "O_RDWR", "O_CREAT"}
COPIES = {"copy", "copy2", "copyfile", "copytree", "move"}
NAMES = [f"{name}(" for name in {"open", "fdopen"} | PATH_CALLS | OS_CALLS | COPIES]  # of every call that is looked at


def writes(tree: ast.AST) -> Iterator[tuple[str, int]]:
    """(function, line) of every call that may write a file, put one in place, or rename one."""

    def walk(node: ast.AST, function: str) -> Iterator[tuple[str, int]]:
        for child in ast.iter_child_nodes(node):
            inner = child.name if isinstance(child, ast.FunctionDef | ast.AsyncFunctionDef) else function
            if isinstance(child, ast.Call) and _is_write(child):
                yield inner, child.lineno
            yield from walk(child, inner)

    return walk(tree, "")


def _is_write(call: ast.Call) -> bool:
    name = call.func
    if isinstance(name, ast.Name):
        return name.id == "open" and _writing(call.args[1:2], call)
    if not isinstance(name, ast.Attribute):
        return False
    owner = name.value.id if isinstance(name.value, ast.Name) else ""
    if owner == "os":
        if name.attr == "open":
            return any(isinstance(part, ast.Attribute) and part.attr in OS_FLAGS for part in ast.walk(call))
        return name.attr in OS_CALLS or (name.attr == "fdopen" and _writing(call.args[1:2], call))
    if owner == "shutil":
        return name.attr in COPIES
    if owner == "tarfile" and name.attr == "open":
        return bool(call.args) and _writing(call.args[1:2], call)
    if name.attr == "open":
        return _writing(call.args[:1], call)
    if name.attr in ("rename", "replace") and len(call.args) == 1 and not call.keywords:
        return True  # a path's; a text's `replace` has two
    return name.attr in PATH_CALLS


def _writing(mode: list[ast.expr], call: ast.Call) -> bool:
    values = [*mode, *(keyword.value for keyword in call.keywords if keyword.arg == "mode")]
    return any(
        isinstance(value, ast.Constant)
        and isinstance(value.value, str)
        and len(value.value) <= 3
        and bool(set("wxa+") & set(value.value))
        for value in values
    )


@cache
def found() -> dict[tuple[str, str], int]:
    places = {}
    for room in ROOMS:
        for path in sorted((ROOT / room).rglob("*.py")):
            for function, line in writes(parsed_if_named(path, NAMES)):
                places[str(path.relative_to(ROOT)), function] = line
    return places


def test_no_writer_opens_a_final_path_by_itself() -> None:
    assert {place: line for place, line in found().items() if place not in ALLOWED} == {}


def test_every_exception_is_still_one() -> None:
    places = found()
    assert {place for place in ALLOWED if place not in places} == set()


@pytest.mark.parametrize(
    "source",
    [
        "path.write_bytes(data)",
        "path.write_text(data, encoding='utf-8')",
        "path.open('wb')",
        "path.open(mode='x')",
        "open(path, 'a')",
        "os.open(path, os.O_CREAT | os.O_EXCL, 0o600)",
        "os.link(draft, path)",
        "os.replace(draft, path)",
        "draft.replace(path)",
        "draft.rename(path)",
        "os.fdopen(descriptor, 'w')",
        "shutil.move(draft, path)",
        "tarfile.open(path, 'w')",
    ],
)
def test_a_writer_of_its_own_would_be_seen(source: str) -> None:
    assert list(writes(ast.parse(source)))


@pytest.mark.parametrize(
    "source", ["path.open('rb')", "open(path)", "text.replace('a', 'b')", "os.open(path, os.O_RDONLY)"]
)
def test_reading_is_not_writing(source: str) -> None:
    assert not list(writes(ast.parse(source)))
