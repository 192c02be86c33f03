"""Check an export, or one leaf with its proof, offline against keys that the reader trusts.

1. Everything is recomputed from the leaves. The manifest's statements count only where they agree.
2. A bad export is a report with problems, never an exception. The first bad leaf is not named here (a file's digest
   narrows it down to a file): `audit fsck` on the database does that.
3. The report always lists what was not shown (`limits`), beginning with the lack of a witness.
4. The stand-alone `verify_kvcustody.py` is this module with what it needs (`audit/exports/amalgamate.py`). Code that is
   reached from here uses packages only through `tlog/backend.py`.
5. The folder holds exactly the files that the manifest names (`what_belongs`): a stray log or tile is a problem.
6. The export's enclosures are tied to the signed checkpoint. A handover of the signing key is a leaf of the system log.
   It refers to a tree that is the beginning of the signed one, and so does a timestamp.
"""

from __future__ import annotations

import hashlib
from collections import Counter
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, field
from itertools import islice
from pathlib import Path
from typing import Any, NamedTuple, Protocol

from kvcustody.audit.evidence.processes.marked_processes import Marked, marked_processes
from kvcustody.audit.evidence.processes.work_periods import LIVES
from kvcustody.audit.exports.enclosures import LEAF, PROOF, TEXT, TOKEN, Enclosed
from kvcustody.audit.exports.file_formats import LeafFormat, leaves_of
from kvcustody.audit.exports.manifest import (
    MANIFEST,
    OPENINGS,
    ExportedLog,
    ExportFile,
    ExportManifest,
    parse_manifest,
    root_line,
)
from kvcustody.audit.kinds import SYSTEM
from kvcustody.audit.leaf import HANDOVER_BYTES_MAX
from kvcustody.audit.leaf.merkle import EMPTY, EMPTY_ROOT, HASH_BYTES, Frontier, TreeHead, leaf_hashes
from kvcustody.audit.tlog.backend import parse_json
from kvcustody.audit.tlog.checkpoint import SignedCheckpoint, open_checkpoint, parse_checkpoint
from kvcustody.audit.tlog.key_rotation import (
    SIGNING_KEY_KIND,
    check_period,
    follow_handovers,
    handover_note,
    parse_handover_leaf,
)
from kvcustody.audit.tlog.log_break import LOG_BROKEN_KIND, LogBreak, break_note, parse_break
from kvcustody.audit.tlog.proofs import check_consistency
from kvcustody.audit.tlog.root_log import (
    HeadProof,
    RootLeafOpening,
    SealedHead,
    check_head,
    check_leaf,
    parse_head_proof,
    parse_leaf_proof,
)
from kvcustody.audit.tlog.signed_note import (
    NOTE_BYTES_MAX,
    CannotCheckError,
    NoteError,
    VerifierKey,
    decode_base64,
    parse_note,
    parse_vkey,
)
from kvcustody.audit.tlog.tiles import CHECKPOINT, HEAD_PROOF, ExportError, read_plain_file
from kvcustody.audit.verify.what_belongs import strays
from kvcustody.errors import LedgerError

_STEP = 1 << 12
_LIVES = frozenset(LIVES)
_STRAYS_MAX = 100
MANIFEST_BYTES_MAX = 1 << 28
_TOKEN_BYTES_MAX = 1 << 18
NO_WITNESS = (
    "split views and cut tails are undetected: no witness's signature was checked, so whoever kept no "
    "earlier head cannot know whether others were shown the same log, or whether it was longer"
)
NOT_RECORDED = "whether everything was recorded: see conservation and coverage"
NOT_TRUE = "whether what was recorded is true: a leaf proves what was written, and no more"

Progress = Callable[[str, int, int], None]
Seen = Callable[[str, int, Sequence[bytes]], None]
"""Given leaves of a log, the first of them at a place."""


class KeptHead(NamedTuple):
    """A sub-log's head that the reader kept from earlier."""

    log: str
    head: TreeHead


