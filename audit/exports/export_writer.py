"""Write an export of the ledger: streaming, resumable, and never under its name unless complete.

1. Memory does not grow with the ledger: one chunk of leaves is held at a time.
2. Files are written beside the export's place (`.NAME.partial`), each fsynced before it is noted as done. What was
   interrupted goes on after its last whole file, at the same checkpoint, when it is asked for again.
3. Leaves that do not give the signed head are not exported: the export stops with `ExportError`.
4. The folder is renamed into place at the end. An export never replaces another.
"""

from __future__ import annotations

import hashlib
import json
import os
import shutil
from collections.abc import Callable, Iterator, Sequence
from dataclasses import asdict, dataclass
from itertools import islice
from pathlib import Path
from typing import Any, NamedTuple

from kvcustody.audit.exports.amalgamate import standalone
from kvcustody.audit.exports.enclosures import handover_files, stamp_files
from kvcustody.audit.exports.file_formats import LeafFormat, encode, leaves_of
from kvcustody.audit.exports.manifest import (
    MANIFEST,
    OPENINGS,
    VERIFIER,
    ExportedLog,
    ExportFile,
    ExportManifest,
    manifest_bytes,
    root_line,
)
from kvcustody.audit.exports.range_proof import RangeProof, range_proof
from kvcustody.audit.exports.source import ExportSource, RootLeaf, SubLog
from kvcustody.audit.leaf.merkle import Frontier, leaf_hashes
from kvcustody.audit.tlog.checkpoint import parse_checkpoint
from kvcustody.audit.tlog.proofs import ProofError
from kvcustody.audit.tlog.signed_note import parse_note
from kvcustody.audit.tlog.tiles import CHECKPOINT, HEAD_PROOF, ExportError
from kvcustody.files import evidence_folder, evidence_mode, fresh_file, is_draft, publish_folder, write_file

CHUNK_LEAVES = 1 << 15
_STATE = ".state.json"
_ROOT_LINES = 1 << 12

Progress = Callable[[str, int, int], None]  # log, leaves done, leaves in all


class LeafRange(NamedTuple):
    """Leaves of a log from `first` up to but without `end`."""

    log: str
    first: int
    end: int


class ExportSelection(NamedTuple):
    """The leaves to export: of these logs (empty: all), between these times (None: no bound).

    `ranges` names them by their places instead, one run of each log at most.
    """

    logs: tuple[str, ...] = ()
    since_us: int | None = None
    until_us: int | None = None
    ranges: tuple[LeafRange, ...] = ()

    @property
    def whole(self) -> bool:
        """Everything under the checkpoint."""
        return self == ExportSelection()


@dataclass(frozen=True, slots=True)
class _Ask:
    """What was asked for; an interrupted export is continued only when it is asked for again."""

    origin: str
    root_size: int
    form: str
    logs: list[str]
    since_us: int | None
    until_us: int | None
    ranges: list[list[Any]]


def write_export(
    folder: Path,
    source: ExportSource,
    selection: ExportSelection = ExportSelection(),  # noqa: B008 - a value
    *,
    form: LeafFormat = LeafFormat.NDJSON,
    made_at_us: int,
    progress: Progress | None = None,
    chunk_leaves: int = CHUNK_LEAVES,
    resumable: bool = True,
) -> ExportManifest:
    """Write the export and return its manifest. On `ExportError` finished files stay for the next attempt.

    Without `resumable` a next try begins anew, and files are made durable together, when the export is whole: for one
    of many small files.
    """
    if os.path.lexists(folder):
        raise ExportError(f"export `{folder}` exists already; choose another place", path=folder)
    partial = folder.with_name(f".{folder.name}.partial")
    try:
        export = _Export(partial, source, selection, form, progress or _silent, chunk_leaves, resumable)
        made = export.write(made_at_us)
        publish_folder(partial, folder)
    except OSError as problem:
        raise ExportError(f"export `{folder}`: {problem.strerror}", path=folder) from problem
    return made


def pinned_size(folder: Path) -> int | None:
    """Return the checkpoint size of an interrupted export to this folder, so that it resumes at the same one."""
    state = folder.with_name(f".{folder.name}.partial") / _STATE
    try:
        size = json.loads(state.read_bytes())["ask"]["root_size"]
    except (OSError, ValueError, KeyError, TypeError):
        return None
    return int(size)


