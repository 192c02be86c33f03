"""What is wrong at start is said with the setting that asks for it; what is wrong later costs a miss, and no more."""

from __future__ import annotations

import ctypes
import errno
import os
import subprocess
import sys
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path

import pytest

from kvcustody.errors import ConfigError, KeyringError
from kvcustody.governance.keys import shred_keys
from kvcustody.governance.tiers import open_tiers as open_tiers_module
from kvcustody.governance.tiers.stores.file_store import FileStore
from standins.governance.offload_world import World, prompt
from standins.governance.sealed_objects import World as Keys

_LIBC = ctypes.CDLL(None, use_errno=True)
Prepare = Callable[[Path], object]


def someone_else_s(folder: Path) -> None:
    (folder / "tier").mkdir(mode=0o700)
    (folder / "tier" / "thesis.tex").write_text("mine")


def of_another_user(folder: Path) -> None:
    (folder / "tier").mkdir(mode=0o700)
    if os.geteuid():
        pytest.skip("no right to give a folder away")
    os.chown(folder / "tier", 65534, 65534)


def a_link(folder: Path) -> None:
    (folder / "elsewhere").mkdir(mode=0o700)
    (folder / "tier").symlink_to(folder / "elsewhere")


def a_linked_mark(folder: Path) -> None:
    (folder / "tier").mkdir(mode=0o700)
    (folder / "tier" / "kvcustody-tier").symlink_to(folder / "elsewhere")


@pytest.mark.parametrize(
    ("prepare", "says"),
    [
        (someone_else_s, "holds other files; give an empty folder"),
        (of_another_user, "another owner; chmod 700 it"),
        (lambda folder: (folder / "tier").mkdir(mode=0o755), "has mode `0755`"),
        (a_link, "give a folder of its own, no link"),
        (lambda folder: (folder / "tier").write_text("a file"), "give a folder of its own, no link"),
        (a_linked_mark, "symbolic links"),
    ],
    ids=["another's", "another user's", "open to all", "link", "file", "linked mark"],
)
def test_a_folder_that_is_not_ours_is_named_with_its_setting(tmp_path: Path, prepare: Prepare, says: str) -> None:
    prepare(tmp_path)
    before = sorted(path.name for path in tmp_path.rglob("*") if "tier" in path.parts)
    with pytest.raises(ConfigError, match=rf"^KVC100: setting `nvme_tier_path`: .*{says}"):
        World(tmp_path, "nvme")
    assert sorted(path.name for path in tmp_path.rglob("*") if "tier" in path.parts) == before, "left as it was"


@contextmanager
def somebody() -> Iterator[None]:
    """Files are opened with the rights of a user that has none of them (setfsuid), where this one may do all."""
    if os.geteuid():
        yield
        return
    _LIBC.setfsuid(65534)
    try:
        yield
    finally:
        _LIBC.setfsuid(0)


