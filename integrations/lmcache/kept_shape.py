"""How large the objects of a worker's tier are, kept beside its files: a start that finds it waits for nobody.

    keep_shape(settings, ChunkShape(chunk_bytes, chunk_tokens))      # before the first object is stored
    shape = kept_shape(settings)                                     # at the next start; None: nothing was begun

1. It stands in the folder of the `nvme` tier; without one, in the spill's, for a start that closes what the last left,
   and finds what it has in a store that workers share.
2. It is its owner's alone, written whole or not at all, and believed only where it says what a shape can be.
3. A folder that has objects and no shape is refused: their ends would wait for somebody who stores.
"""

from __future__ import annotations

import os
import re
import stat
from pathlib import Path
from typing import Annotated

import msgspec

from kvcustody.errors import ConfigError
from kvcustody.files import discard_drafts, write_file
from kvcustody.governance.settings import Settings

FILE = "chunk-shape"
_BYTES_MAX = 4096
_OBJECT = re.compile("[0-9a-f]{64}")
_Count = Annotated[int, msgspec.Meta(ge=1, le=1 << 48)]


class ChunkShape(
    msgspec.Struct, frozen=True, forbid_unknown_fields=True, tag_field="schema", tag="kvcustody/chunk-shape@1"
):
    """Bytes and tokens of every object."""

    chunk_bytes: _Count
    chunk_tokens: _Count


def kept_shape(settings: Settings) -> ChunkShape | None:
    """What the last start left. Raises `ConfigError` where that is not to be believed, or does not fit the tiers."""
    path = _path(settings)
    content = _content(path)
    if content is None:
        folder = settings.nvme_tier_path
        if folder is not None and _has_objects(folder):
            raise ConfigError(
                f"nvme tier `{folder}`: has objects and no `{FILE}`, which says how large they are; give an empty "
                "folder, or the one that this worker had",
                path=folder,
            )
        return None
    try:
        shape = msgspec.json.decode(content, type=ChunkShape)
    except msgspec.MsgspecError as error:
        raise ConfigError(f"`{path}`: is no shape of chunks ({error}); {_REMEDY}", path=path) from None
    room = max(settings.host_tier_bytes, settings.nvme_tier_bytes, settings.remote_tier_bytes)
    if shape.chunk_bytes > room:
        raise ConfigError(
            f"`{path}`: says {shape.chunk_bytes} bytes a chunk, and the largest tier has {room}; give it more, or "
            "another folder",
            path=path,
        )
    return shape


def keep_shape(settings: Settings, shape: ChunkShape) -> None:
    """Say it to the next start. Raises `ConfigError` where the folder does not take it."""
    path = _path(settings)
    content = msgspec.json.encode(shape)
    try:
        if _content(path) != content:
            discard_drafts(path)
            write_file(path, content)
    except OSError as error:
        raise ConfigError(f"`{path}`: cannot be written ({error.strerror})", path=path) from None


_REMEDY = "give an empty folder, or put the file back that was there"


def _path(settings: Settings) -> Path:
    return (settings.nvme_tier_path or settings.spill_path) / FILE


def _content(path: Path) -> bytes | None:
    """The file's bytes; None: it is not there. Raises `ConfigError` for one that is not ours alone."""
    try:
        descriptor = os.open(path, os.O_RDONLY | os.O_NOFOLLOW | os.O_NONBLOCK | os.O_CLOEXEC)
    except (FileNotFoundError, NotADirectoryError):
        return None
    except OSError as error:
        raise ConfigError(f"`{path}`: cannot be opened ({error.strerror}); {_REMEDY}", path=path) from None
    try:
        status = os.fstat(descriptor)
        if not stat.S_ISREG(status.st_mode) or status.st_mode & 0o077 or status.st_uid != os.geteuid():
            raise ConfigError(f"`{path}`: must be a file of its owner alone (0600)", path=path)
        return os.read(descriptor, _BYTES_MAX)
    finally:
        os.close(descriptor)


def _has_objects(folder: Path) -> bool:
    return any(_OBJECT.fullmatch(path.name) for path in folder.glob("[0-9a-f][0-9a-f]/*"))
