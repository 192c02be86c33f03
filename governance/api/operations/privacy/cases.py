"""Operations on cases: record a request of a person, take its steps, see how it stands, write the letter.

1. A tenant's administrator has that tenant's cases alone; the tenant comes from the credential.
2. A case and a step are durable in the ledger before they are answered. A step that may not be taken is a `conflict`.
3. The actor of a step is who asks: a principal, or somebody whom an issuer of tokens keeps.
"""

from __future__ import annotations

from typing import Annotated, Any

from fastapi import Path, Response

from kvcustody.audit.evidence.cases.case_record import CaseStep, StepKind
from kvcustody.audit.evidence.query.known_names import check_tenant
from kvcustody.errors import ConfigError
from kvcustody.governance.api.http.pagination import page
from kvcustody.governance.api.http.route_builder import Api, CallerDep, ServiceDep
from kvcustody.governance.api.models.privacy.cases import (
    CaseModel,
    CasePage,
    CaseRequest,
    CaseSummaryModel,
    LetterForm,
    LetterRequest,
    StepRequest,
)
from kvcustody.governance.api.parameters import Cursor, Limit, Tenant
from kvcustody.governance.cases.show_case import summary_of
from kvcustody.governance.cases.take_step import WantedCase, check_step, opened_event, step_event
from kvcustody.governance.identity.principal import check_identifier
from kvcustody.governance.service.access.caller import Caller
from kvcustody.governance.service.access.roles import Permission
from kvcustody.governance.service.answers.cases import GET_CASE, LIST_CASES, find_case, view_of
from kvcustody.governance.service.operations.operation import Operation
from kvcustody.governance.service.page_cursor import CursorBinding
from kvcustody.governance.service.problem_details import ProblemError
from kvcustody.governance.service.service import Service
from kvcustody.policies.document.model import Action

CaseId = Annotated[str, Path(min_length=1, max_length=64, pattern=r"^[A-Za-z0-9-]+$", examples=["4f1c0e"])]
_MEDIA = {
    LetterForm.TEXT: "text/plain; charset=utf-8",
    LetterForm.HTML: "text/html; charset=utf-8",
    LetterForm.PDF: "application/pdf",
}


def add_cases(api: Api) -> None:
    """Declare the operations."""
    missing = ("not-found",)
    opening = Operation("openCase", "POST", "/v1/cases", Permission.ERASE, "cases", keyed=True)
    api.add(opening, open_case, answers=CaseSummaryModel, status=201, problems=missing)
    api.add(LIST_CASES.operation, cases, answers=CasePage, problems=("not-found", "cursor-invalid"))
    api.add(GET_CASE.operation, case_of, answers=CaseModel, problems=missing)
    stepping = Operation(
        "takeCaseStep", "POST", "/v1/cases/{case}/steps", Permission.ERASE, "cases", keyed=True
    )
    api.add(stepping, take_step, answers=CaseSummaryModel, problems=("not-found", "conflict"))
    writing = Operation(
        "writeCaseLetter", "POST", "/v1/cases/{case}/letter", Permission.CERTIFY, "cases", recorded=True
    )
    problems = ("not-found", "conflict", "not-acceptable")
    api.add(writing, letter, media="application/octet-stream", problems=problems)


def open_case(caller: CallerDep, service: ServiceDep, what: CaseRequest) -> dict[str, Any]:
    """Record a request of a person as a case: the answer is due one month after it came in."""
    mine = service.tenant_of(caller, Permission.ERASE, what.tenant)
    if mine is None:
        raise ProblemError("invalid", "`tenant` is needed: whose subject it is")
    if mine != caller.tenant:  # a name that was typed
        with service.reading() as connection:
            check_tenant(connection, mine)
    check_identifier("subject", what.subject)
    _authorize(caller, service)
    now_us = service.clock.utc_us()
    received_us = now_us if what.received is None else what.received
    wanted = WantedCase(mine, what.subject, what.right.value, what.channel, received_us)
    try:
        calendar = service.settings.case_calendar()
        event = opened_event(service.clock.now_us(), wanted, caller.name, calendar, now_us)
    except ConfigError as error:
        raise ProblemError("invalid", error.message) from None
    service.record(event)
    return summary_of(find_case(service, caller, event.case_id), now_us)._asdict()


def cases(
    caller: CallerDep, service: ServiceDep, tenant: Tenant = None, cursor: Cursor = None, limit: Limit = 100
) -> dict[str, Any]:
    """Cases, newest first, and how each stands by its own clock."""
    found = LIST_CASES.answer(service, caller, tenant=tenant)["items"]
    question = CursorBinding("listCases", caller.name, {"tenant": tenant})
    return page(service, question, found, cursor, limit)


def case_of(caller: CallerDep, service: ServiceDep, case: CaseId) -> dict[str, Any]:
    """One case: its steps, erasures, legal holds and recipients, what is still to be done, and what contradicts it."""
    return GET_CASE.answer(service, caller, case=case)


def take_step(caller: CallerDep, service: ServiceDep, case: CaseId, what: StepRequest) -> dict[str, Any]:
    """Take a step of a case; what may not follow, or the ledger contradicts, is refused with the reason."""
    found = find_case(service, caller, case, Permission.ERASE)
    _authorize(caller, service)
    now_us = service.clock.utc_us()
    given = what.model_dump() | {"step": what.step.value}
    step = CaseStep(**given, actor=caller.name, at_us=now_us)
    try:
        with service.reading() as connection:  # no wall: who is behind a pseudonym is in no tenant's log
            check_step(connection, found, step, keys=service.subject_keys)
    except ConfigError as error:
        raise ProblemError("conflict", error.message) from None
    service.record(step_event(service.clock.now_us(), found, step))
    if step.step in (StepKind.RESTRICT, StepKind.LIFT):
        service.changed()  # workers wait for it
    made = find_case(service, caller, case, Permission.ERASE)
    if made.steps[-1].void:  # somebody else was first
        raise ProblemError("conflict", f"step `{step.step}`: {made.steps[-1].void}")
    return summary_of(made, now_us)._asdict()


def letter(caller: CallerDep, service: ServiceDep, case: CaseId, what: LetterRequest) -> Response:
    """The letter to the person: the answer, the extension or the question who they are. It is kept nowhere."""
    found = find_case(service, caller, case, Permission.CERTIFY)
    if what.form.value not in service.documents.letter_forms():
        raise ProblemError("not-acceptable", "this service cannot write letters in this form")
    given = what.model_dump(include={"kind", "addressee", "sender", "date"})
    try:
        made = service.documents.letter(view_of(service, caller, found), given, what.form.value)
    except ConfigError as error:
        raise ProblemError("conflict", error.message) from None
    return Response(made, media_type=_MEDIA[what.form])


def _authorize(caller: Caller, service: Service) -> None:
    if caller.tenant is not None:
        service.authorize(Action.ADMINISTER, caller)
