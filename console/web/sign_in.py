"""Signing in with an API key, and out.

1. A wrong key, a key of nobody and a token give one answer; so does a link that is used, too old or from elsewhere.
2. After signing in a person is led to a page of the console and to nowhere else.
"""

from __future__ import annotations

from urllib.parse import urlencode

from starlette.requests import Request
from starlette.responses import HTMLResponse, RedirectResponse, Response

from kvcustody.console.web.page_request import PREFIX, redirect
from kvcustody.console.web.rendering import render
from kvcustody.governance.api.http.console_mount import log_in, log_in_by_link, log_out
from kvcustody.governance.api.http.exchange import is_tls
from kvcustody.governance.service.access.sign_in_links import is_direct
from kvcustody.governance.service.problem_details import ProblemError
from kvcustody.governance.service.service import Service

_LOGIN = PREFIX + "/login"
LINK = PREFIX + "/link/"
_KEY_CHARACTERS_MAX = 512


def to_sign_in(request: Request) -> Response:
    """Return the redirect for a caller without a session; after a GET they come back to the same page."""
    after = ""
    if request.method == "GET" and request.url.path.startswith(PREFIX + "/"):
        query = request.url.query
        after = "?" + urlencode({"next": request.url.path + (f"?{query}" if query else "")})
    return RedirectResponse(_LOGIN + after, 303)


def answer(service: Service, request: Request, form: dict[str, str]) -> Response:
    """Answer the sign-in page, a sign-in attempt, or a sign-out."""
    if request.url.path != _LOGIN:
        response = redirect("/login")
        response.headers["Set-Cookie"] = log_out(service, request.headers.get("cookie"), tls=is_tls(request.scope))
        return response
    after = _inside(form.get("next") or request.query_params.get("next", ""))
    if request.method != "POST":
        return _form(after)
    try:
        begun = log_in(service, form.get("key", "").strip()[:_KEY_CHARACTERS_MAX], request.scope)
    except ProblemError as problem:
        return _form(after, problem)
    response = RedirectResponse(after, 303)
    response.headers["Set-Cookie"] = begun.set_cookie
    return response


def by_link(service: Service, request: Request) -> Response:
    """Sign in with a link that was made for this machine (`access.sign_in_links`)."""
    peer = request.client.host if request.client else None
    forwarded = any(name in request.headers for name in ("forwarded", "x-forwarded-for"))
    direct = is_direct(peer, request.headers.get("host", ""), forwarded=forwarded)
    try:
        begun = log_in_by_link(service, request.path_params["token"], direct=direct, tls=is_tls(request.scope))
    except ProblemError as problem:
        return _form(PREFIX + "/", problem, link=True)
    response = RedirectResponse(PREFIX + "/", 303)
    response.headers["Set-Cookie"] = begun.set_cookie
    return response


def _form(after: str, problem: ProblemError | None = None, *, link: bool = False) -> Response:
    status = 200 if problem is None else problem.type.status
    waits = problem is not None and problem.type.name == "too-many-requests"
    refused = problem is not None and not waits
    text = render("login.html", title="Sign in", after=after, refused=refused, waits=waits, link=link)
    headers = dict(problem.headers) if problem is not None else {}
    return HTMLResponse(text, status, headers=headers)


def _inside(after: str) -> str:
    """Return a path of the console, or its first page (rule 2): never another host, never the sign-in again."""
    plain = after.startswith(PREFIX + "/") and after.isascii() and after.isprintable() and "\\" not in after
    inner = plain and "//" not in after.partition("?")[0] and not after.startswith((_LOGIN, LINK, PREFIX + "/logout"))
    return after if inner else PREFIX + "/"
