"""One request for a page: the caller, the parameters, the answer, and the pages in the menu.

1. Parameters are read through here alone: bounded, without control characters, whole numbers in range.
2. A page shows what the caller's roles reach; what is absent and what is somebody else's are one answer.
3. Answers are never cached; a page that shows others' data has recorded the read before it is rendered.
4. Who may open a page is decided by the table of roles; the menu only leaves out what would be refused.
"""

from __future__ import annotations

import secrets
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from typing import Any, NamedTuple, TypeVar
from urllib.parse import urlencode

from starlette.responses import HTMLResponse, RedirectResponse, Response

from kvcustody.audit.evidence.processes.marked_processes import history
from kvcustody.audit.evidence.query.known_names import known_tenant, tenant_names
from kvcustody.console.web.form_errors import FieldError
from kvcustody.console.web.rendering import render
from kvcustody.errors import ConfigError
from kvcustody.governance.api.http.console_mount import record_read
from kvcustody.governance.api.page_calls import ask
from kvcustody.governance.service.access.caller import Caller
from kvcustody.governance.service.access.roles import Permission, Reach
from kvcustody.governance.service.operations.parameters import LARGE
from kvcustody.governance.service.problem_details import ProblemError
from kvcustody.governance.service.service import Service
from kvcustody.tenants import NAME_CHARACTERS_MAX

T = TypeVar("T")
DEMO = "Demo data, not production traffic."
_SUGGESTED_MAX = 200
PREFIX = "/console"
_CHARACTERS_MAX = NAME_CHARACTERS_MAX
_TEXT_MAX = 1 << 20


@dataclass(frozen=True, slots=True)
class PageRequest:
    """A signed-in request."""

    service: Service
    caller: Caller
    path: str
    places: Mapping[str, str]
    query: Mapping[str, str]
    form: Mapping[str, str]
    session: str | None  # the token of its cookie
    sent: Mapping[str, str] = field(default_factory=dict)  # a form that was not accepted, kept for its reader
    sent_to: str = ""
    wrong: dict[str, str] = field(default_factory=dict)  # what is wrong with a form or filter, by field

    def ask(self, function: Callable[..., T], *given: Any, **named: Any) -> T:
        """Return an operation's answer, where the caller may call it."""
        return ask(self.service, self.caller, function, *given, **named)

    def text(self, name: str, characters_max: int = _CHARACTERS_MAX) -> str | None:
        """Return a short query or form parameter; None where it is absent or empty (rule 1)."""
        value = self.form.get(name, self.query.get(name, "")).strip()
        if len(value) > characters_max or not value.isprintable():
            raise _invalid(name, "is too long, or has unprintable characters")
        return value or None

    def document(self, name: str) -> str:
        """Return a multi-line text as typed, with a document's line ends."""
        value = self.form.get(name, "").replace("\r\n", "\n")
        if len(value) > _TEXT_MAX or "\0" in value:
            raise _invalid(name, "is larger than 1 MiB, or holds NUL")
        return value

    def number(self, name: str) -> int | None:
        """Return a whole number below 2^53; None where it is absent."""
        value = self.text(name)
        if value is None:
            return None
        if not (value.isascii() and value.isdecimal()) or len(value) > 16 or int(value) >= LARGE:
            raise _invalid(name, "is not a whole number: write digits alone")
        return int(value)

    def form_at(self, path: str) -> SentForm:
        """Return what was sent to a form at this path and not accepted; empty for any other form."""
        return SentForm(self.sent, self.wrong) if path == self.sent_to else SentForm({}, {})

    def tenant_names(self) -> list[str]:
        """Return the ledger's tenants, for suggestions; none to those who see one tenant alone."""
        if self.caller.reach(Permission.READ_CUSTODY) is not Reach.ALL:
            return []
        with self.service.reading() as connection:
            return tenant_names(connection, _SUGGESTED_MAX)

    def check_tenants(self, *names: str) -> None:
        """Say which of these filters names a tenant that the ledger does not know, and which one was meant.

        Who sees one tenant alone is told nothing of others.
        """
        if self.caller.reach(Permission.READ_CUSTODY) is not Reach.ALL:
            return
        for name in names:
            try:
                if self.query.get(name):
                    with self.service.reading() as connection:
                        known_tenant(connection, self.query[name])
            except ConfigError as error:
                self.wrong[name] = error.message

    def may(self, *actions: Permission) -> bool:
        """Return whether the caller's roles permit any of these actions."""
        return any(self.caller.reach(action) is not Reach.NONE for action in actions)

    def record(self, page: str, tenant_name: str | None = None, *, tenant: str | None = None) -> None:
        """Record the read for callers whose reads are events (rule 3): the filters' names, never their values.

        Whom it is about: a tenant as somebody `said` it, or one by its name.
        """
        filters = tuple(sorted(name[:64] for name, value in self.query.items() if value))[:16]
        about = tenant if tenant_name is None else self.service.about(tenant_name)
        record_read(self.service, self.caller, page, tenant=about, filters=filters)

    def record_live(self, page: str, said: str | None = None) -> None:
        """Record the read of a page that refreshes itself, once in five minutes (`service.live_reads`)."""
        reads, reader = self.service.live_reads, self.caller.name
        if reads.is_new(reader, page, self.query, self.service.clock.utc_us()):
            try:
                self.record(page, said)
            except BaseException:
                reads.forget(reader, page, self.query)
                raise

    def page(self, template: str, title: str, *, status: int = 200, **context: Any) -> Response:
        """Return a page of the console; each one marks replayed or generated history (`history`)."""
        marked = self.service.marked()
        if not self.sent_to:
            self.check_tenants("tenant")
        shared = {
            "history": history(marked),
            "demo": DEMO if marked else "",
            "origins": {one.incarnation: one.origin for one in marked},
            "title": title,
            "who": self.caller,
            "navigation": places_of(self.caller),
            "here": self.path,
            "csrf": "" if self.session is None else self.service.sessions.csrf(self.session),
            "now_us": self.service.clock.utc_us(),
            "visit": self,
            "silent_workers": self.service.fleet.silent_names(),
            "once": secrets.token_hex(16),
        }
        return HTMLResponse(render(template, **shared, **context), status)

    def link(self, **changes: object) -> str:
        """Return this page's address with changed parameters; None removes one."""
        query = {**self.query, **{name: str(value) for name, value in changes.items() if value is not None}}
        kept = {name: value for name, value in query.items() if value and changes.get(name, "") is not None}
        return self.path + ("?" + urlencode(kept) if kept else "")


