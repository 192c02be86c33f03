"""Who is asking, once a credential has been checked; and what that lets them see.

1. The tenant of a caller comes from the credential alone. Asking about another one is asking about nothing.
"""

from __future__ import annotations

from typing import NamedTuple

from kvcustody.governance.service.access.roles import RECORDED, Permission, Reach, Role, reach
from kvcustody.governance.service.problem_details import ProblemError, not_found


class Caller(NamedTuple):
    """An authenticated caller. `by` is how: `key`, `token` or `session`."""

    name: str
    roles: frozenset[Role]
    tenant: str | None
    by: str
    key: str = ""  # the public prefix of the key that was used, or that the session was begun with
    session: str = ""  # the digest of the session's cookie, where one was used
    until_us: int | None = None  # UTC; when a token expires

    def reach(self, action: Permission) -> Reach:
        """How far the caller's roles go."""
        return reach(self.roles, action)

    def must(self, *actions: Permission) -> None:
        """Raise `forbidden` unless some role of the caller may do one of these."""
        if all(self.reach(action) is Reach.NONE for action in actions):
            raise ProblemError("forbidden")

    def tenant_of(self, action: Permission, asked: str | None) -> str | None:
        """The tenant to answer about: None for all of them; raises `not-found` where it is not the caller's."""
        self.must(action)
        if self.reach(action) is Reach.ALL:
            return asked
        if asked is not None and asked != self.tenant:
            raise not_found()
        return self.tenant

    @property
    def party(self) -> str:
        """With whom the caller shares what is bounded by party: its tenant's people, else nobody."""
        return self.name if self.tenant is None else f"tenant {self.tenant}"

    @property
    def recorded(self) -> bool:
        """Whether the caller's reads of the ledger are events of their own."""
        return bool(self.roles & RECORDED)
