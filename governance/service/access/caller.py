"""An authenticated caller, and what it may see.

1. The tenant of a caller comes from the credential alone. Asking about another one is asking about nothing.
"""

from __future__ import annotations

from typing import NamedTuple

from kvcustody.governance.service.access.roles import RECORDED, Permission, Reach, Role, reach, roles_with
from kvcustody.governance.service.problem_details import ProblemError, not_found


def forbidden(*actions: Permission, least: Reach = Reach.OWN) -> ProblemError:
    """Return the refusal of what needs one of these actions. It names the roles that may, and nothing of the caller."""
    may = roles_with(actions, least)
    return ProblemError(
        "forbidden", f"this needs {'the role' if len(may) == 1 else 'one of the roles'} {', '.join(may)}"
    )


class Caller(NamedTuple):
    """An authenticated caller. `by` is the kind of credential: `key`, `token` or `session`."""

    name: str
    roles: frozenset[Role]
    tenant: str | None
    by: str
    key: str = ""  # the public prefix of the key that was used, or that the session was begun with
    session: str = ""  # the digest of the session's cookie, where one was used
    until_us: int | None = None  # UTC; when a token expires

    def reach(self, action: Permission) -> Reach:
        """The reach of the caller's roles."""
        return reach(self.roles, action)

    def must(self, *actions: Permission) -> None:
        """Raise `forbidden` unless a role of the caller permits one of these."""
        if all(self.reach(action) is Reach.NONE for action in actions):
            raise forbidden(*actions)

    def tenant_of(self, action: Permission, asked: str | None) -> str | None:
        """Return the tenant to answer about: None for all; raises `not-found` where it is not the caller's."""
        self.must(action)
        if self.reach(action) is Reach.ALL:
            return asked
        if asked is not None and asked != self.tenant:
            raise not_found()
        return self.tenant

    @property
    def party(self) -> str:
        """The party whose limits apply to the caller: its tenant's people, or the caller alone."""
        return self.name if self.tenant is None else f"tenant {self.tenant}"

    @property
    def recorded(self) -> bool:
        """Whether the caller's reads of the ledger are recorded as events."""
        return bool(self.roles & RECORDED)
