"""The one verifier of documents: reports, certificates of erasures, records of processing.

    check = verify(data, [vkey], [ReportRules(), CertificateRules(opening)], source=folder)
    check.ok, check.problems, check.unchecked

1. The file is hostile: it is bounded, and it has one form as bytes (`reports.document`).
2. The file alone shows who signed it, that every leaf that it carries is under a signed checkpoint, and that it agrees
   with itself. It does not show that its figures are those of the ledger.
3. A document that is made again, from the ledger or a verified export, is compared field by field: what differs is a
   problem.
4. What was not checked is listed by its path with the reason. No document is sound beyond that list.
5. An order that no key of the reader's trust signed is a problem: verdicts of erasures, cases and holds rest on orders.
6. A bad document is a list of problems, never an exception; a malformed key of the reader's is one. An export or a
   ledger from which no document of this checkpoint can be made says nothing of the document: `source_rejected`.
"""

from __future__ import annotations

import hashlib
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any

from sqlalchemy import Connection

from kvcustody.audit.reports.document import Document, read_document
from kvcustody.audit.reports.signing.document_signature import signature_problems, unsigned
from kvcustody.audit.store.database.signed_orders import RefusedOrder, SignedOrders
from kvcustody.audit.tlog.signed_note import parse_vkey
from kvcustody.audit.verify.documents.document_check import (
    LISTED_MAX,
    DocumentCheck,
    DocumentRules,
    MadeAgain,
    OpenedDocument,
    ReaderTrust,
    Unchecked,
    differing,
    is_unchecked,
)
from kvcustody.audit.verify.documents.made_again import SourceRejected, ledger_of_export
from kvcustody.errors import CustodyError

Source = Connection | Path | MadeAgain
_MALFORMED = (CustodyError, ValueError, LookupError, TypeError, AttributeError, OverflowError)
_REPLACED_KEY = Unchecked(
    "signature.enrolments",
    "whether the report's key had been replaced by then: the whole system log shows it",
)
_ORDERS = "whether somebody who may give orders signed what it rests on: give `--trust`, with `--export` or `--ledger`"


def verify(
    data: bytes,
    vkeys: Sequence[str],
    rules: Sequence[DocumentRules],
    *,
    expected_digest: str | None = None,
    source: Source | None = None,
    orders: SignedOrders | None = None,
) -> DocumentCheck:
    """Check a document of one of these kinds (rule 6). `orders`: whose orders count in its ledger.

    `source`: the ledger, the folder of an export, or what was made of one of them before.
    """
    trust = ReaderTrust(tuple(vkeys), tuple(parse_vkey(text) for text in vkeys), orders)
    try:
        document = read_document(data, [each.kind for each in rules])
        mine = next(each for each in rules if each.kind == document.kind)
        opened = OpenedDocument(document, mine.read(document))
    except _MALFORMED as problem:
        digest = hashlib.sha256(data).hexdigest()
        return DocumentCheck(digest=digest, problems=(f"the document cannot be checked: {_why(problem)}",))
    digest, problems = document.digest(), list[str]()
    if expected_digest is not None and digest != expected_digest:
        problems.append(f"the SHA-256 is `{digest}`, not `{expected_digest}`")
    remade, rejected = None, ""
    try:
        remade = _made(opened, mine, source, trust, problems)
    except SourceRejected as problem:
        rejected = problem.message
    wrong = [] if document.signature is None else signature_problems(document, trust.keys)
    problems += wrong
    unchecked = [*_of_signature(document, mine, remade, problems, is_compared=bool(remade or rejected))]
    leaves, shown = 0, dict[str, Any]()
    try:
        found = mine.check(opened, trust)
        problems += found.problems
        leaves, shown = found.leaves, dict(found.shown)
        unchecked += found.unchecked
        if remade is not None:
            problems += [*remade.problems, *_differences(document, remade, mine), *_order_problems(remade.refused)]
    except _MALFORMED as problem:
        problems.append(f"the document cannot be checked: {_why(problem)}")
    unchecked += mine.alone(opened) if remade is None else remade.unchecked
    if mine.orders is not None and (remade is None or remade.refused is None):
        unchecked.append(Unchecked(mine.orders, _ORDERS))
    signed_by = "" if document.signature is None or wrong else document.signature.key
    return DocumentCheck(
        kind=document.kind.name,
        digest=digest,
        checkpoint=document.checkpoint,
        leaves=leaves,
        problems=tuple(problems),
        unchecked=tuple(unchecked),
        signed_by=signed_by,
        source=remade.source if remade else "",
        source_rejected=rejected,
        shown=shown,
    )


