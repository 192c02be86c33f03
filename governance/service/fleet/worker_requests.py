"""What workers ask the control plane to record: issuers that they met, and erasures that their engines began.

1. The control plane writes the leaf, and names the worker that asked as its actor.
2. The same request a second time changes nothing.
3. Where a policy in effect lists issuers, no other is assigned, and the first of them owns the bare ids.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

from kvcustody.audit.evidence.erasure.requests_and_answers import request
from kvcustody.audit.evidence.query.issuers import known_issuers
from kvcustody.audit.kinds import BARE, IssuerAssigned
from kvcustody.errors import ConfigError, IdentityError, LedgerError
from kvcustody.governance.erasure.erasure_run import request_event
from kvcustody.governance.erasure.selector import selector_from
from kvcustody.governance.identity.principal import check_identifier, check_tenant_name
from kvcustody.governance.restriction.orders import check_not_restricted
from kvcustody.governance.service.problem_details import ProblemError
from kvcustody.tenants import SEPARATOR, Issuers

if TYPE_CHECKING:
    from kvcustody.governance.service.service import Service


def assign_issuer(service: Service, worker: str, issuer: str, tenants: str) -> Issuers:
    """Record an issuer; returns the issuers that the ledger then knows. Raises `conflict` (rule 3)."""
    with service.requests_of_workers:
        with service.reading() as connection:
            known = known_issuers(connection)
        if known.knows(issuer) or (tenants == BARE and known.home):
            return known
        if tenants != BARE and not known.home:
            raise ProblemError("conflict", "the ledger's bare tenant ids have no issuer yet; assign that first")
        _check_listed(service, issuer, tenants)
        service.record(IssuerAssigned(service.clock.now_us(), issuer, tenants, worker))
        with service.reading() as connection:
            return known_issuers(connection)


def request_erasure(service: Service, worker: str, erasure: str, selector: str, deadline_us: int) -> bool:
    """Record an erasure that a worker began; False where it was recorded before. `deadline_us` is UTC.

    Raises `invalid` for an invalid selector. Raises `conflict` where a case restricts a person that it covers, or where
    somebody else requested an erasure with this id.
    """
    try:
        chosen = selector_from(selector)
        if chosen.tenant is not None:
            check_tenant_name(chosen.tenant)
        for name in ("subject", "session", "classification", "segment"):
            if getattr(chosen, name) is not None:
                check_identifier(name, getattr(chosen, name))
    except (ConfigError, IdentityError) as error:
        raise ProblemError("invalid", error.message) from None
    with service.requests_of_workers:
        with service.reading() as connection:
            try:
                there = request(connection, erasure)
            except LedgerError:
                there = None
            if there is not None:
                if there.actor != worker or there.tenant != chosen.tenant:
                    raise ProblemError("conflict", "another erasure with this id is on record")
                return False
            issuer = (chosen.tenant or "").partition(SEPARATOR)[2]
            if issuer and not known_issuers(connection).knows(issuer):
                raise ProblemError(
                    "conflict",
                    f"the ledger knows no issuer `{issuer}`: assign it first (`assignIssuer`)",
                )
            try:
                check_not_restricted(connection, chosen, service.subject_keys)
            except ConfigError as error:
                raise ProblemError("conflict", error.message) from None
        deadline = deadline_us - service.writer.offset_us
        event = request_event(chosen, erasure, worker, deadline, service.clock.now_us())
        service.record_erasure(event, chosen)
    return True


def _check_listed(service: Service, issuer: str, tenants: str) -> None:
    """Rule 3."""
    state = service.policies.released()
    policies = [] if state is None else [one.policy for one in (state.active, state.staged) if one is not None]
    listed = [policy.issuers for policy in policies if policy.issuers]
    if not listed:
        return
    if any(issuer == issuers[0] if tenants == BARE else issuer in issuers for issuers in listed):
        return
    raise ProblemError("conflict", f"no policy in effect lists the issuer `{issuer}` so: list it under `issuers`")
