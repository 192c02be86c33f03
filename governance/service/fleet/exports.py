"""Whether a tenant's leaves may leave the control plane: decided as `export` wherever they are handed over.

1. Asked: exports, reports and their files, events by the API (pages and stream), webhooks. What is asked about are the
   classifications that the tenant's log holds: one that may not leave keeps the whole log here.
2. Not asked: a page of the console, one leaf with its proof, custody and coverage. There the role decides
   (`custody.read`).
3. People of no tenant act by their roles, and each read of theirs is on record (`access`). A webhook is of nobody's
   role: who may set it may read the ledger's files.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence
from contextlib import AbstractContextManager

from sqlalchemy import Connection, select

from kvcustody.audit.evidence.query.events import EventRow
from kvcustody.audit.kinds import SYSTEM, log_of
from kvcustody.audit.store.schema.all_tables import has_leaf
from kvcustody.audit.store.schema.leaf_tables import residencies
from kvcustody.audit.store.schema.ledger import logs
from kvcustody.governance.service.access.caller import Caller
from kvcustody.governance.service.fleet.policy_releases import PolicyReleases
from kvcustody.governance.service.problem_details import ProblemError
from kvcustody.policies.document.model import Action

_TENANTS_MAX = 4096
_TENANT = log_of("")


class Exports:
    """Decides for one service; every method may be called on any thread."""

    def __init__(
        self, policies: PolicyReleases, reading: Callable[[str | None], AbstractContextManager[Connection]]
    ) -> None:
        self._policies = policies
        self._reading = reading
        self._held: dict[str, tuple[frozenset[str], int]] = {}  # by tenant, and up to which leaf of its log

    def check(self, caller: Caller, *, once: bool = False) -> None:
        """Let a tenant's own people export leaves of its log, or raise `forbidden`; recorded (`authorize`)."""
        if caller.tenant is not None:
            self._check(caller.tenant, caller.roles, once=once)

    def leaving(self, rows: Sequence[EventRow]) -> list[EventRow]:
        """Return the rows that a webhook may get; those of the system log belong to the operator."""
        logs = {row.log for row in rows}
        may = {log for log in logs if log == SYSTEM or self._permitted(log.removeprefix(_TENANT))}
        return [row for row in rows if row.log in may]

    def _permitted(self, tenant: str) -> bool:
        try:
            self._check(tenant, ("webhook",), once=True)
        except ProblemError:
            return False
        return True

    def _check(self, tenant: str, roles: Iterable[str], *, once: bool) -> None:
        held = self._classifications(tenant)
        self._policies.authorize(Action.EXPORT, tenant, held, roles, once=once)

    def _classifications(self, tenant: str) -> frozenset[str]:
        """What the tenant's log has residencies of; only what is new in it is looked at."""
        held, since = self._held.get(tenant, (frozenset(), 0))
        column = residencies.c
        with self._reading(tenant) as connection:
            query = select(logs.c.id, logs.c.size).where(logs.c.name == log_of(tenant))
            log = connection.execute(query).first()
            if log is None:
                return held
            new = (column.log == log.id, column.idx >= since, has_leaf(residencies))
            more = connection.scalars(select(column.classification).where(*new).distinct())
            found = held.union(more)
        if len(self._held) >= _TENANTS_MAX:
            self._held.clear()
        self._held[tenant] = (found, log.size)
        return found