def parse_kept_head(text: str) -> KeptHead:
    """Return a head from `LOG SIZE ROOT`, the form of proofs and exports; raises `NoteError`."""
    parts = text.rsplit(" ", 2)
    if len(parts) != 3 or not (parts[1].isascii() and parts[1].isdigit() and len(parts[1]) <= 19):
        raise NoteError(f"`{text[:80]}` is not `LOG SIZE ROOT`")
    root = decode_base64(parts[2], "root")
    if len(root) != HASH_BYTES:
        raise NoteError(f"`{text[:80]}` is not `LOG SIZE ROOT`")
    return KeptHead(parts[0], TreeHead(int(parts[1]), root))


class StampAuthority(Protocol):
    """A timestamp authority (RFC 3161) whose certificate the reader supplies."""

    @property
    def name(self) -> str:
        """Its name in verdicts."""

    def stamped_at_us(self, token: bytes, text: bytes) -> int | None:
        """Return when, by its token, the text existed (UTC µs); None if this is not its token over the text."""


class StampVerdict(NamedTuple):
    """A checkpoint of so many root leaves existed at this time (UTC µs), according to an authority that the reader
    trusts.
    """

    authority: str
    size: int
    at_us: int


@dataclass(slots=True)
class LogVerdict:
    """The verdict on one sub-log: leaves `first` up to but without `end` of `size`. Times are UTC µs."""

    name: str
    size: int
    first: int
    end: int
    kinds: Counter[str] = field(default_factory=Counter)
    first_us: int = 0
    last_us: int = 0
    unchecked_heads: int = 0
    handovers: int = 0
    breaks: list[bytes] = field(default_factory=list)


@dataclass(slots=True)
class ExportVerdict:
    """The verdict on an export. `ok`: every leaf is what the trusted keys signed."""

    origin: str = ""
    root: TreeHead = TreeHead(0, EMPTY_ROOT)  # noqa: RUF009 - a value
    signed: SignedCheckpoint | None = None
    whole: bool = False
    closed: int = 0
    handovers: int = 0
    breaks: list[LogBreak] = field(default_factory=list)  # each stated by a key that is trusted
    stamps: list[StampVerdict] = field(default_factory=list)
    unchecked_stamps: int = 0
    marked: Marked = ()
    is_marked_shown: bool = False
    logs: list[LogVerdict] = field(default_factory=list)
    problems: list[str] = field(default_factory=list)

    @property
    def ok(self) -> bool:
        """Whether no problem was found."""
        return not self.problems

    @property
    def leaves(self) -> int:
        """The number of checked leaves."""
        return sum(log.end - log.first for log in self.logs)

    @property
    def limits(self) -> list[str]:
        """What the verdict does not show (rule 3)."""
        sentences = [] if self.signed is not None and self.signed.witnesses else [NO_WITNESS]
        sentences += [NOT_RECORDED, NOT_TRUE]
        if not self.is_marked_shown:
            sentences.append(
                "which processes replayed or generated what they recorded: not all of the system log is here"
            )
        if not self.stamps:
            along = f"{self.unchecked_stamps} timestamps came along, and none was checked"
            sentences.append(f"when this existed: {along if self.unchecked_stamps else 'no timestamp came along'}")
        if not self.whole:
            sentences.append("whether other sub-logs exist, or newer heads of these: this is an export of a part")
        if self.closed:
            sentences.append(f"what leaves of the root log stand for whose salts were destroyed: {self.closed}")
        bare = [log for log in self.logs if self.whole and log.first]
        sentences += [f"what leaves 0 to {log.first} of `{log.name}` said: only their hashes are there" for log in bare]
        unchecked = sum(log.unchecked_heads for log in self.logs)
        if unchecked:
            sentences.append(f"{unchecked} earlier heads whose leaves are not in this export")
        return sentences


