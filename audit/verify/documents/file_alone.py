"""A document's own evidence, checked with Python only: the stand-alone verifier's part of `verify`.

1. It checks the one form, the signature, that every leaf is under a signed checkpoint, and what the file says twice.
2. What takes the blocks that leaves name, the library of frameworks, or a ledger, it does not check: it says so.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import NamedTuple

from kvcustody.audit.reports.document import Document, read_document
from kvcustody.audit.reports.erasure.certificate import CERTIFICATE
from kvcustody.audit.reports.model import REPORT
from kvcustody.audit.reports.signing.document_signature import signature_problems
from kvcustody.audit.tlog.signed_note import CannotCheckError, VerifierKey
from kvcustody.audit.verify.documents.certificate_agreement import (
    certificate_disagreements,
    check_parts,
    proved_bodies,
)
from kvcustody.audit.verify.documents.record_agreement import RECORD, record_disagreements
from kvcustody.audit.verify.documents.report_agreement import (
    proved_leaves,
    report_disagreements,
    stated_checkpoint,
)
from kvcustody.errors import LedgerError

DOCUMENT_KINDS = (REPORT, CERTIFICATE, RECORD)
NOT_SHOWN_ALONE = {
    REPORT.name: (
        "whether its figures are those of the ledger: `kvcustody report verify` makes them again from an export",
        "whether its opinion, statuses and limitations follow from its figures, and each leaf from a drawn custody",
        "whether its pages are of this file",
    ),
    CERTIFICATE.name: (
        "whether its figures are those of its leaves: `kvcustody erasure verify` computes them again",
        "which selector it is of, whether its request was signed, and what no leaf of it says",
    ),
    RECORD.name: (
        "whether it is of the ledger: `kvcustody report verify` makes it again from an export",
        "whether its controls are those of the library, and what its controller or processor stated",
    ),
}


class FileAlone(NamedTuple):
    """A document, the number of its proved leaves, and its problems."""

    document: Document
    leaves: int
    problems: tuple[str, ...]


def check_file_alone(data: bytes, keys: Sequence[VerifierKey]) -> FileAlone:
    """Check a file by itself; raises `LedgerError` if it is not a document, and `CannotCheckError`."""
    document = read_document(data, DOCUMENT_KINDS)
    problems, leaves = signature_problems(document, keys), 0
    try:
        leaves = _of_kind(document, keys, problems)
    except CannotCheckError:
        raise
    except (LedgerError, ValueError, LookupError, TypeError, AttributeError, OverflowError) as problem:
        text = problem.message if isinstance(problem, LedgerError) else repr(problem)
        problems.append(f"the document cannot be checked: {text}")
    return FileAlone(document, leaves, tuple(problems))


def _of_kind(document: Document, keys: Sequence[VerifierKey], problems: list[str]) -> int:
    """What a kind says twice, and its leaves: how many are proved."""
    facts = document.facts
    if document.kind == REPORT:
        problems += report_disagreements(facts)
        signed = stated_checkpoint(facts, keys, problems)
        return sum(1 for _ in proved_leaves(facts, keys, signed, problems))
    if document.kind == CERTIFICATE:
        check_parts(facts)
        bodies = proved_bodies(facts, keys, problems)
        problems += certificate_disagreements(facts, bodies)
        return len(bodies)
    problems += record_disagreements(facts)
    return 0
