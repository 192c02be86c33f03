"""Digests of what an engine loaded, for a `ModelIdentity`; a prefix names the method."""

from __future__ import annotations

import hashlib
import secrets
from pathlib import Path
from typing import NamedTuple

_EPOCHS = 1 << 52  # a leaf's integers are below 2^53


def weights_fingerprint(name: str, revision: str) -> str:
    """Return a digest of a local folder's files by name, size and time, or of a hub name by its revision."""
    folder = Path(name)
    if not folder.is_dir():
        return named_digest("fingerprint", name, revision)
    files = sorted(path for path in folder.iterdir() if path.is_file())
    facts = [f"{path.name}:{path.stat().st_size}:{path.stat().st_mtime_ns}" for path in files]
    return named_digest("fingerprint", name, revision, *facts)


class FileFacts(NamedTuple):
    """Facts that change when a folder's files change: of the files, and of their location.

    `places` differ between machines.
    """

    contents: tuple[tuple[str, int, int], ...]  # name, size, time of change
    places: tuple[tuple[int, int, int], ...]  # device, inode, time of change of that

    @classmethod
    def unknown(cls) -> FileFacts:
        """Facts that equal no folder's."""
        return cls((("", -1, secrets.randbits(64)),), ())


def file_facts(name: str) -> FileFacts:
    """Return the facts of a local folder's files, by name; none for a missing folder."""
    try:
        found = sorted((path.name, path.stat()) for path in Path(name).iterdir() if path.is_file())
    except OSError:
        return FileFacts((), ())
    return FileFacts(
        tuple((name, stat.st_size, stat.st_mtime_ns) for name, stat in found),
        tuple((stat.st_dev, stat.st_ino, stat.st_ctime_ns) for _, stat in found),
    )


def unique_epoch() -> int:
    """Return a number from 1 that no other process gets: copies in files outlive the process that wrote them."""
    return 1 + secrets.randbelow(_EPOCHS)


def named_digest(kind: str, *texts: str) -> str:
    """Return `kind:` and the digest of the texts, each framed by its length."""
    hashed = hashlib.blake2b(digest_size=32)
    for text in texts:
        data = text.encode("utf-8", "surrogatepass")
        hashed.update(len(data).to_bytes(8, "little") + data)
    return f"{kind}:{hashed.hexdigest()}"


def attributes_text(config: object, *names: str) -> str:
    """Return a configuration's values under these names as text."""
    return "; ".join(f"{name}={getattr(config, name, None)!r}" for name in names)
