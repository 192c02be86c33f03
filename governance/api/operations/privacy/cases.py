"""Operations on cases: open one, take its steps, see its state, write the letter.

1. A tenant's administrator has that tenant's cases alone; the tenant comes from the credential.
2. A case and a step are durable in the ledger before they are answered. A step that may not be taken is a `conflict`.
3. The actor of a step is who asks: a principal, or somebody whom an issuer of tokens keeps. Whoever acts on the ledger
   itself acts as one.
4. Why all content is held is for those who see all.
"""

from __future__ import annotations

from functools import partial
from typing import TYPE_CHECKING, Annotated, Any

from kvcustody.audit.evidence.cases.case_record import CaseStep, StepKind, SubjectCase
from kvcustody.audit.evidence.cases.read_cases import read_case, read_cases
from kvcustody.audit.evidence.query.known_names import check_tenant
from kvcustody.errors import ConfigError, LedgerError
from kvcustody.governance.api.declarations import Declarations
from kvcustody.governance.api.given import CallerDep, DeskDep, ServiceDep
from kvcustody.governance.api.models.privacy.cases import (
    CaseModel,
    CasePage,
    CaseRequest,
    CaseSummaryModel,
    LetterForm,
    LetterRequest,
    StepRequest,
)
from kvcustody.governance.cases.show_case import summary_of, view_case
from kvcustody.governance.cases.take_step import WantedCase, check_step, opened_event, step_event
from kvcustody.governance.identity.principal import check_identifier
from kvcustody.governance.service.access.caller import Caller
from kvcustody.governance.service.access.local_administration import local_name
from kvcustody.governance.service.access.roles import Permission, Reach
from kvcustody.governance.service.operations.answer import Content
from kvcustody.governance.service.operations.desk import Desk
from kvcustody.governance.service.operations.operation import Operation
from kvcustody.governance.service.operations.pages import page
from kvcustody.governance.service.operations.parameters import Cursor, Limit, Path, Tenant
from kvcustody.governance.service.page_cursor import CursorBinding
from kvcustody.governance.service.problem_details import ProblemError, not_found
from kvcustody.policies.document.model import Action

if TYPE_CHECKING:
    from kvcustody.governance.service.service import Service

READ = Permission.READ_CUSTODY
CaseId = Annotated[str, Path(min_length=1, max_length=64, pattern=r"^[A-Za-z0-9-]+$", examples=["4f1c0e"])]
_read = partial(Operation, method="GET", action=READ, tag="cases", recorded=True)
_MEDIA = {
    LetterForm.TEXT: "text/plain; charset=utf-8",
    LetterForm.HTML: "text/html; charset=utf-8",
    LetterForm.PDF: "application/pdf",
}


def add_cases(api: Declarations) -> None:
    """Declare the operations."""
    missing = ("not-found",)
    opening = Operation("openCase", "POST", "/v1/cases", Permission.ERASE, "cases", keyed=True, command="case open")
    api.add(opening, open_case, answers=CaseSummaryModel, status=201, problems=missing)
    api.add(
        _read("listCases", path="/v1/cases", command="case list"),
        cases,
        answers=CasePage,
        problems=("not-found", "cursor-invalid"),
    )
    api.add(
        _read("getCase", path="/v1/cases/{case}", command="case show"),
        case_of,
        answers=CaseModel,
        problems=missing,
    )
    stepping = Operation(
        "takeCaseStep",
        "POST",
        "/v1/cases/{case}/steps",
        Permission.ERASE,
        "cases",
        keyed=True,
        command="case step",
    )
    api.add(stepping, take_step, answers=CaseSummaryModel, problems=("not-found", "conflict"))
    writing = Operation(
        "writeCaseLetter",
        "POST",
        "/v1/cases/{case}/letter",
        Permission.CERTIFY,
        "cases",
        recorded=True,
        command="case draft-letter",
    )
    problems = ("not-found", "conflict", "not-acceptable")
    api.add(writing, letter, media="application/octet-stream", problems=problems)


def open_case(caller: CallerDep, service: ServiceDep, what: CaseRequest) -> dict[str, Any]:
    """Open a case for a person's request: the answer is due one month after it arrived."""
    mine = service.tenant_of(caller, Permission.ERASE, what.tenant)
    if mine is None:
        raise ProblemError("invalid", "`tenant` is needed: the subject's tenant")
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


