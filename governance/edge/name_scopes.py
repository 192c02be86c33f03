"""What the policies in effect tell doors: the scope of names, the workers that may serve, and receipt shares.

    scopes = NameScopes.of_policies([policy])
    scopes.of("corp", "acme")            # ScopeKind.SUBJECT
    scopes.demand(principal, None)       # placement groups, and the share with a receipt; None: nobody said

1. Where several policies are in effect, the narrowest scope that one of them says holds for a tenant.
2. What no policy says is named by session, the narrowest.
3. It names requests, and decides nothing: a worker reuses by its own policy.
4. A request goes where every policy lets it go (`policies.table.placement`). A worker refuses by its own policy what
   comes to it all the same.
"""

from __future__ import annotations

import hashlib
from collections.abc import Iterable, Mapping
from functools import cached_property, reduce
from typing import Any, Final

import orjson

from kvcustody.errors import ServiceError
from kvcustody.governance.identity.domain_spec import ScopeKind
from kvcustody.governance.identity.principal import Principal
from kvcustody.policies.document.model import Policy, Scope
from kvcustody.policies.table.decision_table import name_scope
from kvcustody.policies.table.placement import ANYWHERE, Demand, PlacementTable
from kvcustody.tenants import issuers_of

NARROWEST: Final = ScopeKind.SESSION


class NameScopes:
    """The scopes at one moment, immutable. Equal ones have equal digests."""

    def __init__(
        self,
        default: Scope | None = None,
        tenants: Mapping[str, Scope] | None = None,
        issuers: tuple[str, ...] = (),
        placement: tuple[PlacementTable, ...] | None = None,
    ) -> None:
        """`default`: of tenants that are not among `tenants`, which are called as policies call them; None: rule 2.

        `placement`: of every policy, where one says anything of it; None: no policy is known.
        """
        self._placement = placement
        self._default = default
        self._tenants = dict(tenants or {})
        self._issuers = issuers
        self._names = issuers_of(issuers)

    @classmethod
    def of_policies(cls, policies: Iterable[Policy]) -> NameScopes:
        """Return the combined answer of these policies; empty where they name tenants differently."""
        every = tuple(policies)
        issuers = {policy.issuers for policy in every}
        tables = [PlacementTable.of(policy) for policy in every]
        placement = None if not every else tuple(tables) if any(one.says_anything for one in tables) else ()
        if len(issuers) != 1:
            return cls(placement=placement)
        listed = [{entry.id: name_scope(entry) for entry in policy.tenants} for policy in every]
        unlisted = [scope for scope in map(_unlisted, every) if scope is not None]
        default = min(unlisted, default=None)
        tenants = {}
        for name in sorted({name for each in listed for name in each}):
            said = [each.get(name, _unlisted(policy)) for each, policy in zip(listed, every, strict=True)]
            tenants[name] = min(scope for scope in said if scope is not None)
        others = {name: scope for name, scope in tenants.items() if scope != default}
        return cls(default, others, issuers.pop(), placement)

    @classmethod
    def from_data(cls, data: Mapping[str, Any]) -> NameScopes:
        """Parse what `data` wrote; raises `ServiceError` for anything else."""
        try:
            default = None if data["default"] is None else Scope[data["default"].upper()]
            tenants = {str(name): Scope[scope.upper()] for name, scope in data["tenants"].items()}
            said = data.get("placement")
            placement = None if said is None else tuple(map(PlacementTable.from_data, said))
            return cls(default, tenants, tuple(map(str, data["issuers"])), placement)
        except (KeyError, AttributeError, TypeError):
            raise ServiceError("the scopes of routers' names are malformed") from None

    def data(self) -> dict[str, Any]:
        """Return JSON data."""
        return {
            "default": None if self._default is None else self._default.name.lower(),
            "tenants": {name: scope.name.lower() for name, scope in self._tenants.items()},
            "issuers": list(self._issuers),
            "placement": None if self._placement is None else [table.data() for table in self._placement],
        }

    @cached_property
    def digest(self) -> str:
        """The digest of its content."""
        form = orjson.dumps(self.data(), option=orjson.OPT_SORT_KEYS)
        return hashlib.blake2b(form, digest_size=16, person=b"name-scopes").hexdigest()

    @property
    def is_known(self) -> bool:
        """Whether any policy sets anything."""
        return self._default is not None or bool(self._tenants)

    def without_names(self) -> NameScopes:
        """Return the placement alone, without name scopes."""
        return NameScopes(placement=self._placement)

    def demand(self, principal: Principal, hint: str | None) -> Demand | None:
        """Return the placement groups that may serve a request with this classification hint; None: no policy
        is known.
        """
        if self._placement is None:
            return None
        demands = (
            table.demand(
                table.name(principal.issuer, principal.tenant),
                principal.route,
                principal.classification,
                hint,
            )
            for table in self._placement
        )
        return reduce(Demand.together, demands) if self._placement else ANYWHERE

    def of(self, issuer: str, tenant: str) -> ScopeKind:
        """The scope of a tenant's names."""
        name = self._names.name(issuer, tenant) if self._issuers else tenant
        scope = self._tenants.get(name, self._default)
        return NARROWEST if scope is None else ScopeKind(scope.name.lower())


def _unlisted(policy: Policy) -> Scope | None:
    return None if policy.default is None else name_scope(policy.default)
