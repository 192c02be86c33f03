"""Operations on erasures: ask for one, watch it over all workers, take its certificate.

1. A tenant's administrator erases that tenant's custody alone; the tenant comes from the credential.
2. A request is durable in the ledger before it is answered; workers find it there.
3. The certificate of an erasure is for auditors and those who may certify its tenant; the opening, which names the
   selector, is for the latter alone.
"""

from __future__ import annotations

import uuid
from functools import partial
from typing import TYPE_CHECKING, Annotated, Any

from kvcustody.audit.evidence.erasure import requests_and_answers as ledger
from kvcustody.audit.evidence.erasure.erasure_holds import holds_on_erasure
from kvcustody.audit.evidence.erasure.preview import preview
from kvcustody.audit.evidence.erasure.requests_and_answers import Requested
from kvcustody.audit.evidence.query.known_names import check_tenant
from kvcustody.audit.evidence.subjects.subject_table import session_names, subject_names
from kvcustody.errors import ConfigError, LedgerError
from kvcustody.governance.api.declarations import Declarations
from kvcustody.governance.api.given import CallerDep, DeskDep, ServiceDep
from kvcustody.governance.api.models.custody import facts
from kvcustody.governance.api.models.erasures import (
    Certificate,
    ErasureModel,
    ErasurePage,
    ErasurePreview,
    ErasureRequest,
    ErasureStatus,
    OpeningModel,
)
from kvcustody.governance.erasure.erasure_run import request_event
from kvcustody.governance.erasure.selector import Selector, check_selector
from kvcustody.governance.identity.principal import check_identifier, check_tenant_name
from kvcustody.governance.restriction.orders import check_not_restricted
from kvcustody.governance.service.access.caller import Caller
from kvcustody.governance.service.access.roles import Permission, Reach
from kvcustody.governance.service.certificates import certificate, opening
from kvcustody.governance.service.operations.answer import Content
from kvcustody.governance.service.operations.operation import Operation
from kvcustody.governance.service.operations.pages import page
from kvcustody.governance.service.operations.parameters import LARGE, Cursor, Limit, Path, Tenant
from kvcustody.governance.service.page_cursor import CursorBinding
from kvcustody.governance.service.problem_details import ProblemError, not_found
from kvcustody.policies.document.model import Action

if TYPE_CHECKING:
    from kvcustody.governance.service.service import Service

READ = Permission.READ_CUSTODY
ErasureId = Annotated[str, Path(min_length=1, max_length=64, pattern=r"^[A-Za-z0-9-]+$", examples=["4f1c0e"])]
_read = partial(Operation, method="GET", action=READ, tag="erasures", recorded=True)
_paper = partial(Operation, method="GET", tag="erasures", recorded=True)


def add_erasures(api: Declarations) -> None:
    """Declare the operations."""
    asking = Operation(
        "requestErasure",
        "POST",
        "/v1/erasures",
        Permission.ERASE,
        "erasures",
        keyed=True,
        command="erasure request",
    )
    api.add(asking, request, answers=ErasureModel, status=202, problems=("not-found", "conflict"))
    looking = Operation(
        "previewErasure",
        "POST",
        "/v1/erasures:preview",
        Permission.ERASE,
        "erasures",
        recorded=True,
        command="erasure preview",
    )
    api.add(looking, previewed, answers=ErasurePreview, problems=("not-found",))
    listing = _read("listErasures", path="/v1/erasures", command="erasure list")
    api.add(listing, erasures, answers=ErasurePage, problems=("not-found", "cursor-invalid"))
    api.add(
        _read("getErasure", path="/v1/erasures/{erasure}", command="erasure status"),
        erasure_of,
        answers=ErasureStatus,
        problems=("not-found",),
    )
    erasure_path = "/v1/erasures/{erasure}"
    missing = ("not-found", "conflict")
    certificate = _paper(
        "getCertificate",
        path=f"{erasure_path}/certificate",
        action=Permission.READ_CERTIFICATE,
        command="erasure fetch-certificate",
    )
    api.add(certificate, certificate_of, answers=Certificate, problems=missing)
    page_ = _paper(
        "getCertificatePage",
        path=f"{erasure_path}/certificate.html",
        action=Permission.READ_CERTIFICATE,
        command="erasure fetch-page",
    )
    api.add(page_, certificate_page, media="text/html", problems=(*missing, "not-acceptable"))
    opens = _paper("getOpening", path=f"{erasure_path}/opening", action=Permission.CERTIFY, command="erasure opening")
    api.add(opens, opening_of, answers=OpeningModel, problems=("not-found",))