def take_step(caller: CallerDep, service: ServiceDep, case: CaseId, what: StepRequest) -> dict[str, Any]:
    """Take a step of a case. A step that may not follow, or that the ledger contradicts, is refused with the reason."""
    opened = find_case(service, caller, case, Permission.ERASE)
    _authorize(caller, service)
    now_us = service.clock.utc_us()
    given = what.model_dump() | {"step": what.step.value}
    step = CaseStep(**given, actor=caller.name, at_us=now_us)
    try:
        with service.reading() as connection:  # no wall: who is behind a pseudonym is in no tenant's log
            check_step(connection, opened, step, keys=service.subject_keys)
    except ConfigError as error:
        raise ProblemError("conflict", error.message) from None
    service.record(step_event(service.clock.now_us(), opened, step))
    if step.step in (StepKind.RESTRICT, StepKind.LIFT):
        service.changed()  # workers wait for it
    made = find_case(service, caller, case, Permission.ERASE)
    if made.steps[-1].void:  # somebody else was first
        raise ProblemError("conflict", f"step `{step.step}`: {made.steps[-1].void}")
    return summary_of(made, now_us)._asdict()


def letter(caller: CallerDep, service: ServiceDep, case: CaseId, what: LetterRequest) -> Content:
    """Write the letter to the person: the answer, the extension, or the request for identification. It is not
    stored.
    """
    found = find_case(service, caller, case, Permission.CERTIFY)
    if what.form.value not in service.documents.letter_forms():
        raise ProblemError("not-acceptable", "this service cannot write letters in this form")
    given = what.model_dump(include={"kind", "addressee", "sender", "date"})
    try:
        made = service.documents.letter(view_of(service, caller, found), given, what.form.value)
    except ConfigError as error:
        raise ProblemError("conflict", error.message) from None
    return Content(made, _MEDIA[what.form])


def _authorize(caller: Caller, service: Service) -> None:
    if caller.name == local_name():  # rule 3
        raise ProblemError("invalid", "every step needs a principal of the ledger: name one with --as NAME")
    service.check_can_name()
    if caller.tenant is not None:
        service.authorize(Action.ADMINISTER, caller)


def find_case(desk: Desk, caller: Caller, case_id: str, action: Permission = READ) -> SubjectCase:
    """Return the case, if it exists and the caller may do this with its tenant's cases (rule 1)."""
    caller.must(action)
    own = caller.tenant if caller.reach(action) is Reach.OWN else None
    with desk.reading(own) as connection:
        try:
            found = read_case(connection, case_id)
        except LedgerError as error:
            raise desk.absent(error) from None
    if own is not None and found.opened.tenant != own:
        raise not_found()
    return found


def view_of(desk: Desk, caller: Caller, case: SubjectCase) -> dict[str, Any]:
    """Return the case with everything about it (rule 4)."""
    with desk.reading() as connection:  # no wall: who is behind a pseudonym is in no tenant's log
        view = view_case(
            connection,
            case,
            desk.clock.utc_us(),
            keys=desk.subject_keys,
            release=desk.released(),
            issuers=desk.token_issuers,
        )
    if caller.reach(READ) is not Reach.ALL:
        holds = tuple(one if one.tenant is not None else one._replace(reason="") for one in view.holds)
        view = view._replace(holds=holds)
    return view.data()


def cases(
    desk: DeskDep, caller: CallerDep, *, tenant: Tenant = None, cursor: Cursor = None, limit: Limit = 100
) -> dict[str, Any]:
    """List cases, newest first, each with its deadline and state."""
    mine = desk.tenant_of(caller, READ, tenant)
    now_us = desk.clock.utc_us()
    with desk.reading(mine) as connection:
        found = read_cases(connection, tenant=mine)
    question = CursorBinding("listCases", caller.name, {"tenant": tenant})
    return page(desk, question, [summary_of(case, now_us)._asdict() for case in found], cursor, limit)


def case_of(desk: DeskDep, caller: CallerDep, *, case: CaseId) -> dict[str, Any]:
    """Get one case: its steps, erasures, legal holds and recipients, open tasks, and contradictions."""
    return view_of(desk, caller, find_case(desk, caller, case))
