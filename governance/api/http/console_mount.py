"""The seam for pages: a console is an ASGI application behind the same gate, with sessions, CSRF and recorded reads.

1. Pages see a request after the gate has authenticated it: `scope["kvcustody.caller"]` is a `Caller`. It is None for
   somebody who is not logged in; pages show them nothing of the ledger.
2. A request that may change something must come from the service's own origin. It carries the session's CSRF token, in
   `X-CSRF-Token` or in the form field `csrf`. Only the login has no session yet; its origin is checked too.
3. Before pages show what an auditor, a data protection officer or an administrator sees, they record it (class A).
"""

from __future__ import annotations

from typing import TYPE_CHECKING, NamedTuple, Protocol
from urllib.parse import parse_qs

from kvcustody.audit.kinds import AccessRecorded
from kvcustody.governance.api.http.exchange import Exchange, Receive, Scope, Send, is_tls
from kvcustody.governance.api.http.session_cookie import cookie_of, set_cookie
from kvcustody.governance.service.access.authenticator import unauthenticated
from kvcustody.governance.service.access.caller import Caller

if TYPE_CHECKING:
    from kvcustody.governance.service.service import Service

ADDRESS = "kvcustody.address"  # in a page's scope: where the request comes from (`Exchange.address`)
FORM = "application/x-www-form-urlencoded"


class Pages(Protocol):
    """A console: it serves every path at and below `prefix`, and `/`."""

    prefix: str

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        """Answer a request; its body has been read, within the service's limit."""


class LoggedIn(NamedTuple):
    """The result of a login: the session's `Set-Cookie`, and its CSRF token."""

    set_cookie: str
    csrf: str
    caller: Caller


def log_in(service: Service, key: str, scope: Scope) -> LoggedIn:
    """Begin a session with an API key; raises `unauthenticated`, or `too-many-requests` after too many failures."""
    caller = service.authenticator.caller(f"Bearer {key}", None, scope[ADDRESS])
    if caller.by != "key":  # a token's issuer keeps its principal: there is nobody to read anew (`sessions`)
        raise unauthenticated()
    begun = service.sessions.begin(caller.name, key=caller.key)
    seconds = service.settings.session_minutes * 60
    return LoggedIn(set_cookie(begun.token, seconds, tls=is_tls(scope)), begun.csrf, caller)


def log_in_by_link(service: Service, token: str, *, direct: bool, tls: bool) -> LoggedIn:
    """Begin a session with a link (`access.sign_in_links`); raises `unauthenticated` for a link that is not valid."""
    link = service.sign_in_links.take(token, direct=direct)
    if link is None or service.principals.narrowed_since(link.principal, link.made_us):
        raise unauthenticated()
    name = link.principal
    begun = service.sessions.begin(name, key="")
    caller = service.authenticator.of_session(begun.token)
    if caller is None:
        raise unauthenticated()
    seconds = service.settings.session_minutes * 60
    return LoggedIn(set_cookie(begun.token, seconds, tls=tls), begun.csrf, caller)


def log_out(service: Service, cookie_header: str | None, *, tls: bool) -> str:
    """End the session of a request; returns the `Set-Cookie` that removes its cookie."""
    token = cookie_of(cookie_header, tls=tls)
    if token is not None:
        service.sessions.end(token)
    return set_cookie("", 0, tls=tls)


def record_read(
    service: Service, caller: Caller, page: str, *, tenant: str | None = None, filters: tuple[str, ...] = ()
) -> None:
    """Put a read on record before it is shown, for those whose reads are events; raises `unavailable` (rule 3)."""
    if caller.recorded:
        now_us, roles = service.clock.now_us(), tuple(sorted(caller.roles))
        about = caller.tenant or tenant or ""
        service.record(AccessRecorded(now_us, caller.name, roles, page, about, filters))


def form_token(exchange: Exchange) -> str:
    """The field `csrf` of a form; empty where it has none."""
    if (exchange.header("content-type") or "").partition(";")[0].strip().lower() != FORM:
        return ""
    try:
        return parse_qs(exchange.body.decode("utf-8"), max_num_fields=200).get("csrf", [""])[0]
    except ValueError:
        return ""