def verify_export(
    folder: Path,
    keys: Sequence[str],
    *,
    witnesses: Sequence[str] = (),
    witness_threshold: int = 0,
    kept: Sequence[KeptHead] = (),
    authorities: Sequence[StampAuthority] = (),
    progress: Progress | None = None,
    seen: Seen | None = None,
) -> ExportVerdict:
    """Check every byte of an export with these vkeys (rule 1, rule 2).

    `seen` is given the leaves on the way: they are what was signed only where the verdict is sound.

    Raises `NoteError` for a malformed key of yours, `CannotCheckError` where what it takes is not installed.

    Keys that yours handed over to on record are followed. Each of `authorities` has to have stamped a checkpoint that
    this one extends; their certificates are yours, too.
    """
    trusted, cosigners = [parse_vkey(key) for key in keys], [parse_vkey(key) for key in witnesses]
    verdict = ExportVerdict()
    try:
        _Check(folder, verdict, kept, progress, seen).run(trusted, cosigners, witness_threshold, authorities)
    except CannotCheckError:
        raise
    except LedgerError as problem:
        verdict.problems.append(problem.message)
    except OSError as problem:
        verdict.problems.append(f"`{problem.filename or folder}`: {problem.strerror}")
    return verdict


def verify_leaf(
    leaf: bytes,
    proof: bytes,
    keys: Sequence[str],
    *,
    witnesses: Sequence[str] = (),
    witness_threshold: int = 0,
) -> tuple[SealedHead, int]:
    """Return the head over a leaf by its proof (`audit prove --out`), and the leaf's place.

    Raises `NoteError` or `ProofError` where the proof does not show it.
    """
    trusted, cosigners = [parse_vkey(key) for key in keys], [parse_vkey(key) for key in witnesses]
    parsed = parse_leaf_proof(proof)
    sealed = check_leaf(parsed, leaf, trusted, witnesses=cosigners, witness_threshold=witness_threshold)
    return sealed, parsed.index


