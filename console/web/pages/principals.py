"""Access: the service's principals and their keys, and ending them, for callers who manage keys.

1. What is done here is done by the API's own functions. A name is typed again before its principal is ended.
"""

from __future__ import annotations

from starlette.responses import Response

from kvcustody.console.web.form_errors import FieldError
from kvcustody.console.web.page_request import PageRequest, redirect
from kvcustody.governance.api.models.access import Ending, KeyEnding, KeyKeeping
from kvcustody.governance.api.operations import principals as endings_api
from kvcustody.governance.service.access.roles import Permission
from kvcustody.governance.service.problem_details import not_found

_SHOWN = 200
_PREFIX_DIGITS = 12
_KEPT_DAYS = 90


def show(visit: PageRequest) -> Response:
    """Return principals in the order of names, and the chosen one's keys."""
    visit.caller.must(Permission.MANAGE_KEYS)
    book, name = visit.service.principals, visit.text("name")
    found, more = book.listed(after=visit.text("after") or "", limit=_SHOWN)
    return visit.page(
        "operate/principals.html",
        "Access",
        principals=found,
        following=found[-1].name if more else None,
        chosen=None if name is None else book.get(name),
        keys=() if name is None else book.keys(name),
    )


def disable(visit: PageRequest) -> Response:
    """End a principal (rule 1)."""
    visit.caller.must(Permission.MANAGE_KEYS)
    name = _name(visit)
    if visit.text("again") != name:
        raise FieldError({"again": f"type `{name}`: ending it cannot be undone here"})
    last = visit.text("allow_last") is not None
    visit.ask(endings_api.disable, Ending(name=name, allow_last=last))
    return redirect("/principals", name=name)


def revoke(visit: PageRequest) -> Response:
    """Refuse one key of a principal (rule 1)."""
    visit.caller.must(Permission.MANAGE_KEYS)
    name, prefix = _name(visit), visit.text("prefix", _PREFIX_DIGITS)
    if prefix is None:
        raise not_found()
    visit.ask(endings_api.revoke_keys, KeyEnding.model_construct(name=name, prefix=prefix))
    return redirect("/principals", name=name)


def keep(visit: PageRequest) -> Response:
    """Let a key that its principal made outlive its parent key (rule 1)."""
    visit.caller.must(Permission.MANAGE_KEYS)
    name, prefix = _name(visit), visit.text("prefix", _PREFIX_DIGITS)
    if prefix is None:
        raise not_found()
    which = KeyKeeping.model_construct(name=name, prefix=prefix, days=_KEPT_DAYS)
    visit.ask(endings_api.keep_key, which)
    return redirect("/principals", name=name)


def _name(visit: PageRequest) -> str:
    name = visit.text("name", 128)
    if name is None:
        raise not_found()
    return name
