"""Operations of key custodians on who may ask: see principals and their keys, disable them, refuse their keys.

E1 They only take away: whoever was disabled is let back in, and given a key, with the bootstrap key alone.
E2 An unknown principal, an unknown key and another principal's key are one answer.
E3 The last who manages keys is ended where the request says that it means so, and not else.
"""

from __future__ import annotations

from functools import partial
from typing import Any

from kvcustody.governance.api.builder import Api, Asking, Serving
from kvcustody.governance.api.enrolment import Named, shown
from kvcustody.governance.api.models.access import Ending, KeyEnding, Keys, Principal
from kvcustody.governance.api.operation import Operation
from kvcustody.governance.service.roles import Action

_manage = partial(Operation, action=Action.MANAGE_KEYS, tag="principals")


def add_principal_endings(api: Api) -> None:
    """Declare the operations."""
    listing = _manage("listKeys", "GET", "/v1/principals/{name}/keys", also=(Action.ENROL,))
    api.add(listing, keys, answers=Keys, problems=("not-found",))
    disabling = _manage("disablePrincipal", "POST", "/v1/principals:disable", keyed=True)
    api.add(disabling, disable, answers=Principal, problems=("not-found",))
    revoking = _manage("revokeKeys", "POST", "/v1/principals:revoke-keys", keyed=True)
    api.add(revoking, revoke_keys, answers=Keys, problems=("not-found",))


def keys(service: Serving, name: Named) -> dict[str, Any]:
    """The keys of a principal, newest first: when they were issued and last used, never what they are."""
    service.principals.get(name)
    return {"items": [key._asdict() for key in service.principals.keys(name)]}


def disable(caller: Asking, service: Serving, who: Ending) -> dict[str, Any]:
    """End a principal with all of its keys and sessions, at once; its tokens too, where an issuer keeps it.

    Whatever it shows is answered as an unknown key is. Questions that it holds open are not answered any more.
    """
    found = service.principals.disable(who.name, allow_last=who.allow_last, by=caller.name)
    service.changed()
    return shown(found)


def revoke_keys(caller: Asking, service: Serving, which: KeyEnding) -> dict[str, Any]:
    """Refuse one key of a principal from now on, or all of them and its sessions; its keys, as they are then."""
    book, allow = service.principals, which.allow_last
    if which.prefix is None:
        book.revoke_keys(which.name, allow_last=allow, by=caller.name)
    else:
        book.revoke_key(which.prefix, principal=which.name, allow_last=allow, by=caller.name)
    service.changed()
    return {"items": [key._asdict() for key in book.keys(which.name)]}
