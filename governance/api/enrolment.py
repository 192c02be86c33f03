"""Operations of the bootstrap key: enrol principals, give them keys, let them back in. Nothing else is open to it."""

from __future__ import annotations

from functools import partial
from typing import Annotated, Any

from fastapi import Path

from kvcustody.governance.api.builder import Api, Asking, Serving
from kvcustody.governance.api.models.access import (
    Enrolled,
    Enrolment,
    IssuedKey,
    KeyRequest,
    Principal,
    PrincipalName,
    PrincipalPage,
)
from kvcustody.governance.api.models.base import Cursor, Limit
from kvcustody.governance.api.operation import Operation
from kvcustody.governance.service.cursor import Question
from kvcustody.governance.service.principal_rows import Principal as Found
from kvcustody.governance.service.problems import ProblemError
from kvcustody.governance.service.roles import Action, Role

Named = Annotated[str, Path(min_length=1, max_length=128, examples=["alice"])]
_enrol = partial(Operation, action=Action.ENROL, tag="principals")


def add_enrolment(api: Api) -> None:
    """Declare the operations."""
    listing = _enrol("listPrincipals", "GET", "/v1/principals", also=(Action.MANAGE_KEYS,))
    api.add(listing, principals, answers=PrincipalPage, problems=("cursor-invalid",))
    one = _enrol("getPrincipal", "GET", "/v1/principals/{name}", also=(Action.MANAGE_KEYS,))
    api.add(one, principal, answers=Principal, problems=("not-found",))
    enrolling = _enrol("enrolPrincipal", "POST", "/v1/principals", keyed=True)
    api.add(enrolling, enrol, answers=Enrolled, status=201)
    issuing = _enrol("issueKey", "POST", "/v1/principals/{name}/keys", keyed=True)
    api.add(issuing, issue_key, answers=IssuedKey, status=201, problems=("not-found",))
    enabling = _enrol("enablePrincipal", "POST", "/v1/principals:enable", keyed=True)
    api.add(enabling, enable, answers=Principal, problems=("not-found",))


def principals(caller: Asking, service: Serving, cursor: Cursor = None, limit: Limit = 100) -> dict[str, Any]:
    """Every principal that was ever enrolled, in the order of names."""
    question = Question("listPrincipals", caller.name, {})
    position = service.cursors.read(question, cursor)
    found = service.principals.listed(after=str(position[0]) if position else "", limit=limit + 1)
    following = service.cursors.write(question, [found[limit - 1].name]) if len(found) > limit else None
    return {"items": [shown(item) for item in found[:limit]], "next": following}


def principal(service: Serving, name: Named) -> dict[str, Any]:
    """One principal."""
    return shown(service.principals.get(name))


def enrol(caller: Asking, service: Serving, who: Enrolment) -> dict[str, Any]:
    """Enrol a principal, and issue its first key."""
    if Role.BOOTSTRAP in who.roles:
        raise ProblemError("invalid", "the bootstrap role is given by `kvcustody init` alone")
    if who.certificate is not None and Role.WORKER not in who.roles:
        raise ProblemError("invalid", "a key is bound to a certificate for a worker alone")
    made = service.principals.enrol(who.name, who.roles, tenant=who.tenant, kind=who.kind, by=caller.name)
    days = who.key_days or service.settings.key_days
    key = service.principals.issue_key(who.name, days=days, certificate=who.certificate, by=caller.name)
    return {"principal": shown(made), "key": key._asdict()}


def issue_key(caller: Asking, service: Serving, name: Named, how: KeyRequest) -> dict[str, Any]:
    """A further key for a principal that was enrolled and has lost its own; not for the bootstrap role.

    With `overlap_days` the principal's other keys end after so many days: the way to another client certificate.
    """
    if Role.BOOTSTRAP in service.principals.get(name).roles:
        raise ProblemError("invalid", "a bootstrap key is made by `kvcustody init` alone")
    bound, overlap = how.certificate, how.overlap_days
    issue = service.principals.issue_key
    made = issue(name, days=how.days, overlap_days=overlap, certificate=bound, by=caller.name)
    return made._asdict()


def enable(caller: Asking, service: Serving, who: PrincipalName) -> dict[str, Any]:
    """Let a principal ask again that was disabled. No key or session from before works: issue a new key."""
    return shown(service.principals.enable(who.name, by=caller.name))


def shown(found: Found) -> dict[str, Any]:
    """A principal as the API shows it."""
    return found._asdict() | {"roles": sorted(found.roles)}
