"""Verify an exported log offline, from its files and the public keys that the reader trusts.

1. Everything is recomputed from the leaves: hashes, tiles, root. Nothing in the folder is believed for being there;
   its head counts only when a trusted key signed it.
2. A sound export has exactly its head and the files of its tree. A file too many is a problem like a file too few,
   for a reader would take it for part of the log.
3. The first bad leaf is named, or where the tiles were changed with it, the narrowest range it must be in.
4. Heads that the reader kept from before must be prefixes: a log that was cut, replaced or forked since is found out,
   however well it is signed.
5. A leaf may be missing only below `purged_below`, which the reader sets; its hash still counts.
"""

from __future__ import annotations

import os
from collections.abc import Sequence
from dataclasses import dataclass, field
from pathlib import Path

from kvcustody.audit.leaf.merkle import (
    EMPTY,
    HASH_BYTES,
    TILE_HEIGHT,
    Frontier,
    TreeHead,
    leaf_hashes,
    parents,
    split_hashes,
)
from kvcustody.audit.tlog.checkpoint import SignedCheckpoint, open_checkpoint
from kvcustody.audit.tlog.proofs import TILE_WIDTH, tile_width, tree_root
from kvcustody.audit.tlog.root_log import check_head, parse_head_proof
from kvcustody.audit.tlog.signed_note import NOTE_BYTES_MAX, parse_vkey
from kvcustody.audit.tlog.tiles import (
    CHECKPOINT,
    HEAD_PROOF,
    ExportError,
    TileFolder,
    read_plain_file,
    tile_path,
    tile_paths,
)
from kvcustody.audit.verify.what_belongs import strays
from kvcustody.errors import LedgerError

PROBLEMS_MAX = 100
_UNKNOWN = bytes(HASH_BYTES)


@dataclass(frozen=True, slots=True)
class TileFinding:
    """A problem, and the leaves it concerns, from `first` to `last` inclusive (None: not about leaves)."""

    text: str
    first: int | None = None
    last: int | None = None


@dataclass(slots=True)
class ExportReport:
    """The result of a verification. `ok` means that every leaf is exactly what the trusted keys signed."""

    name: str = ""
    size: int = 0
    root: bytes = b""
    leaves: int = 0
    signed: SignedCheckpoint | None = None
    problems: list[TileFinding] = field(default_factory=list)
    problems_left_out: int = 0

    @property
    def ok(self) -> bool:
        """Whether no problem was found."""
        return not self.problems

    @property
    def first_bad_leaf(self) -> int | None:
        """The lowest leaf that any problem concerns."""
        return min((problem.first for problem in self.problems if problem.first is not None), default=None)

    def add(self, text: str, first: int | None = None, last: int | None = None) -> None:
        """Note a problem; beyond `PROBLEMS_MAX` they are only counted."""
        if len(self.problems) < PROBLEMS_MAX:
            self.problems.append(TileFinding(text, first, last))
        else:
            self.problems_left_out += 1


def verify_export(
    folder: Path,
    vkeys: str | Sequence[str],
    *,
    name: str | None = None,
    witnesses: Sequence[str] = (),
    witness_threshold: int = 0,
    known: Sequence[TreeHead] = (),
    purged_below: int = 0,
) -> ExportReport:
    """Check every byte of an export; `vkeys` are keys of the log (of the root log, for a sub-log's export).

    A bad export is a report with problems, never an exception. Raises `NoteError` for a malformed key of yours.
    """
    keys = [parse_vkey(text) for text in ([vkeys] if isinstance(vkeys, str) else vkeys)]
    cosigners = [parse_vkey(text) for text in witnesses]
    report = ExportReport()
    files = TileFolder(folder)
    try:
        named = CHECKPOINT if os.path.lexists(folder / CHECKPOINT) else HEAD_PROOF
        if named == CHECKPOINT:
            note = read_plain_file(folder, CHECKPOINT, NOTE_BYTES_MAX)
            report.signed = open_checkpoint(note, keys, witnesses=cosigners, witness_threshold=witness_threshold)
            report.name, head = report.signed.checkpoint.origin, report.signed.checkpoint.head
        else:
            proof = parse_head_proof(read_plain_file(folder, HEAD_PROOF, 2 * NOTE_BYTES_MAX))
            sealed = check_head(proof, keys, witnesses=cosigners, witness_threshold=witness_threshold)
            report.name, head, report.signed = sealed
    except LedgerError as problem:
        report.add(f"no head to verify against: {problem.message}")
        return report
    report.size, report.root = head
    if name is not None and report.name != name:
        report.add(f"this is log `{report.name}`, not `{name}`")
    _check_names(report, folder, named, head.size)
    _Check(report, files, head, known, purged_below).run()
    return report


