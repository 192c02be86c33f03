#!/usr/bin/env python3
"""Check an export of a kvcustody ledger, or a document, with only Python (3.11 or later): no package, no network.

    python3 -I verify_kvcustody.py EXPORT --key 'ledger.example.com+1a2b3c4d+AbC…'
    python3 -I verify_kvcustody.py report.json --key 'ledger.example.com+1a2b3c4d+AbC…'

EXPORT is the folder, or NAME.proof beside NAME.leaf for one leaf that was mailed (then 1, 2, 3 and 7 are checked, and
no handovers). A document is the JSON of a report, a certificate of an erasure or a record of processing (then 8 is).
The key is the ledger's public key, from somebody you trust and NOT from the export. Take this program from somewhere
you trust too: a forged export may come with a forged copy of it.

What is checked, in this order:
  1. The checkpoint is signed by the key (Ed25519; a C2SP signed note), or by one that it handed over to. Each handover
     is signed by both keys and is a leaf of the system log. It names a tree that is the beginning of the signed one. A
     key that was handed over signs nothing later. The checkpoint states the root of the root log.
  2. Each sub-log's head opens a leaf of the root log that the checkpoint covers.
  3. The leaves give that head: hashed according to RFC 6962, they lead to its root, none changed, missing, added or
     moved.
  4. Every file has the digest and the size that the manifest states. Each leaf names the log that it is in. The folder
     holds only the manifest's files: a stray log, tile, folder or link is refused.
  5. If the export is of the whole ledger, every leaf of the root log opens to a head that the leaves give. So no
     sub-log was left out, and none had two histories.
  6. With --head, that a head that you kept from earlier is the beginning of what you were given.
  7. With --witness, that this witness signed the checkpoint, and when. Timestamps (RFC 3161) are tied to the checkpoint
     here; their tokens are checked by `openssl ts -verify`.
  8. Of a document: that the log's key signed it, or one that leaves of the log name; that every leaf in it is under a
     checkpoint that the log signed; and that it agrees with itself.

The end of the output lists what this does NOT show. Exit status: 0 sound, 1 not, 2 cannot be checked.
"""

from __future__ import annotations

import argparse
import sys
from collections.abc import Sequence
from pathlib import Path

from kvcustody.audit.tlog.checkpoint import SignedCheckpoint
from kvcustody.audit.tlog.proofs import ProofError
from kvcustody.audit.tlog.signed_note import CannotCheckError, NoteError, parse_vkey
from kvcustody.audit.verify.documents.file_alone import NOT_SHOWN_ALONE, check_file_alone
from kvcustody.audit.verify.verify_export import ExportVerdict, parse_kept_head, verify_export, verify_leaf
from kvcustody.errors import LedgerError
from kvcustody.plurals import several

_TIMESTAMPS = (
    "a timestamp authority that you trust is asked by: openssl ts -verify -data PLACE.txt -in PLACE.tsr "
    "-CAfile roots.pem -untrusted tsa.pem"
)
_OF_ONE_LEAF = (
    "what else the log holds, and that its head is the newest: this is one leaf",
    "whether its process was an engine at work: the leaf of its start (`origin`) says so",
)


def main(arguments: Sequence[str] | None = None) -> int:
    """Run the checks and print their results; return the exit status."""
    parser = argparse.ArgumentParser(description="Check an export of a kvcustody ledger.")
    add = parser.add_argument
    add("export", type=Path)
    add("--key", required=True, help="the ledger's public key, or a file that holds it")
    add("--witness", action="append", default=[], help="a witness's key that must have signed")
    add("--head", action="append", default=[], metavar="'LOG SIZE ROOT'", help="a head you kept")
    options = parser.parse_args(arguments)
    try:
        keys, witnesses = [_key_text(options.key)], [_key_text(text) for text in options.witness]
        for text in (*keys, *witnesses):
            parse_vkey(text)
        kept_heads = [parse_kept_head(text) for text in options.head]
        if options.export.suffix == ".proof" and options.export.is_file():
            if kept_heads:
                raise CannotCheckError("--head is for exports; this is the proof of one leaf")
            return _check_mailed(options.export, keys, witnesses)
        if options.export.is_file():
            if kept_heads or witnesses:
                raise CannotCheckError("--head and --witness are for exports; this is a document")
            return _check_document(options.export, keys)
        witness_count = len(witnesses)
        verdict = verify_export(
            options.export, keys, witnesses=witnesses, witness_threshold=witness_count, kept=kept_heads
        )
    except (LedgerError, OSError) as problem:
        print(f"CANNOT BE CHECKED: {problem.message if isinstance(problem, LedgerError) else problem}")
        return 2
    for what in verdict.problems:
        print(f"NOT SOUND: {what}")
    if verdict.ok:
        _print_sound(verdict)
    return 0 if verdict.ok else 1


