"""Checks a record of processing: with its file and the log's public keys, and against the ledger where it is there.

1. The file alone shows who signed it, and that it agrees with itself. That it is of the ledger is shown by making it
   again, field by field: from the ledger as the record's checkpoint left it, or from a verified export of that.
2. Its verdicts rest on orders: one that no key of the reader's trust signed is a problem.
3. What no ledger has is listed with the reason (`ReportCheck.unchecked`): what was stated, and documents of policies
   that came with the question.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from pathlib import Path

import orjson
from sqlalchemy import Connection

from kvcustody._version import __version__
from kvcustody.audit.reports.framework import load_framework
from kvcustody.audit.reports.signing.report_signature import check_signature
from kvcustody.audit.store.database.signed_orders import SignedOrders
from kvcustody.audit.tlog.signed_note import VerifierKey, parse_vkey
from kvcustody.audit.verify.report.figures_again import SealedAs, Unchecked, ledger_of_export, orders_refused
from kvcustody.audit.verify.report.verify_report import ORDERS_NOT_CHECKED, ReportCheck, order_problems
from kvcustody.errors import ConfigError, LedgerError
from kvcustody.governance.processing.build_record import FRAMEWORK, RecordRequest, build_record
from kvcustody.governance.processing.record import (
    GIVEN,
    OF_RELEASE,
    OPEN,
    PROCESSOR,
    SCHEMA,
    STATEMENT,
    UNKNOWN,
    ControllerStatement,
    ProcessingRecord,
    record_of_facts,
)
from kvcustody.policies.document.digest import digest as digest_of
from kvcustody.policies.document.model import Policy

UNSIGNED = "no key signed the record: anybody may have written it"
_OF_LEDGER = (
    "categories",
    "due",
    "covered",
    "policies",
    "recipients",
    "time_limits",
    "erasure_within",
    "measures",
    "controls",
    "policy",
    "policy_digest",
    "run_by",
    "history",
    "orders",
)
_OF_DOCUMENTS = ("recipients", "time_limits", "erasure_within", "measures")
_NOT_COMPARED = "not compared with the ledger: give `--ledger` or `--export`"
_STATED = ("controller", "contact", "officer", "purposes", "subjects", "data", "transfers", "controllers")


def is_processing_record(data: bytes) -> bool:
    """Whether a file is meant as one."""
    try:
        body = orjson.loads(data)
    except orjson.JSONDecodeError:
        return False
    return (
        isinstance(body, dict)
        and str(body.get("schema_name", "")).partition("@")[0] == SCHEMA.partition("@")[0]
    )


def verify_record(
    data: bytes,
    vkeys: Sequence[str],
    *,
    expected_digest: str | None = None,
    connection: Connection | None = None,
    given: Policy | None = None,
    export: Path | None = None,
    orders: SignedOrders | None = None,
) -> ReportCheck:
    """Check `ropa.json`; a bad one is a list of problems. `given` is the policy that the record was made with.

    `export`: the folder of one, in place of the ledger's `connection`. `orders`: whose orders count in it (rule 2).
    """
    keys = [parse_vkey(text) for text in vkeys]
    try:
        record = record_of_facts(orjson.loads(data))
        if record.to_bytes() != data:
            raise LedgerError("its bytes are not those that a record of these values has")
    except (orjson.JSONDecodeError, LedgerError) as problem:
        why = problem.message if isinstance(problem, LedgerError) else "it is no JSON"
        return ReportCheck("", 0, 0, (f"the record cannot be checked: {why}",))
    digest, problems = record.digest(), list(_disagreements(record))
    if expected_digest is not None and digest != expected_digest:
        problems.append(f"the SHA-256 is `{digest}`, not `{expected_digest}`")
    signed_by, wrong = _signature(record, digest, keys)
    problems += wrong
    source, refused = "", None
    if connection is not None and record.checkpoint:
        source = "the ledger"
        problems += _differences(connection, record, given)
        refused = orders_refused(connection, record.checkpoint, orders)
    elif export is not None:
        try:
            with ledger_of_export(export, SealedAs(record.checkpoint), vkeys) as made:
                source = "the export"
                problems += _differences(made, record, given)
                refused = orders_refused(made, record.checkpoint, orders)
        except LedgerError as problem:
            problems.append(f"it cannot be made again from the export: {problem.message}")
    problems += order_problems(refused)
    unchecked = tuple(_unchecked(record, given, is_made_again=bool(source)))
    if refused is None:
        unchecked += (ORDERS_NOT_CHECKED._replace(path="orders"),)
    return ReportCheck(digest, record.checkpoint, 0, tuple(problems), unchecked, signed_by, source)


def _signature(record: ProcessingRecord, digest: str, keys: Sequence[VerifierKey]) -> tuple[str, list[str]]:
    if record.signature is None:
        return "", [UNSIGNED]
    facts = record.facts()["signature"]
    try:
        wrong = check_signature(facts, digest, record.checkpoint, keys, STATEMENT)
    except (LedgerError, ValueError, KeyError, TypeError) as problem:
        why = problem.message if isinstance(problem, LedgerError) else repr(problem)
        return "", [f"the signature does not hold: {why}"]
    return ("" if wrong else record.signature.key), wrong


def _disagreements(record: ProcessingRecord) -> Iterator[str]:
    """What the record has to agree with itself about."""
    digests = {one.digest for one in record.policies}
    known = {one.digest for one in record.policies if one.source != UNKNOWN}
    if {one.policy_digest for one in record.time_limits} != known:
        yield "time limits are not of the policies that it names, each"
    if not {one.policy_digest for one in record.recipients} <= known or record.policy_digest not in digests:
        yield "recipients, or the policy, are of a policy that it does not name"
    if any(one.since_us >= record.until_us or 0 < one.until_us <= record.since_us for one in record.policies):
        yield "a policy was not in effect in the period"
    sums = [sum(getattr(one, name) for one in record.categories) for name in ("due", "covered")]
    if sums != [record.due, record.covered] or not 0 <= record.covered <= record.due:
        yield "the categories do not add up to what was due and covered"
    if (record.role == PROCESSOR) != bool(record.controllers) and record.categories:
        yield "a processor names the controllers that it acts for, a controller none"
    titles = {one.id: one.title for one in load_framework(FRAMEWORK).controls}
    if any(titles.get(one.control) != one.title or one.framework != FRAMEWORK for one in record.controls):
        yield "a control is not one of the library"


def _differences(connection: Connection, record: ProcessingRecord, given: Policy | None) -> Iterator[str]:
    """Fields that the ledger does not give (rule 1)."""
    if record.version != __version__:
        yield f"version {record.version} made it and this is {__version__}: it can be made again with that one"
        return
    stated = ControllerStatement(*(getattr(record, name) for name in ControllerStatement._fields))
    asked = RecordRequest(
        record.role,
        record.checkpoint,
        record.since_us,
        record.until_us,
        stated,
        tuple(one for one in record.controllers if one.name != OPEN),
    )
    lacking = _lacking(record, given)
    try:
        again = build_record(connection, asked, given=given)
    except (ConfigError, LedgerError) as problem:
        if not lacking:
            yield f"it cannot be made again: {problem.message}"
        return
    passed = {
        "signature",
        *((*_OF_DOCUMENTS, "policies", "policy", "policy_digest", "run_by") if lacking else ()),
    }
    for name in ProcessingRecord._fields:
        if name not in passed and getattr(again, name) != getattr(record, name):
            yield f"`{name}` is not what the ledger gives"
    if lacking:
        ours = {one.digest: one for one in again.policies}
        for policy in record.policies:
            if policy.digest not in lacking and policy != ours.get(policy.digest):
                yield f"policy `{policy.digest}` is not what the ledger gives"


def _lacking(record: ProcessingRecord, given: Policy | None) -> set[str]:
    """Digests of policies whose documents are not in the ledger's leaves, nor given now."""
    away = {one.digest for one in record.policies if one.source in (GIVEN, OF_RELEASE)}
    return away - ({digest_of(given)} if given is not None else set())


def _unchecked(record: ProcessingRecord, given: Policy | None, *, is_made_again: bool) -> Iterator[Unchecked]:
    for name in ("role", "since_us", "until_us"):
        yield Unchecked(name, "whether it was this that was asked for")
    for name in _STATED:
        yield Unchecked(name, "it is what the controller or the processor states")
    lacking = _lacking(record, given)
    for name in _OF_LEDGER:
        if not is_made_again:
            yield Unchecked(name, _NOT_COMPARED)
        elif name in _OF_DOCUMENTS and lacking:
            yield Unchecked(
                name, f"of policies whose documents are not in the leaves: {', '.join(sorted(lacking))}"
            )
