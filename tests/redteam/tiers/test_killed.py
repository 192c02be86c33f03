"""E2, E7: a worker with tiers, killed at any moment, leaves no plaintext, and its next start takes up nothing torn."""

from __future__ import annotations

import base64
import os
import random
import resource
import signal
import subprocess
import sys
import time
from pathlib import Path
from typing import NamedTuple

import pytest

from kvcustody.audit.evidence.copies.copy_coverage import copy_coverage
from kvcustody.audit.store.database.engine import open_store
from kvcustody.audit.verify.ledger.fsck_ledger import fsck
from kvcustody.governance.tiers.seal.object_layout import read_header
from standins import PLACE
from standins.governance.offload_world import prompt
from standins.redteam.killed_tiers import CANARY, LIFE_US, TENANTS, CanaryWorld

pytestmark = pytest.mark.system
FORMS = {
    "raw": CANARY[:16],
    "hexadecimal": CANARY[:16].hex().encode(),
    **{f"base64, {shift}": base64.b64encode(bytes(shift) + CANARY)[4:24] for shift in range(3)},
}


class Killed(NamedTuple):
    """What the killed had done: lives that had served, requests, blocks from tiers, objects found by a next start."""

    lives: int
    served: int
    restored: int
    found: int


def places(folder: Path, shared_before: set[Path]) -> list[str]:
    """In which files of the folder, and of shared memory, the canary is, in whatever form."""
    files = [path for path in sorted(folder.rglob("*")) if path.is_file() and not path.is_symlink()]
    files += [path for path in shared() - shared_before if path.is_file()]
    found = []
    for path in files:
        data = path.read_bytes()
        found += [f"{form} in {path.name}" for form, needle in FORMS.items() if needle in data]
    return found


def shared() -> set[Path]:
    return set(Path("/dev/shm").iterdir())


def kill_often(folder: Path, kills: int) -> Killed:
    """Start a worker, kill it, and again, on one folder; cores may be written, and would lie in it."""
    chance, done = random.Random(kills), []
    (folder / "tmp").mkdir()

    def with_cores() -> None:
        hard = resource.getrlimit(resource.RLIMIT_CORE)[1]
        resource.setrlimit(resource.RLIMIT_CORE, (hard, hard))

    server = subprocess.Popen(
        [sys.executable, str(PLACE / "redteam" / "killed_tiers.py")],
        stdin=subprocess.PIPE,
        stdout=subprocess.PIPE,
        cwd=folder,
        env={**os.environ, "TMPDIR": str(folder / "tmp"), "PYTHONPATH": os.pathsep.join(sys.path)},
        text=True,
        preexec_fn=with_cores,  # noqa: PLW1509 - this process has no other threads
    )
    assert server.stdin and server.stdout
    try:
        for number in range(kills):
            progress = folder / f"progress-{number}"
            print("go", folder, number, file=server.stdin, flush=True)
            process = int(server.stdout.readline())
            in_start = number and chance.random() < 0.1
            until = time.monotonic() + (chance.random() * 0.3 if in_start else 30)
            while not progress.exists() and time.monotonic() < until:
                time.sleep(0.001)
            wanted = chance.randrange(25)  # requests before it, on a slow machine too
            while progress.exists() and told(progress)[0] < wanted and time.monotonic() < until + 30:
                time.sleep(0.001)
            time.sleep(chance.random() * 0.05)
            os.kill(process, signal.SIGKILL)
            print("wait", file=server.stdin, flush=True)
            assert server.stdout.readline() == "dead\n"
            if progress.exists():
                done.append(told(progress))
            assert not list(folder.glob("failed-*")), next(folder.glob("failed-*")).read_text()
    finally:
        server.stdin.close()
        server.wait(60)
    return Killed(len(done), *(sum(one[at] for one in done) for at in range(3)))


def told(progress: Path) -> list[int]:
    """Requests served, blocks from tiers, objects found at its start."""
    words = progress.read_text().split()
    return [int(word) for word in words] if len(words) == 3 else [0, 0, 0]


