"""Files that appear whole and stay: the one way in which the product writes a file under its final name.

1. A file is written under another name in the same folder, fsynced, put under its name, and the folder is fsynced:
   a reader finds the old content, the new content or no file, and what was reported as written survives a power cut.
2. `exclusive` puts the file there by a link, which fails where anything has the name, a dangling link included;
   otherwise by a rename, which replaces a link instead of writing where it points.
3. `mode` is what the file is created with, less the umask: it is never open to more, not even while it is written.
   Keys are `PRIVATE`. Evidence (ledgers, exports, reports, answers of commands) is its user's alone whatever the umask,
   and its group's to read where the environment says so by name (`GROUP_READS`). What is nobody's secret is `READABLE`.
4. Whatever fails, the draft goes. A killed process may leave one; it is never read, and `discard_drafts` removes it.
5. A device, pipe or socket (`/dev/stdout`) has no content to replace and is written to.
6. A file that SQLite writes by itself is claimed first, and taken back from others where it was open to them.
7. A folder of many files is written as a draft folder and put there by `publish_folder`, every part fsynced first.
"""

from __future__ import annotations

import os
import re
import secrets
import stat
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager, suppress
from pathlib import Path
from typing import BinaryIO

PRIVATE = 0o600
READABLE = 0o666  # less the umask: policies, public keys, schemas
GROUP_READS = "KVCUSTODY_FILES_GROUP_READS"  # `1` or `true`: evidence may be read by the group of its files
_GROUP = 0o640
_DRAFT = ".new"
_SYNC_THREADS = 16


def evidence_mode() -> int:
    """The mode of a file of evidence (rule 3)."""
    return _GROUP if os.environ.get(GROUP_READS, "").lower() in ("1", "true", "yes") else PRIVATE


def evidence_folder(path: Path) -> None:
    """Make a folder for evidence where there is none; one that somebody made stays as it is."""
    if not path.is_dir():
        path.mkdir(parents=True, exist_ok=True)
        path.chmod(0o750 if evidence_mode() == _GROUP else 0o700)


def private_folder(path: Path) -> None:
    """Make a folder, and those above it that are missing, each for its user alone; what is there stays as it is."""
    for folder in (*reversed(path.parents), path):
        if not folder.is_dir():
            folder.mkdir(mode=0o700, exist_ok=True)


def read_words(path: Path) -> str:
    """A text file that a person wrote: UTF-8, with or without the byte order mark that some editors put first.

    Raises `OSError`, and `UnicodeDecodeError` for other bytes.
    """
    return path.read_bytes().decode("utf-8-sig")


def claim_file(path: Path, mode: int) -> None:
    """Make a file for SQLite, with this mode; nothing where there is one, or no folder. What SQLite makes beside it
    (`-wal`, `-shm`) gets the same mode.

    One that exists is not opened: closing it would give the process's own SQLite locks up.
    """
    if path.parent.is_dir():
        with suppress(FileExistsError):
            os.close(os.open(path, os.O_WRONLY | os.O_CREAT | os.O_EXCL | os.O_CLOEXEC, mode))


def take_back(path: Path, mode: int) -> bool:
    """Take what others may do with a SQLite database beyond `mode`, and let the group do what it says; True where it
    was open to more. For who has seen that it is one. A file of another user's stays as it is.
    """
    was_open = False
    for each in (path, *(path.with_name(path.name + end) for end in ("-wal", "-shm", "-journal"))):
        with suppress(FileNotFoundError):
            status = each.stat()
            found = stat.S_IMODE(status.st_mode)
            if not stat.S_ISREG(status.st_mode) or status.st_uid != os.geteuid():
                continue
            was_open = was_open or bool(found & ~mode & 0o077)
            wanted = found & (mode | 0o700) | (mode if mode == _GROUP else 0)
            if wanted != found:
                each.chmod(wanted)
    return was_open


def write_file(path: Path, data: bytes | memoryview, *, mode: int = PRIVATE, exclusive: bool = False) -> None:
    """Put `data` under `path`, durable on return. Raises `OSError`; `FileExistsError` where `exclusive` and taken."""
    with _fresh(path, mode, exclusive) as descriptor:
        rest = memoryview(data)  # unbuffered: a secret gets no second copy here
        while rest:
            rest = rest[os.write(descriptor, rest) :]


@contextmanager
def fresh_file(path: Path, *, mode: int = PRIVATE, exclusive: bool = False) -> Iterator[BinaryIO]:
    """A file to write into that appears under `path`, durable, when the block ends without an error."""
    with _fresh(path, mode, exclusive) as descriptor, open(descriptor, "wb", closefd=False) as file:
        yield file


@contextmanager
def _fresh(path: Path, mode: int, exclusive: bool) -> Iterator[int]:
    flags = os.O_WRONLY | os.O_CLOEXEC
    if not exclusive and _is_channel(path):
        with _closing(os.open(path, flags)) as descriptor:
            yield descriptor
        return
    draft = path.with_name(f".{path.name}.{secrets.token_hex(8)}{_DRAFT}")
    try:
        with _closing(os.open(draft, flags | os.O_CREAT | os.O_EXCL | os.O_NOFOLLOW, mode)) as descriptor:
            if mode == _GROUP:  # named by a setting, so the umask does not take it back
                os.fchmod(descriptor, mode)
            yield descriptor
            os.fsync(descriptor)
        if exclusive:
            os.link(draft, path)
        else:
            draft.replace(path)
    finally:
        draft.unlink(missing_ok=True)
    sync_path(path.parent)


def is_draft(path: Path) -> bool:
    """Whether a file is what a writer has under way, or a killed one left."""
    return re.fullmatch(rf"\..+\.[0-9a-f]{{16}}{re.escape(_DRAFT)}", path.name) is not None


def discard_drafts(path: Path) -> None:
    """Remove what killed writers of `path` left; for who holds a lock against other writers (rule 4)."""
    for other in path.parent.iterdir():
        if is_draft(other) and other.name.startswith(f".{path.name}."):
            other.unlink(missing_ok=True)


def publish_folder(draft: Path, folder: Path, *, durable: bool = True) -> None:
    """Put a folder that is complete under its final name, which nothing has yet (rule 6)."""
    if durable:
        places = [draft]
        for parent, folders, names in os.walk(draft):
            places += [Path(parent, name) for name in (*names, *folders)]
        with ThreadPoolExecutor(_SYNC_THREADS) as pool:
            for _ in pool.map(sync_path, places):
                pass
    draft.rename(folder)
    if durable:
        sync_path(folder.parent)


def sync_path(path: Path) -> None:
    """Make a file's content, or the names that were created, renamed or removed in a folder, durable."""
    with _closing(os.open(path, os.O_RDONLY | os.O_CLOEXEC)) as descriptor:
        os.fsync(descriptor)


@contextmanager
def _closing(descriptor: int) -> Iterator[int]:
    try:
        yield descriptor
    finally:
        os.close(descriptor)


def _is_channel(path: Path) -> bool:
    try:
        mode = path.stat().st_mode
    except OSError:
        return False
    return stat.S_ISCHR(mode) or stat.S_ISFIFO(mode) or stat.S_ISSOCK(mode)
