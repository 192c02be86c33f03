"""Builds the record of a period from the ledger at a checkpoint, policy documents, and statements.

    asked = RecordRequest(PROCESSOR, checkpoint, since_us, until_us, stated)
    record = build_record(connection, asked, release=state)

1. Policies are those that processes enforced in the period. Where none was, it is the one that was given, or what is
   released; where there is neither, there is no record.
2. A policy that is given is in the record with its limits and recipients, whoever runs it: nobody may.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from typing import NamedTuple

from sqlalchemy import Connection

from kvcustody._version import __version__
from kvcustody.audit.evidence.coverage.summary import CoverageRow, coverage
from kvcustody.audit.evidence.processes.marked_processes import history, marked_processes
from kvcustody.audit.evidence.processes.orders import orders_statement
from kvcustody.audit.evidence.processes.policies_in_period import (
    PeriodPolicy,
    lives_as_of,
    read_policies_in_period,
)
from kvcustody.audit.reports.build_report import build_report
from kvcustody.audit.reports.document import Document
from kvcustody.audit.reports.framework import OURS
from kvcustody.audit.reports.parameters import ReportParameters
from kvcustody.audit.reports.sections.controls import SECTION as CONTROLS
from kvcustody.audit.reports.sections.coverage import SECTION as COVERAGE
from kvcustody.audit.reports.signing.document_signature import sign_document
from kvcustody.audit.store.database.snapshot import as_of_sizes
from kvcustody.audit.tlog.database_proofs import LedgerProofs
from kvcustody.audit.tlog.signing_key import SigningKey
from kvcustody.errors import ConfigError
from kvcustody.governance.cases.recipients import KnownPolicy, known_policies, recipients_in
from kvcustody.governance.processing.record import (
    GIVEN,
    OF_LEAVES,
    OF_RELEASE,
    OPEN,
    ROLES,
    UNKNOWN,
    ControllerStatement,
    MeasuredControl,
    ProcessedCategory,
    ProcessingRecord,
    RecordedPolicy,
    ServedController,
    length,
    limits_of,
    measures_of,
)
from kvcustody.governance.release.policies_in_effect import policies_in_effect
from kvcustody.governance.release.replay_records import ReleaseState
from kvcustody.policies.document.digest import digest as digest_of
from kvcustody.policies.document.model import Policy

FRAMEWORK = "gdpr"
ACTIVITY = "Caching of attention keys and values of language models, so that prompts need not be computed again"
TENSORS = "Tensors computed from prompts and answers of users; no text, but derived from it"
NO_POLICY = (
    "no policy was in effect in the period: no worker ran one and none was released; give the policy of the record"
)


class RecordRequest(NamedTuple):
    """The parameters of a record besides the ledger and documents. `checkpoint` 0: the ledger as it is, unsigned.

    `controllers` are the names of tenants as controllers, as they are stated.
    """

    role: str
    checkpoint: int
    since_us: int
    until_us: int
    stated: ControllerStatement
    controllers: tuple[ServedController, ...] = ()


def build_record(
    connection: Connection,
    asked: RecordRequest,
    *,
    given: Policy | None = None,
    release: ReleaseState | None = None,
) -> ProcessingRecord:
    """Build the requested record; raises `ConfigError` where no policy is known (rule 1)."""
    if asked.role not in ROLES:
        raise ConfigError(f"a record is of a {' or a '.join(ROLES)}, not of a `{asked.role}`")
    if asked.since_us >= asked.until_us:
        raise ConfigError("the period is empty: `since` must be before `until`")
    sizes = LedgerProofs(connection).sizes(asked.checkpoint) if asked.checkpoint else None
    state = None if sizes is None else as_of_sizes(connection, sizes)
    ran = read_policies_in_period(connection, asked.since_us, asked.until_us, state)
    known, sources = _known(ran, given, release, asked)
    recipients = recipients_in(connection, known, asked.since_us, asked.until_us, as_of=state)
    rows, controls = _evidence(connection, asked)
    named, policy = _the_one(known, given)
    stated = asked.stated
    due, covered = sum(row.due for row in rows), sum(row.covered for row in rows)
    lives = lives_as_of(connection, state)
    documents = {one.period.digest: one.policy for one in known if one.policy is not None}
    return ProcessingRecord(
        version=__version__,
        role=asked.role,
        checkpoint=asked.checkpoint,
        since_us=asked.since_us,
        until_us=asked.until_us,
        activity=ACTIVITY,
        controller=stated.controller or OPEN,
        contact=stated.contact or OPEN,
        officer=stated.officer or OPEN,
        purposes=stated.purposes or OPEN,
        subjects=stated.subjects or OPEN,
        data=stated.data or TENSORS,
        transfers=stated.transfers or OPEN,
        controllers=_controllers(rows, asked.controllers) if asked.role != ROLES[0] else (),
        categories=tuple(ProcessedCategory(row.tenant, row.classification, row.due, row.covered) for row in rows),
        policies=tuple(_recorded(one.period, sources[place]) for place, one in enumerate(known)),
        recipients=recipients,
        time_limits=tuple(limit for digest, document in documents.items() for limit in limits_of(document, digest)),
        erasure_within=OPEN if policy is None else length(policy.erasure.within_us),
        measures=() if policy is None else measures_of(policy),
        controls=controls,
        policy=named.name,
        policy_digest=named.digest,
        run_by=named.workers,
        due=due,
        covered=covered,
        history=history(marked_processes(lives)),
        orders="" if state is None else orders_statement(connection, state, lives),
    )


def signed_record(connection: Connection, record: ProcessingRecord, key: SigningKey) -> Document:
    """Return the record as a signed document; raises as `sign_document`, and `ConfigError` without a checkpoint."""
    if not record.checkpoint:
        raise ConfigError("a record is made as of a signed checkpoint, and this ledger has none")
    return sign_document(connection, record.document(), key)


def _known(
    ran: Sequence[PeriodPolicy], given: Policy | None, release: ReleaseState | None, asked: RecordRequest
) -> tuple[list[KnownPolicy], list[str]]:
    """The policies of the record, each with where its document comes from (rules 1 and 2)."""
    known = list(known_policies(ran, release))
    sources = [UNKNOWN if one.policy is None else OF_LEAVES if one.period.document else OF_RELEASE for one in known]
    if given is not None:
        digest = digest_of(given)
        for place, one in enumerate(known):
            if one.period.digest == digest:
                known[place], sources[place] = one._replace(policy=given), sources[place]
                if one.policy is None:
                    sources[place] = GIVEN
        if all(one.period.digest != digest for one in known):
            period = PeriodPolicy(digest, "", given.name, 0, asked.since_us, None, (), "", {})
            known.append(KnownPolicy(period, given))
            sources.append(GIVEN)
    elif not known:
        for released in policies_in_effect((), release).policies:
            gone = dict.fromkeys(sorted(released.revoked), released.since_us)
            period = PeriodPolicy(
                released.digest,
                released.stage,
                released.name,
                released.revision,
                released.since_us,
                None,
                (),
                "",
                gone,
            )
            known.append(KnownPolicy(period, released.policy))
            sources.append(OF_RELEASE)
    if not known:
        raise ConfigError(NO_POLICY)
    return known, sources


def _the_one(known: Sequence[KnownPolicy], given: Policy | None) -> tuple[PeriodPolicy, Policy | None]:
    """The policy that was given, else the last to take effect for everybody; its document, where one has it."""
    if given is not None:
        digest = digest_of(given)
        return next(one.period for one in known if one.period.digest == digest), given
    whole = [one for one in known if not one.period.stage] or list(known)
    last = max(whole, key=lambda one: (one.period.until_us is None, one.period.since_us, one.period.digest))
    return last.period, last.policy


def _recorded(period: PeriodPolicy, source: str) -> RecordedPolicy:
    return RecordedPolicy(
        period.digest,
        period.name,
        period.stage,
        period.since_us,
        period.until_us or 0,
        period.workers,
        source,
    )


def _evidence(
    connection: Connection, asked: RecordRequest
) -> tuple[tuple[CoverageRow, ...], tuple[MeasuredControl, ...]]:
    """Coverage by tenant and classification, and the controls with their status: none where nothing is signed."""
    if not asked.checkpoint:
        found = coverage(connection, since_us=asked.since_us, until_us=asked.until_us)
        return found.rows, ()
    parameters = ReportParameters(FRAMEWORK, asked.checkpoint, asked.since_us, asked.until_us, sample=0, recount=False)
    report = build_report(connection, parameters, is_proved=False)
    status = {one.control: one for one in report[CONTROLS]}
    controls = tuple(
        MeasuredControl(FRAMEWORK, one.id, one.title, status[one.id].status, status[one.id].sections)
        for one in report.framework.controls
        if one.scope == OURS
    )
    return report[COVERAGE].coverage, controls


def _controllers(rows: Iterable[CoverageRow], named: Sequence[ServedController]) -> tuple[ServedController, ...]:
    """Every tenant of the period, and those that were named; the name of one that was not is open."""
    names = {one.tenant: one.name for one in named}
    tenants = sorted({row.tenant for row in rows} | names.keys())
    return tuple(ServedController(tenant, names.get(tenant, OPEN)) for tenant in tenants)
