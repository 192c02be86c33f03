"""The names that routers know requesters by at this moment: under the epochs that are known, and the day.

    names = CurrentNamespaces(RouterNamespaces(secret), clock, days=settings.namespace_days)
    names.of("corp", "acme", "ann", known=known)

Doors and workers of one deployment have the same secret, and the same `days`, those of the control plane where it says
them: what one calls a requester, the others do.
"""

from __future__ import annotations

from typing import Final

from kvcustody.clock import Clock
from kvcustody.governance.edge.erase_epochs import NO_EPOCHS, KnownEpochs
from kvcustody.governance.edge.router_namespace import NamespaceAge, RouterNamespaces

NAMESPACE_DAYS: Final = 30


class CurrentNamespaces:
    """Namespaces as they are now; `days` is how long one lives at most (0: no name ends with time)."""

    def __init__(self, namespaces: RouterNamespaces, clock: Clock, *, days: int = NAMESPACE_DAYS) -> None:
        self._namespaces = namespaces
        self._clock = clock
        self._days = days

    def of(
        self,
        issuer: str,
        tenant: str,
        subject: str | None = None,
        session: str | None = None,
        *,
        known: KnownEpochs | None = None,
    ) -> str:
        """The name of a tenant, or of a subject or session in it; without `known` no epoch was ever raised.

        Of a subject's session it is, ended by the epochs of both.
        """
        epochs, days = tuple(NO_EPOCHS), self._days
        if known is not None:
            epochs = tuple(known.of(issuer, tenant, subject, session))
            if subject is not None and session is not None:
                epochs += (known.of(issuer, tenant, None, session).private,)
            days = self._days if known.namespace_days is None else known.namespace_days
        age = NamespaceAge(epochs, self._clock.utc_us(), days)
        return self._namespaces.of(issuer, tenant, subject, session, age)
