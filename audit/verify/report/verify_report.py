"""Checks a report: with its file and the log's public keys, and with an export or the ledger where the reader has one.

1. The file alone shows who signed it, that every sampled leaf is under the signed checkpoint, that it agrees with
   itself, and that nothing is in it that the model has not. It does not show that its figures are those of the ledger.
2. A report made again from leaves (`figures_again`) is compared field by field: what differs is a problem.
3. What was not checked is listed by its path with the reason. A report is never sound beyond that list.
4. An order that no key of the reader's trust signed is a problem: verdicts of erasures, cases and holds rest on orders.
5. A bad report is a list of problems, never an exception; a malformed key of the reader's is one.
"""

from __future__ import annotations

import hashlib
from collections.abc import Iterator, Mapping, Sequence
from itertools import chain
from typing import Any, NamedTuple

import numpy as np
import orjson

from kvcustody._version import __version__
from kvcustody.audit.evidence.coverage.custody_units import DEVICE_TIER
from kvcustody.audit.kinds.block_runs import UNNAMED, decode_flat
from kvcustody.audit.leaf.change_items import plain_bodies, runs_of_items
from kvcustody.audit.leaf.leaf_schema import LIST_OF_KIND
from kvcustody.audit.reports.framework import NAMES
from kvcustody.audit.reports.model import Report
from kvcustody.audit.reports.sampling.population import PopulationMember
from kvcustody.audit.reports.sampling.sample import CONTEXT, SampleItem
from kvcustody.audit.reports.signing.read_report import report_of
from kvcustody.audit.reports.signing.report_signature import check_signature
from kvcustody.audit.store.database.signed_orders import RefusedOrder
from kvcustody.audit.tlog.checkpoint import SignedCheckpoint, open_checkpoint
from kvcustody.audit.tlog.root_log import check_leaf, parse_leaf_proof
from kvcustody.audit.tlog.signed_note import VerifierKey, parse_vkey
from kvcustody.audit.verify.report.figures_again import OWN_FRAMEWORK, MadeAgain, Unchecked
from kvcustody.audit.verify.report.identities import disagreements
from kvcustody.errors import LedgerError

LISTED_MAX = 100
UNSIGNED = "no key signed the report: anybody may have written it"
ALONE = (
    ("asked", "whether it was these parameters that were asked for"),
    ("boundary", "logs, workers, policies, issuers and witnesses, but for the checkpoint's own note"),
    ("population", "the definition, count, digest and identities"),
    ("coverage", "units and bytes by tenant and classification"),
    ("total", "units and bytes"),
    ("timeline", "units by part of the period"),
    ("timeliness", "times from due to destroyed"),
    ("recount", "the recount from leaves"),
    ("sampling", "how many members each stratum has"),
    ("sample", "verdicts of drawn custodies, but for the leaves that are proved"),
    ("exceptions", "what is not covered, and of whom"),
    ("exceptions_left_out", "how many groups are not listed"),
    ("activity", "erasures, findings and recorded events"),
    ("decided", "decisions and residencies by rule"),
    ("read_back", "what was read back"),
    ("losses", "gaps and spills"),
    ("storage", "ages and limits of each classification"),
    ("window", "the longest time between a leaf and its signature"),
    ("unscanned", "which pools were not scanned"),
    ("board", "workers and earlier periods of the first page; its other figures follow from other sections"),
    ("responses", "what people answered"),
    ("statuses", "whether the facts are those that they follow from"),
    ("opinion", "whether the facts are those that it follows from"),
    ("tiers", "copies off the device"),
    ("proof", "the policy's proof"),
)
_GIVE = "not compared with the ledger: give `--export` or `--ledger`"


class ReportCheck(NamedTuple):
    """What was looked at, what is wrong with it, and what was not checked; `source`: what it was made again from."""

    digest: str
    checkpoint: int
    leaves: int
    problems: tuple[str, ...]
    unchecked: tuple[Unchecked, ...] = ()
    signed_by: str = ""
    source: str = ""

    @property
    def ok(self) -> bool:
        """No problem was found."""
        return not self.problems


