"""A report's signature: over its digest, by a key that the ledger names and that signs nothing else.

1. The key is enrolled: a `report-key` leaf of the system log names it, and a later one, which both signed, hands over
   to the next. A signature carries every such leaf up to its key's own, each with its proof under the first signed
   checkpoint that covers it. So the same key gives the same bytes, and who trusts the log's key needs no other.
2. A key that handed over may sign reports of checkpoints up to the one of its handover, and of none that is newer.
3. What is signed is a statement (`signing_key`, rule 4): whose key, that it is a report, and the report's digest.
"""

from __future__ import annotations

import base64
import binascii
from collections.abc import Sequence
from typing import Any, NamedTuple

import orjson
from sqlalchemy import Connection, func, select

from kvcustody.audit.kinds import SYSTEM
from kvcustody.audit.store.schema.all_tables import has_leaf
from kvcustody.audit.store.schema.ledger import events, logs
from kvcustody.audit.store.schema.trees import root_leaves
from kvcustody.audit.tlog.database_proofs import LedgerProofs
from kvcustody.audit.tlog.key_rotation import KeyPeriod, key_periods
from kvcustody.audit.tlog.root_log import check_leaf, parse_leaf_proof
from kvcustody.audit.tlog.signed_note import NoteError, NoteSignature, VerifierKey, parse_vkey
from kvcustody.audit.tlog.signing_key import SigningKey, sign_statement, verify_statement

REPORT_KEY_KIND = "report-key"


class KeyEnrolment(NamedTuple):
    """A leaf that names a report key, as text, and the text of its proof."""

    leaf: str
    proof: str


class ReportSignature(NamedTuple):
    """Who signed a report's digest; `data` is base64, `key_id` hexadecimal."""

    key: str
    key_id: str
    data: str
    enrolments: tuple[KeyEnrolment, ...]


REPORT = "kvcustody evidence report"


def statement_text(key_name: str, digest: str, what: str = REPORT) -> str:
    """What is signed; `what` says what the digest is of, so that no signature counts for another kind of document."""
    return f"{key_name}\n{what}\n{digest}\n"


def sign_digest(connection: Connection, digest: str, key: SigningKey, what: str = REPORT) -> ReportSignature:
    """The signature of a report, or of `what`, by a key that the ledger names.

    Raises `NoteError` where it names another or none, `ProofError` where the leaf is under no signed checkpoint yet.
    """
    leaves = enrolment_leaves(connection)
    named = [orjson.loads(leaf)["vkey"] for _, leaf in leaves]
    if not named or named[-1] != str(key.verifier):
        found = f"`{named[-1]}`" if named else "none"
        raise NoteError(f"`{key.verifier}` does not sign reports of this ledger, which names {found}")
    proofs = LedgerProofs(connection)
    carried = tuple(
        KeyEnrolment(
            leaf.decode(),
            proofs.inclusion(SYSTEM, idx, as_of=_first_cover(connection, proofs, idx)).to_bytes().decode(),
        )
        for idx, leaf in leaves
    )
    made = sign_statement(key, statement_text(key.name, digest, what))
    return ReportSignature(
        str(key.verifier), made.key_id.hex(), base64.b64encode(made.data).decode(), carried
    )


def enrolment_leaves(connection: Connection) -> list[tuple[int, bytes]]:
    """(idx, leaf) of every leaf that names a report key, in order."""
    query = (
        select(events.c.idx, events.c.leaf)
        .join(logs, logs.c.id == events.c.log)
        .where(logs.c.name == SYSTEM, events.c.kind == REPORT_KEY_KIND, has_leaf(events))
        .order_by(events.c.idx)
    )
    return [(row.idx, bytes(row.leaf)) for row in connection.execute(query)]


def report_key_periods(leaves: Sequence[bytes]) -> tuple[KeyPeriod, ...]:
    """Every report key that leaves name, in order, with the checkpoints it may sign of; `NoteError` where it breaks."""
    bodies = [orjson.loads(leaf) for leaf in leaves]
    if not bodies:
        return ()
    try:
        records = [base64.b64decode(body["record"], validate=True) for body in bodies[1:]]
    except (binascii.Error, KeyError, TypeError):
        raise NoteError("the leaf of a report key is malformed") from None
    return key_periods(parse_vkey(bodies[0]["vkey"]), records)


def check_signature(
    signature: dict[str, Any],
    digest: str,
    checkpoint: int,
    keys: Sequence[VerifierKey],
    what: str = REPORT,
) -> list[str]:
    """What is wrong with a signature over a digest, for the reader's keys of the log; raises as what it calls."""
    key = parse_vkey(signature["key"])
    data = base64.b64decode(signature["data"], validate=True)
    made = NoteSignature(key.name, bytes.fromhex(signature["key_id"]), data)
    verify_statement(key, statement_text(key.name, digest, what), made)
    leaves = []
    for carried in signature["enrolments"]:
        leaf = carried["leaf"].encode()
        sealed = check_leaf(parse_leaf_proof(carried["proof"].encode()), leaf, keys)
        body = orjson.loads(leaf)
        if (sealed.name, body["kind"]) != (SYSTEM, REPORT_KEY_KIND):
            return ["a leaf that should name the report's key is of another kind or log"]
        leaves.append(leaf)
    return check_period(key, report_key_periods(leaves), checkpoint, is_last=True)


def check_period(
    key: VerifierKey, periods: Sequence[KeyPeriod], checkpoint: int, *, is_last: bool = False
) -> list[str]:
    """What speaks against a key having signed a report of a checkpoint (rule 2)."""
    mine = [period for period in periods if period.key == key]
    if not mine or (is_last and periods[-1].key != key):
        return [f"no leaf of the ledger names `{key}` as a key that signs reports"]
    last = mine[-1].last_size
    if last is not None and checkpoint > last:
        return [f"key `{key}` handed over at checkpoint {last}, and may sign no report of {checkpoint}"]
    return []


def _first_cover(connection: Connection, proofs: LedgerProofs, idx: int) -> int:
    """The first signed checkpoint that covers a leaf of the system log."""
    query = (
        select(func.min(root_leaves.c.idx))
        .join(logs, logs.c.id == root_leaves.c.log)
        .where(logs.c.name == SYSTEM, root_leaves.c.size > idx)
    )
    first = connection.scalar(query)
    return proofs.signed(None if first is None else first + 1).size