def request(caller: CallerDep, service: ServiceDep, what: ErasureRequest) -> dict[str, Any]:
    """Request that all custody of a selector end by a deadline, on every worker.

    Refused while a case restricts the processing of anybody whom it covers.
    """
    selector = _selector(caller, service, what)
    if caller.tenant is not None:
        named = selector.classification
        service.authorize(Action.ADMINISTER, caller, () if named is None else (named,))
    try:
        with service.reading() as connection:  # no wall: who is behind a pseudonym is in no tenant's log
            check_not_restricted(connection, selector, service.subject_keys)
    except ConfigError as error:
        raise ProblemError("conflict", error.message) from None
    now_us, erasure = service.clock.now_us(), uuid.uuid4().hex
    deadline_us = now_us + what.deadline_seconds * 1_000_000
    service.record_erasure(request_event(selector, erasure, caller.name, deadline_us, now_us), selector)
    offset_us = service.writer.offset_us
    return {
        "erasure": erasure,
        "tenant": selector.tenant,
        "selector": selector.kind,
        "actor": caller.name,
        "at_us": now_us + offset_us,
        "deadline_us": deadline_us + offset_us,
    }


def previewed(caller: CallerDep, service: ServiceDep, what: ErasureRequest) -> dict[str, Any]:
    """Preview an erasure: the live residencies that it would cover now, by tenant and classification.

    Parts of the selector that the ledger does not know of a residency are named in `not_counted`: then it covers at
    most what is counted. Nothing is erased.
    """
    selector = _selector(caller, service, what)
    tenant, subject, session = selector.tenant, selector.subject, selector.session
    beyond = [name for name in selector.narrowing if name != "classification"]
    subjects: list[str] | None = None
    sessions: list[str] | None = None
    with service.reading() as connection:  # no wall: who is behind a pseudonym is in no tenant's log
        if tenant is not None and subject is not None:
            subjects = subject_names(connection, tenant, subject, service.subject_keys)
            if session is not None:
                sessions = session_names(connection, tenant, subject, session, service.subject_keys)
        elif session is not None:
            beyond.append("session")
    periods = service.work_periods()
    with service.reading(tenant) as connection:
        affected = preview(
            connection,
            now_us=service.clock.utc_us(),
            tenant=tenant,
            subjects=subjects,
            sessions=sessions,
            classification=selector.classification,
            not_counted=sorted(beyond),
            periods=periods,
        )
    figures = {"residencies": affected.residencies, "running": affected.running, "is_cut": affected.is_cut}
    named = {"not_counted": list(affected.not_counted), "workers": list(affected.workers)}
    return {"tenant": tenant, "selector": selector.kind, "rows": facts(affected.rows), **figures, **named}


def erasures(
    caller: CallerDep, desk: DeskDep, tenant: Tenant = None, cursor: Cursor = None, limit: Limit = 100
) -> dict[str, Any]:
    """List requested erasures, newest first, with the state of each."""
    mine = desk.tenant_of(caller, READ, tenant)
    periods = desk.work_periods()
    with desk.reading(mine) as connection:
        found = ledger.requests(connection, tenant=mine)
        standings = ledger.read_standings(connection, found, desk.clock.utc_us(), periods)
    question = CursorBinding("listErasures", caller.name, {"tenant": mine})
    items = [_shown(item) | standings[item]._asdict() for item in found]
    return page(desk, question, items, cursor, limit)


