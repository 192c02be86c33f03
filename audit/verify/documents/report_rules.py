"""Rules of evidence reports: internal agreement, sampled leaves, and remaking.

1. Of an export every figure is made from leaves: they are written into an empty ledger of the reader's own, and the
   report is built on that. What no leaf says (`NOT_IN_LEAVES`) is taken from the report, and is unchecked.
2. What a report changed since an earlier checkpoint is made again too: the openings of the root log say how long every
   log was then.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from itertools import chain, islice
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np
import orjson
from sqlalchemy import Connection

from kvcustody._version import __version__
from kvcustody.audit.evidence.coverage.custody_units import DEVICE_TIER, last_event_us
from kvcustody.audit.exports.manifest import OPENINGS
from kvcustody.audit.kinds.block_runs import UNNAMED, decode_flat
from kvcustody.audit.leaf.change_items import plain_bodies, runs_of_items
from kvcustody.audit.leaf.leaf_schema import LIST_OF_KIND
from kvcustody.audit.leaf.merkle import EMPTY, Frontier, TreeHead, leaf_hashes
from kvcustody.audit.reports.build_report import build_report
from kvcustody.audit.reports.document import Document, Facts, read_document
from kvcustody.audit.reports.framework import NAMES, Framework, load_framework
from kvcustody.audit.reports.model import REPORT, Report
from kvcustody.audit.reports.section import sections
from kvcustody.audit.reports.sections.boundary import SECTION as BOUNDARY
from kvcustody.audit.reports.sections.changes import SECTION as CHANGES
from kvcustody.audit.reports.sections.changes import changes_since
from kvcustody.audit.reports.sections.proof import SECTION as PROOF
from kvcustody.audit.reports.sections.responses import SECTION as RESPONSES
from kvcustody.audit.reports.sections.sample import CONTEXT
from kvcustody.audit.reports.sections.window import SECTION as WINDOW
from kvcustody.audit.reports.signing.read_report import report_of
from kvcustody.audit.store.database.snapshot import as_of_sizes
from kvcustody.audit.tlog.proofs import ProofError, check_consistency
from kvcustody.audit.tlog.root_log import RootLeafOpening
from kvcustody.audit.verify.documents.document_check import (
    GIVE,
    DocumentRules,
    MadeAgain,
    OpenedDocument,
    ReaderTrust,
    ShownAlone,
    Unchecked,
    differing,
)
from kvcustody.audit.verify.documents.made_again import SealedAs, check_ledger, orders_refused
from kvcustody.audit.verify.documents.report_agreement import proved_leaves, stated_checkpoint
from kvcustody.errors import LedgerError

NOT_IN_LEAVES = (
    Unchecked("boundary.witnessed", "which witnesses had signed is in no leaf"),
    Unchecked("boundary.checkpoint.at_us", "when leaves were sealed is in no leaf"),
    Unchecked("boundary.checkpoint.signed_us", "when the checkpoint was signed is in no leaf"),
    Unchecked("window", "when leaves were signed is in no leaf"),
)
SAID_BY_PEOPLE = (
    Unchecked("responses", "what people answered to exceptions is in no leaf"),
    Unchecked("asked.preparer", "who prepared it is in no leaf: the signature says whose key signed"),
    Unchecked(
        "asked.organisation",
        "of which organisation it is stands in no leaf: the signature says whose key signed",
    ),
    Unchecked("asked.threshold_ppm", "which share its reader asked for is in no leaf"),
    Unchecked("asked.zone", "in which zone its reader asked for times is in no leaf"),
)
OWN_FRAMEWORK = (
    Unchecked("framework", "it is of the preparer's own file: whether its controls are what they say"),
    Unchecked("asked.framework", "it is of the preparer's own file"),
    Unchecked("statements", "they name controls of the preparer's own file"),
)
EARLIER_EDITION = Unchecked(
    "changes",
    "what was so at the earlier checkpoint: the export has not what opens each leaf of its root log",
)
PROOF_NOT_GIVEN = Unchecked("proof", "the policy was not given: prove it again with `--policy`")
_AT_ONCE = 20_000
NO_PATH = "none that leads from the earlier checkpoint to this one"


class ReportRules(DocumentRules):
    """Rules of evidence reports."""

    kind = REPORT
    orders = "boundary.orders"
    may_be_unsigned = True

    def read(self, document: Document) -> Report:
        """Return the report; raises `LedgerError` unless its facts are a report's."""
        return open_report(document)

    def check(self, opened: OpenedDocument, trust: ReaderTrust) -> ShownAlone:
        """Check its checkpoint, its sampled leaves, and its internal agreement."""
        problems, leaves = list[str](), 0
        problems += disagreements(opened.model)
        signed = stated_checkpoint(opened.facts, trust.keys, problems)
        used: dict[int, set[tuple[str, int]]] = {}
        for item, where, body in proved_leaves(opened.facts, trust.keys, signed, problems):
            leaves += 1
            mine = used.setdefault(id(item), _residencies_of(item))
            if not _belongs(body, item["custody"], mine):
                problems.append(f"{where} does not name the custody that it was drawn for")
        return ShownAlone(problems, leaves, (_version(opened),))

    def alone(self, opened: OpenedDocument) -> tuple[Unchecked, ...]:
        """Return what is unchecked unless the report was remade."""
        point = ("boundary.checkpoint.at_us", "boundary.checkpoint.signed_us")
        sealed = [Unchecked(path, "when it was sealed and signed is in no note") for path in point]
        own = () if opened.facts["asked"]["framework"] in NAMES else OWN_FRAMEWORK
        asked = Unchecked("asked", f"whether it was these parameters that were asked for: {GIVE}")
        fields = (each for section in sections() for each in section.fields.items())
        return (asked, *sealed, *own, *(Unchecked(path, f"{what}: {GIVE}") for path, what in fields if what))

    def seal(self, opened: OpenedDocument) -> SealedAs:
        """Return the checkpoint that an export must have according to the report."""
        boundary = opened.model[BOUNDARY]
        point = boundary.checkpoint
        return SealedAs(point.size, point.root, point.note, point.signed_us, boundary.witnessed)

    def from_ledger(self, opened: OpenedDocument, connection: Connection, trust: ReaderTrust) -> MadeAgain:
        """Return the report remade from its ledger; raises like `build_report`."""
        check_ledger(connection, opened.document.checkpoint)
        stated: Report = opened.model
        made = build_report(
            connection, stated.asked, proof=stated[PROOF], responses=stated[RESPONSES], framework=_own(stated)
        )
        refused = orders_refused(connection, stated.asked.checkpoint, trust.orders, stated.asked.tenant)
        return MadeAgain(_facts(made), "the ledger", _of_proof(stated), refused)

    def from_export(
        self, opened: OpenedDocument, folder: Path, connection: Connection, trust: ReaderTrust
    ) -> MadeAgain:
        """Return the report remade from an export's leaves (rule 1)."""
        stated: Report = opened.model
        report = build_report(
            connection,
            stated.asked._replace(extends=None),
            proof=stated[PROOF],
            is_proved=False,
            responses=stated[RESPONSES],
            framework=_own(stated),
        )
        earlier = None if stated.asked.extends is None else _earlier_state(folder, stated.asked.extends)
        if earlier is not None and earlier.sizes is not None:
            state = as_of_sizes(connection, earlier.sizes)
            changes = changes_since(connection, report, state, last_event_us(connection, state))
            report = report.replace(changes=changes)
        refused = orders_refused(connection, stated.asked.checkpoint, trust.orders, stated.asked.tenant)
        path = () if earlier is None else _extension(earlier, stated)
        unchecked = (*NOT_IN_LEAVES, *_of_proof(stated))
        if earlier is not None and earlier.sizes is None:
            report, unchecked = report.replace(changes=stated[CHANGES]), (*unchecked, EARLIER_EDITION)
        return MadeAgain(_facts(_with_seal(report, stated, path)), "the export", unchecked, refused)

    def comparable(self, facts: Facts) -> Any:
        """Return its facts without the leaves' proofs, which are checked separately."""
        sample = [{**item, "leaves": [{**leaf, "proof": ""} for leaf in item["leaves"]]} for item in facts["sample"]]
        return {**facts, "sample": sample}


