"""Checks an erasure's certificate offline: with the document, the public keys that the reader trusts, and nothing else.

1. The document is hostile: it is bounded, and every figure in it is computed again from leaves whose place in the
   ledger is proved under a checkpoint that a trusted key signed.
2. A certificate that claims more than its leaves show is refused with what it claims and what they show.
3. Every worker that was at work when the erasure was requested, as signed starts and ends say, owes an answer.
4. With the opening, the selector must be the one that the certificate commits to.
5. With the keys that may sign orders, the request must be signed by one, or an `order-signed` leaf that it carries.
6. What no leaf of the document shows is listed by its path with the reason: no certificate is sound beyond that list.
"""

from __future__ import annotations

import base64
import binascii
from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Any, NamedTuple

import orjson

from kvcustody.audit.evidence.erasure.certificate import (
    EARLIER_LIMITS,
    LIMITS,
    REQUESTED,
    SCHEMA,
    SelectorOpening,
    statement_text,
)
from kvcustody.audit.evidence.erasure.erasure_holds import holds_among
from kvcustody.audit.evidence.erasure.figures_from_leaves import ErasureFigures, figures_of
from kvcustody.audit.evidence.erasure.who_owes import owing, without_answer
from kvcustody.audit.evidence.processes.enforcement import CANARY, MONITOR, NotEnforced, unnamed_qualification
from kvcustody.audit.evidence.processes.marked_processes import Marked, marked_processes
from kvcustody.audit.evidence.processes.work_periods import work_periods
from kvcustody.audit.leaf.merkle import TreeHead, leaf_hash
from kvcustody.audit.store.database.signed_orders import SignedOrders
from kvcustody.audit.tlog.proofs import check_inclusion
from kvcustody.audit.tlog.root_log import check_head, parse_head_proof
from kvcustody.audit.tlog.signed_note import NoteSignature, VerifierKey, parse_vkey
from kvcustody.audit.tlog.signing_key import verify_statement
from kvcustody.errors import LedgerError
from kvcustody.signed_document import encode_ascii

DOCUMENT_BYTES_MAX = 256 << 20
_PARTS = {
    *(
        "schema",
        "erasure",
        "issued_us",
        "outcome",
        "request",
        "marked",
        "monitored",
        "workers",
        "waiting",
        "unreachable",
    ),
    *("holds", "population", "figures", "ledger", "leaves", "limits", "order"),
}
_REQUEST = {"erasure", "tenant", "selector", "subject", "session", "actor", "at_us", "deadline_us", "detail"}


class NotShown(NamedTuple):
    """What no leaf of a certificate shows, and why; `is_exact`: it is about a list as a whole, not about its items."""

    path: str
    why: str
    is_exact: bool = False

    def is_about(self, path: str) -> bool:
        """Whether a field is among it."""
        inside = not self.is_exact and path.startswith((f"{self.path}.", f"{self.path}["))
        return path == self.path or inside


NOT_SHOWN = (
    NotShown("issued_us", "when it was issued is its issuer's word"),
    NotShown("workers", "what answers say beyond that they were given: the leaves of answers say it"),
    NotShown("population", "how many residencies the ledger had, and by which query, but for the units"),
    NotShown(
        "monitored", "when policies were not enforced: `enforcement-changed` leaves of the system log say it"
    ),
    NotShown("holds", "whether a hold that somebody placed was left out: an export has them all", True),
    NotShown("leaves", "whether a leaf that changes no figure was left out: an export has them all", True),
)
ORDER_NOT_CHECKED = NotShown(
    "request",
    "whether somebody who may give orders asked for it: give `--trust`, where orders are signed",
    True,
)
NOT_OPENED = NotShown("request.commitment", "which selector it is of: give `--opening`")
PARTIAL = (
    NotShown("waiting", "which of those without an answer had time left"),
    NotShown("unreachable", "which of those without an answer had none"),
)


@dataclass(slots=True)
class CertificateReport:
    """What a check found. `ok`: everything that the certificate says is shown by leaves under a trusted signature."""

    erasure: str = ""
    outcome: str = ""
    figures: ErasureFigures | None = None
    opened: bool = False
    marked: Marked = ()
    monitored: str = ""
    problems: list[str] = field(default_factory=list)
    unchecked: tuple[NotShown, ...] = ()

    @property
    def ok(self) -> bool:
        """No problem was found."""
        return not self.problems


