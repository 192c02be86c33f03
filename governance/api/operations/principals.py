"""Operations on principals: list them and their keys, disable them, refuse their keys.

1. They only take away access: only the bootstrap key can enable a disabled principal again and issue it a key. There is
   one exception: a key that another principal made for itself can be kept beyond the key that it was made with
   (`keepKey`).
2. An unknown principal, an unknown key and another principal's key get the same answer.
3. The last principal who manages keys is ended only if the request confirms it.

Operations of the bootstrap key: enrol principals, issue keys to them, enable them again. It permits nothing else.

Operations on oneself: who am I, my keys, my session, which version.
"""

from __future__ import annotations

import platform
from functools import partial
from typing import Annotated, Any

import orjson

from kvcustody._version import __version__
from kvcustody.audit.store.database.engine import SCHEMA_REVISION
from kvcustody.governance.api.declarations import Declarations
from kvcustody.governance.api.given import CallerDep, DeskDep, ServiceDep, WireDep
from kvcustody.governance.api.http.answer_times import answer_bytes
from kvcustody.governance.api.http.session_cookie import cookie_of, set_cookie
from kvcustody.governance.api.models.access import (
    ApiKeyPage,
    EndedKeys,
    Ending,
    Enrolled,
    Enrolment,
    IssuedKeyModel,
    KeyEnding,
    KeyKeeping,
    KeyRequest,
    OpenApiDocument,
    PrincipalModel,
    PrincipalName,
    PrincipalPage,
    RotationModel,
    Session,
    VersionModel,
    Whoami,
)
from kvcustody.governance.service.access.principal_table import (
    PrincipalRecord,
    find_principal,
    keys_of_principal,
    principals_after,
)
from kvcustody.governance.service.access.roles import PROCESSES, Permission, Reach, Role, reach
from kvcustody.governance.service.operations.answer import Content
from kvcustody.governance.service.operations.operation import Operation
from kvcustody.governance.service.operations.parameters import Cursor, Limit, Path, Query
from kvcustody.governance.service.page_cursor import CursorBinding
from kvcustody.governance.service.problem_details import ProblemError, not_found

_manage = partial(Operation, action=Permission.MANAGE_KEYS, tag="principals")


def add_principal_endings(api: Declarations) -> None:
    """Declare the operations."""
    keys_ = _manage("listKeys", "GET", "/v1/principals/{name}/keys", also=(Permission.ENROL,), command="apikey list")
    api.add(keys_, keys, answers=ApiKeyPage, problems=("not-found",))
    disabling = _manage("disablePrincipal", "POST", "/v1/principals:disable", keyed=True, command="principal disable")
    api.add(disabling, disable, answers=PrincipalModel, problems=("not-found",))
    revoking = _manage("revokeKeys", "POST", "/v1/principals:revoke-keys", keyed=True, command="apikey revoke")
    api.add(revoking, revoke_keys, answers=EndedKeys, problems=("not-found",))
    keeping = _manage(
        "keepKey",
        "POST",
        "/v1/principals:keep-key",
        keyed=True,
        also=(Permission.ENROL,),
        command="apikey keep",
    )
    api.add(keeping, keep_key, answers=ApiKeyPage, problems=("not-found", "conflict"))


def disable(caller: CallerDep, service: ServiceDep, who: Ending) -> dict[str, Any]:
    """Disable a principal with all of its keys and sessions, at once; with its tokens too, where an issuer keeps it.

    Whatever it shows is answered as an unknown key is. Questions that it holds open are not answered any more.
    """
    found = service.principals.disable(who.name, allow_last=who.allow_last, by=caller.name)
    service.changed()
    return shown(found)


def revoke_keys(caller: CallerDep, service: ServiceDep, ending: KeyEnding) -> dict[str, Any]:
    """Refuse one key of a principal from now on, or all of its keys and sessions; answers with its keys.

    With one key end the sessions that were begun with it, and the keys that were made with it.
    """
    book, allow, name = service.principals, ending.allow_last, ending.name
    if ending.prefix is not None:
        name = book.revoke_key(ending.prefix, principal=name, allow_last=allow, by=caller.name).principal
    else:
        assert name is not None, "the model refuses neither"
        book.revoke_keys(name, allow_last=allow, by=caller.name)
    service.changed()
    return {"principal": name, "items": [key._asdict() for key in book.keys(name)]}


def keep_key(caller: CallerDep, service: ServiceDep, keeping: KeyKeeping) -> dict[str, Any]:
    """Keep a key that its principal made: it no longer ends with the key that it was made with.

    Its principal cannot do this itself.
    """
    book = service.principals
    book.keep_key(keeping.prefix, principal=keeping.name, days=keeping.days, by=caller.name)
    return {"items": [key._asdict() for key in book.keys(keeping.name)]}