class _Check:
    def __init__(
        self,
        folder: Path,
        verdict: ExportVerdict,
        kept: Sequence[KeptHead],
        progress: Progress | None,
        seen: Seen | None,
    ) -> None:
        self._seen = seen
        self._folder = folder
        self._verdict = verdict
        self._kept = kept
        self._progress = progress
        self._heads: dict[str, dict[int, bytes]] | None = None
        self._lives: list[dict[str, Any]] = []

    def run(
        self,
        trusted: Sequence[VerifierKey],
        cosigners: Sequence[VerifierKey],
        witness_threshold: int,
        authorities: Sequence[StampAuthority],
    ) -> None:
        verdict = self._verdict
        self._note = self._file(CHECKPOINT, NOTE_BYTES_MAX)
        self._text = parse_note(self._note).text
        manifest = parse_manifest(self._file(MANIFEST, MANIFEST_BYTES_MAX))
        signed = self._open_signed(manifest.handovers, trusted, cosigners, witness_threshold)
        verdict.signed, verdict.handovers = signed, len(manifest.handovers)
        verdict.origin, verdict.root = signed.checkpoint.origin, signed.checkpoint.head
        verdict.unchecked_stamps = 0 if authorities else len(manifest.stamps)
        self._check_stamps(manifest.stamps, authorities)
        self._check_files(manifest)
        names = [log.name for log in manifest.logs]
        if len(set(names)) != len(names):
            raise ExportError("a sub-log is listed twice")
        if manifest.openings:
            self._root_log(names)
        for log in manifest.logs:
            self._log(log, manifest.form)
        if verdict.whole and sum(log.handovers for log in verdict.logs) != verdict.handovers:
            raise ExportError("the system log has other handovers of the signing key than the export lists")
        for record in (record for log in verdict.logs for record in log.breaks):
            verdict.breaks.append(parse_break(record, [period.key for period in self._periods]))
        self._check_marked(manifest)
        for kept in self._kept:
            if kept.log not in names:
                verdict.problems.append(f"log `{kept.log}`, whose head was kept, is not in the export")

    def _file(self, path: str, bytes_max: int) -> bytes:
        return read_plain_file(self._folder, path, bytes_max)

    def _opened(self, proof: HeadProof) -> SignedCheckpoint | None:
        """Return the signed checkpoint if the proof ends in that exact note, so that its signature is checked once."""
        return self._signed if proof.note == self._note else None

    def _open_signed(
        self,
        entries: Sequence[Enclosed],
        trusted: Sequence[VerifierKey],
        cosigners: Sequence[VerifierKey],
        witness_threshold: int,
    ) -> SignedCheckpoint:
        """Return the checkpoint, by keys that the reader trusts or their recorded successors (rule 6).

        Raises `NoteError`, `ProofError` or `ExportError`: also for a key that signed past its handover.
        """
        leaves = [self._file(entry.place + LEAF, HANDOVER_BYTES_MAX) for entry in entries]
        self._periods = periods = follow_handovers(trusted, leaves)
        self._trusted = tuple(dict.fromkeys(period.key for period in periods))
        signed = self._signed = open_checkpoint(
            self._note, self._trusted, witnesses=cosigners, witness_threshold=witness_threshold
        )
        check_period(signed, periods)
        places = set()
        for entry, leaf in zip(entries, leaves, strict=True):
            proof = parse_leaf_proof(self._file(entry.place + PROOF, 4 * NOTE_BYTES_MAX))
            if parse_note(proof.head.note).text != self._text:
                raise ExportError(f"`{entry.place}` is under another checkpoint")
            if check_leaf(proof, leaf, self._trusted, signed=self._opened(proof.head)).name != SYSTEM:
                raise ExportError(f"`{entry.place}` is not a leaf of the system log")
            check_consistency(parse_handover_leaf(leaf).head, signed.checkpoint.head, entry.path)
            places.add(proof.index)
        if len(places) != len(entries):
            raise ExportError("a handover of the signing key is listed twice")
        return signed

    def _check_stamps(self, entries: Sequence[Enclosed], authorities: Sequence[StampAuthority]) -> None:
        """Every token that verifies by one of the reader's authorities, over a checkpoint that the signed one extends.

        Raises `ProofError` or `ExportError` where an entry is about another ledger or history, and where an authority
        has no token here that verifies.
        """
        verdict = self._verdict
        for entry in entries:
            text = self._file(entry.place + TEXT, NOTE_BYTES_MAX)
            token = self._file(entry.place + TOKEN, _TOKEN_BYTES_MAX)
            try:
                stamped = parse_checkpoint(text.decode())
            except UnicodeDecodeError:
                raise ExportError(f"`{entry.place}` is not the text of a checkpoint") from None
            if stamped.origin != verdict.origin:
                raise ExportError(f"`{entry.place}` is a timestamp of `{stamped.origin}`")
            check_consistency(stamped.head, verdict.root, entry.path)
            for authority in authorities:  # another's token is none of its; each of the reader's has to have one
                at_us = authority.stamped_at_us(token, text)
                if at_us is not None:
                    verdict.stamps.append(StampVerdict(authority.name, stamped.size, at_us))
        for authority in authorities:
            if not any(stamp.authority == authority.name for stamp in verdict.stamps):
                raise ExportError(f"no timestamp in this export verifies as one of `{authority.name}`")

    def _check_marked(self, manifest: ExportManifest) -> None:
        """The leaves decide which processes are replayed, where all of the system log is here; else the manifest."""
        verdict = self._verdict
        whole = [log for log in verdict.logs if log.name == SYSTEM and (log.first, log.end) == (0, log.size)]
        verdict.is_marked_shown = bool(whole)
        verdict.marked = marked_processes(self._lives) if whole else manifest.marked
        if manifest.marked != verdict.marked and verdict.is_marked_shown:
            raise ExportError(
                f"`{MANIFEST}` calls other processes replayed or generated than the leaves of their starts"
            )

    def _check_files(self, manifest: ExportManifest) -> None:
        """The folder holds the manifest's files, each named once, and nothing else (rule 5)."""
        if (manifest.origin, manifest.root) != (self._verdict.origin, self._verdict.root):
            raise ExportError(f"`{MANIFEST}` is of another checkpoint than the signed one")
        paths = manifest.paths
        if len(set(paths)) != len(paths):
            raise ExportError(f"`{MANIFEST}` names a file twice")
        found = list(islice(strays(self._folder, set(paths)), _STRAYS_MAX))
        self._verdict.problems += [f"`{path}` is no part of the export" for path in found]

    def _root_log(self, names: Sequence[str]) -> None:
        """The whole root log, and the heads that it opens to: no sub-log left out, none with two histories."""
        frontier: Frontier = EMPTY
        heads: dict[str, dict[int, bytes]] = {}
        self._heads = heads
        with (self._folder / OPENINGS).open("rb") as file:
            while lines := list(islice(file, _STEP)):
                leaves = [self._root_leaf(line, heads) for line in lines]
                frontier = frontier.extend(leaf_hashes(leaves)).frontier
        if frontier.head() != self._verdict.root:
            raise ExportError(f"`{OPENINGS}` is not the signed root log")
        missing = sorted(heads.keys() - set(names))
        if missing:
            raise ExportError(f"log `{missing[0]}` was left out")
        self._verdict.whole = True

    def _root_leaf(self, line: bytes, heads: dict[str, dict[int, bytes]]) -> bytes:
        try:
            value = parse_json(line)
            leaf = bytes.fromhex(value["leaf"])
            opened = None if value["opening"] is None else bytes.fromhex(value["opening"])
        except (ValueError, KeyError, TypeError):
            raise ExportError(f"`{OPENINGS}` is malformed") from None
        if line != root_line(leaf, opened):
            raise ExportError(f"`{OPENINGS}` is not in canonical form")
        if opened is None:
            self._verdict.closed += 1
            return leaf
        opening = RootLeafOpening.from_bytes(opened)
        if opening.commitment() != leaf:
            raise ExportError(f"a leaf of the root log is not what its opening (`{opening.name}`) says")
        if heads.setdefault(opening.name, {}).setdefault(opening.head.size, opening.head.root) != opening.head.root:
            raise ExportError(f"`{opening.name}` has two histories: two heads at `{opening.head.size}` leaves")
        return leaf

    def _log(self, log: ExportedLog, form: LeafFormat) -> None:
        proof = parse_head_proof(self._file(f"{log.folder}/{HEAD_PROOF}", 2 * NOTE_BYTES_MAX))
        sealed = check_head(proof, self._trusted, signed=self._opened(proof))
        if parse_note(proof.note).text != self._text:
            raise ExportError(f"the head of `{log.name}` is under another checkpoint")
        if (sealed.name, sealed.head) != (log.name, log.head):
            raise ExportError(f"`{log.folder}` holds log `{sealed.name}`, and the manifest says `{log.name}`")
        log_verdict = LogVerdict(log.name, log.head.size, log.range.first, log.range.end)
        self._verdict.logs.append(log_verdict)
        due = DueHeads(log.name, self._heads, self._kept)
        digest = hashlib.sha256()
        frontier = log.range.before
        for file in log.files:
            if file.first != frontier.size:
                raise ExportError(f"`{file.path}` begins at leaf `{file.first}`; `{frontier.size}` was expected")
            if (self._folder / file.path).stat().st_size != file.bytes:
                raise ExportError(f"`{file.path}` does not have the size that the manifest states")
            for leaves in self._leaves(file, form):
                due.check(frontier, hashes := leaf_hashes(leaves))
                frontier = frontier.extend(hashes).frontier
                digest.update(b"".join(leaf + b"\n" for leaf in leaves))
                self._lives += _take_leaves(log_verdict, leaves, frontier.size - len(leaves))
                if self._seen is not None:
                    self._seen(log.name, frontier.size - len(leaves), leaves)
                if self._progress is not None:
                    self._progress(log.name, frontier.size - log.range.first, log.leaves)
            if frontier.size - file.first != file.leaves:
                raise ExportError(f"`{file.path}` does not have the leaves that the manifest states")
        due.check(frontier, [])
        if self._verdict.whole and log.range.end != log.head.size:
            raise ExportError(f"`{log.name}` ends at leaf `{log.range.end}` of {log.head.size} in a whole export")
        log.range.check(frontier, log.head)
        if digest.hexdigest() != log.digest:
            raise ExportError(f"the leaves of `{log.name}` do not have the digest that the manifest states")
        log_verdict.unchecked_heads = due.unchecked(log.range.first, log.head.size)

    def _leaves(self, file: ExportFile, form: LeafFormat) -> Iterator[list[bytes]]:
        path = self._folder / file.path
        if path.is_symlink() or not path.is_file():
            raise ExportError(f"`{file.path}` is missing or not a plain file")
        with path.open("rb") as opened:
            if hashlib.file_digest(opened, "sha256").hexdigest() != file.sha256:
                raise ExportError(f"`{file.path}` does not have the digest that the manifest states")
        leaves = leaves_of(form, path)
        while some := list(islice(leaves, _STEP)):
            yield some