def test_a_folder_without_permission_is_named_with_its_setting(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def opened(folder: Path, capacity_bytes: int) -> FileStore:
        with somebody():
            return FileStore(folder, capacity_bytes)

    monkeypatch.setattr(open_tiers_module, "FileStore", opened)
    locked = tmp_path / "locked"
    locked.mkdir(mode=0o500)
    with pytest.raises(ConfigError, match=r"setting `nvme_tier_path`: .*Permission denied"):
        OnDisk(tmp_path, locked)


@pytest.mark.parametrize(("given", "says"), [(100, "give more"), (1 << 62, "give less")])
def test_a_host_tier_that_cannot_be_had_is_named_with_its_setting(tmp_path: Path, given: int, says: str) -> None:
    class Odd(World):
        def open(self) -> None:
            self.set["host_tier_bytes"] = given
            super().open()

    with pytest.raises(ConfigError, match=f"setting `host_tier_bytes`: .*{says}"):
        Odd(tmp_path, "host")


@pytest.mark.parametrize(
    ("prepare", "says"),
    [
        (lambda path: (path.write_bytes(b"something else"), path.chmod(0o600)), "is not a file of shred keys"),
        (lambda path: (path.touch(), path.chmod(0o644)), "chmod 600 it"),
        (lambda path: path.mkdir(), "cannot be opened"),
        (lambda path: path.symlink_to("elsewhere"), "cannot be opened"),
    ],
    ids=["another file", "open to all", "folder", "link"],
)
def test_a_file_of_shred_keys_that_is_none_is_named_with_its_setting(
    tmp_path: Path, prepare: Prepare, says: str
) -> None:
    prepare(tmp_path / "shred.keys")
    with pytest.raises(ConfigError, match=f"setting `shred_keys_path`: .*{says}"):
        World(tmp_path, "nvme")


def test_shred_keys_under_another_root_key_are_named_with_their_setting(tmp_path: Path) -> None:
    """Nothing of the folder is ended for it: with the right key it is all there again."""
    (tmp_path / "one").mkdir()
    world, mine = World(tmp_path / "one", "nvme"), prompt(1, 10)
    world.serve("acme", mine)
    world.crowd()
    stored = len(world.tiers[0])
    world.worker.close()
    for name in ("root.key", "keys.json"):
        (tmp_path / "one" / name).rename(tmp_path / name)
    for _ in range(2):  # what failed once lets go of the folder
        with pytest.raises(
            ConfigError, match=r"setting `shred_keys_path`: .*cannot be opened with this root key; give"
        ):
            world.open()
    for name in ("root.key", "keys.json"):
        (tmp_path / name).replace(tmp_path / "one" / name)
    world.open()
    assert stored and world.tiers[0].found_at_start == stored and world.serve("acme", mine) == 160
    world.worker.close()


def test_shred_keys_of_another_deployment_open_nothing(tmp_path: Path) -> None:
    """The same root key, and the file of another worker: what is in the folder is nobody's, and ends."""
    world, mine = World(tmp_path, "nvme"), prompt(1, 10)
    world.serve("acme", mine)
    world.crowd()
    stored = len(world.tiers[0])
    world.worker.close()
    (tmp_path / "shred.keys").unlink()
    world.open()
    assert stored and (world.tiers[0].found_at_start, world.tiers[0].ended_at_start) == (0, stored)
    assert world.serve("acme", mine) == 0
    world.worker.close()


LIMITED = """
import ctypes, resource, sys
from pathlib import Path
from standins.governance.offload_world import World
from kvcustody.errors import ConfigError
header, data = (ctypes.c_uint32 * 2)(0x20080522, 0), (ctypes.c_uint32 * 6)()
ctypes.CDLL(None).capget(header, data)
data[0] &= ~(1 << 14)  # CAP_IPC_LOCK, which knows no limit
ctypes.CDLL(None).capset(header, data)
resource.setrlimit(resource.RLIMIT_MEMLOCK, (int(sys.argv[2]),) * 2)
try:
    World(Path(sys.argv[1]), "host").worker.close()
    print("started")
except ConfigError as error:
    print(error)
"""


@pytest.mark.system("a limit of locked memory stops a start without a word")
@pytest.mark.parametrize(
    ("limit", "says"),
    [(8192, "setting `tier_staging_buffers`: "), (8 << 20, "started")],
    ids=["too low", "enough"],
)
def test_a_limit_of_locked_memory_is_named_with_the_setting(tmp_path: Path, limit: int, says: str) -> None:
    done = subprocess.run(
        [sys.executable, "-c", LIMITED, str(tmp_path), str(limit)],
        capture_output=True,
        text=True,
        env={**os.environ, "PYTHONPATH": os.pathsep.join(sys.path)},
        check=False,
    )
    assert says in done.stdout, done.stderr
    assert ("`ulimit -l`" in done.stdout) == (limit == 8192)


# -- a disk that is full -----------------------------------------------------------------------------------------------


@pytest.fixture
def small_disk(tmp_path: Path) -> Iterator[Callable[[str], Path]]:
    """A disk of the size that is asked for."""
    places: list[Path] = []

    def mount(options: str) -> Path:
        place = tmp_path / f"disk-{len(places)}"
        place.mkdir()
        done = subprocess.run(["mount", "-t", "tmpfs", "-o", options, "tmpfs", place], capture_output=True, check=False)
        if done.returncode:
            pytest.skip("no right to mount a disk here")
        places.append(place)
        return place

    yield mount
    for place in places:
        subprocess.run(["umount", "-l", place], check=True)


class OnDisk(World):
    """A worker whose tier is on another disk."""

    def __init__(self, folder: Path, disk: Path) -> None:
        self.disk = disk
        super().__init__(folder, "nvme")

    def open(self) -> None:
        self.set["nvme_tier_path"] = self.disk / "tier"
        super().open()


def test_a_disk_without_room_for_the_folder_is_named_with_its_setting(
    tmp_path: Path, small_disk: Callable[[str], Path]
) -> None:
    with pytest.raises(ConfigError, match=r"setting `nvme_tier_path`: .*No space left on device"):
        OnDisk(tmp_path, small_disk("nr_inodes=2"))


def test_a_disk_that_fills_up_costs_misses(tmp_path: Path, small_disk: Callable[[str], Path]) -> None:
    """`serve` compares every block under a hit."""
    world = OnDisk(tmp_path, small_disk("size=32k"))
    for number in range(12):
        world.serve("acme", prompt(number % 4, 10))
        world.crowd(number)
    (tier,) = world.tiers
    assert 0 < len(tier) == len(tier.objects()) < 8 and tier.counts.refused > 10
    world.worker.close()


def test_shred_keys_on_a_full_disk_are_said_and_end_no_process(
    tmp_path: Path, small_disk: Callable[[str], Path]
) -> None:
    """A file of records is mapped: a write into a hole of a full disk would end the process (SIGBUS)."""
    disk = small_disk("size=40k")
    keys = Keys(tmp_path)
    shred = shred_keys.ShredKeys.open(disk / "shred.keys", keys.wrapping, keys.clock)
    (disk / "filling").write_bytes(bytes(8192))
    subjects = [bytes([number]) * 8 for number in range(80)]
    with pytest.raises(KeyringError, match="no room for another"):
        for subject in subjects:
            shred.of_subject(subject)
    living = shred.living()
    assert 40 < len(living) < 80
    (disk / "filling").unlink()
    assert {shred.of_subject(subject).id for subject in subjects} >= {key.id for key in living}
    shred.close()
    (disk / "filling").write_bytes(bytes(1 << 15)[: _room(disk)])
    with pytest.raises(KeyringError, match=r"cannot be opened .*No space left on device"):
        shred_keys.ShredKeys.open(disk / "other.keys", keys.wrapping, keys.clock)
    keys.close()


def _room(disk: Path) -> int:
    found = os.statvfs(disk)
    return found.f_bavail * found.f_frsize


def test_without_room_for_a_shred_key_nothing_is_stored_and_nothing_fails(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def full(descriptor: int, at: int, size: int) -> None:
        raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))

    world = World(tmp_path, "host")
    keys = world.tiers[0]._index.shred
    monkeypatch.setattr(os, "posix_fallocate", full)
    while keys._free:
        keys.of_subject(os.urandom(8))
    world.serve("acme", prompt(1, 10))
    world.crowd()
    assert len(world.tiers[0]) == 0 and world.tiers[0].counts.refused > 0
    monkeypatch.undo()
    world.crowd(1)
    assert len(world.tiers[0]) > 0
    world.worker.close()