class _Export:
    def __init__(
        self,
        partial: Path,
        source: ExportSource,
        selection: ExportSelection,
        form: LeafFormat,
        progress: Progress,
        chunk_leaves: int,
        resumable: bool,
    ) -> None:
        note = parse_note(source.note)
        self._checkpoint = parse_checkpoint(note.text)
        names = tuple(line.name for line in note.signatures if line.name != self._checkpoint.origin)
        self._witnesses = tuple(dict.fromkeys(names))
        self._partial = partial
        self._source = source
        self._selection = selection
        self._form = form
        self._progress = progress
        self._chunk_leaves = chunk_leaves
        self._resumable = resumable
        self._put = _write if resumable else _write_plain
        self._ranges = {each.log: (each.first, each.end) for each in selection.ranges}
        self._done: dict[str, list[dict[str, Any]]] = {}

    def write(self, made_at_us: int) -> ExportManifest:
        logs = self._chosen()
        self._open()
        self._put(self._partial / CHECKPOINT, self._source.note)
        exported = tuple(self._log(log, f"logs/{number:06d}") for number, log in enumerate(logs, 1))
        if self._selection.whole:
            _write_lines(self._partial / OPENINGS, self._source.root_leaves())
        handovers, key_files = handover_files(self._source.handovers())
        stamps, stamped = stamp_files(self._source.stamps())
        for path, data in (key_files | stamped).items():
            (self._partial / path).parent.mkdir(exist_ok=True)
            self._put(self._partial / path, data)
        manifest = ExportManifest(
            self._checkpoint.origin,
            self._checkpoint.head,
            self._form,
            made_at_us,
            self._witnesses,
            self._selection.whole,
            exported,
            handovers,
            stamps,
            self._source.marked(),
        )
        self._put(self._partial / VERIFIER, standalone())
        self._put(self._partial / MANIFEST, manifest_bytes(manifest))
        (self._partial / _STATE).unlink(missing_ok=True)
        return manifest

    def _chosen(self) -> Sequence[SubLog]:
        sub_logs = self._source.logs()
        wanted = self._selection.logs or tuple(self._ranges)
        missing = sorted(set(wanted) - {log.name for log in sub_logs})
        if missing:
            raise ExportError(
                f"log `{missing[0]}` is not under the checkpoint of size `{self._checkpoint.size}`",
                log=missing[0],
            )
        return [log for log in sub_logs if not wanted or log.name in wanted]

    def _open(self) -> None:
        """Start, or take up what an earlier try at the very same export left."""
        ask = asdict(
            _Ask(
                self._checkpoint.origin,
                self._checkpoint.size,
                self._form,
                sorted(self._selection.logs),
                self._selection.since_us,
                self._selection.until_us,
                [list(each) for each in self._selection.ranges],
            )
        )
        state = self._partial / _STATE
        if self._resumable and state.is_file():
            kept = json.loads(state.read_bytes())
            if kept["ask"] == ask:
                self._done = kept["done"]
                for stray in [path for path in self._partial.rglob("*") if is_draft(path)]:
                    stray.unlink()  # of the try that was killed; an export holds what its manifest names alone
                return
        shutil.rmtree(self._partial, ignore_errors=True)
        evidence_folder(self._partial)
        self._save(ask)

    def _save(self, ask: dict[str, Any] | None = None) -> None:
        if not self._resumable:
            return
        path = self._partial / _STATE
        ask = ask or json.loads(path.read_bytes())["ask"]
        _write(path, json.dumps({"ask": ask, "done": self._done}).encode())

    def _log(self, log: SubLog, folder: str) -> ExportedLog:
        (self._partial / folder).mkdir(parents=True, exist_ok=True)
        first, end = self._range(log)
        proof = range_proof(self._source.tiles(log.name), first, end, log.head.size)
        digest = hashlib.sha256()
        files: list[ExportFile] = []
        frontier = proof.before
        for kept in self._done.get(log.name, []):
            made = ExportFile(**kept)
            again = leaves_of(self._form, self._partial / made.path)
            frontier = _take(frontier, list(again), digest)
            files.append(made)
        at = frontier.size
        leaves = self._source.leaves(log.name, at, end)
        while chunk := list(islice(leaves, self._chunk_leaves)):
            files.append(self._chunk(log.name, folder, at, chunk))
            frontier = _take(frontier, chunk, digest)
            at = frontier.size
            self._progress(log.name, at - first, end - first)
        self._check(log, proof, frontier)
        self._put(self._partial / folder / HEAD_PROOF, log.proof.to_bytes())
        return ExportedLog(log.name, folder, log.head, proof, log.purged_below, digest.hexdigest(), tuple(files))

    def _range(self, log: SubLog) -> tuple[int, int]:
        if self._ranges:
            return self._ranges[log.name]
        first, end = log.purged_below, log.head.size
        if self._selection.since_us is not None or self._selection.until_us is not None:
            low, high = self._source.span(log.name, self._selection.since_us, self._selection.until_us)
            first, end = max(first, low), min(end, high)
        return (first, end) if first < end else (end, end)

    def _chunk(self, name: str, folder: str, first: int, leaves: list[bytes]) -> ExportFile:
        path = f"{folder}/{first:012d}.{self._form}"
        data = encode(self._form, name, first, leaves)
        self._put(self._partial / path, data)
        made = ExportFile(path, first, len(leaves), len(data), hashlib.sha256(data).hexdigest())
        self._done.setdefault(name, []).append(asdict(made))
        self._save()
        return made

    def _check(self, log: SubLog, proof: RangeProof, frontier: Frontier) -> None:
        try:
            proof.check(frontier, log.head)
        except ProofError as problem:
            shutil.rmtree(self._partial, ignore_errors=True)  # a bad file of an earlier try must not stay
            raise ExportError(
                f"log `{log.name}` does not match its own signed head ({problem.message}); run `kvcustody audit fsck`",
                log=log.name,
            ) from problem


def _take(frontier: Frontier, leaves: list[bytes], digest: Any) -> Frontier:
    digest.update(b"".join(leaf + b"\n" for leaf in leaves))
    return frontier.extend(leaf_hashes(leaves)).frontier


def _write_lines(path: Path, root_leaves: Iterator[RootLeaf]) -> None:
    """The root log: each leaf, and what opens it, in hexadecimal."""
    with fresh_file(path, mode=evidence_mode()) as file:
        while some := list(islice(root_leaves, _ROOT_LINES)):
            lines = (root_line(leaf.commitment, leaf.opening.to_bytes() if leaf.opening else None) for leaf in some)
            file.writelines(lines)


def _write(path: Path, data: bytes) -> None:
    write_file(path, data, mode=evidence_mode())


def _write_plain(path: Path, data: bytes) -> None:
    """Put a new file there; `publish_folder` makes it durable with the others."""
    flags = os.O_WRONLY | os.O_CREAT | os.O_EXCL | os.O_CLOEXEC
    with open(os.open(path, flags, evidence_mode()), "wb") as file:  # noqa: PTH123 - a descriptor
        file.write(data)


def _silent(log: str, done: int, total: int) -> None:
    """No progress is shown."""