def verify(
    document: bytes,
    vkeys: Sequence[str],
    opening: SelectorOpening | None = None,
    orders: SignedOrders | None = None,
) -> CertificateReport:
    """Check a certificate; a bad one is a report with problems. Raises `NoteError` for a malformed key of yours.

    `orders`: whose orders count in the ledger that it is of (rule 5).
    """
    keys = [parse_vkey(text) for text in vkeys]
    report = CertificateReport()
    if len(document) > DOCUMENT_BYTES_MAX:
        report.problems.append(f"the document has {len(document)} bytes, over {DOCUMENT_BYTES_MAX}")
        return report
    try:
        whole = orjson.loads(document)
        if whole.keys() != {"body", "signature"} or whole["signature"].keys() != {"name", "key_id", "data"}:
            report.problems.append("it has parts that no certificate has")
        _check(report, whole["body"], whole["signature"], keys, opening)
        _check_order(report, whole["body"], orders)
    except (orjson.JSONDecodeError, KeyError, TypeError, ValueError, AttributeError, IndexError) as problem:
        report.problems.append(f"the document is malformed ({type(problem).__name__})")
    except LedgerError as problem:
        report.problems.append(problem.message)
    return report


def _check(
    report: CertificateReport,
    body: dict[str, Any],
    signature: dict[str, str],
    keys: Sequence[VerifierKey],
    opening: SelectorOpening | None,
) -> None:
    if body["schema"] != SCHEMA:
        report.problems.append(f"its schema is `{body['schema']}`, not `{SCHEMA}`")
        return
    if body.keys() | {"marked", "monitored", "holds", "order"} != _PARTS:
        report.problems.append("it has parts that no certificate has, or lacks some")
    report.erasure, report.outcome = body["erasure"], body["outcome"]
    report.unchecked = NOT_SHOWN
    _check_signature(report, body, signature, keys)
    bodies = _proved(report, body, keys)
    figures = report.figures = figures_of(bodies, body["erasure"])
    if figures.as_dict() != body["figures"]:
        report.problems.append(f"it states {body['figures']}, its leaves show {figures.as_dict()}")
    report.marked = marked_processes(bodies)
    if body.get("marked", []) != [one._asdict() for one in report.marked]:
        report.problems.append(
            "the processes that it calls replayed or generated are not those of its leaves"
        )
    spans = tuple(NotEnforced(**one) for one in body.get("monitored", []))
    if any(one.mode not in (MONITOR, CANARY) or type(one.from_us) is not int for one in spans):
        report.problems.append("the times of monitoring that it states are none")
    else:
        report.monitored = unnamed_qualification(spans)
    asked = body["request"]
    holds = [one._asdict() for one in holds_among(bodies, asked["tenant"], asked["subject"])]
    if body.get("holds", []) != holds:
        report.problems.append("the legal holds that it lists are not those of its leaves")
    _check_request(report, body, bodies, opening)
    _check_statements(report, body, figures)
    _check_outcome(report, body, bodies, figures)


def _check_signature(
    report: CertificateReport, body: dict[str, Any], signature: dict[str, str], keys: Sequence[VerifierKey]
) -> None:
    key = next((one for one in keys if one.name == signature["name"]), None)
    if key is None:
        report.problems.append(f"no trusted key is named `{signature['name']}`")
        return
    try:
        data = base64.b64decode(signature["data"], validate=True)
    except binascii.Error:
        report.problems.append("the signature is malformed")
        return
    made = NoteSignature(signature["name"], bytes.fromhex(signature["key_id"]), data)
    verify_statement(key, statement_text(key.name, encode_ascii(body)), made)


def _proved(
    report: CertificateReport, body: dict[str, Any], keys: Sequence[VerifierKey]
) -> list[dict[str, Any]]:
    """The bodies of the leaves whose place is proved; the others are problems."""
    heads: dict[str, TreeHead] = {}
    for log, text in body["ledger"]["heads"].items():
        sealed = check_head(parse_head_proof(text.encode()), keys)
        if sealed.name == log:
            heads[log] = sealed.head
            size = sealed.signed.checkpoint.head.size
            if size != body["ledger"]["checkpoint_size"]:
                report.problems.append(
                    f"the head of `{log}` is under a checkpoint of {size}, not the stated one"
                )
        else:
            report.problems.append(f"the head of `{log}` is that of another log")
    bodies = []
    seen: set[tuple[str, int]] = set()
    for one in body["leaves"]:
        log, idx, leaf = one["log"], one["idx"], one["leaf"].encode()
        if log not in heads or (log, idx) in seen:
            report.problems.append(f"leaf {idx} of `{log}` has no head, or is there twice")
            continue
        seen.add((log, idx))
        path = [base64.b64decode(hash_, validate=True) for hash_ in one["path"]]
        check_inclusion(leaf_hash(leaf), idx, heads[log], path)
        if one.keys() != {"log", "idx", "leaf", "path"}:
            report.problems.append(f"leaf {idx} of `{log}` has parts that none has")
        bodies.append(orjson.loads(leaf))
    if heads.keys() != {log for log, _ in seen} or body["ledger"].keys() != {"checkpoint_size", "heads"}:
        report.problems.append("it carries heads of logs without a leaf, or parts that none has")
    return bodies


