"""A key custodian's acts on a ledger's keys: its signing key, subjects' keys, tenants' keys on every worker.

1. The signing key is handed over on record while the service runs: the old signer ends, both keys sign the handover,
   the next signer begins. Where it cannot be recorded, or another process signs with the key, the old one goes on.
2. Tenants' keys never leave their workers. What is ordered here is on record before any worker hears of it, and what
   each worker did is on record as its own.
3. A subject's key is destroyed in the store that the service was given; its name goes with it.
"""

from __future__ import annotations

import threading
from typing import TYPE_CHECKING, NamedTuple

from kvcustody.audit.evidence.query.key_orders import DESTROY, KeyOrderStanding, order_standings
from kvcustody.audit.keep.purge_and_legal_hold import RetentionError
from kvcustody.audit.keep.unlink_subject import UnlinkedSubject, unlink_subject
from kvcustody.audit.kinds import KeysOrdered
from kvcustody.audit.tlog.log_break import LogBreak
from kvcustody.audit.tlog.signed_note import KeyKind, SigningKind
from kvcustody.audit.tlog.signing_key import SigningKeyError, read_signing_key
from kvcustody.errors import ConfigError, LedgerUnavailable
from kvcustody.governance.erasure.selector import Selector
from kvcustody.governance.identity.principal import check_identifier, check_tenant_name
from kvcustody.governance.keys import checkpoint_signing_key as signing
from kvcustody.governance.keys.checkpoint_signing_key import recorded_keys, rotate_signing_key
from kvcustody.governance.restriction.orders import check_not_restricted
from kvcustody.governance.service.problem_details import ProblemError

if TYPE_CHECKING:
    from kvcustody.governance.service.service import Service

_handing_over = threading.Lock()


class SigningPeriod(NamedTuple):
    """A key may sign trees from `first_size` through `last_size` leaves (None: it signs now)."""

    key: str
    first_size: int
    last_size: int | None


def signing_keys(service: Service) -> list[SigningPeriod]:
    """Return every key that signs or signed this ledger, oldest first, from its own leaves."""
    return [SigningPeriod(str(key), first, last) for key, first, last in recorded_keys(service.engine)]


def hand_over(service: Service, actor: str, kind: SigningKind | None) -> list[SigningPeriod]:
    """Hand the ledger over to a new signing key (rule 1); returns every key afterwards."""
    with _handing_over:
        if service.signer is None:
            raise ProblemError("conflict", "another process signs this ledger; rotate the key there")
        path, signer = service.settings.signing_key_path, service.signer
        signer.close()
        try:
            wanted = None if kind is None else KeyKind.named(kind)
            rotate_signing_key(path, signer, service.writer, service.clock, actor, wanted)
        except SigningKeyError as error:
            raise ProblemError("conflict", error.message) from None
        except LedgerUnavailable:
            raise ProblemError("unavailable", "the ledger cannot record", headers={"Retry-After": "2"}) from None
        finally:
            service.signer = service.signing_with(read_signing_key(path))
    return signing_keys(service)


def confirm_break(service: Service, actor: str, reason: str) -> LogBreak:
    """Resume signing after the ledger lost leaves, with the key's statement on record (rule 1).

    Erasures may be among what is lost: every router's name ends.
    """
    with _handing_over:
        if service.signer is None:
            raise ProblemError("conflict", "another process signs this ledger; confirm the break there")
        path, signer = service.settings.signing_key_path, service.signer
        key = read_signing_key(path)
        signer.close()
        try:
            broken = signing.confirm_break(signer, key, service.engine, service.writer, service.clock, actor, reason)
        except (ConfigError, SigningKeyError) as error:
            raise ProblemError("conflict", error.message) from None
        except LedgerUnavailable:
            raise ProblemError("unavailable", "the ledger cannot record", headers={"Retry-After": "2"}) from None
        finally:
            service.signer = service.signing_with(key)
    service.raise_above(None)
    return broken


def unlink(service: Service, tenant: str, subject: str, *, actor: str, reason: str) -> UnlinkedSubject:
    """Destroy the link of a subject's pseudonyms (rule 3); returns what remains in which copies."""
    check_tenant_name(tenant)
    check_identifier("subject", subject)
    keys = service.settings.open_subject_keys()  # of its own: the writer's belong to its thread
    try:
        return unlink_subject(
            service.engine,
            tenant,
            subject,
            keys=keys,
            actor=actor,
            reason=reason,
            clock=service.clock,
            put=service.record,
        )
    except RetentionError as error:
        raise ProblemError("conflict", error.message) from None
    finally:
        if keys is not None:
            keys.close()


def order(service: Service, tenant: str, action: str, *, actor: str, reason: str) -> KeyOrderStanding:
    """Order every worker to rotate or destroy a tenant's present key epochs (rule 2)."""
    check_tenant_name(tenant)
    if action == DESTROY:
        _check_not_restricted(service, tenant)
    service.record(KeysOrdered(service.clock.now_us(), tenant, action, actor, reason))
    service.changed()
    return next(found for found in reversed(orders(service)) if (found.tenant, found.action) == (tenant, action))


def _check_not_restricted(service: Service, tenant: str) -> None:
    """Without its keys nothing of a tenant is kept, and what a case restricts is."""
    try:
        with service.reading() as connection:
            check_not_restricted(connection, Selector(tenant), service.subject_keys)
    except ConfigError as error:
        raise ProblemError("conflict", error.message) from None


def orders(service: Service) -> list[KeyOrderStanding]:
    """Return every order on tenants' keys with its progress, oldest first."""
    with service.reading() as connection:
        return order_standings(connection)