def _check_mailed(path: Path, keys: Sequence[str], witnesses: Sequence[str]) -> int:
    """Check NAME.leaf by NAME.proof."""
    leaf, proof = path.with_suffix(".leaf").read_bytes(), path.read_bytes()
    try:
        sealed, idx = verify_leaf(leaf, proof, keys, witnesses=witnesses, witness_threshold=len(witnesses))
    except (NoteError, ProofError) as problem:
        print(f"NOT SOUND: {problem.message}")
        return 1
    root = sealed.signed.checkpoint
    size = several(sealed.head.size, "leaf")
    print(f"SOUND: leaf {idx} of `{sealed.name}` ({size}), under a checkpoint of {root.size} of `{root.origin}`")
    _print_end(sealed.signed, _OF_ONE_LEAF)
    return 0


def _check_document(path: Path, keys: Sequence[str]) -> int:
    """Check a report, a certificate or a record."""
    try:
        checked = check_file_alone(path.read_bytes(), [parse_vkey(text) for text in keys])
    except CannotCheckError:
        raise
    except LedgerError as problem:
        print(f"NOT SOUND: {problem.message}")
        return 1
    for what in checked.problems:
        print(f"NOT SOUND: {what}")
    if checked.problems:
        return 1
    document = checked.document
    signed_by = document.signature.key if document.signature else "nobody"
    print(
        f"SOUND: {document.kind.name} of checkpoint {document.checkpoint}, signed by {signed_by}, with "
        f"{several(checked.leaves, 'proved leaf')}, SHA-256 {document.digest()}"
    )
    print("Not shown:")
    for limit in NOT_SHOWN_ALONE[document.kind.name]:
        print(f"  - {limit}")
    return 0


def _print_sound(verdict: ExportVerdict) -> None:
    for log in verdict.logs:
        kinds = ", ".join(f"{kind} {count}" for kind, count in sorted(log.kinds.items()))
        print(f"{log.name}: leaves {log.first} to {log.end} of {log.size} are as signed ({kinds})")
    print(f"SOUND: {several(verdict.leaves, 'leaf')} of `{verdict.origin}`, checkpoint of {verdict.root.size}")
    for one in verdict.marked:
        print(f"NOT AN ENGINE AT WORK: all that process {one.incarnation} of {one.worker!a} recorded is {one.origin}")
    if verdict.handovers:
        print(f"{several(verdict.handovers, 'handover')} of the signing key on record")
    _print_end(verdict.signed, [*verdict.limits, *([_TIMESTAMPS] if verdict.unchecked_stamps else [])])


def _print_end(signed: SignedCheckpoint | None, limits: Sequence[str]) -> None:
    for line in signed.witnesses if signed else ():
        print(f"witness `{line.key.name}` signed at {line.at_seconds} (POSIX seconds)")
    print("Not shown:")
    for limit in limits:
        print(f"  - {limit}")


def _key_text(given: str) -> str:
    """Return a key as given, or the first line of the named file; `#` begins a comment."""
    if not Path(given).is_file():
        return given
    lines = [line.strip() for line in Path(given).read_text("utf-8-sig").splitlines()]
    return next((line for line in lines if line and not line.startswith("#")), "")


if __name__ == "__main__":
    sys.exit(main())