Named = Annotated[str, Path(min_length=1, max_length=128, examples=["alice"])]
_enrol = partial(Operation, action=Permission.ENROL, tag="principals")


def add_enrolment(api: Declarations) -> None:
    """Declare the operations."""
    listing = _enrol(
        "listPrincipals", "GET", "/v1/principals", also=(Permission.MANAGE_KEYS,), command="principal list"
    )
    api.add(listing, principals, answers=PrincipalPage, problems=("cursor-invalid",))
    enrolment = _enrol(
        "getPrincipal",
        "GET",
        "/v1/principals/{name}",
        also=(Permission.MANAGE_KEYS,),
        command="principal show",
    )
    api.add(enrolment, principal, answers=PrincipalModel, problems=("not-found",))
    enrolling = _enrol("enrolPrincipal", "POST", "/v1/principals", keyed=True, command="principal add")
    api.add(enrolling, enrol, answers=Enrolled, status=201)
    issuing = _enrol("issueKey", "POST", "/v1/principals/{name}/keys", keyed=True, command="apikey issue")
    api.add(issuing, issue_key, answers=IssuedKeyModel, status=201, problems=("not-found",))
    enabling = _enrol("enablePrincipal", "POST", "/v1/principals:enable", keyed=True, command="principal enable")
    api.add(enabling, enable, answers=PrincipalModel, problems=("not-found",))


def principal(service: ServiceDep, name: Named) -> dict[str, Any]:
    """Get one principal."""
    return shown(service.principals.get(name))


def enrol(caller: CallerDep, service: ServiceDep, who: Enrolment) -> dict[str, Any]:
    """Enrol a principal, and issue its first key."""
    if Role.BOOTSTRAP in who.roles:
        raise ProblemError("invalid", "only `kvcustody init` gives the bootstrap role")
    if who.certificate is not None and not PROCESSES.intersection(who.roles):
        raise ProblemError("invalid", "only a worker's or a door's key can be bound to a certificate")
    made = service.principals.enrol(who.name, who.roles, tenant=who.tenant, kind=who.kind, by=caller.name)
    days = who.key_days or service.settings.key_days
    key = service.principals.issue_key(who.name, days=days, certificate=who.certificate, by=caller.name)
    return {"principal": shown(made), "key": key._asdict()}


def issue_key(caller: CallerDep, service: ServiceDep, name: Named, how: KeyRequest) -> dict[str, Any]:
    """Issue a further key for a principal that has lost its own; not for the bootstrap role.

    With `overlap_days` the principal's other keys end after so many days: the way to another client certificate.
    """
    if Role.BOOTSTRAP in service.principals.get(name).roles:
        raise ProblemError("invalid", "only `kvcustody init` makes a bootstrap key")
    bound, overlap = how.certificate, how.overlap_days
    issue = service.principals.issue_key
    made = issue(name, days=how.days, overlap_days=overlap, certificate=bound, by=caller.name)
    return made._asdict()


def enable(caller: CallerDep, service: ServiceDep, who: PrincipalName) -> dict[str, Any]:
    """Enable a disabled principal again. Its earlier keys and sessions stay invalid: issue a new key."""
    return shown(service.principals.enable(who.name, by=caller.name))


AllowLast = Annotated[bool, Query(description="Allow it even for the last key of the last principal who manages keys.")]
Prefix = Annotated[str, Path(pattern=r"^[0-9a-f]{12}$", examples=["0f1e2d3c4b5a"])]


_mine = partial(Operation, action=Permission.SELF, tag="self")


def add_self_service(api: Declarations) -> None:
    """Declare the operations."""
    api.add(_mine("whoami", "GET", "/v1/whoami", command="principal whoami"), whoami, answers=Whoami)
    api.add(_mine("version", "GET", "/v1/version", command="service version"), version, answers=VersionModel)
    api.add(
        _mine("listOwnKeys", "GET", "/v1/keys", at_workers=True, command="apikey own"),
        own_keys,
        answers=ApiKeyPage,
    )
    rotate = _mine("rotateOwnKey", "POST", "/v1/keys:rotate", keyed=True, at_workers=True, command="apikey rotate")
    api.add(rotate, rotate_own_key, answers=IssuedKeyModel, status=201)
    revoke = _mine("revokeOwnKey", "DELETE", "/v1/keys/{prefix}", at_workers=True, command="apikey revoke-own")
    api.add(revoke, revoke_own_key, status=204, problems=("not-found", "conflict"))
    begin = _mine("beginSession", "POST", "/v1/session", keyed=True, command="principal begin-session")
    api.add(begin, begin_session, answers=Session, status=201)
    api.add(_mine("endSession", "DELETE", "/v1/session", command="principal end-session"), end_session, status=204)
    stating = _mine("apiDocument", "GET", "/v1/openapi.json", command="service document")
    api.add(stating, document, answers=OpenApiDocument)


