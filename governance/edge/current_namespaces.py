"""Routers' names of requesters at this moment: under the known epochs, and the day.

    names = CurrentNamespaces(RouterNamespaces(secret), clock, days=settings.namespace_days)
    names.of("corp", "acme", "ann", known=known)

Doors and workers of one deployment have the same secret, and the same `days`, those of the control plane where it says
them: what one calls a requester, the others do. A door names by what it knows now (`FollowedNamespaces`). Past its
lease on erase epochs each name is one of its own: nothing is found, nothing breaks.
"""

from __future__ import annotations

import secrets
from collections.abc import Callable, Sequence
from typing import Final, NamedTuple

from kvcustody.clock import Clock
from kvcustody.governance.edge.erase_epochs import NO_EPOCHS, Epochs, KnownEpochs
from kvcustody.governance.edge.name_scopes import NameScopes
from kvcustody.governance.edge.named_requester import NamedRequester, named_requester
from kvcustody.governance.edge.router_namespace import NamespaceAge, RouterNamespaces
from kvcustody.governance.identity.domain_spec import ScopeKind
from kvcustody.governance.identity.principal import Principal
from kvcustody.policies.table.placement import ANYWHERE, Demand

NAMESPACE_DAYS: Final = 30
EpochsSource = Callable[[], KnownEpochs | None]  # what is known at this moment; None past the lease
ScopesSource = Callable[[], NameScopes]
_REQUEST: Final = "request"


class CurrentNamespaces:
    """Namespaces of this moment; `days` is the longest life of a name (0: unlimited)."""

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
        """Return the name of a tenant, or of a subject or session in it; without `known`, no epoch was ever raised.

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

    def block_hash(self, namespace: str, before: bytes, tokens: Sequence[int], lora_name: str | None = None) -> bytes:
        """Return what `RouterNamespaces.block_hash` returns."""
        return self._namespaces.block_hash(namespace, before, tokens, lora_name)


class Named(NamedTuple):
    """The router's name of a request, the epochs that apply to its principal, and whether the lease is over.

    `scope`: whose name it is: `tenant`, `subject`, `session`, or `request` where it is nobody else's.
    """

    namespace: str
    epochs: Epochs
    scope: str
    is_past_lease: bool = False


class FollowedNamespaces:
    """A door's names of requesters, by the epochs and scopes that it knows now."""

    def __init__(
        self, names: CurrentNamespaces, epochs: EpochsSource | None, scopes: ScopesSource | None = None
    ) -> None:
        """`epochs`: None where no control plane gives any out, so that none is ever raised.

        `scopes`: of a policy that the door reads itself; without it those that come with epochs.
        """
        self._names = names
        self._source = epochs
        self._scopes = scopes
        self._last: KnownEpochs | None = None

    @property
    def is_past_lease(self) -> bool:
        """Whether no name may be given at this moment."""
        return self._source is not None and self._source() is None

    @property
    def last_known(self) -> KnownEpochs | None:
        """The epochs at the last question, even past the lease; None before the first."""
        return self._last

    @property
    def has_scopes(self) -> bool:
        """Whether any policy sets the scope of names."""
        return self._scopes_by(None if self._source is None else self._source()).is_known

    def demand(self, principal: Principal, hint: str | None) -> Demand | None:
        """Return the placement groups that may serve a request, as last known; None while none is known."""
        if self._source is None and self._scopes is None:
            return ANYWHERE
        self._heard()
        return self._scopes_by(self._last).demand(principal, hint)

    def tenant(self, issuer: str, tenant: str) -> Named:
        """The name of a tenant."""
        return self._named((issuer, tenant), lambda known: NamedRequester(issuer, tenant))

    def of(self, principal: Principal) -> Named:
        """Return the name of a request: of its private scope, or one that no other request has."""
        session = principal.session if principal.subject is None else None
        whose = (principal.issuer, principal.tenant, principal.subject, session)
        return self._named(whose, lambda known: named_requester(principal, self._scope_of(principal, known)))

    def _named(
        self,
        whose: tuple[str, str] | tuple[str, str, str | None, str | None],
        requester: Callable[[KnownEpochs | None], NamedRequester | None],
    ) -> Named:
        known = self._heard()
        epochs = NO_EPOCHS if self._last is None else self._last.of(*whose)
        if self._source is not None and known is None:
            return Named(_own_name(), epochs, _REQUEST, is_past_lease=True)
        by = requester(known)
        if by is None:
            return Named(_own_name(), epochs, _REQUEST)
        return Named(self._names.of(*by, known=known), epochs, by.scope.value)

    def _heard(self) -> KnownEpochs | None:
        """What is known now; None past the lease."""
        known = None if self._source is None else self._source()
        self._last = known or self._last
        return known

    def _scope_of(self, principal: Principal, known: KnownEpochs | None) -> ScopeKind:
        return self._scopes_by(known).of(principal.issuer, principal.tenant)

    def _scopes_by(self, known: KnownEpochs | None) -> NameScopes:
        if self._scopes is not None:
            return self._scopes()
        return NameScopes() if known is None else known.scopes


def _own_name() -> str:
    """A name under which nothing is found."""
    return secrets.token_hex(16)