def open_report(document: Document) -> Report:
    """Return the report with a document's facts; raises `LedgerError` if they are not a report's."""
    report = report_of(document.body())
    if _facts(report) != document.facts:
        parts = [path for path, _, _ in differing(document.facts, _facts(report))]
        raise LedgerError(f"it is not as its own facts give it: {', '.join(parts[:3])}")
    return report


def read_report(data: bytes) -> Report:
    """Return the report in a file; raises `LedgerError` for bytes that are not canonical."""
    return open_report(read_document(data, [REPORT]))


def _facts(report: Report) -> Facts:
    return report.document().facts


def _version(opened: OpenedDocument) -> Unchecked:
    if opened.facts["version"] == __version__:
        return Unchecked("version", "whether this version of kvcustody made it")
    return Unchecked("version", f"this is version {__version__}, which may state some things otherwise")


def disagreements(report: Report) -> Iterator[str]:
    """Yield contradictions between its sections, and differences of its framework from the library's."""
    name = report.asked.framework
    if name not in NAMES:  # a file of the preparer's, which is listed as unchecked
        if report.framework.id != name:
            yield f"the controls are those of framework `{report.framework.id}`, not `{name}`"
    elif report.framework != load_framework(name):
        yield f"the controls are not those of framework `{name}`"
    for section in sections():
        yield from section.problems(report)


