"""Checks what an export encloses beside its leaves, against the reader's keys and certificates (`enclosures`)."""

from __future__ import annotations

from collections.abc import Sequence
from typing import NamedTuple

from kvcustody.audit.events import HANDOVER_BYTES_MAX, SYSTEM
from kvcustody.audit.exports.enclosures import LEAF, PROOF, TEXT, TOKEN, Enclosed
from kvcustody.audit.tlog.checkpoint import SignedCheckpoint, open_checkpoint, parse_checkpoint
from kvcustody.audit.tlog.key_handover import follow_handovers, parse_handover_leaf
from kvcustody.audit.tlog.key_rotation import KeyPeriod, check_period
from kvcustody.audit.tlog.merkle import TreeHead
from kvcustody.audit.tlog.proofs import check_consistency
from kvcustody.audit.tlog.rfc3161_timestamp import TimestampAuthority, TimestampError, check
from kvcustody.audit.tlog.root_log import check_leaf, parse_leaf_proof
from kvcustody.audit.tlog.signed_note import NOTE_BYTES_MAX, VerifierKey, parse_note
from kvcustody.audit.tlog.tiles import ExportError, TileFolder

_LEAF_BYTES_MAX = HANDOVER_BYTES_MAX  # the longest of any kind
_TOKEN_BYTES_MAX = 1 << 18


class StampVerdict(NamedTuple):
    """A checkpoint of so many root leaves existed at this time (UTC µs), says an authority that the reader trusts."""

    authority: str
    size: int
    at_us: int


class Signers(NamedTuple):
    """Who may have signed: the reader's keys and those that they handed over to; places of the handovers' leaves."""

    keys: tuple[VerifierKey, ...]
    periods: tuple[KeyPeriod, ...]
    signed: SignedCheckpoint
    handovers: tuple[int, ...]


def open_signed(
    files: TileFolder,
    note: bytes,
    entries: Sequence[Enclosed],
    trusted: Sequence[VerifierKey],
    cosigners: Sequence[VerifierKey],
    witness_threshold: int,
) -> Signers:
    """The checkpoint, by keys that the reader trusts or that these handed over to on record.

    Raises `NoteError`, `ProofError` or `ExportError`: also for a handover that is not in the log, or speaks of a tree
    that is not the beginning of the signed one, and for a key that signed past its handover.
    """
    leaves = [files.file(entry.place + LEAF, _LEAF_BYTES_MAX) for entry in entries]
    periods = follow_handovers(trusted, leaves)
    keys = tuple(dict.fromkeys(period.key for period in periods))
    signed = open_checkpoint(note, keys, witnesses=cosigners, witness_threshold=witness_threshold)
    check_period(signed, periods)
    places = []
    for entry, leaf in zip(entries, leaves, strict=True):
        proof = parse_leaf_proof(files.file(entry.place + PROOF, 4 * NOTE_BYTES_MAX))
        if parse_note(proof.head.note).text != parse_note(note).text:
            raise ExportError(f"`{entry.place}` is under another checkpoint")
        if check_leaf(proof, leaf, keys).name != SYSTEM:
            raise ExportError(f"`{entry.place}` is not a leaf of the system log")
        check_consistency(parse_handover_leaf(leaf).head, signed.checkpoint.head, entry.path)
        places.append(proof.index)
    if len(set(places)) != len(places):
        raise ExportError("a handover of the signing key is listed twice")
    return Signers(keys, periods, signed, tuple(places))


def check_stamps(
    files: TileFolder,
    entries: Sequence[Enclosed],
    root: TreeHead,
    origin: str,
    authorities: Sequence[TimestampAuthority],
) -> list[StampVerdict]:
    """Every token that verifies by one of the reader's authorities, over a checkpoint that the signed one extends.

    Raises `ProofError` or `ExportError` where an entry is about another ledger or history, and `TimestampError` where
    an authority has no token here that verifies.
    """
    found: list[StampVerdict] = []
    for entry in entries:
        text = files.file(entry.place + TEXT, NOTE_BYTES_MAX)
        token = files.file(entry.place + TOKEN, _TOKEN_BYTES_MAX)
        stamped = parse_checkpoint(_decoded(text, entry.place))
        if stamped.origin != origin:
            raise ExportError(f"`{entry.place}` is a timestamp of `{stamped.origin}`")
        check_consistency(stamped.head, root, entry.path)
        for authority in authorities:
            try:
                moment = check(authority, token, text)
            except TimestampError:
                continue  # another authority's; each of the reader's has to have one
            found.append(StampVerdict(authority.name, stamped.size, moment))
    for authority in authorities:
        if not any(stamp.authority == authority.name for stamp in found):
            raise TimestampError(f"no timestamp in this export verifies as one of `{authority.name}`")
    return found


def _decoded(text: bytes, place: str) -> str:
    try:
        return text.decode()
    except UnicodeDecodeError:
        raise ExportError(f"`{place}` is not the text of a checkpoint") from None
