"""The console as an ASGI application behind the service's gate (`governance.api.pages_port`).

1. Without a session there is the sign-in page and the static files, and nothing else: every other page leads there.
2. No page holds a script or a style of its own; the policy of content allows this origin's files alone, and no frame.
3. A refusal is a page with the problem's status. Absent, foreign and unknown paths give the same bytes.
4. A form that is not accepted is shown again with what was typed, each fault at its field, under that status. A button
   of a row has its fault beside it. A form that is signed in the browser stays there: its script gets the faults.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from typing import Any
from urllib.parse import parse_qsl

from starlette.applications import Starlette
from starlette.concurrency import run_in_threadpool
from starlette.exceptions import HTTPException
from starlette.requests import Request
from starlette.responses import JSONResponse, RedirectResponse, Response
from starlette.routing import Route

from kvcustody.console.web.audit_export import export as audit_export
from kvcustody.console.web.form_errors import wrong_fields
from kvcustody.console.web.page_request import PREFIX, PageRequest
from kvcustody.console.web.pages.audit import event as audit_event
from kvcustody.console.web.pages.audit import explore as audit_explore
from kvcustody.console.web.pages.consents import show as consent_show
from kvcustody.console.web.pages.custody import live as custody_live
from kvcustody.console.web.pages.custody import subject as custody_subject
from kvcustody.console.web.pages.decisions import rule as decisions_rule
from kvcustody.console.web.pages.decisions import show as decisions_show
from kvcustody.console.web.pages.deletion import show as deletion_show
from kvcustody.console.web.pages.fleet.fleet import show as fleet_show
from kvcustody.console.web.pages.fleet.routes import show as routes_show
from kvcustody.console.web.pages.grants import show as grants_show
from kvcustody.console.web.pages.health import scan as health_scan
from kvcustody.console.web.pages.health import show as health_show
from kvcustody.console.web.pages.overview import inbox as inbox_show
from kvcustody.console.web.pages.overview import show as overview_show
from kvcustody.console.web.pages.policy import check as policy_check
from kvcustody.console.web.pages.policy import draft as policy_draft
from kvcustody.console.web.pages.policy import revision as policy_revision
from kvcustody.console.web.pages.policy import show as policy_show
from kvcustody.console.web.pages.principals import disable as principals_disable
from kvcustody.console.web.pages.principals import keep as principals_keep
from kvcustody.console.web.pages.principals import revoke as principals_revoke
from kvcustody.console.web.pages.principals import show as principals_show
from kvcustody.console.web.pages.privacy.cases import letter as cases_letter
from kvcustody.console.web.pages.privacy.cases import listed as cases_listed
from kvcustody.console.web.pages.privacy.cases import open_case as cases_open
from kvcustody.console.web.pages.privacy.cases import show as cases_show
from kvcustody.console.web.pages.privacy.cases import step as cases_step
from kvcustody.console.web.pages.privacy.erasures import download as erasures_download
from kvcustody.console.web.pages.privacy.erasures import listed as erasures_listed
from kvcustody.console.web.pages.privacy.erasures import preview as erasures_preview
from kvcustody.console.web.pages.privacy.erasures import request as erasures_request
from kvcustody.console.web.pages.privacy.erasures import show as erasures_show
from kvcustody.console.web.pages.release_step import prepare as release_prepare
from kvcustody.console.web.pages.reports import again as reports_again
from kvcustody.console.web.pages.reports import cancel as reports_cancel
from kvcustody.console.web.pages.reports import change as reports_change
from kvcustody.console.web.pages.reports import download as reports_download
from kvcustody.console.web.pages.reports import listed as reports_listed
from kvcustody.console.web.pages.reports import make as reports_make
from kvcustody.console.web.pages.reports import schedule as reports_schedule
from kvcustody.console.web.pages.reports import show as reports_show
from kvcustody.console.web.pages.reuse import show as reuse_show
from kvcustody.console.web.pages.tiers import show as tiers_show
from kvcustody.console.web.rendering import STATIC_FILES, render
from kvcustody.console.web.sign_in import LINK
from kvcustody.console.web.sign_in import answer as sign_in_answer
from kvcustody.console.web.sign_in import by_link as sign_in_by_link
from kvcustody.console.web.sign_in import to_sign_in as sign_in_to_sign_in
from kvcustody.errors import CustodyError
from kvcustody.governance.api.http.exchange import Receive, Scope, Send, is_tls
from kvcustody.governance.api.http.session_cookie import cookie_of
from kvcustody.governance.service.operations.run import problem_of
from kvcustody.governance.service.problem_details import ProblemError, not_found
from kvcustody.governance.service.service import Service
from kvcustody.logger import get_logger

_log = get_logger(__name__)
_FIELDS_MAX = 200
_CONTENT = (
    "default-src 'none'; script-src 'self'; style-src 'self'; img-src 'self'; connect-src 'self'; "
    "form-action 'self'; frame-ancestors 'none'; base-uri 'none'"
)
_HEADERS = {"Content-Security-Policy": _CONTENT, "Referrer-Policy": "same-origin"}
Page = Callable[[PageRequest], Response]

_PAGES: tuple[tuple[str, str, Page], ...] = (
    ("GET", "/", overview_show),
    ("GET", "/inbox", inbox_show),
    ("GET", "/audit", audit_explore),
    ("GET", "/audit/event", audit_event),
    ("GET", "/audit/export/{form}", audit_export),
    ("GET", "/custody", custody_live),
    ("GET", "/custody/subject", custody_subject),
    ("GET", "/reuse", reuse_show),
    ("GET", "/tiers", tiers_show),
    ("GET", "/fleet", fleet_show),
    ("GET", "/routes", routes_show),
    ("GET", "/erasures", erasures_listed),
    ("POST", "/erasures", erasures_request),
    ("POST", "/erasures/preview", erasures_preview),
    ("GET", "/erasures/{erasure}", erasures_show),
    ("GET", "/erasures/{erasure}/{file}", erasures_download),
    ("GET", "/cases", cases_listed),
    ("POST", "/cases", cases_open),
    ("GET", "/cases/{case}", cases_show),
    ("POST", "/cases/{case}/step", cases_step),
    ("POST", "/cases/{case}/letter", cases_letter),
    ("GET", "/deletion", deletion_show),
    ("GET", "/policy", policy_show),
    ("GET", "/policy/draft", policy_draft),
    ("POST", "/policy/draft", policy_check),
    ("GET", "/policy/consents", consent_show),
    ("POST", "/policy/step", release_prepare),
    ("GET", "/policy/{revision}", policy_revision),
    ("GET", "/grants", grants_show),
    ("GET", "/decisions", decisions_show),
    ("GET", "/decisions/rule", decisions_rule),
    ("GET", "/reports", reports_listed),
    ("POST", "/reports", reports_make),
    ("POST", "/reports/schedules", reports_schedule),
    ("POST", "/reports/schedules/{schedule}/{act}", reports_change),
    ("POST", "/reports/{job}/retry", reports_again),
    ("GET", "/reports/{job}", reports_show),
    ("POST", "/reports/{job}/cancel", reports_cancel),
    ("GET", "/reports/{job}/{file}", reports_download),
    ("GET", "/health", health_show),
    ("POST", "/health/scan", health_scan),
    ("GET", "/principals", principals_show),
    ("POST", "/principals/disable", principals_disable),
    ("POST", "/principals/revoke", principals_revoke),
    ("POST", "/principals/keep", principals_keep),
)

_FORM_PAGES: dict[Page, tuple[Page, str]] = {  # the page that has a form, and how the form's path goes on from it
    erasures_preview: (erasures_listed, "/preview"),
    erasures_request: (erasures_preview, ""),
    cases_open: (cases_listed, ""),
    cases_step: (cases_show, "/step"),
    cases_letter: (cases_show, "/letter"),
    reports_make: (reports_listed, ""),
    reports_schedule: (reports_listed, "/schedules"),
    principals_disable: (principals_show, "/disable"),
    principals_revoke: (principals_show, "/revoke"),
    principals_keep: (principals_show, "/keep"),
    health_scan: (health_show, "/scan"),
}
_AT_THE_FIELD = (409, 422)
_OF_A_ROW = (principals_revoke, principals_keep, health_scan)
_AT_THE_ROW = (404, *_AT_THE_FIELD)  # what the row is about may have gone meanwhile


class Console:
    """The pages of one service."""

    prefix = PREFIX

    def __init__(self, service: Service) -> None:
        self._service = service
        routes = [Route("/", _home), Route(PREFIX, _home), Route(f"{PREFIX}/static/{{name}}", _static)]
        for path, methods in (("/login", ["GET", "POST"]), ("/logout", ["POST"])):
            routes.append(Route(PREFIX + path, self._sign_in, methods=methods))
        routes.append(Route(LINK + "{token}", self._link, methods=["GET"]))
        routes += [Route(PREFIX + path, self._endpoint(page), methods=[method]) for method, path, page in _PAGES]
        routes.append(Route("/{rest:path}", self._endpoint(_nothing), methods=["GET", "POST"]))
        self._app = Starlette(routes=routes, exception_handlers={HTTPException: _refused})
        self._app.router.redirect_slashes = False

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        """Answer a request that has passed the gate."""
        await self._app(scope, receive, send)

    def _endpoint(self, page: Page) -> Callable[[Request], Any]:
        async def endpoint(request: Request) -> Response:
            caller = request.scope.get("kvcustody.caller")
            if caller is None:
                return sign_in_to_sign_in(request)
            form = dict(_fields(await request.body())) if request.method == "POST" else {}
            visit = PageRequest(
                self._service,
                caller,
                request.url.path,
                request.path_params,
                dict(request.query_params),
                form,
                cookie_of(request.headers.get("cookie"), tls=is_tls(request.scope)),
            )
            return _with_headers(await run_in_threadpool(_answered, page, visit))

        return endpoint

    async def _link(self, request: Request) -> Response:
        if request.method != "GET":  # a HEAD of a program that looks at links spends none
            return await _refused(request, HTTPException(405))
        return _with_headers(await run_in_threadpool(sign_in_by_link, self._service, request))

    async def _sign_in(self, request: Request) -> Response:
        form = dict(_fields(await request.body()))
        made = await run_in_threadpool(sign_in_answer, self._service, request, form)
        return _with_headers(made)


def _answered(page: Page, visit: PageRequest) -> Response:
    """Return a page's answer; a refusal is a page too (rule 3)."""
    error: CustodyError
    try:
        return page(visit)
    except CustodyError as raised:
        known = problem_of(raised)
        if known is None:
            _log.error("page failed", path=visit.path, exc_info=True)
        problem, error = known or ProblemError("internal"), raised
    except Exception:
        _log.error("page failed", path=visit.path, exc_info=True)
        problem = error = ProblemError("internal")
    if visit.form and page is release_prepare:
        faults = {"detail": problem.detail or problem.type.advice, "wrong": wrong_fields(error, problem, {*visit.form})}
        return JSONResponse(faults, problem.type.status, {**problem.headers}, media_type="application/problem+json")
    at_the_field = _AT_THE_ROW if page in _OF_A_ROW else _AT_THE_FIELD
    if visit.form and problem.type.status in at_the_field and page in _FORM_PAGES:
        again = _form_again(page, visit, wrong_fields(error, problem, {*visit.form}))
        if again is not None:
            again.status_code = problem.type.status
            return again
    shown = problem.type
    response = visit.page("problem.html", shown.title, status=shown.status, problem=shown, detail=problem.detail)
    response.headers.update(problem.headers)
    return response


