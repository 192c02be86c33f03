"""One open task, and for whom: the model behind the page, the API, the command, metrics and mail.

1. `waiting` has no date, `soon` ends within its kind's time, `overdue` is past its date.
2. An item is shown to those who can do something about it: by permission, of a tenant its own people alone, of a key
   its own principal as well. Whoever only reads is shown nothing.
3. An item keeps its id as long as it waits for the same thing. It names tenants and principals, and no subject.
"""

from __future__ import annotations

from collections.abc import Iterable
from enum import StrEnum
from typing import NamedTuple

from kvcustody.audit.evidence.cases.case_record import NEAR_US
from kvcustody.governance.service.access.caller import Caller
from kvcustody.governance.service.access.roles import Permission, Reach
from kvcustody.times import DAY_US, SECOND_US


class InboxKind(StrEnum):
    """The kinds of tasks."""

    APPROVAL = "approval"
    ACTIVATION = "activation"
    CONSENT = "consent"
    ERASURE = "erasure"
    CASE = "case"
    GRANT = "grant"
    POLICY = "policy"
    KEY = "key"
    CERTIFICATE = "certificate"
    WITNESS = "witness"
    REPORT = "report"
    SINK = "sink"
    SERVICE = "service"


class InboxState(StrEnum):
    """The states of tasks (rule 1)."""

    WAITING = "waiting"
    SOON = "soon"
    OVERDUE = "overdue"


_PERMISSION = {
    InboxKind.APPROVAL: Permission.APPROVE_POLICY,
    InboxKind.ACTIVATION: Permission.ACTIVATE_POLICY,
    InboxKind.CONSENT: Permission.CONSENT,
    InboxKind.ERASURE: Permission.ERASE,
    InboxKind.CASE: Permission.ERASE,
    InboxKind.GRANT: Permission.WRITE_POLICY,
    InboxKind.POLICY: Permission.WRITE_POLICY,
    InboxKind.KEY: Permission.MANAGE_KEYS,
    InboxKind.CERTIFICATE: Permission.OPERATE,
    InboxKind.WITNESS: Permission.OPERATE,
    InboxKind.REPORT: Permission.READ_CUSTODY,
    InboxKind.SINK: Permission.OPERATE,
    InboxKind.SERVICE: Permission.OPERATE,
}
SOON_US = {
    InboxKind.CASE: NEAR_US,
    InboxKind.GRANT: 30 * DAY_US,
    InboxKind.POLICY: 30 * DAY_US,
    InboxKind.KEY: 14 * DAY_US,
    InboxKind.CERTIFICATE: 30 * DAY_US,
}
WITNESS_AGE_US = 3600 * SECOND_US  # without a witness's word for longer is overdue
_ORDER = {InboxState.OVERDUE: 0, InboxState.SOON: 1, InboxState.WAITING: 2}


class InboxItem(NamedTuple):
    """One task. Times are UTC microseconds; `due_us` None: no date. `page` is the console's, `command` the command
    line's.

    `about` is what the id is made of besides the kind: a revision, an erasure, a key's prefix.
    """

    kind: InboxKind
    about: str
    state: InboxState
    text: str
    since_us: int | None
    due_us: int | None
    tenant: str | None
    principal: str | None
    page: str
    command: str

    @property
    def id(self) -> str:
        """The task's id (rule 3)."""
        return f"{self.kind}:{self.about}"

    def is_for(self, caller: Caller) -> bool:
        """Whether this person can do the task (rule 2)."""
        if self.principal is not None and self.principal == caller.name:
            return True
        reach = caller.reach(_PERMISSION[self.kind])
        if self.kind is InboxKind.GRANT and caller.tenant is not None:  # whose data it is may let it end, or not
            reach = caller.reach(Permission.CONSENT)
        return reach is Reach.ALL or (reach is Reach.OWN and self.tenant == caller.tenant is not None)

    def data(self) -> dict[str, object]:
        """Return JSON data."""
        return {"id": self.id, **self._asdict()}


def state_until(kind: InboxKind, due_us: int, now_us: int) -> InboxState | None:
    """Return the state of something that ends at `due_us`; None where that is far away."""
    if due_us <= now_us:
        return InboxState.OVERDUE
    return InboxState.SOON if due_us - now_us < SOON_US[kind] else None


def in_order(items: Iterable[InboxItem]) -> tuple[InboxItem, ...]:
    """Sort the most urgent first: overdue, then ending soon by date, then the longest waiting."""
    late = 1 << 62
    return tuple(
        sorted(
            items,
            key=lambda item: (
                _ORDER[item.state],
                item.due_us if item.due_us is not None else late,
                item.since_us or 0,
                item.id,
            ),
        )
    )
