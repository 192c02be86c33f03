"""The session cookie, and the check that a request that changes something comes from the service's own pages.

1. The cookie is `HttpOnly`, `SameSite=Strict` and bound to the host; over TLS, its proxy's too (`Exchange.tls`), it is
   `Secure` with the `__Host-` prefix.
2. An act in a session needs the session's CSRF token, and where the browser says whence it comes, the own origin.
"""

from __future__ import annotations

from kvcustody.governance.api.http.exchange import Exchange
from kvcustody.governance.service.access.sessions import Sessions
from kvcustody.governance.service.problem_details import ProblemError

SECURE_COOKIE = "__Host-kvcustody"
PLAIN_COOKIE = "kvcustody"  # on this machine, without TLS
_DEFAULT_PORTS = {"http": ":80", "https": ":443"}


def set_cookie(token: str, seconds: int, *, tls: bool) -> str:
    """The `Set-Cookie` of a session; with 0 seconds it removes the cookie."""
    name = SECURE_COOKIE if tls else PLAIN_COOKIE
    secure = "; Secure" if tls else ""
    return f"{name}={token}; Path=/; Max-Age={seconds}; HttpOnly; SameSite=Strict{secure}"


def cookie_of(header: str | None, *, tls: bool) -> str | None:
    """The session's cookie; over TLS only the `__Host-` one, which no other host can set."""
    if header is None:
        return None
    found = dict(part.strip().partition("=")[::2] for part in header.split(";"))
    return found.get(SECURE_COOKIE if tls else PLAIN_COOKIE)


def check_origin(exchange: Exchange) -> None:
    """Raise `csrf` where the browser says that the request comes from another site (rule 2)."""
    if exchange.header("sec-fetch-site") not in (None, "same-origin"):
        raise ProblemError("csrf")
    origin = exchange.header("origin")
    if origin is None:
        return
    scheme, _, authority = origin.partition("://")
    own = exchange.header("host") or ""
    if _without_default_port(authority, scheme) != _without_default_port(own, scheme):
        raise ProblemError("csrf")


def _without_default_port(authority: str, scheme: str) -> str:
    """An authority as browsers write it in `Origin`; a client or a proxy may name the default port in `Host`."""
    return authority.lower().removesuffix(_DEFAULT_PORTS.get(scheme, ""))


def check_act(exchange: Exchange, sessions: Sessions, cookie: str, form_token: str = "") -> None:
    """Raise `csrf` unless a request in a session comes from a page of this service (rule 2)."""
    check_origin(exchange)
    if not sessions.vouches(cookie, exchange.header("x-csrf-token") or form_token):
        raise ProblemError("csrf")