class DueHeads:
    """Heads of one log that its leaves must give: those of the root log, and kept ones."""

    def __init__(self, name: str, heads: dict[str, dict[int, bytes]] | None, kept: Sequence[KeptHead]) -> None:
        self._name = name
        due = [TreeHead(*head) for head in (heads or {}).get(name, {}).items()]
        due += [item.head for item in kept if item.log == name]
        self._due = sorted(due, reverse=True)
        self._past = 0

    def check(self, frontier: Frontier, hashes: Sequence[bytes]) -> None:
        """Raise `ExportError` if a head within these leaves differs from what they give."""
        end = frontier.size + len(hashes)
        while self._due and self._due[-1][0] <= end:
            size, root = self._due.pop()
            if size < frontier.size:
                self._past += 1
                continue
            frontier, hashes = (
                frontier.extend(hashes[: size - frontier.size]).frontier,
                hashes[size - frontier.size :],
            )
            if frontier.root() != root:
                raise ExportError(f"`{self._name}` had another history at `{size}` leaves")

    def unchecked(self, first: int, size: int) -> int:
        """Return how many heads could not be compared; raises `ExportError` for one beyond the log's end, which was
        cut.
        """
        beyond = [due for due in self._due if due[0] > size]
        if beyond:
            raise ExportError(f"`{self._name}` was cut: it had `{beyond[0][0]}` leaves, and has {size}")
        return self._past + len(self._due)