def _of_proof(stated: Report) -> tuple[Unchecked, ...]:
    made = () if stated[PROOF] is None else (PROOF_NOT_GIVEN, Unchecked("rerun", "it names the policy's file"))
    return (*SAID_BY_PEOPLE, *made, *(() if _own(stated) is None else OWN_FRAMEWORK))


def _own(stated: Report) -> Framework | None:
    """Return a framework from the report itself if it is not the library's."""
    return None if stated.asked.framework in NAMES else stated.framework


class _EarlierState(NamedTuple):
    """The beginning of the root log; `sizes` of every log, None where what opens a leaf of it was destroyed."""

    frontier: Frontier
    sizes: dict[str, int] | None


def _earlier_state(folder: Path, size: int) -> _EarlierState:
    """Return the first leaves of the root log from a verified export; fewer if it has no more."""
    frontier, sizes, is_open = EMPTY, dict[str, int](), True
    with (folder / OPENINGS).open("rb") as file:
        lines = islice(map(orjson.loads, file), max(0, size))
        while some := list(islice(lines, _AT_ONCE)):
            frontier = frontier.extend(leaf_hashes([bytes.fromhex(line["leaf"]) for line in some])).frontier
            openings = [line["opening"] for line in some]
            is_open = is_open and None not in openings
            for opening in openings if is_open else ():
                opened = RootLeafOpening.from_bytes(bytes.fromhex(opening))
                sizes[opened.name] = max(opened.head.size, sizes.get(opened.name, 0))
    return _EarlierState(frontier, sizes if is_open else None)


def _extension(earlier: _EarlierState, stated: Report) -> tuple[str, ...]:
    """Return the path from the earlier checkpoint if it leads from the root log's beginning to the signed root."""
    boundary = stated[BOUNDARY]
    point = boundary.checkpoint
    try:
        if earlier.frontier.size != stated.asked.extends:
            raise ProofError(f"the root log has no `{stated.asked.extends}` leaves")
        path = [bytes.fromhex(node) for node in boundary.consistency]
        check_consistency(earlier.frontier.head(), TreeHead(point.size, bytes.fromhex(point.root)), path)
    except (ProofError, ValueError):
        return (NO_PATH,)
    return boundary.consistency


def _with_seal(made: Report, stated: Report, path: tuple[str, ...]) -> Report:
    """What no leaf says, from the report (rule 1)."""
    boundary, sealed = made[BOUNDARY], stated[BOUNDARY]
    point = boundary.checkpoint._replace(at_us=sealed.checkpoint.at_us)
    return made.replace(
        asked=stated.asked,
        window=stated[WINDOW],
        boundary=boundary._replace(
            checkpoint=point,
            witnessed=sealed.witnessed,
            extends=stated.asked.extends,
            consistency=path,
        ),
    )


def _residencies_of(item: Mapping[str, Any]) -> set[tuple[str, int]]:
    """Return the residencies, by process, of the leaves that name the drawn custody."""
    found = set()
    for leaf in item["leaves"]:
        for body in plain_bodies(orjson.loads(leaf["leaf"])):
            if "residency" in body and _names(body, item["custody"]):
                found.add((str(body.get("of_incarnation") or body["incarnation"]), int(body["residency"])))
    return found


def _belongs(body: Mapping[str, Any], custody: Mapping[str, Any], used: set[tuple[str, int]]) -> bool:
    """Return whether a leaf names the drawn custody, releases its users, or concerns its whole process."""
    if body["kind"] in CONTEXT:
        return bool(
            body["kind"] == "erasure-requested"
            or body["incarnation"] == custody["incarnation"]
            or (body.get("of_incarnation") == custody["incarnation"])
        )
    if custody["tier"] != DEVICE_TIER:
        return bool(body.get("tier") == custody["tier"] and custody["copy"] in body.get("numbers", ()))
    return _names(body, custody) or any(
        "residency" in each and (str(each.get("of_incarnation") or each["incarnation"]), int(each["residency"])) in used
        for each in plain_bodies(body)
    )


def _names(body: Mapping[str, Any], custody: Mapping[str, Any]) -> bool:
    """Return whether a leaf names the block at the generation."""
    pairs, _ = decode_flat(
        [
            *body.get("runs", ()),
            *body.get("written", ()),
            *chain.from_iterable(runs_of_items(body, LIST_OF_KIND).values()),
        ]
    )
    there = (pairs.pools == custody["pool"]) & (pairs.generations == custody["generation"])
    return bool((there & np.isin(pairs.blocks, (custody["block"], UNNAMED))).any())
