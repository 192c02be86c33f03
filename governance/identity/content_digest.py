"""Digests of what an engine loaded, for a `ModelIdentity`: they say in their prefix how they were made."""

from __future__ import annotations

import hashlib
import secrets
from pathlib import Path
from typing import NamedTuple

_EPOCHS = 1 << 52  # a leaf's integers are below 2^53


def weights_fingerprint(name: str, revision: str) -> str:
    """A local folder's files by name, size and time; a hub name by its revision."""
    folder = Path(name)
    if not folder.is_dir():
        return named_digest("fingerprint", name, revision)
    files = sorted(path for path in folder.iterdir() if path.is_file())
    facts = [f"{path.name}:{path.stat().st_size}:{path.stat().st_mtime_ns}" for path in files]
    return named_digest("fingerprint", name, revision, *facts)


class FileFacts(NamedTuple):
    """What tells a folder's files from what they were: of the files themselves, and of where they lie.

    `places` differ between machines.
    """

    contents: tuple[tuple[str, int, int], ...]  # name, size, time of change
    places: tuple[tuple[int, int, int], ...]  # device, inode, time of change of that

    @classmethod
    def unknown(cls) -> FileFacts:
        """Equal to no folder's."""
        return cls((("", -1, secrets.randbits(64)),), ())


def file_facts(name: str) -> FileFacts:
    """The facts of a local folder's files, by name; none of what is no folder, or has gone."""
    try:
        found = sorted((path.name, path.stat()) for path in Path(name).iterdir() if path.is_file())
    except OSError:
        return FileFacts((), ())
    return FileFacts(
        tuple((name, stat.st_size, stat.st_mtime_ns) for name, stat in found),
        tuple((stat.st_dev, stat.st_ino, stat.st_ctime_ns) for _, stat in found),
    )


def unique_epoch() -> int:
    """A number from 1 that no process has again: copies in files outlive the one that wrote them."""
    return 1 + secrets.randbelow(_EPOCHS)


def named_digest(kind: str, *texts: str) -> str:
    """`kind:` and the digest of the texts, each with its length."""
    hashed = hashlib.blake2b(digest_size=32)
    for text in texts:
        data = text.encode("utf-8", "surrogatepass")
        hashed.update(len(data).to_bytes(8, "little") + data)
    return f"{kind}:{hashed.hexdigest()}"


def attributes_text(config: object, *names: str) -> str:
    """What a configuration says under these names."""
    return "; ".join(f"{name}={getattr(config, name, None)!r}" for name in names)
