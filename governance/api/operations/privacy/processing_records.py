"""Records of processing (GDPR 30): made of a period, signed by the key that signs reports.

1. A record names every tenant, so it is for those who see all. That it was asked for is on record before it is made.
2. Where this process signs the ledger, the record is of its newest signed checkpoint, or the one that is named, and
   signed. Where another does, it is as that one signed last, and is not signed here.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

from kvcustody.audit.evidence.coverage.custody_units import last_event_us
from kvcustody.audit.evidence.query.known_names import check_tenant
from kvcustody.audit.reports.build_report import newest_checkpoint, period
from kvcustody.audit.tlog.database_proofs import LedgerProofs
from kvcustody.audit.tlog.proofs import ProofError
from kvcustody.errors import ConfigError
from kvcustody.governance.api.declarations import Declarations
from kvcustody.governance.api.given import CallerDep, ServiceDep
from kvcustody.governance.api.http.console_mount import record_read
from kvcustody.governance.api.models.privacy.processing_records import (
    ProcessingRecordModel,
    ProcessingRequest,
)
from kvcustody.governance.api.operations.policy_workbench import policy_of
from kvcustody.governance.processing.build_record import RecordRequest, build_record, signed_record
from kvcustody.governance.processing.record import ControllerStatement, ServedController
from kvcustody.governance.service.access.roles import Permission
from kvcustody.governance.service.operations.answer import Content
from kvcustody.governance.service.operations.operation import Operation
from kvcustody.governance.service.problem_details import ProblemError, not_found
from kvcustody.governance.service.reports import report_key

if TYPE_CHECKING:
    from kvcustody.governance.service.service import Service


def add_processing_records(api: Declarations) -> None:
    """Declare the operation."""
    recording = Operation(
        "makeProcessingRecord",
        "POST",
        "/v1/reports:processing",
        Permission.READ_CUSTODY,
        "evidence",
        whole=True,
        command="report ropa",
    )
    api.add(recording, processing_record, answers=ProcessingRecordModel, problems=("conflict", "not-found"))


def processing_record(caller: CallerDep, service: ServiceDep, what: ProcessingRequest) -> Content:
    """Make the record of processing activities (GDPR 30): every policy in effect in the period, limits and recipients.

    It names every tenant that reads another's blocks, so it is for those who see all. Nothing is changed or kept.
    """
    if what.since is not None and what.until is not None and what.since >= what.until:
        raise ProblemError("invalid", "`since` must be before `until`")
    given = None if what.policy is None else policy_of(what.policy)
    stated = ControllerStatement(**what.model_dump(include=set(ControllerStatement._fields)))
    named = tuple(sorted(ServedController(tenant, name) for tenant, name in what.controllers.items()))
    record_read(service, caller, "makeProcessingRecord")
    key = report_key(service)
    size, since_us, until_us = _bounds(service, what)  # first: what is read after it has this checkpoint
    with service.reading_at_rest() as connection:
        for one in named:
            check_tenant(connection, one.tenant)
        asked = RecordRequest(what.role, size, since_us, until_us, stated, named)
        try:
            record = build_record(connection, asked, given=given, release=service.policies.released())
        except ConfigError as error:
            raise ProblemError("conflict", f"{error.message}; send the policy of the record") from None
        document = record.document() if key is None or not size else signed_record(connection, record, key)
    return Content(document.to_bytes())


def _bounds(service: Service, what: ProcessingRequest) -> tuple[int, int, int]:
    """The checkpoint (0: nothing is signed) and the period."""
    if what.as_of is None:
        service.cover()
    with service.reading() as connection:
        try:
            size = (
                newest_checkpoint(connection)
                if what.as_of is None
                else LedgerProofs(connection).checkpoint(what.as_of).size
            )
            return (size, *period(connection, size, what.since, what.until))
        except ProofError:
            if what.as_of is not None:
                raise not_found() from None
            return 0, what.since or 0, what.until or last_event_us(connection) + 1
        except ConfigError as error:
            raise ProblemError("invalid", error.message) from None