@pytest.mark.parametrize("kills", [10, pytest.param(1_000, marks=pytest.mark.soak)])
def test_no_plaintext_is_left_and_the_next_start_takes_up_whole_objects(tmp_path: Path, kills: int) -> None:
    before = shared()
    killed = kill_often(tmp_path, kills)
    assert killed.lives > kills // 2 and killed.served > 5 * kills, "void: they were killed before they did anything"
    assert killed.restored > kills and killed.found > 0, "void: nothing came from a tier, or was found by a start"
    assert places(tmp_path, before) == []
    assert list((tmp_path / "tier").rglob("*")), "void: nothing is in the folder"

    world = CanaryWorld(tmp_path, kills)
    host, nvme = world.tiers
    assert len(host) == 0 and nvme.found_at_start == len(nvme) == len(nvme.objects())
    for one in nvme._index.store.page(b"", 1 << 20):
        data = nvme._index.store.peek(one.name, one.size)
        assert data is not None and read_header(memoryview(data)).name == one.name
    for tenant in TENANTS:
        for number in range(12):
            world.serve(tenant, prompt(number, 12))
    assert world.worker.recover().findings == ()
    for _ in range(3_700):  # until the last is due, as an engine does that steps
        world.clock.advance(1_000_000)
        world.worker.governor.step()
    assert [len(tier.objects()) for tier in world.tiers] == [0, 0]
    world.worker.close()
    assert places(tmp_path, before) == []
    reconciled(tmp_path, world.clock.utc_us() + LIFE_US)


def reconciled(folder: Path, now_us: int) -> None:
    """The ledger is whole; what the killed had in memory alone is unproven, every other copy has its evidence."""
    engine = open_store(folder / "ledger.db")
    with engine.connect() as connection:
        assert fsck(connection).problems == []
        rows = {row.tier: row for row in copy_coverage(connection, as_of_us=now_us).by_tier()}
        assert rows.keys() == {"host", "nvme"}
        for row in rows.values():
            assert row.due == row.covered + row.unproven + row.late and row.covered, row
            assert not (row.open or row.disputed or row.waiting), row
    engine.dispose()


def test_a_store_in_clear_leaves_it(tmp_path: Path) -> None:
    """The control: the same worker, killed the same way, whose store keeps blocks as they are."""
    before = shared()
    (tmp_path / "in-clear").touch()
    assert kill_often(tmp_path, 3).served > 0
    assert {place.split()[0] for place in places(tmp_path, before)} == {"raw"}


HOLDER = """
import mmap, os, sys
from kvcustody.governance.tiers.staging import Staging
from kvcustody.governance.tiers.stores.host_arena import HostArena
staging, arena, name = Staging(1, 4096), HostArena(1 << 16), bytes(32)
plain = mmap.mmap(-1, 4096)
with staging.take(4096) as view, open(sys.argv[1], "rb", buffering=0) as file:
    for into in (view, arena.prepare_store(name, 4096), *([plain] if sys.argv[2] == "plain" else [])):
        file.seek(0)
        file.readinto(into)
    os.abort()
"""


@pytest.mark.parametrize("how", ["tiers", "plain"])
def test_a_core_dump_has_nothing_of_staging_or_of_the_arena(tmp_path: Path, how: str) -> None:
    """The control: a mapping of the usual kind beside them is in it."""
    if Path("/proc/sys/kernel/core_pattern").read_text().strip() != "core":
        pytest.skip("cores are not written here")
    needle = os.urandom(32)
    (tmp_path / "canary").write_bytes(needle * 128)
    hard = resource.getrlimit(resource.RLIMIT_CORE)[1]
    limit = f"import resource; resource.setrlimit(resource.RLIMIT_CORE, ({hard}, {hard}))\n"
    done = subprocess.run(
        [sys.executable, "-c", limit + HOLDER, str(tmp_path / "canary"), how],
        cwd=tmp_path,
        env={**os.environ, "PYTHONPATH": os.pathsep.join(sys.path)},
        capture_output=True,
        check=False,
    )
    assert done.returncode == -signal.SIGABRT, done.stderr
    (core,) = tmp_path.glob("core*")
    assert (core.read_bytes().count(needle) > 0) == (how == "plain")
