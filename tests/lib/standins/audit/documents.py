"""The one verifier as tests call it, by kind; forgeries that are signed again; and fields of a document by path."""

from __future__ import annotations

import base64
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from sqlalchemy import Connection

from kvcustody.audit.reports.document import Document, Facts, Signature
from kvcustody.audit.reports.erasure.certificate import CERTIFICATE, SelectorOpening
from kvcustody.audit.reports.model import Report
from kvcustody.audit.reports.signing.document_signature import sign_document
from kvcustody.audit.store.database.signed_orders import SignedOrders
from kvcustody.audit.tlog.signing_key import SigningKey, sign_statement
from kvcustody.audit.verify.documents.certificate_rules import CertificateRules
from kvcustody.audit.verify.documents.document_check import DocumentCheck, MadeAgain
from kvcustody.audit.verify.documents.report_rules import ReportRules
from kvcustody.audit.verify.documents.verify import make_again, verify
from kvcustody.governance.processing.record_rules import RecordRules
from kvcustody.policies.document.model import Policy

UNSIGNED = "no key signed the report: anybody may have written it"


def verify_report(data: bytes, vkeys: Sequence[str], **how: Any) -> DocumentCheck:
    """A check of a report."""
    return verify(data, vkeys, [ReportRules()], **how)


def verify_certificate(
    data: bytes,
    vkeys: Sequence[str],
    opening: SelectorOpening | None = None,
    orders: SignedOrders | None = None,
    **how: Any,
) -> DocumentCheck:
    """A check of a certificate."""
    return verify(data, vkeys, [CertificateRules(opening)], orders=orders, **how)


def verify_record(data: bytes, vkeys: Sequence[str], given: Policy | None = None, **how: Any) -> DocumentCheck:
    """A check of a record of processing."""
    return verify(data, vkeys, [RecordRules(given)], **how)


def report_again(
    source: Connection | Path, report: Report, vkeys: Sequence[str], orders: SignedOrders | None = None
) -> MadeAgain:
    """The report made again, as the verifier makes it."""
    return make_again(report.to_bytes(), vkeys, [ReportRules()], source, orders)


def signed_by_reports_key(connection: Connection, report: Report, key: SigningKey) -> Report:
    """The report, signed by the key that the ledger names."""
    return report.replace(signature=sign_document(connection, report.document(), key).signature)


def says_orders_unchecked(check: DocumentCheck) -> bool:
    """Whether it says that nobody looked at who gave the orders that the document rests on."""
    return bool({"boundary.orders", "orders"} & {each.path for each in check.unchecked})


def signed_again(document: Document, facts: Facts, key: SigningKey) -> Document:
    """Other facts under a signature that holds: whoever made it has the key."""
    false = document._replace(facts=facts)
    made = sign_statement(key, false.statement(key.name))
    carried = () if document.signature is None else document.signature.enrolments
    data = base64.b64encode(made.data).decode()
    return false._replace(signature=Signature(str(key.verifier), made.key_id.hex(), data, carried))


def signed_certificate(facts: Facts, key: SigningKey) -> Document:
    """The certificate of these facts, whatever they are, signed by the key of the log."""
    return signed_again(Document(CERTIFICATE, facts, 0), facts, key)