def make_again(
    data: bytes,
    vkeys: Sequence[str],
    rules: Sequence[DocumentRules],
    source: Connection | Path,
    orders: SignedOrders | None = None,
) -> MadeAgain:
    """Return the document that `verify` compares with, for callers that check many documents of one source.

    Raises `LedgerError` for a document that is none, and `SourceRejected` as `verify`.
    """
    document = read_document(data, [each.kind for each in rules])
    mine = next(each for each in rules if each.kind == document.kind)
    trust = ReaderTrust(tuple(vkeys), tuple(parse_vkey(text) for text in vkeys), orders)
    return _again(OpenedDocument(document, mine.read(document)), mine, source, trust)


def _again(opened: OpenedDocument, mine: DocumentRules, source: Connection | Path, trust: ReaderTrust) -> MadeAgain:
    if isinstance(source, Connection):
        return mine.from_ledger(opened, source, trust)
    with ledger_of_export(source, mine.seal(opened), trust.vkeys) as connection:
        return mine.from_export(opened, source, connection, trust)


def _made(
    opened: OpenedDocument,
    mine: DocumentRules,
    source: Source | None,
    trust: ReaderTrust,
    problems: list[str],
) -> MadeAgain | None:
    """Return the remade document; adds a problem if the document's own facts prevent it."""
    if source is None or isinstance(source, MadeAgain):
        return source
    try:
        return _again(opened, mine, source, trust)
    except SourceRejected:
        raise
    except _MALFORMED as problem:
        problems.append(f"it cannot be made again: {_why(problem)}")
    return None


def _of_signature(
    document: Document,
    mine: DocumentRules,
    remade: MadeAgain | None,
    problems: list[str],
    *,
    is_compared: bool,
) -> Iterator[Unchecked]:
    """What is not checked of who signed; that nobody did is a problem where nothing else shows the facts."""
    if document.signature is not None:
        if document.kind.signer == "reports" and remade is None:
            yield _REPLACED_KEY
    elif is_compared and mine.may_be_unsigned:
        yield Unchecked("signature", unsigned(document))
    else:
        problems.append(unsigned(document))


def _order_problems(refused: Sequence[RefusedOrder] | None) -> list[str]:
    """Each order that a document's verdicts rest on, and that does not count (at most `LISTED_MAX`)."""
    refused = refused or ()
    found = [f"its verdicts rest on an order that does not count: {order}" for order in refused[:LISTED_MAX]]
    more = len(refused) - LISTED_MAX
    return found + ([f"and on {more} more such orders"] if more > 0 else [])


def _differences(document: Document, remade: MadeAgain, mine: DocumentRules) -> list[str]:
    """Every field that is not what the document has that was made again."""
    stated, again = mine.comparable(document.facts), mine.comparable(remade.facts)
    differences = [
        f"`{path}` is {_shown(one)}; by {remade.source} it is {_shown(other)}"
        for path, one, other in differing(stated, again)
        if not is_unchecked(path, (*remade.unchecked, Unchecked("version", "")))
    ]
    more = len(differences) - LISTED_MAX
    return differences[:LISTED_MAX] + ([f"and {more} more fields"] if more > 0 else [])


def _shown(value: Any) -> str:
    text = str(value)
    return f"`{text}`" if len(text) <= 80 else f"`{text[:77]}...`"


def _why(problem: Exception) -> str:
    return problem.message if isinstance(problem, CustodyError) else repr(problem)
