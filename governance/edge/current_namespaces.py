"""The names that routers know requesters by at this moment: under the epochs that are known, and the day.

    names = CurrentNamespaces(RouterNamespaces(secret), clock, days=settings.namespace_days)
    names.of("corp", "acme", "ann", known=known)

Doors and workers of one deployment have the same secret, and the same `days`, those of the control plane where it says
them: what one calls a requester, the others do. A door names by what it knows now (`FollowedNamespaces`). Past its
lease on erase epochs each name is one of its own: nothing is found, nothing breaks.
"""

from __future__ import annotations

import secrets
from collections.abc import Callable
from typing import Final, NamedTuple

from kvcustody.clock import Clock
from kvcustody.governance.edge.erase_epochs import NO_EPOCHS, Epochs, KnownEpochs
from kvcustody.governance.edge.router_namespace import NamespaceAge, RouterNamespaces

NAMESPACE_DAYS: Final = 30
EpochsSource = Callable[[], KnownEpochs | None]  # what is known at this moment; None past the lease


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
        """The name of a tenant, or of a subject or session in it; without `known` no epoch was ever raised."""
        epochs, days = NO_EPOCHS, self._days
        if known is not None:
            epochs = known.of(issuer, tenant, subject, session)
            days = self._days if known.namespace_days is None else known.namespace_days
        age = NamespaceAge(epochs, self._clock.utc_us(), days)
        return self._namespaces.of(issuer, tenant, subject, session, age)


class Named(NamedTuple):
    """Where routers look for a request, the epochs that its principal stands on, and whether the lease is over."""

    namespace: str
    epochs: Epochs
    is_past_lease: bool = False


class FollowedNamespaces:
    """What a door calls requesters, by the epochs that it knows at this moment."""

    def __init__(self, names: CurrentNamespaces, epochs: EpochsSource | None) -> None:
        """`epochs`: None where no control plane gives any out, so that none is ever raised."""
        self._names = names
        self._source = epochs
        self._last: KnownEpochs | None = None

    @property
    def is_past_lease(self) -> bool:
        """Whether no name is found at this moment."""
        return self._source is not None and self._source() is None

    def of(
        self,
        issuer: str,
        tenant: str,
        subject: str | None = None,
        session: str | None = None,
        *,
        by_tenant: bool = False,
    ) -> Named:
        """The name of a request's subject, else of its session, else of its tenant, which `by_tenant` takes always."""
        whose = (issuer, tenant, subject, session if subject is None else None)
        known = None if self._source is None else self._source()
        self._last = known or self._last
        epochs = NO_EPOCHS if self._last is None else self._last.of(*whose)
        if self._source is not None and known is None:
            return Named(secrets.token_hex(16), epochs, is_past_lease=True)
        named = whose[:2] if by_tenant else whose
        return Named(self._names.of(*named, known=known), epochs)