def erasure_of(caller: CallerDep, desk: DeskDep, erasure: ErasureId) -> dict[str, Any]:
    """Get one erasure: answers of workers, those outstanding, what each ended, and legal holds that apply.

    Holds bind the ledger's record of it, and no block. The reason of one on everything is for those who see all.
    """
    periods = desk.work_periods()
    with desk.reading(caller.tenant) as connection:
        try:
            progress = ledger.status(connection, erasure, desk.clock.utc_us(), periods)
        except LedgerError as error:
            raise desk.absent(error) from None
    if caller.reach(READ) is Reach.OWN and progress.request.tenant != caller.tenant:
        raise not_found()
    with desk.reading() as connection:  # no wall: a hold on everything is in the system log
        holds = holds_on_erasure(connection, progress.request.tenant, progress.request.subject)
    sees_all = caller.reach(READ) is Reach.ALL
    held = [hold if sees_all or hold.tenant is not None else hold._replace(reason="") for hold in holds]
    standing = {
        **progress.standing._asdict(),
        "outcome": progress.outcome,
        "waiting": list(progress.waiting),
        "unreachable": list(progress.unreachable),
    }
    return _shown(progress.request) | standing | {"answers": facts(progress.answers), "holds": facts(held)}


def certificate_of(caller: CallerDep, service: ServiceDep, erasure: ErasureId) -> Content:
    """Get the certificate of an erasure: figures, proofs, what remains and why, under one signature."""
    _check_reach(caller, service, erasure, Permission.READ_CERTIFICATE)
    return Content(certificate(service, erasure).to_bytes())


def certificate_page(caller: CallerDep, service: ServiceDep, erasure: ErasureId) -> Content:
    """Get the certificate as one printable page."""
    _check_reach(caller, service, erasure, Permission.READ_CERTIFICATE)
    made = service.documents.certificate(certificate(service, erasure))
    return Content(made, "text/html; charset=utf-8")


def opening_of(caller: CallerDep, service: ServiceDep, erasure: ErasureId) -> dict[str, Any]:
    """Get the opening of an erasure certificate's commitment. It reveals the selector: keep it secret."""
    _check_reach(caller, service, erasure, Permission.CERTIFY)
    return opening(service, erasure)._asdict()


def _check_reach(caller: Caller, service: Service, erasure: str, action: Permission) -> None:
    """Raise `not-found` unless the erasure is there and its tenant is in the caller's reach (rule 3)."""
    tenant = caller.tenant if caller.reach(action) is Reach.OWN else None
    with service.reading(tenant) as connection:
        try:
            found = ledger.request(connection, erasure)
        except LedgerError:
            raise not_found() from None
    if caller.reach(action) is Reach.OWN and found.tenant != caller.tenant:
        raise not_found()


def _selector(caller: Caller, service: Service, what: ErasureRequest) -> Selector:
    """The selector of a request, its tenant from the credential (rule 1); raises for one that is none."""
    mine = service.tenant_of(caller, Permission.ERASE, what.tenant)
    if mine != caller.tenant:  # a name that was typed
        with service.reading() as connection:
            check_tenant(connection, mine)
    parts = {name: getattr(what, name) for name in ("subject", "session", "classification", "segment")}
    for name, value in parts.items():
        if value is not None:
            check_identifier(name, value)
    if mine is not None:
        check_tenant_name(mine)
    model = None if what.model is None else bytes.fromhex(what.model)
    labels = tuple(sorted(what.labels.items()))
    selector = Selector(tenant=mine, model=model, key_epoch=what.key_epoch, labels=labels, **parts)
    check_selector(selector)
    if selector.subject is not None or selector.session is not None:
        service.check_can_name()
    return selector


def _shown(found: Requested) -> dict[str, Any]:
    """A request as it is shown; a deadline that no answer can hold, by whoever writes a ledger, is bounded."""
    names = ("erasure", "tenant", "selector", "actor", "at_us")
    deadline_us = min(max(found.deadline_us, 0), LARGE - 1)
    return {name: getattr(found, name) for name in names} | {"deadline_us": deadline_us}