def _check_request(
    report: CertificateReport,
    body: dict[str, Any],
    bodies: list[dict[str, Any]],
    opening: SelectorOpening | None,
) -> None:
    asked = [one for one in bodies if one["kind"] == REQUESTED and one["erasure"] == body["erasure"]]
    if len(asked) != 1:
        report.problems.append(f"it has one request, and the leaves of requests are {len(asked)}")
        return
    stated = body["request"]
    if stated.keys() != _REQUEST | {"commitment"}:
        report.problems.append("its request has parts that none has, or lacks some")
    deadline_us = int(asked[0]["at_us"]) - int(asked[0]["boot_us"]) + int(asked[0]["deadline_boot_us"])
    if stated["erasure"] != body["erasure"] or stated["deadline_us"] != deadline_us:
        report.problems.append("it states another erasure or deadline than the request says")
    for name in ("tenant", "selector", "subject", "session", "actor", "at_us", "detail"):
        if stated[name] != asked[0][name]:
            report.problems.append(
                f"it states `{name}` as `{stated[name]}`, the request says `{asked[0][name]}`"
            )
    if opening is None:
        report.unchecked += (NOT_OPENED,)
    else:
        report.opened = opening.commitment() == stated["commitment"]
        if not report.opened:
            report.problems.append("the opening is not of this certificate")


def _check_order(report: CertificateReport, body: dict[str, Any], orders: SignedOrders | None) -> None:
    """Whether its request counts, as its issuer says, and as `orders` do."""
    if body.get("order"):
        report.problems.append(f"nobody follows its request, as its issuer says: {body['order']}")
    if orders is None:
        report.unchecked += (ORDER_NOT_CHECKED,)
        return
    leaves = [one["leaf"].encode() for one in body["leaves"]]
    signed = orders.beside(leaves)
    for leaf in leaves:
        said = orjson.loads(leaf)
        refused = signed.refusal(leaf) if said["kind"] == REQUESTED else None
        if refused is not None and said["erasure"] == body["erasure"]:
            report.problems.append(f"nobody follows its request: {refused.why}")


def _check_statements(report: CertificateReport, body: dict[str, Any], figures: ErasureFigures) -> None:
    if tuple(body["limits"]) not in (LIMITS, *EARLIER_LIMITS):
        report.problems.append("the limits that it states are not those of any certificate")
    if body["population"].get("units") != figures.units:
        report.problems.append("the units of its population are not those of its leaves")


def _check_outcome(
    report: CertificateReport, body: dict[str, Any], bodies: list[dict[str, Any]], figures: ErasureFigures
) -> None:
    if body["outcome"] == "partial":
        report.unchecked += PARTIAL
        _check_partial(report, body, bodies, figures)
        return
    if body["outcome"] != "complete":
        report.problems.append(f"its outcome `{body['outcome']}` is none")
        return
    for worker in without_answer(bodies, body["erasure"]):
        report.problems.append(f"no leaf of worker `{worker}` says that it is complete")
    owed = owing(work_periods(bodies), int(body["request"]["at_us"]))
    if owed != sorted(worker["worker"] for worker in body["workers"]):
        report.problems.append(
            "the workers that it lists are not those that were at work when it was requested"
        )
    copies = figures.waiting_copies
    if figures.unproven or copies or figures.reread_nonzero or body["waiting"] or body["unreachable"]:
        away = len(body["waiting"]) + len(body["unreachable"])
        report.problems.append(
            f"it says complete, with {figures.unproven} blocks unproven, {copies} copies without evidence of their "
            f"end, {figures.reread_nonzero} bytes not zero, and {away} workers without an answer"
        )


def _check_partial(
    report: CertificateReport, body: dict[str, Any], bodies: list[dict[str, Any]], figures: ErasureFigures
) -> None:
    """Partial is what leaves something open: an answer, a block, a copy, or bytes that were not zero."""
    is_open = figures.unproven or figures.waiting_copies or figures.reread_nonzero
    if not (is_open or without_answer(bodies, body["erasure"]) or body["waiting"] or body["unreachable"]):
        report.problems.append("it says partial, and its leaves leave nothing open")