class _Check:
    """One pass over the leaves from left to right; a second look only where the root disagrees."""

    def __init__(
        self,
        report: ExportReport,
        files: TileFolder,
        head: TreeHead,
        known: Sequence[TreeHead],
        purged_below: int,
    ) -> None:
        self._report = report
        self._files = files
        self._head = head
        self._known = sorted(known)
        self._purged_below = purged_below
        self._frontier: Frontier = EMPTY
        self._rows: list[list[bytes]] = [[]]  # the recomputed hashes of each tile level above 0, at [level]
        self._wrong_tiles: list[tuple[int, int]] = []

    def run(self) -> None:
        for index in range(-(-self._head.size // TILE_WIDTH)):
            self._bundle(index)
        self._check_known(self._frontier, [], last=True)
        for level in range(1, len(self._rows)):
            self._check_tiles(level)
        if self._frontier.root() == self._head.root:
            for level, index in self._wrong_tiles:  # the leaves are right, so these are not
                self._report.add(f"`{self._path(level, index)}` does not hold the hashes of the log")
        else:
            self._locate()

    def _bundle(self, index: int) -> None:
        width = tile_width(self._head.size, 0, index)
        hashes, tile = self._leaves(index, width), self._tile(0, index, width)
        if hashes and tile and hashes != tile:
            self._wrong_tiles.append((0, index))
        hashes = hashes or tile or [_UNKNOWN] * width
        self._check_known(self._frontier, hashes)
        self._frontier, grown = self._frontier.extend(hashes)
        for level, _, made in grown:
            if level == len(self._rows):
                self._rows.append([])
            self._rows[level] += made

    def _leaves(self, index: int, width: int) -> list[bytes]:
        """Return the hashes of a bundle's leaves; empty if it cannot be read."""
        first = index * TILE_WIDTH
        try:
            leaves = self._files.entries(index, width)
        except ExportError as problem:
            if first + width > self._purged_below:
                self._report.add(problem.message, first, first + width - 1)
            return []
        self._report.leaves += len(leaves)
        return leaf_hashes(leaves)

    def _tile(self, level: int, index: int, width: int) -> list[bytes]:
        try:
            return split_hashes(self._files.tile(level, index, width))
        except ExportError as problem:
            self._report.add(problem.message)
            return []

    def _check_tiles(self, level: int) -> None:
        row = self._rows[level]
        for index in range(-(-len(row) // TILE_WIDTH)):
            mine = row[index * TILE_WIDTH : (index + 1) * TILE_WIDTH]
            tile = self._tile(level, index, len(mine))
            if tile and tile != mine:
                self._wrong_tiles.append((level, index))

    def _check_known(self, frontier: Frontier, hashes: list[bytes], *, last: bool = False) -> None:
        """Compare the heads kept from before that end within these hashes, or when `last`, that were not reached."""
        end = frontier.size + len(hashes)
        while self._known and (last or self._known[0].size <= end):
            before = self._known.pop(0)
            if before.size > end:
                self._report.add(f"the log was cut: it has `{end}` leaves, and had {before.size} before", end, None)
            elif frontier.extend(hashes[: before.size - frontier.size]).frontier.root() != before.root:
                self._report.add(f"the log is not the one whose head at `{before.size}` leaves was kept")

    def _locate(self) -> None:
        """Name the leaves for which the recomputed root is not the signed one (rule 3).

        Where the tiles still give the signed root, each is trusted in turn from above, and compared with what
        the leaves give.
        """
        try:
            sound = tree_root(self._files, self._head.size) == self._head.root
        except LedgerError:
            sound = False
        if not sound:
            text = "neither the leaves nor the tiles match the signed root"
            self._report.add(text, self._first_difference(), self._head.size - 1)
            return
        for level in reversed(range(len(self._rows))):
            size = self._head.size >> TILE_HEIGHT * level
            if size % TILE_WIDTH:  # the right edge hangs on the root alone
                self._descend(level, size // TILE_WIDTH)

    def _descend(self, level: int, index: int) -> None:
        """Compare a trusted tile with the leaves below it, down to the leaves that differ."""
        width = tile_width(self._head.size, level, index)
        tile = split_hashes(self._files.tile(level, index, width))
        mine = self._recomputed(level, index, width)
        for at, (right, found) in enumerate(zip(tile, mine, strict=True), index * TILE_WIDTH):
            if right == found:
                continue
            first = at << TILE_HEIGHT * level
            if level == 0:
                self._report.add(f"leaf `{first}` is not the one that was signed", first, first)
            elif self._folds_to(level - 1, at, right):
                self._descend(level - 1, at)
            else:
                last = ((at + 1) << TILE_HEIGHT * level) - 1
                self._report.add(f"leaves `{first}` to `{last}` and their tile were changed", first, last)

    def _recomputed(self, level: int, index: int, width: int) -> list[bytes]:
        if level:
            start = index * TILE_WIDTH
            return self._rows[level][start : start + width]
        try:
            return leaf_hashes(self._files.entries(index, width))
        except ExportError:
            return split_hashes(self._files.tile(0, index, width))  # reported when it was first read

    def _folds_to(self, level: int, index: int, root: bytes) -> bool:
        try:
            hashes = split_hashes(self._files.tile(level, index, TILE_WIDTH))
        except ExportError:
            return False
        while len(hashes) > 1:
            hashes = parents(hashes)
        return hashes[0] == root

    def _first_difference(self) -> int:
        """Return the first leaf that contradicts its own tile; without one, any leaf may be bad."""
        for level, index in self._wrong_tiles:
            if level == 0:
                width = tile_width(self._head.size, 0, index)
                pairs = zip(self._recomputed(0, index, width), self._tile(0, index, width), strict=False)
                return index * TILE_WIDTH + [mine == tile for mine, tile in pairs].index(False)
        return 0

    def _path(self, level: int, index: int) -> str:
        return tile_path(level, index, tile_width(self._head.size, level, index))


def _check_names(report: ExportReport, folder: Path, head: str, size: int) -> None:
    """Problems for everything that is no file of the tree (rule 2); missing ones are found on reading."""
    try:
        for path in strays(folder, {tile_path(*place) for place in tile_paths(size)} | {head}):
            report.add(f"`{path}` is no part of the signed tree of `{size}` leaves")
    except OSError as problem:
        report.add(f"`{problem.filename or folder}`: {problem.strerror}")