def document() -> Content:
    """Get this API's OpenAPI 3.1 document."""
    from kvcustody.governance.api import openapi_document

    return Content(openapi_document.document())


def whoami(caller: CallerDep) -> dict[str, Any]:
    """Get who you are to this service, and what your roles permit."""
    actions = {action.value: reach(caller.roles, action) for action in Permission}
    return {
        "name": caller.name,
        "roles": sorted(caller.roles),
        "tenant": caller.tenant,
        "by": caller.by,
        "actions": {name: found.name.lower() for name, found in actions.items() if found is not Reach.NONE},
    }


def version() -> Content:
    """Get the versions that decide how this service behaves."""
    versions = {
        "kvcustody": __version__,
        "api": "v1",
        "schema": SCHEMA_REVISION,
        "python": platform.python_version(),
    }
    return Content(orjson.dumps(versions))


def own_keys(caller: CallerDep, service: ServiceDep) -> dict[str, Any]:
    """List your keys, newest first: when they were issued and last used, never their secrets."""
    return {"items": [key._asdict() for key in service.principals.keys(caller.name)]}


def rotate_own_key(caller: CallerDep, service: ServiceDep, wire: WireDep, how: RotationModel) -> dict[str, Any]:
    """Issue a new key for yourself; your other keys end after the overlap.

    It is bound to the same client certificate as the key you use; with `bind`, to the one of this connection. It is
    revoked with the key you use. In a session, it also expires no later than the key that the session began with, or
    than a session without a key. Only an administrator can issue, or keep, a key that outlives it.
    """
    _enrolled(caller.by)
    book, presented = service.principals, wire.certificate
    if how.bind and presented is None:
        raise ProblemError("invalid", "`bind` needs a connection with a client certificate (`workers_listen`)")
    bound = presented if how.bind else book.binding(caller.key)
    return book.issue_key(
        caller.name,
        days=how.days,
        overlap_days=how.overlap_days,
        certificate=bound,
        source=service.authenticator.source_of(caller),
        by=caller.name,
    )._asdict()


def revoke_own_key(caller: CallerDep, service: ServiceDep, prefix: Prefix, allow_last: AllowLast = False) -> Content:
    """Refuse one of your keys, and those made with it, from now on; not the key that you call with."""
    keep = caller.key if caller.by == "key" else ""
    service.principals.revoke_key(prefix, principal=caller.name, keep=keep, allow_last=allow_last, by=caller.name)
    service.changed()
    return Content(media=None, status=204)


def begin_session(caller: CallerDep, service: ServiceDep, wire: WireDep) -> Content:
    """Begin a person's session at the console, and set its cookie."""
    _enrolled(caller.by)
    made = service.sessions.begin(caller.name, key=caller.key)
    seconds = service.settings.session_minutes * 60
    body = answer_bytes(Session, {"csrf": made.csrf, "expires_us": made.expires_us})
    headers = {"Set-Cookie": set_cookie(made.token, seconds, tls=wire.tls)}
    return Content(body, status=201, headers=headers)


def end_session(service: ServiceDep, wire: WireDep) -> Content:
    """End the session, and remove its cookie."""
    token = cookie_of(wire.headers.get("cookie"), tls=wire.tls)
    if token is not None:
        service.sessions.end(token)
    return Content(media=None, status=204, headers={"Set-Cookie": set_cookie("", 0, tls=wire.tls)})


def _enrolled(by: str) -> None:
    if by == "token":
        raise ProblemError("conflict", "principals from a token issuer have no keys or sessions here")
    if by == "local":
        raise ProblemError("conflict", "own keys and sessions need a server (--server)")


def shown(found: PrincipalRecord) -> dict[str, Any]:
    """Return a principal as the API shows it."""
    return found._asdict() | {"roles": sorted(found.roles)}


def principals(desk: DeskDep, caller: CallerDep, *, cursor: Cursor = None, limit: Limit = 100) -> dict[str, Any]:
    """List every principal that was ever enrolled, by name."""
    question = CursorBinding("listPrincipals", caller.name, {})
    position = desk.cursors.read(question, cursor)
    after = str(position[0]) if position else ""
    with desk.reading() as connection:
        found, more = principals_after(connection, after, limit)
    following = desk.cursors.write(question, [found[-1].name]) if more else None
    return {"items": [shown(item) for item in found], "next": following}


def keys(desk: DeskDep, caller: CallerDep, *, name: Named) -> dict[str, Any]:
    """List the keys of a principal, newest first: when they were issued and last used, never their secrets."""
    with desk.reading() as connection:
        if find_principal(connection, name) is None:
            raise not_found()
        return {"items": [key._asdict() for key in keys_of_principal(connection, name, desk.clock.utc_us())]}
