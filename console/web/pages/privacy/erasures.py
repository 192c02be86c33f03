"""Erasures: request one, follow every worker's answer, download the certificate.

1. The request is the API's own function: the tenant of a tenant's administrator comes from the credential.
2. A certificate is issued to those who may certify that tenant, by the same code as the API's.
3. A form has a key of its own: sent twice, by a double click or a reload, it asks for one erasure.
4. A selector of any parts is shown with what it would cover before it can be asked for; seeing that erases nothing.
"""

from __future__ import annotations

from typing import Any

import orjson
from pydantic import ValidationError
from starlette.responses import Response

from kvcustody.console.web.form_errors import FieldError, refused
from kvcustody.console.web.page_request import PageRequest, redirect
from kvcustody.console.web.pages.overview import erasure_states, sees_all
from kvcustody.governance.api.models.erasures import ErasureRequest
from kvcustody.governance.api.operations import erasures as erasures_api
from kvcustody.governance.service.access.roles import Permission
from kvcustody.governance.service.certificates import certificate, opening
from kvcustody.governance.service.problem_details import ProblemError, not_found

_PAGE = 50
_TEXTS = ("tenant", "subject", "session", "classification", "segment", "model")
_DEADLINES = {60: "1 minute", 3600: "1 hour", 86400: "1 day", 604800: "7 days"}
OPENING = "opening.json"
FILES = {
    "certificate.json": "application/json",
    "certificate.html": "text/html; charset=utf-8",
    OPENING: "application/json",
}


def listed(visit: PageRequest) -> Response:
    """Return every erasure that the caller may see, newest first."""
    tenant = visit.text("tenant")
    visit.record("consoleErasures", tenant)
    found = visit.ask(erasures_api.erasures, tenant, visit.text("cursor", 1024), _PAGE)
    return visit.page(
        "erasure/erasures.html",
        "Erasures",
        found=found,
        states=erasure_states(visit, tenant),
        tenant=tenant,
        all_tenants=sees_all(visit),
        erases=visit.may(Permission.ERASE),
        deadlines=_DEADLINES,
    )


def request(visit: PageRequest) -> Response:
    """Request an erasure (rule 1) and return its page."""
    visit.caller.must(Permission.ERASE)
    what = _wanted(visit)
    if visit.text("sure") != _narrowest(visit, what):
        raise FieldError({"sure": "type the name again to confirm: an erasure cannot be undone"})
    return redirect(f"/erasures/{_once(visit, what)}")


def preview(visit: PageRequest) -> Response:
    """Return what a selector would cover now, and the form that requests it (rule 4)."""
    visit.caller.must(Permission.ERASE)
    what = _wanted(visit)
    visit.record("consoleErasurePreview", what.tenant)
    found = visit.ask(erasures_api.previewed, what)
    named = {name: value for name, value in what.model_dump().items() if value not in (None, {})}
    return visit.page(
        "erasure/erasure_preview.html",
        "What this erasure would cover",
        found=found,
        parts={name: value for name, value in named.items() if name not in ("labels", "deadline_seconds")},
        labels=", ".join(f"{name}={value}" for name, value in what.labels.items()),
        deadline_seconds=what.deadline_seconds,
        deadline=_DEADLINES.get(what.deadline_seconds, f"{what.deadline_seconds} seconds"),
        narrowest=_narrowest(visit, what),
    )


def _wanted(visit: PageRequest) -> ErasureRequest:
    """Return a form's request; raises `invalid` for an invalid selector."""
    parts: dict[str, Any] = {name: visit.text(name, 128) for name in _TEXTS}
    parts |= {"key_epoch": visit.number("key_epoch"), "labels": _labels(visit.text("labels", 1024))}
    try:
        return ErasureRequest(**parts, deadline_seconds=visit.number("deadline_seconds") or 3600)
    except ValidationError as error:
        raise refused(error) from None


def _labels(text: str | None) -> dict[str, str]:
    """Return `region=eu, purpose=support` as labels."""
    labels = {}
    for item in (text or "").split(","):
        name, is_label, value = (part.strip() for part in item.partition("="))
        if name and is_label and value and name not in labels:
            labels[name] = value
        elif item.strip():
            raise FieldError({"labels": "write `name=value`, each name once, with commas between them"})
    return labels


def _narrowest(visit: PageRequest, what: ErasureRequest) -> str:
    """Return the narrowest name of a person or tenant, which is typed again to confirm."""
    return what.session or what.subject or what.tenant or visit.caller.tenant or "every tenant"


def _once(visit: PageRequest, what: ErasureRequest) -> str:
    """Return this form's erasure: sending the form twice requests one (rule 3)."""
    key = visit.text("once", 64)
    if key is None:
        raise ProblemError("idempotency-key-required", "this form is not one of the console's; open it again")
    answers = visit.service.answers
    claim = answers.claim(visit.caller.name, f"console:{key}", what.model_dump_json().encode())
    if isinstance(claim, bytes):
        return claim.decode()
    try:
        made = visit.ask(erasures_api.request, what)
    except BaseException:
        answers.give_up(claim)
        raise
    erasure = str(made["erasure"])
    answers.settle(claim, erasure.encode())
    return erasure


def show(visit: PageRequest) -> Response:
    """Return one erasure: which workers have answered, and what each ended."""
    visit.record("consoleErasure")
    status = _status(visit)
    return visit.page(
        "erasure/erasure.html",
        f"Erasure {status['erasure'][:12]}",
        found=status,
        reads_certificate=_may(visit, Permission.READ_CERTIFICATE, status["tenant"]),
        opens=_may(visit, Permission.CERTIFY, status["tenant"]),
        signs=visit.service.signer is not None,
    )


def download(visit: PageRequest) -> Response:
    """Return the certificate, its page for people, or the opening of its commitment (rule 2)."""
    name = visit.places["file"]
    status = _status(visit)
    needed = Permission.CERTIFY if name == OPENING else Permission.READ_CERTIFICATE
    if name not in FILES or not _may(visit, needed, status["tenant"]):
        raise not_found()
    visit.record("consoleCertificate", tenant=status["tenant"])
    content = _file(visit, name, status["erasure"])
    headers = {"Content-Disposition": f'attachment; filename="{status["erasure"][:12]}-{name}"'}
    return Response(content, media_type=FILES[name], headers=headers)


def _status(visit: PageRequest) -> dict[str, Any]:
    erasure = visit.places["erasure"]
    if not (len(erasure) <= 64 and erasure.isascii() and erasure.replace("-", "").isalnum()):
        raise not_found()
    visit.caller.must(Permission.READ_CUSTODY)
    return visit.ask(erasures_api.erasure_of, erasure)


def _may(visit: PageRequest, action: Permission, tenant: str | None) -> bool:
    """Return whether the caller may do this with a tenant's erasure."""
    if not visit.may(action):
        return False
    try:
        visit.caller.tenant_of(action, tenant)
    except ProblemError:
        return False
    return tenant is not None or visit.caller.tenant is None


def _file(visit: PageRequest, name: str, erasure: str) -> bytes:
    if name == OPENING:
        return orjson.dumps(opening(visit.service, erasure)._asdict())
    document = certificate(visit.service, erasure)
    if name == "certificate.json":
        return document.to_bytes()
    return visit.service.documents.certificate(document)