def _take_leaves(log_verdict: LogVerdict, leaves: Sequence[bytes], first: int) -> list[dict[str, Any]]:
    """What kinds of leaves there are, and when; raises `ExportError` for one that is none, or is another log's.

    Those about the lives of processes are given back.
    """
    lives: list[dict[str, Any]] = []
    for idx, leaf in enumerate(leaves, first):
        try:
            body: dict[str, Any] = parse_json(leaf)
            log, kind, moment = body["log"], body["kind"], int(body["at_us"])
        except (ValueError, KeyError, TypeError):
            raise ExportError(f"leaf `{idx}` of `{log_verdict.name}` is not a leaf") from None
        if log != log_verdict.name:
            raise ExportError(f"leaf `{idx}` of `{log_verdict.name}` says that it belongs to `{log}`")
        log_verdict.kinds[kind] += 1
        log_verdict.handovers += kind == SIGNING_KEY_KIND and handover_note(leaf) is not None
        if kind == LOG_BROKEN_KIND and log_verdict.name == SYSTEM:
            log_verdict.breaks.append(break_note(leaf))
        log_verdict.first_us = min(log_verdict.first_us or moment, moment)
        log_verdict.last_us = max(log_verdict.last_us, moment)
        if kind in _LIVES and log_verdict.name == SYSTEM:
            lives.append(body)
    return lives