class SentForm(NamedTuple):
    """A form that was sent and not accepted: its values, and what is wrong by field."""

    values: Mapping[str, str]
    wrong: Mapping[str, str]

    def value(self, name: str, default: object = "") -> str:
        """Return what was typed into a field."""
        return self.values.get(name, str(default))


def redirect(path: str, **query: object) -> Response:
    """Return a redirect to another page of the console, by GET."""
    return RedirectResponse(PREFIX + path + ("?" + urlencode(query) if query else ""), 303)


def _invalid(name: str, what: str) -> ProblemError:
    return FieldError({name: f"this {what}"})


class Place(NamedTuple):
    """A page in the navigation, and the actions any of which opens it."""

    path: str
    name: str
    actions: tuple[Permission, ...]


_CUSTODY = (Permission.READ_CUSTODY,)
_POLICY = (Permission.READ_POLICY, Permission.CONSENT)
PLACES = (
    Place("/console/", "Overview", ()),
    Place("/console/inbox", "Inbox", ()),
    Place("/console/policy", "Policy", _POLICY),
    Place("/console/grants", "Grants", _POLICY),
    Place("/console/decisions", "Decisions", (Permission.READ_CUSTODY, Permission.WRITE_POLICY)),
    Place("/console/reuse", "Reuse", _CUSTODY),
    Place("/console/custody", "Custody", _CUSTODY),
    Place("/console/tiers", "Tiers", (Permission.READ_CUSTODY, Permission.READ_OPERATIONS)),
    Place("/console/fleet", "Fleet", (Permission.READ_OPERATIONS,)),
    Place("/console/routes", "Routes", (Permission.READ_OPERATIONS,)),
    Place("/console/erasures", "Erasures", _CUSTODY),
    Place("/console/cases", "Cases", _CUSTODY),
    Place("/console/deletion", "Deletion", _CUSTODY),
    Place("/console/audit", "Audit explorer", _CUSTODY),
    Place("/console/reports", "Reports", _CUSTODY),
    Place("/console/health", "Health", (Permission.READ_HEALTH,)),
    Place("/console/principals", "Access", (Permission.MANAGE_KEYS,)),
)


def places_of(caller: Caller) -> tuple[Place, ...]:
    """Return the pages that a caller may open."""
    return tuple(
        place
        for place in PLACES
        if not place.actions or any(caller.reach(action) is not Reach.NONE for action in place.actions)
    )
