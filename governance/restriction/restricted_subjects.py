"""Subjects whose data is stored but not used, because a case restricts its processing (GDPR 18).

    restricted = RestrictedSubjects([RestrictedSubject("case-1", "acme", "ada")])
    restricted.covers("acme", "ada"); restricted.withholds("acme", spec)

1. A request of the subject finds nothing and leaves nothing that could be found. What it left before stays, until the
   deadlines that it has anyway, or until its room is needed.
2. Who wrote a block of a tenant-wide domain is not known to the pool. So the tenant's requests use another domain,
   named by the cases, while a restriction is in force. Blocks in the previous domain cannot be found meanwhile; once
   the restriction is lifted, everybody finds them again. A second restriction makes another one.
3. A declared segment is the text that the policy names, and of no subject: it is withheld from the subject alone.
4. What withholds is what was ordered, whoever asks: every pool, tier and adapter asks here.
"""

from __future__ import annotations

import hashlib
from collections.abc import Iterable
from typing import NamedTuple

from kvcustody.errors import ConfigError
from kvcustody.governance.identity.domain_spec import DomainSpec, ScopeKind

RESTRICTED = "processing-restricted"  # the rule that a withheld reuse is denied by
BESIDE_RESTRICTED = "processing-restricted-beside"  # another request of the tenant, in the domain of rule 2
_ERA_DIGITS = 32


class RestrictedSubject(NamedTuple):
    """A restriction in force: the case that orders it, and the subject as the tenant names it."""

    case_id: str
    tenant: str
    subject: str


class RestrictedSubjects:
    """The restrictions of one moment, immutable."""

    def __init__(self, inside: Iterable[RestrictedSubject] = ()) -> None:
        self.orders = frozenset(inside)
        self._people = {(one.tenant, one.subject) for one in self.orders}
        cases: dict[str, set[str]] = {}
        for one in self.orders:
            cases.setdefault(one.tenant, set()).add(one.case_id)
        self._eras = {tenant: _era(named) for tenant, named in cases.items()}

    def __bool__(self) -> bool:
        return bool(self.orders)

    def digest(self) -> str:
        """A digest that is equal for equal restrictions: a worker reports it."""
        named = "\n".join("\0".join(one) for one in sorted(self.orders))
        return hashlib.sha256(named.encode()).hexdigest()[:_ERA_DIGITS]

    def covers(self, tenant: str, subject: str | None) -> bool:
        """Whether a request of this tenant and subject may use no kept block."""
        return (tenant, subject) in self._people

    def has_tenant(self, tenant: str) -> bool:
        """Whether any subject of a tenant is restricted."""
        return tenant in self._eras

    def salt(self, tenant: str, scope: ScopeKind, salt: str | None) -> str | None:
        """Return the salt of a tenant's own domain from the caller's (rule 2); the same on every worker."""
        era = self._eras.get(tenant)
        if era is None or scope is not ScopeKind.TENANT:
            return salt
        if salt is None:
            return era
        return era + hashlib.sha256(salt.encode()).hexdigest()[:_ERA_DIGITS]

    def withholds(self, tenant: str, spec: DomainSpec | None, *, is_monitored: bool = False) -> bool:
        """Whether a domain's blocks are stored but not used now."""
        era = self._eras.get(tenant)
        if era is None or spec is None:
            return False
        if is_monitored:  # under the engine's own keys, which know no tenant
            return True
        if spec.scope is ScopeKind.TENANT:
            return not (spec.salt or "").startswith(era)
        return spec.subject is not None and (tenant, spec.subject) in self._people

    def check_erasable(self, tenant: str | None, subject: str | None, session: str | None = None) -> None:
        """Raise `ConfigError` where an erasure might end what a restriction preserves; lift it first, with a reason.

        An erasure without a tenant is of all; one of a session whose subject is not named may be of anybody.
        """
        for one in sorted(self.orders):
            is_other = tenant not in (None, one.tenant) or subject not in (None, one.subject)
            if not is_other:
                what = "session" if session is not None else "erasure"
                raise ConfigError(
                    f"case `{one.case_id}` restricts the processing of a subject of tenant `{one.tenant}`, whom this "
                    f"{what} covers: restricted data is kept (GDPR Article 18(2)). "
                    "Lift the restriction first (step `lift-restriction`)",
                    case_id=one.case_id,
                )


NOBODY_RESTRICTED = RestrictedSubjects()


def _era(cases: Iterable[str]) -> str:
    return "restricted-" + hashlib.sha256("\n".join(sorted(cases)).encode()).hexdigest()[:_ERA_DIGITS]
