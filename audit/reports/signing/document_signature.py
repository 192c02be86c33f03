"""A document's signature: over its digest, by a key of the log, or by one that the ledger names only for reports.

1. A key of reports is enrolled: a `report-key` leaf of the system log names it, and a later one, which both signed,
   hands over to the next. A signature carries every such leaf up to its key's own, each with its proof under the first
   signed checkpoint that covers it. So the same key gives the same bytes, and who trusts the log's key needs no other.
2. A key that handed over may sign documents of checkpoints up to the one of its handover, and of none that is newer.
3. A document that the log's own key signs carries no leaves: its reader trusts that key already.
"""

from __future__ import annotations

import base64
import binascii
from collections.abc import Sequence

from sqlalchemy import Connection, func, select

from kvcustody.audit.kinds import SYSTEM
from kvcustody.audit.reports.document import Document, KeyEnrolment, Signature
from kvcustody.audit.store.schema.all_tables import has_leaf
from kvcustody.audit.store.schema.ledger import events, logs
from kvcustody.audit.store.schema.trees import root_leaves
from kvcustody.audit.tlog.backend import parse_json
from kvcustody.audit.tlog.database_proofs import LedgerProofs
from kvcustody.audit.tlog.key_rotation import KeyPeriod, key_periods
from kvcustody.audit.tlog.root_log import check_leaf, parse_leaf_proof
from kvcustody.audit.tlog.signed_note import NoteError, NoteSignature, VerifierKey, decode_base64, parse_vkey
from kvcustody.audit.tlog.signing_key import SigningKey, sign_statement, verify_statement
from kvcustody.errors import LedgerError

REPORT_KEY_KIND = "report-key"


def sign_document(connection: Connection, document: Document, key: SigningKey) -> Document:
    """Return the document with its signature.

    Raises `NoteError` where the ledger names another key or none, `ProofError` where the leaf that names it is under no
    signed checkpoint yet. Who signs with a key of the log is believed: its reader is not (rule 3).
    """
    carried = _enrolments(connection, key) if document.kind.signer == "reports" else ()
    made = sign_statement(key, document.statement(key.name))
    data = base64.b64encode(made.data).decode()
    return document._replace(signature=Signature(str(key.verifier), made.key_id.hex(), data, carried))


def enrolment_leaves(connection: Connection) -> list[tuple[int, bytes]]:
    """Return (idx, leaf) of every leaf that names a report key, in order."""
    query = (
        select(events.c.idx, events.c.leaf)
        .join(logs, logs.c.id == events.c.log)
        .where(logs.c.name == SYSTEM, events.c.kind == REPORT_KEY_KIND, has_leaf(events))
        .order_by(events.c.idx)
    )
    return [(row.idx, bytes(row.leaf)) for row in connection.execute(query)]


def report_key_periods(leaves: Sequence[bytes]) -> tuple[KeyPeriod, ...]:
    """Return every report key named in leaves, in order, with its checkpoints; `NoteError` if the chain breaks."""
    bodies = [parse_json(leaf) for leaf in leaves]
    if not bodies:
        return ()
    try:
        records = [base64.b64decode(body["record"], validate=True) for body in bodies[1:]]
    except (binascii.Error, KeyError, TypeError):
        raise NoteError("the leaf of a report key is malformed") from None
    return key_periods(parse_vkey(bodies[0]["vkey"]), records)


def signature_problems(document: Document, keys: Sequence[VerifierKey]) -> list[str]:
    """Return the problems of a signed document's signature, for the reader's keys of the log."""
    try:
        return _problems(document, keys)
    except (LedgerError, ValueError, LookupError, TypeError) as problem:
        text = problem.message if isinstance(problem, LedgerError) else repr(problem)
        return [f"the signature does not verify: {text}"]


def check_report_period(
    key: VerifierKey, periods: Sequence[KeyPeriod], checkpoint: int, *, is_last: bool = False
) -> list[str]:
    """Return why a key may not have signed a document of a checkpoint (rule 2)."""
    mine = [period for period in periods if period.key == key]
    if not mine or (is_last and periods[-1].key != key):
        return [f"no leaf of the ledger names `{key}` as a key that signs reports"]
    last = mine[-1].last_size
    if last is not None and checkpoint > last:
        return [f"key `{key}` handed over at checkpoint {last}, and may sign no document of {checkpoint}"]
    return []


def _problems(document: Document, keys: Sequence[VerifierKey]) -> list[str]:
    signature = document.signature
    if signature is None:
        return [unsigned(document)]
    key = parse_vkey(signature.key)
    data = decode_base64(signature.data, "signature")
    made = NoteSignature(key.name, bytes.fromhex(signature.key_id), data)
    verify_statement(key, document.statement(key.name), made)
    if document.kind.signer == "log":
        trusted = [] if key in keys else [f"`{key}` signed it, which is no key that is trusted here"]
        return trusted + (["a key of the log is named by no leaf"] if signature.enrolments else [])
    leaves = []
    for carried in signature.enrolments:
        leaf = carried.leaf.encode()
        sealed = check_leaf(parse_leaf_proof(carried.proof.encode()), leaf, keys)
        if (sealed.name, parse_json(leaf)["kind"]) != (SYSTEM, REPORT_KEY_KIND):
            return ["a leaf that should name the report's key is of another kind or log"]
        leaves.append(leaf)
    return check_report_period(key, report_key_periods(leaves), document.checkpoint, is_last=True)


def unsigned(document: Document) -> str:
    """Return the statement about a document without a signature."""
    return f"no key signed the {document.kind.name}: anybody may have written it"


def _enrolments(connection: Connection, key: SigningKey) -> tuple[KeyEnrolment, ...]:
    """Return the leaves up to the key's own, each with its proof (rule 1)."""
    leaves = enrolment_leaves(connection)
    named = [parse_json(leaf)["vkey"] for _, leaf in leaves]
    if not named or named[-1] != str(key.verifier):
        found = f"`{named[-1]}`" if named else "none"
        raise NoteError(f"`{key.verifier}` does not sign reports of this ledger, which names {found}")
    proofs = LedgerProofs(connection)
    return tuple(
        KeyEnrolment(
            leaf.decode(),
            proofs.inclusion(SYSTEM, idx, as_of=_first_cover(connection, proofs, idx)).to_bytes().decode(),
        )
        for idx, leaf in leaves
    )


def _first_cover(connection: Connection, proofs: LedgerProofs, idx: int) -> int:
    """Return the first signed checkpoint that covers a leaf of the system log."""
    query = (
        select(func.min(root_leaves.c.idx))
        .join(logs, logs.c.id == root_leaves.c.log)
        .where(logs.c.name == SYSTEM, root_leaves.c.size > idx)
    )
    first = connection.scalar(query)
    return proofs.signed(None if first is None else first + 1).size