def verify_report(
    data: bytes,
    vkeys: Sequence[str],
    *,
    expected_digest: str | None = None,
    again: MadeAgain | None = None,
) -> ReportCheck:
    """Check `report.json`; raises `NoteError` for a malformed key of the reader's. `again`: rule 2."""
    keys = [parse_vkey(text) for text in vkeys]
    problems: list[str] = []
    digest, size, leaves, signed_by = hashlib.sha256(data).hexdigest(), 0, 0, ""
    try:
        report = open_report(data)
        digest = report.digest()
        size = report.boundary.checkpoint.size
        if expected_digest is not None and digest != expected_digest:
            problems.append(f"the SHA-256 is `{digest}`, not `{expected_digest}`")
        signed_by, wrong = _signature(report, digest, keys, again)
        problems += wrong
        signed = _checkpoint(report, keys, problems)
        problems += disagreements(report)
        leaves = _leaves(report, keys, signed, problems)
        if again is not None:
            problems += _differences(report, again)
            problems += order_problems(again.refused)
    except (LedgerError, ValueError, LookupError, TypeError, AttributeError, OverflowError) as problem:
        text = problem.message if isinstance(problem, LedgerError) else repr(problem)
        problems.append(f"the report cannot be checked: {text}")
        return ReportCheck(digest, size, leaves, tuple(problems))
    return ReportCheck(
        digest,
        size,
        leaves,
        tuple(problems),
        _unchecked(report, again),
        signed_by,
        again.source if again else "",
    )


def open_report(data: bytes) -> Report:
    """The report in a file; raises `LedgerError` unless these bytes are the one form of it."""
    try:
        body = orjson.loads(data)
    except orjson.JSONDecodeError as problem:
        raise LedgerError(f"this is no JSON: {problem}") from None
    report = report_of(body)
    if report.to_bytes() != data:
        parts = [path for path, _, _ in _differing(body, orjson.loads(report.to_bytes()), "")]
        raise LedgerError(f"it is not in its one form: {', '.join(parts[:3]) or 'as bytes'}")
    return report


def _signature(
    report: Report, digest: str, keys: Sequence[VerifierKey], again: MadeAgain | None
) -> tuple[str, list[str]]:
    """Who signed, and what is wrong; that nobody did is a problem where nothing else shows the figures."""
    if report.signature is None:
        return "", [] if again is not None else [UNSIGNED]
    return report.signature.key, signature_problems(report, digest, keys)


def signature_problems(report: Report, digest: str, keys: Sequence[VerifierKey]) -> list[str]:
    """What is wrong with the signature of a signed report of this digest, by the log's keys."""
    body = orjson.loads(orjson.dumps(report.to_json()["signature"]))
    try:
        return check_signature(body, digest, report.asked.checkpoint, keys)
    except (LedgerError, ValueError, LookupError, TypeError) as problem:
        text = problem.message if isinstance(problem, LedgerError) else repr(problem)
        return [f"the signature does not verify: {text}"]


def _checkpoint(report: Report, keys: Sequence[VerifierKey], problems: list[str]) -> SignedCheckpoint:
    point = report.boundary.checkpoint
    signed = open_checkpoint(point.note.encode(), keys)
    head = signed.checkpoint.head
    stated = (signed.checkpoint.origin, head.size, head.root.hex())
    if stated != (point.origin, point.size, point.root):
        problems.append("the checkpoint is not the one that its note states")
    return signed


def _unchecked(report: Report, again: MadeAgain | None) -> tuple[Unchecked, ...]:
    made = [] if report.signature is None else [_REPLACED_KEY] if again is None else []
    if report.signature is None:
        made.append(Unchecked("signature", UNSIGNED))
    made.append(
        Unchecked(
            "version",
            "whether this version of kvcustody made it"
            if report.version == __version__
            else f"this is version {__version__}, which may state some things otherwise",
        )
    )
    if again is None or again.refused is None:
        made.append(ORDERS_NOT_CHECKED)
    if again is not None:
        return (*made, *again.unchecked)
    point = ("boundary.checkpoint.at_us", "boundary.checkpoint.signed_us")
    made += [Unchecked(path, "when it was sealed and signed is in no note") for path in point]
    made += [] if report.asked.framework in NAMES else OWN_FRAMEWORK
    return (*made, *(Unchecked(path, f"{what}: {_GIVE}") for path, what in ALONE))


ORDERS_NOT_CHECKED = Unchecked(
    "boundary.orders",
    "whether somebody who may give orders signed those that its verdicts rest on: give `--trust`, with `--export` or "
    "`--ledger`",
)
_REPLACED_KEY = Unchecked(
    "signature.enrolments",
    "whether the report's key had been replaced by then: the whole system log shows it",
)


def order_problems(refused: Sequence[RefusedOrder] | None) -> list[str]:
    """Each order that a document's verdicts rest on, and that does not count (at most `LISTED_MAX`)."""
    refused = refused or ()
    found = [f"its verdicts rest on an order that does not count: {order}" for order in refused[:LISTED_MAX]]
    more = len(refused) - LISTED_MAX
    return found + ([f"and on {more} more such orders"] if more > 0 else [])


