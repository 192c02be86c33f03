"""Rules of records of processing: internal consistency, and rebuilding from the ledger.

1. It is made again from the ledger as the record's checkpoint left it, or from a verified export of that.
2. What no ledger has is unchecked: what was stated, and documents of policies that came with the question.
"""

from __future__ import annotations

from pathlib import Path

from sqlalchemy import Connection

from kvcustody._version import __version__
from kvcustody.audit.reports.document import Document
from kvcustody.audit.reports.framework import load_framework
from kvcustody.audit.verify.documents.document_check import (
    GIVE,
    DocumentRules,
    MadeAgain,
    OpenedDocument,
    ReaderTrust,
    ShownAlone,
    Unchecked,
)
from kvcustody.audit.verify.documents.made_again import check_ledger, orders_refused
from kvcustody.audit.verify.documents.record_agreement import RECORD, record_disagreements
from kvcustody.errors import ConfigError
from kvcustody.governance.processing.build_record import FRAMEWORK, RecordRequest, build_record
from kvcustody.governance.processing.record import (
    GIVEN,
    OF_RELEASE,
    OPEN,
    ControllerStatement,
    ProcessingRecord,
    RecordedPolicy,
    record_of_facts,
)
from kvcustody.policies.document.digest import digest as digest_of
from kvcustody.policies.document.model import Policy

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
_OF_DOCUMENTS = (
    "recipients",
    "time_limits",
    "erasure_within",
    "measures",
    "policy",
    "policy_digest",
    "run_by",
)
_STATED = ("controller", "contact", "officer", "purposes", "subjects", "data", "transfers", "controllers")
_ALWAYS = (
    *(Unchecked(name, "whether it was this that was asked for") for name in ("role", "since_us", "until_us")),
    *(Unchecked(name, "it is what the controller or the processor states") for name in _STATED),
)


class RecordRules(DocumentRules):
    """The rules of records; `given` is the policy that the record was made with, where the reader has it."""

    kind = RECORD
    orders = "orders"

    def __init__(self, given: Policy | None = None) -> None:
        self._given = given

    def read(self, document: Document) -> ProcessingRecord:
        """Parse the record; raises `LedgerError` for other facts."""
        return record_of_facts(document.facts)

    def check(self, opened: OpenedDocument, trust: ReaderTrust) -> ShownAlone:
        """Check the record's internal consistency, and its controls against the library."""
        problems = [*record_disagreements(opened.facts)]
        titles = {one.id: one.title for one in load_framework(FRAMEWORK).controls}
        controls = opened.facts["controls"]
        if any(titles.get(one["control"]) != one["title"] or one["framework"] != FRAMEWORK for one in controls):
            problems.append("a control is not one of the library")
        return ShownAlone(problems, unchecked=_ALWAYS)

    def alone(self, opened: OpenedDocument) -> tuple[Unchecked, ...]:
        """Return everything that a ledger supplies."""
        return tuple(Unchecked(name, GIVE) for name in (*_OF_LEDGER, "activity", "version"))

    def from_ledger(self, opened: OpenedDocument, connection: Connection, trust: ReaderTrust) -> MadeAgain:
        """Build the record again from its ledger; raises as `build_record`."""
        check_ledger(connection, opened.document.checkpoint)
        return self._again(opened, connection, trust, "the ledger")

    def from_export(
        self, opened: OpenedDocument, folder: Path, connection: Connection, trust: ReaderTrust
    ) -> MadeAgain:
        """Build the record again from an export's leaves; raises as `build_record`."""
        return self._again(opened, connection, trust, "the export")

    def _again(self, opened: OpenedDocument, connection: Connection, trust: ReaderTrust, source: str) -> MadeAgain:
        record: ProcessingRecord = opened.model
        lacking, problems = _lacking(record, self._given), list[str]()
        why = f"of policies whose documents are not in the leaves: {', '.join(sorted(lacking))}"
        unchecked = [Unchecked(name, why) for name in (_OF_DOCUMENTS if lacking else ())]
        refused = orders_refused(connection, record.checkpoint, trust.orders)
        try:
            rebuilt = build_record(connection, _request(record), given=self._given)
        except ConfigError:
            if not lacking:
                raise
            nothing = tuple(Unchecked(name, why) for name in _OF_LEDGER)
            return MadeAgain(opened.facts, "", nothing, refused)
        places = [place for place, one in enumerate(record.policies) if one.digest in lacking]
        unchecked += [Unchecked(f"policies[{place}]", why) for place in places]
        rebuilt = rebuilt._replace(policies=_beside(record, rebuilt, lacking))
        if record.version != __version__:
            problems.append(
                f"version {record.version} made it and this is {__version__}: it can be made again with that one"
            )
        return MadeAgain(rebuilt.document().facts, source, tuple(unchecked), refused, tuple(problems))


def _request(record: ProcessingRecord) -> RecordRequest:
    """What the record was made of."""
    stated = ControllerStatement(*(getattr(record, name) for name in ControllerStatement._fields))
    named = tuple(one for one in record.controllers if one.name != OPEN)
    return RecordRequest(record.role, record.checkpoint, record.since_us, record.until_us, stated, named)


def _beside(record: ProcessingRecord, made: ProcessingRecord, lacking: set[str]) -> tuple[RecordedPolicy, ...]:
    """The policies that the ledger gives, and in their places those of the record that it lacks."""
    ours = iter([one for one in made.policies if one.digest not in lacking])
    together = [one if one.digest in lacking else next(ours, None) for one in record.policies]
    return (*(one for one in together if one is not None), *ours)


def _lacking(record: ProcessingRecord, given: Policy | None) -> set[str]:
    """Digests of policies whose documents are not in the ledger's leaves, nor given now."""
    away = {one.digest for one in record.policies if one.source in (GIVEN, OF_RELEASE)}
    return away - ({digest_of(given)} if given is not None else set())
