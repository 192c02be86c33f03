"""Operations on oneself: who am I, my keys, my session, which version."""

from __future__ import annotations

import platform
from collections.abc import Callable
from functools import partial
from typing import Annotated, Any

import orjson
from fastapi import Path, Query, Request, Response

import kvcustody
from kvcustody.audit.store import SCHEMA_REVISION
from kvcustody.governance.api.builder import Api, Asking, Serving
from kvcustody.governance.api.cookies import SESSION_COOKIES, set_cookie
from kvcustody.governance.api.exchange import CERTIFICATE
from kvcustody.governance.api.models.access import (
    Document,
    IssuedKey,
    Keys,
    Rotation,
    Session,
    Version,
    Whoami,
)
from kvcustody.governance.api.operation import Operation
from kvcustody.governance.service.problems import ProblemError
from kvcustody.governance.service.roles import Action, Reach, reach

AllowLast = Annotated[bool, Query(description="Even the last key of the last who manages keys.")]
Prefix = Annotated[str, Path(pattern=r"^[0-9a-f]{12}$", examples=["0f1e2d3c4b5a"])]


_mine = partial(Operation, action=Action.SELF, tag="self")


def add_self_service(api: Api) -> None:
    """Declare the operations."""
    api.add(_mine("whoami", "GET", "/v1/whoami"), whoami, answers=Whoami)
    api.add(_mine("version", "GET", "/v1/version"), version, answers=Version)
    api.add(_mine("listOwnKeys", "GET", "/v1/keys", at_workers=True), own_keys, answers=Keys)
    rotate = _mine("rotateOwnKey", "POST", "/v1/keys:rotate", keyed=True, at_workers=True)
    api.add(rotate, rotate_own_key, answers=IssuedKey, status=201)
    revoke = _mine("revokeOwnKey", "DELETE", "/v1/keys/{prefix}", at_workers=True)
    api.add(revoke, revoke_own_key, status=204, problems=("not-found", "conflict"))
    begin = _mine("beginSession", "POST", "/v1/session", keyed=True)
    api.add(begin, begin_session, answers=Session, status=201)
    api.add(_mine("endSession", "DELETE", "/v1/session"), end_session, status=204)
    document = _mine("apiDocument", "GET", "/v1/openapi.json")
    api.add(document, _document(api), answers=Document)


def _document(api: Api) -> Callable[[], Response]:
    def document() -> Response:
        """The document of this API, OpenAPI 3.1."""
        return Response(api.document(), media_type="application/json")

    return document


def whoami(caller: Asking) -> dict[str, Any]:
    """Who you are to this service, and what your roles let you do."""
    actions = {action.value: reach(caller.roles, action) for action in Action}
    return {
        "name": caller.name,
        "roles": sorted(caller.roles),
        "tenant": caller.tenant,
        "by": caller.by,
        "actions": {name: found.name.lower() for name, found in actions.items() if found is not Reach.NONE},
    }


def version() -> Response:
    """The versions that decide how this service behaves."""
    found = {
        "kvcustody": kvcustody.__version__,
        "api": "v1",
        "schema": SCHEMA_REVISION,
        "python": platform.python_version(),
    }
    return Response(orjson.dumps(found), media_type="application/json")


def own_keys(caller: Asking, service: Serving) -> dict[str, Any]:
    """Your keys, newest first: when they were issued and last used, never what they are."""
    return {"items": [key._asdict() for key in service.principals.keys(caller.name)]}


def rotate_own_key(caller: Asking, service: Serving, request: Request, how: Rotation) -> dict[str, Any]:
    """A new key for yourself; your other keys end after the overlap.

    It is bound to the client certificate that the key you ask with is bound to; with `bind`, to the one of this
    connection.
    """
    _enrolled(caller.by)
    book, presented = service.principals, request.scope.get(CERTIFICATE)
    if how.bind and presented is None:
        raise ProblemError(
            "invalid", "`bind` needs a connection with a client certificate (`workers_listen`)"
        )
    bound = presented if how.bind else book.binding(caller.key)
    days, overlap = how.days, how.overlap_days
    return book.issue_key(
        caller.name, days=days, overlap_days=overlap, certificate=bound, by=caller.name
    )._asdict()


def revoke_own_key(
    caller: Asking, service: Serving, prefix: Prefix, allow_last: AllowLast = False
) -> Response:
    """Refuse one of your keys from now on."""
    book = service.principals
    book.revoke_key(prefix, principal=caller.name, allow_last=allow_last, by=caller.name)
    return Response(status_code=204)


def begin_session(caller: Asking, service: Serving) -> Response:
    """Begin a session of a person at the console: sets its cookie."""
    _enrolled(caller.by)
    made = service.sessions.begin(caller.name)
    seconds = service.settings.session_minutes * 60
    body = orjson.dumps({"csrf": made.csrf, "expires_us": made.expires_us})
    answer = Response(body, 201, media_type="application/json")
    answer.headers["Set-Cookie"] = set_cookie(made.token, seconds, tls=service.settings.tls)
    return answer


def end_session(service: Serving, request: Request) -> Response:
    """End the session, and remove its cookie."""
    for name in SESSION_COOKIES:
        token = request.cookies.get(name)
        if token is not None:
            service.sessions.end(token)
    answer = Response(status_code=204)
    answer.headers["Set-Cookie"] = set_cookie("", 0, tls=service.settings.tls)
    return answer


def _enrolled(by: str) -> None:
    if by == "token":
        raise ProblemError(
            "conflict", "a token's issuer keeps its principal; there is no key or session for it here"
        )
    if by == "local":
        raise ProblemError("conflict", "a key or a session of one's own is asked for over a server")