def _differences(report: Report, again: MadeAgain) -> list[str]:
    """Every field that is not what the report has that was made again."""
    stated, made = (_comparable(each) for each in (report, again.report))
    found = [
        f"`{path}` is {_shown(one)}; by {again.source} it is {_shown(other)}"
        for path, one, other in _differing(stated, made, "")
        if not is_unchecked(path, (*again.unchecked, Unchecked("version", "")))
    ]
    more = len(found) - LISTED_MAX
    return found[:LISTED_MAX] + ([f"and {more} more fields"] if more > 0 else [])


def is_unchecked(path: str, unchecked: Sequence[Unchecked]) -> bool:
    """Whether a field is among the parts that were not checked."""
    return any(path == each.path or path.startswith((each.path + ".", each.path + "[")) for each in unchecked)


def _comparable(report: Report) -> Any:
    """Plain data without what is checked by itself: the signature, and the proofs of leaves."""
    body = orjson.loads(report._replace(signature=None).to_bytes())
    for item in body["sample"]:
        for leaf in item["leaves"]:
            leaf["proof"] = ""
    return body


def _differing(one: Any, other: Any, path: str) -> Iterator[tuple[str, Any, Any]]:
    if isinstance(one, dict) and isinstance(other, dict):
        for name in sorted({*one, *other}):
            below = f"{path}.{name}" if path else str(name)
            yield from _differing(one.get(name, _MISSING), other.get(name, _MISSING), below)
    elif isinstance(one, list) and isinstance(other, list):
        for place in range(max(len(one), len(other))):
            here, there = (side[place] if place < len(side) else _MISSING for side in (one, other))
            yield from _differing(here, there, f"{path}[{place}]")
    elif one != other or type(one) is not type(other):
        yield path, one, other


_MISSING = "not there"


def _shown(value: Any) -> str:
    text = str(value)
    return f"`{text}`" if len(text) <= 80 else f"`{text[:77]}...`"


def _leaves(
    report: Report, keys: Sequence[VerifierKey], signed: SignedCheckpoint, problems: list[str]
) -> int:
    """Check every leaf of the sample; how many there are. All stand under one note, whose signature is checked once."""
    count, note = 0, report.boundary.checkpoint.note.encode()
    for item in report.sample:
        used = _residencies_of(item)
        for leaf in item.leaves:
            count += 1
            where, data = f"leaf {leaf.idx} of `{leaf.log}`", leaf.leaf.encode()
            try:
                proof = parse_leaf_proof(leaf.proof.encode())
                sealed = check_leaf(proof, data, keys, signed=signed if proof.head.note == note else None)
            except LedgerError as problem:
                problems.append(f"{where}: {problem.message}")
                continue
            body = orjson.loads(data)
            if (sealed.name, proof.index) != (leaf.log, leaf.idx):
                problems.append(f"{where} is leaf {proof.index} of `{sealed.name}`")
            if proof.head.note != note:
                problems.append(f"{where} is proved under another checkpoint")
            if body["kind"] != leaf.kind:
                problems.append(f"{where} is of kind `{body['kind']}`")
            if not _belongs(body, item.custody, used):
                problems.append(f"{where} does not name the custody that it was drawn for")
    return count


def _residencies_of(item: SampleItem) -> set[tuple[str, int]]:
    """The residencies, by process, of the leaves that name the drawn custody."""
    found = set()
    for leaf in item.leaves:
        for body in plain_bodies(orjson.loads(leaf.leaf)):
            if "residency" in body and _names(body, item.custody._asdict()):
                found.add((str(body.get("of_incarnation") or body["incarnation"]), int(body["residency"])))
    return found


def _belongs(body: dict[str, Any], custody: PopulationMember, used: set[tuple[str, int]]) -> bool:
    """Whether a leaf names what was drawn, is a release of who used it, or says something of its whole process."""
    if body["kind"] in CONTEXT:
        return (
            body["kind"] == "erasure-requested"
            or body["incarnation"] == custody.incarnation
            or (body.get("of_incarnation") == custody.incarnation)
        )
    if custody.tier != DEVICE_TIER:
        return body.get("tier") == custody.tier and custody.copy in body.get("numbers", ())
    return _names(body, custody._asdict()) or any(
        "residency" in each
        and (str(each.get("of_incarnation") or each["incarnation"]), int(each["residency"])) in used
        for each in plain_bodies(body)
    )


def _names(body: Mapping[str, Any], custody: dict[str, Any]) -> bool:
    """Whether a leaf names the block at the generation."""
    pairs, _ = decode_flat(
        [
            *body.get("runs", ()),
            *body.get("written", ()),
            *chain.from_iterable(runs_of_items(body, LIST_OF_KIND).values()),
        ]
    )
    there = (pairs.pools == custody["pool"]) & (pairs.generations == custody["generation"])
    return bool((there & np.isin(pairs.blocks, (custody["block"], UNNAMED))).any())