def _form_again(page: Page, visit: PageRequest, wrong: dict[str, str]) -> Response | None:
    """Return the page of a form that was not accepted, with what was typed and what is wrong (rule 4)."""
    form_page, end = _FORM_PAGES[page]
    place = visit.path.removesuffix(end)
    query = {"name": visit.form["name"]} if form_page is principals_show and "name" in visit.form else {}
    kept = visit.form if form_page is erasures_preview else {}
    sent = {name: value for name, value in visit.form.items() if name not in ("csrf", "once")}
    try:
        return form_page(replace(visit, path=place, query=query, form=kept, sent=sent, sent_to=visit.path, wrong=wrong))
    except CustodyError:
        return None


def _nothing(visit: PageRequest) -> Response:
    raise not_found()


async def _home(request: Request) -> Response:
    return RedirectResponse(PREFIX + "/", 303)


async def _static(request: Request) -> Response:
    found = STATIC_FILES.get(request.path_params["name"])
    if found is None:
        return Response("nothing here\n", 404, media_type="text/plain")
    kept = "public, max-age=31536000, immutable"
    return Response(found.content, media_type=found.media_type, headers={"Cache-Control": kept})


async def _refused(request: Request, error: Exception) -> Response:
    assert isinstance(error, HTTPException)
    text = render("bare.html", title="Not here", status=error.status_code)
    headers = {"Allow": ", ".join(_methods(request))} if error.status_code == 405 else None
    return _with_headers(Response(text, error.status_code, headers, media_type="text/html"))


def _methods(request: Request) -> list[str]:
    """Return a page's methods for `Allow`; for a path without a page, those of any page."""
    *pages, any_path = (route for route in request.app.routes if isinstance(route, Route))
    found = [route for route in pages if route.path_regex.match(request.scope["path"])] or [any_path]
    named = {method for route in found for method in route.methods or ()}
    is_link = request.scope["path"].startswith(LINK)
    return sorted(named - {"HEAD"} if is_link else named)  # a HEAD spends no link: it is refused


def _with_headers(response: Response) -> Response:
    response.headers.update(_HEADERS)
    return response


def _fields(body: bytes) -> list[tuple[str, str]]:
    """Return a form's fields; none for a body that is no form."""
    try:
        return parse_qsl(body.decode(), keep_blank_values=True, max_num_fields=_FIELDS_MAX)
    except ValueError:
        return []
