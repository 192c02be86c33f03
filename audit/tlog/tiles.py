"""A log as files: C2SP tlog-tiles paths, tiles, entry bundles, and their folder.

1. Files are where and what c2sp.org/tlog-tiles says, so its readers read our exports: `tile/<level>/<index>` and
   `tile/entries/<index>`, 256 wide, partial ones under `.p/<width>`, and the signed note in `checkpoint`.
2. An export is written beside its place and renamed into it when it is complete and, unless told otherwise, fsynced:
   under its name there is a whole export or none. It is refused when its root is not the expected one.
3. A folder that is read is hostile: files are regular, reached through no link of their own, bounded, and exactly as
   long as their width says.
"""

from __future__ import annotations

import itertools
import os
import secrets
import shutil
import stat
from collections.abc import Iterable, Iterator, Mapping
from pathlib import Path

from kvcustody.audit.leaf.merkle import EMPTY, HASH_BYTES, Frontier, TreeError, TreeHead, leaf_hashes
from kvcustody.audit.tlog.proofs import TILE_WIDTH, tile_width
from kvcustody.files import publish_folder

CHECKPOINT = "checkpoint"
HEAD_PROOF = "head.tlog-proof"
ENTRIES = "entries"
ENTRY_BYTES_MAX = (1 << 16) - 1  # two length bytes
_BUNDLE_BYTES_MAX = TILE_WIDTH * (2 + ENTRY_BYTES_MAX)
_SYNC_THREADS = 16  # one journal commit then serves several files


class ExportError(TreeError):
    """An export cannot be written, or one of its files is missing or malformed."""

    code = "KVC623"


