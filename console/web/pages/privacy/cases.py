"""Cases: record a subject request, see its clock and open tasks, take its steps, write the letter.

1. What is done is the API's own function; the actor is who is signed in.
2. A form has a key of its own: sent twice, by a double click or a reload, it acts once.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable
from typing import Any, TypeVar

from pydantic import ValidationError
from starlette.responses import Response

from kvcustody.audit.evidence.cases.case_record import SubjectRight, allowed_steps
from kvcustody.console.web.form_errors import refused
from kvcustody.console.web.page_request import PageRequest, redirect
from kvcustody.console.web.pages.audit import moment_us
from kvcustody.console.web.pages.overview import sees_all
from kvcustody.governance.api.models.base import Model
from kvcustody.governance.api.models.privacy.cases import CaseRequest, LetterForm, LetterRequest, StepRequest
from kvcustody.governance.api.operations.privacy import cases as cases_api
from kvcustody.governance.service.access.roles import Permission
from kvcustody.governance.service.problem_details import ProblemError, not_found

_PAGE = 50
_Kind = TypeVar("_Kind", bound=Model)
_STEP = ("step", "outcome", "ground", "about", "reason", "digest")


def listed(visit: PageRequest) -> Response:
    """Return every case that the caller may see, newest first, and a form for a new one."""
    tenant = visit.text("tenant")
    visit.record("consoleCases", tenant)
    found = visit.ask(cases_api.cases, tenant=tenant, cursor=visit.text("cursor", 1024), limit=_PAGE)
    return visit.page(
        "case/cases.html",
        "Cases",
        found=found,
        tenant=tenant,
        all_tenants=sees_all(visit),
        acts=visit.may(Permission.ERASE),
        rights=list(SubjectRight),
        zone=visit.service.settings.case_zone,
    )


def open_case(visit: PageRequest) -> Response:
    """Record a request (rule 1); its page shows the open tasks."""
    visit.caller.must(Permission.ERASE)
    parts = {name: visit.text(name, 128) for name in ("tenant", "subject", "right", "channel")}
    what = _model(CaseRequest, parts | {"received": moment_us(visit, "received")})

    def act() -> str:
        return str(visit.ask(cases_api.open_case, what)["case_id"])

    return redirect(f"/cases/{_once(visit, what, act)}")


def show(visit: PageRequest) -> Response:
    """Return one case."""
    visit.record("consoleCase")
    view = visit.ask(cases_api.case_of, case=_id(visit))
    record = cases_api.find_case(visit.service, visit.caller, _id(visit))
    steps = allowed_steps(record, visit.service.clock.utc_us())
    return visit.page(
        "case/case.html",
        f"Case {view['case_id'][:12]}",
        found=view,
        acts=visit.may(Permission.ERASE),
        writes=visit.may(Permission.CERTIFY),
        steps=list(dict.fromkeys(step.step for step in steps)),
        outcomes=_by_step((step.step, step.outcome) for step in steps),
        grounds=_by_step((step.step, step.ground) for step in steps),
        forms=visit.service.documents.letter_forms(),
    )


def _by_step(pairs: Iterable[tuple[str, str]]) -> dict[str, list[str]]:
    """Return the outcomes or grounds that each step may have, for the steps that have any."""
    by_step: dict[str, list[str]] = {}
    for step, value in pairs:
        if value and value not in by_step.setdefault(step, []):
            by_step[step].append(value)
    return {step: values for step, values in by_step.items() if values}


def step(visit: PageRequest) -> Response:
    """Take a step (rule 1)."""
    visit.caller.must(Permission.ERASE)
    case = _id(visit)
    what = _model(StepRequest, {name: visit.text(name, 500) or "" for name in _STEP})

    def act() -> str:
        return str(visit.ask(cases_api.take_step, case, what)["case_id"])

    return redirect(f"/cases/{_once(visit, what, act)}")


def letter(visit: PageRequest) -> Response:
    """Return the letter for the caller to keep."""
    visit.caller.must(Permission.CERTIFY)
    case = _id(visit)
    parts = {name: visit.text(name, 64) for name in ("kind", "form", "date")}
    texts = {name: visit.document(name).strip() for name in ("addressee", "sender")}
    what = _model(LetterRequest, {name: value for name, value in (parts | texts).items() if value})
    visit.record("consoleCaseLetter")
    made = visit.ask(cases_api.letter, case, what)
    end = {LetterForm.TEXT: "txt", LetterForm.HTML: "html", LetterForm.PDF: "pdf"}[what.form]
    headers = {"Content-Disposition": f'attachment; filename="letter-{case[:12]}.{end}"'}
    return Response(made.body, headers=headers, media_type=made.media)


def _id(visit: PageRequest) -> str:
    case = visit.places["case"]
    if not (len(case) <= 64 and case.isascii() and case.replace("-", "").isalnum()):
        raise not_found()
    return case


def _model(kind: type[_Kind], parts: dict[str, Any]) -> _Kind:
    """Return a form's content; raises `invalid` for invalid content."""
    try:
        return kind(**parts)
    except ValidationError as error:
        raise refused(error) from None


def _once(visit: PageRequest, what: Model, act: Callable[[], str]) -> str:
    """Return a form's result; sending the form twice acts once (rule 2)."""
    key = visit.text("once", 64)
    if key is None:
        raise ProblemError("idempotency-key-required", "this form is not one of the console's; open it again")
    answers = visit.service.answers
    asked = f"{visit.path} {what.model_dump_json()}".encode()
    claim = answers.claim(visit.caller.name, f"console:{key}", asked)
    if isinstance(claim, bytes):
        return claim.decode()
    try:
        made = act()
    except BaseException:
        answers.give_up(claim)
        raise
    answers.settle(claim, made.encode())
    return made
