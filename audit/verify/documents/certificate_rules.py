"""Rules of erasures' certificates: every figure is recomputed from the leaves in the certificate.

1. A certificate that claims more than its leaves show is refused with what it claims and what they show.
2. Every worker that was at work when the erasure was requested, as signed starts and ends say, owes an answer.
3. With the opening, the selector must be the one that the certificate commits to.
4. With the keys that may sign orders, the request must be signed by one, or an `order-signed` leaf that it carries.
"""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path
from typing import Any

import orjson
from sqlalchemy import Connection

from kvcustody.audit.evidence.erasure.figures_from_leaves import figures_of
from kvcustody.audit.evidence.processes.enforcement import NotEnforced, unnamed_qualification
from kvcustody.audit.evidence.processes.marked_processes import marked_processes
from kvcustody.audit.reports.document import Document, Facts
from kvcustody.audit.reports.erasure.certificate import CERTIFICATE, SelectorOpening, certificate_facts
from kvcustody.audit.store.database.signed_orders import SignedOrders
from kvcustody.audit.verify.documents.certificate_agreement import (
    REQUESTED_KIND,
    certificate_disagreements,
    check_parts,
    differ,
    proved_bodies,
)
from kvcustody.audit.verify.documents.document_check import (
    DocumentRules,
    MadeAgain,
    OpenedDocument,
    ReaderTrust,
    ShownAlone,
    Unchecked,
)
from kvcustody.audit.verify.documents.made_again import SourceRejected

ISSUED = Unchecked("issued_us", "when it was issued is its issuer's word")
NOT_SHOWN = (
    ISSUED,
    Unchecked("workers", "what answers say beyond that they were given: the leaves of answers say it"),
    Unchecked("population", "how many residencies the ledger had, and by which query, but for the units"),
    Unchecked("monitored", "when policies were not enforced: `enforcement-changed` leaves of the system log say it"),
    Unchecked("holds", "whether a hold that somebody placed was left out: an export has them all", True),
    Unchecked("leaves", "whether a leaf that changes no figure was left out: an export has them all", True),
)
ORDER_NOT_CHECKED = Unchecked(
    "request",
    "whether somebody who may give orders asked for it: give `--trust`, where orders are signed",
    True,
)
NOT_OPENED = Unchecked("request.commitment", "which selector it is of: give `--opening`")
PARTIAL = (
    Unchecked("waiting", "which of those without an answer had time left"),
    Unchecked("unreachable", "which of those without an answer had none"),
)


class CertificateRules(DocumentRules):
    """Rules of certificates; `opening` opens the commitment, if the reader has it."""

    kind = CERTIFICATE

    def __init__(self, opening: SelectorOpening | None = None) -> None:
        self._opening = opening

    def read(self, document: Document) -> Facts:
        """Return its facts; raises `LedgerError` if their parts are not a certificate's."""
        check_parts(document.facts)
        return document.facts

    def check(self, opened: OpenedDocument, trust: ReaderTrust) -> ShownAlone:
        """Check its leaves, and statements that they do not support."""
        facts, problems = opened.facts, list[str]()
        bodies = proved_bodies(facts, trust.keys, problems)
        figures = figures_of(bodies, facts["erasure"])
        if differ(figures.as_dict(), facts["figures"]):
            problems.append(f"it states {facts['figures']}, its leaves show {figures.as_dict()}")
        problems += certificate_disagreements(facts, bodies)
        problems += _refusals(facts, trust.orders)
        unchecked: tuple[Unchecked, ...] = ()
        is_opened = self._opening is not None and self._opening.commitment() == facts["request"]["commitment"]
        if self._opening is None:
            unchecked += (NOT_OPENED,)
        elif not is_opened:
            problems.append("the opening is not of this certificate")
        if trust.orders is None:
            unchecked += (ORDER_NOT_CHECKED,)
        shown: dict[str, Any] = {
            "erasure": facts["erasure"],
            "outcome": facts["outcome"],
            "opened": is_opened,
            "figures": figures,
            "marked": marked_processes(bodies),
            "monitored": unnamed_qualification([NotEnforced(**one) for one in facts["monitored"]]),
        }
        return ShownAlone(problems, len(bodies), unchecked, shown)

    def alone(self, opened: OpenedDocument) -> tuple[Unchecked, ...]:
        """Return what none of its leaves shows."""
        return NOT_SHOWN + (PARTIAL if opened.facts["outcome"] == "partial" else ())

    def from_ledger(self, opened: OpenedDocument, connection: Connection, trust: ReaderTrust) -> MadeAgain:
        """Raise `SourceRejected`: an erasure's certificate also needs later leaves, which an export lacks."""
        size = opened.document.checkpoint
        raise SourceRejected(
            f"a certificate is compared with an export of its checkpoint: `kvcustody audit export --as-of {size}`"
        )

    def from_export(
        self, opened: OpenedDocument, folder: Path, connection: Connection, trust: ReaderTrust
    ) -> MadeAgain:
        """Return the certificate remade from every leaf of the ledger."""
        stated = opened.facts
        commitment = stated["request"]["commitment"]
        made = certificate_facts(connection, stated["erasure"], commitment, stated["issued_us"], is_proved=False)
        return MadeAgain({**made, **_order(stated)}, "the export", (ISSUED,))

    def comparable(self, facts: Facts) -> Any:
        """Return its facts without the leaves' proofs, which are checked separately."""
        ledger = {**facts["ledger"], "heads": sorted(facts["ledger"]["heads"])}
        return {**facts, "ledger": ledger, "leaves": [{**one, "path": []} for one in facts["leaves"]]}


def _order(stated: Facts) -> dict[str, Any]:
    """What its issuer says of the request, whose orders no export knows: that it says so is a problem."""
    return {"order": stated["order"]} if "order" in stated else {}


def _refusals(facts: Facts, orders: SignedOrders | None) -> Iterator[str]:
    """Why nobody follows its request, by the keys that its reader trusts (rule 4)."""
    if orders is None:
        return
    leaves = [one["leaf"].encode() for one in facts["leaves"]]
    signed = orders.beside(leaves)
    for leaf in leaves:
        body = orjson.loads(leaf)
        refused = signed.refusal(leaf) if body["kind"] == REQUESTED_KIND else None
        if refused is not None and body["erasure"] == facts["erasure"]:
            yield f"nobody follows its request: {refused.why}"