def tile_path(level: int | str, index: int, width: int = TILE_WIDTH) -> str:
    """Return the path of a tile, or with `ENTRIES` of an entry bundle: `tile/0/x001/x234/067` or `…/067.p/112`."""
    digits = str(index)
    digits = digits.zfill(-(-len(digits) // 3) * 3)
    groups = [digits[start : start + 3] for start in range(0, len(digits), 3)]
    place = "/".join(["x" + group for group in groups[:-1]] + groups[-1:])
    return f"tile/{level}/{place}" + ("" if width == TILE_WIDTH else f".p/{width}")


def tile_paths(size: int) -> Iterator[tuple[int | str, int, int]]:
    """Yield (level, index, width) of every file under `tile/` for a tree of `size` leaves."""
    level = 0
    while size >> 8 * level:
        for index in itertools.count():
            width = tile_width(size, level, index)
            if not width:
                break
            yield level, index, width
            if level == 0:
                yield ENTRIES, index, width
        level += 1


def encode_bundle(leaves: Iterable[bytes]) -> bytes:
    """Return an entry bundle: each leaf after its length in two bytes. Raises `ExportError` for an overlong leaf."""
    parts = []
    for leaf in leaves:
        if len(leaf) > ENTRY_BYTES_MAX:
            raise ExportError(f"a leaf of `{len(leaf)}` bytes does not fit an entry bundle", bytes=len(leaf))
        parts += [len(leaf).to_bytes(2, "big"), leaf]
    return b"".join(parts)


def decode_bundle(data: bytes, width: int) -> list[bytes]:
    """Return the leaves of a bundle; raises `ExportError` unless there are exactly `width` and no further byte."""
    leaves: list[bytes] = []
    at, end = 0, len(data)
    while at < end and len(leaves) < width:
        start = at + 2
        at = start + int.from_bytes(data[at:start], "big")
        leaves.append(data[start:at])
    if at != end or len(leaves) != width:
        raise ExportError(f"an entry bundle does not hold exactly `{width}` leaves", width=width)
    return leaves


def read_plain_file(folder: Path, path: str, bytes_max: int) -> bytes:
    """Return a file's bytes; raises `ExportError` if it is missing, too long, or not a plain file (rule 3)."""
    try:
        descriptor = os.open(folder / path, os.O_RDONLY | os.O_NOFOLLOW | os.O_NONBLOCK | os.O_CLOEXEC)
    except OSError as problem:
        raise ExportError(f"`{path}` cannot be read: {problem.strerror}", path=path) from None
    try:
        status = os.fstat(descriptor)
        if not stat.S_ISREG(status.st_mode) or status.st_size > bytes_max:
            raise ExportError(f"`{path}` is not a plain file of at most {bytes_max} bytes", path=path)
        return os.read(descriptor, status.st_size)
    finally:
        os.close(descriptor)


class TileFolder:
    """Reads one exported log, as the source of proofs from files."""

    def __init__(self, folder: Path) -> None:
        self.folder = folder

    def tile(self, level: int, index: int, width: int) -> bytes:
        """Return the first `width` hashes of a tile, from its own file or the full one; raises `ExportError`."""
        data = self._either(level, index, width, TILE_WIDTH * HASH_BYTES)
        whole = TILE_WIDTH if len(data) == TILE_WIDTH * HASH_BYTES else width
        if len(data) != whole * HASH_BYTES:
            problem = f"`{tile_path(level, index, width)}` has `{len(data)}` bytes, not {width * HASH_BYTES}"
            raise ExportError(problem, level=level, index=index, width=width)
        return data[: width * HASH_BYTES]

    def entries(self, index: int, width: int) -> list[bytes]:
        """Return the first `width` leaves of a bundle; raises `ExportError`."""
        path = tile_path(ENTRIES, index, width)
        try:
            if width == TILE_WIDTH or os.path.lexists(self.folder / path):
                return decode_bundle(read_plain_file(self.folder, path, _BUNDLE_BYTES_MAX), width)
            path = tile_path(ENTRIES, index)
            return decode_bundle(read_plain_file(self.folder, path, _BUNDLE_BYTES_MAX), TILE_WIDTH)[:width]
        except ExportError as problem:
            raise ExportError(f"`{path}`: {problem.message}", index=index, width=width) from None

    def _either(self, level: int, index: int, width: int, bytes_max: int) -> bytes:
        path = tile_path(level, index, width)
        if width != TILE_WIDTH and not os.path.lexists(self.folder / path):
            path = tile_path(level, index)  # the log has grown: C2SP lets a full tile stand for its partial ones
        return read_plain_file(self.folder, path, bytes_max)


def write_export(
    folder: Path,
    leaves: Iterable[bytes],
    head: TreeHead,
    files: Mapping[str, bytes],
    *,
    durable: bool = True,
) -> None:
    """Write a log's tiles and entries, and `files` (a `checkpoint`, a `head.tlog-proof`) beside them (rule 2).

    Raises `ExportError` when the folder is there already, the disk refuses, or the leaves do not give `head`.
    """
    if os.path.lexists(folder):
        raise ExportError(f"export `{folder}` exists already; choose another place", path=folder)
    fresh = folder.with_name(f".{folder.name}.{secrets.token_hex(8)}")
    try:
        fresh.mkdir()
        try:
            found = _write_tiles(fresh, leaves)
            if found != head:
                problem = f"the leaves give `{found.size}` leaves and another root than the head of `{head.size}`"
                raise ExportError(problem, size=found.size, expected=head.size)
            for name, data in files.items():
                _write(fresh / name, data)
            publish_folder(fresh, folder, durable=durable)
        except BaseException:
            shutil.rmtree(fresh, ignore_errors=True)
            raise
    except OSError as problem:
        raise ExportError(f"export `{folder}`: {problem.strerror}", path=folder) from problem


def _write_tiles(folder: Path, leaves: Iterable[bytes]) -> TreeHead:
    """All tiles and bundles; the head of what was written."""
    frontier, index = EMPTY, 0
    upper: list[list[bytes]] = []  # of each level above 0, the hashes of the tile that is not full yet
    done: list[int] = []
    each = iter(leaves)
    while chunk := list(itertools.islice(each, TILE_WIDTH)):
        hashes = leaf_hashes(chunk)
        _write(folder / tile_path(0, index, len(chunk)), b"".join(hashes))
        _write(folder / tile_path(ENTRIES, index, len(chunk)), encode_bundle(chunk))
        frontier = _grow(folder, frontier, hashes, upper, done)
        index += 1
    for level, row in enumerate(upper, 1):
        if row:
            _write(folder / tile_path(level, done[level - 1], len(row)), b"".join(row))
    return frontier.head()


def _grow(folder: Path, frontier: Frontier, hashes: list[bytes], upper: list[list[bytes]], done: list[int]) -> Frontier:
    frontier, grown = frontier.extend(hashes)
    for level, _, made in grown:
        if level > len(upper):
            upper.append([])
            done.append(0)
        row = upper[level - 1]
        row += made
        if len(row) == TILE_WIDTH:  # at most one hash a level and call: full tiles below come one at a time
            _write(folder / tile_path(level, done[level - 1]), b"".join(row))
            row.clear()
            done[level - 1] += 1
    return frontier


def _write(path: Path, data: bytes) -> None:
    try:
        path.write_bytes(data)
    except FileNotFoundError:
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_bytes(data)
