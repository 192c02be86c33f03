"""Roles and what each permits: the table of the design.

1. What is not in the table is not allowed. No role implies another.
2. A reach of `OWN` is the tenant that the credential names, and no other.
3. Nobody holds two roles of one of the `APART` pairs: who writes policies does not approve them.
"""

from __future__ import annotations

from collections.abc import Iterable
from enum import Enum, StrEnum
from functools import cache

from kvcustody.errors import IdentityError


class Role(StrEnum):
    """A role of a person or a machine."""

    TENANT_VIEWER = "tenant-viewer"
    TENANT_ADMIN = "tenant-admin"
    DPO = "dpo"
    AUDITOR = "auditor"
    AUTHOR = "author"
    APPROVER = "approver"
    OPERATOR = "operator"
    KEY_CUSTODIAN = "key-custodian"
    WORKER = "worker"
    DOOR = "door"  # before a router
    BREAK_GLASS = "break-glass"
    BOOTSTRAP = "bootstrap"


class Permission(StrEnum):
    """A permission that an operation of the service needs."""

    READ_CUSTODY = "custody.read"  # custody, log and reports
    READ_HEALTH = "health.read"
    ERASE = "erasure.request"
    CERTIFY = "erasure.certificate"  # what opens a certificate, letters to people
    READ_CERTIFICATE = "certificate.read"  # figures and proofs, without whom it is about
    CONSENT = "grant.consent"
    READ_POLICY = "policy.read"
    WRITE_POLICY = "policy.propose"  # propose, test, diff, prove, simulate
    APPROVE_POLICY = "policy.approve"
    ACTIVATE_POLICY = "policy.activate"  # activate, roll back
    STAGE_POLICY = "policy.stage"
    NARROW_POLICY = "policy.narrow"
    READ_OPERATIONS = "operations.read"  # quotas, workers, scans, backups
    OPERATE = "operations.write"
    MANAGE_KEYS = "keys.manage"
    WORK = "worker.sync"  # pull policies, take erasures and orders
    HAND_IN = "worker.hand-in"  # register a process, ship ledger batches, take erase epochs
    ENROL = "principal.enrol"
    SELF = "self.manage"  # one's own keys and sessions


class Reach(Enum):
    """The reach of a permission: none, the own tenant, or all."""

    NONE = 0
    OWN = 1
    ALL = 2


_OWN, _ALL = Reach.OWN, Reach.ALL
PERMISSIONS: dict[Role, dict[Permission, Reach]] = {
    Role.TENANT_VIEWER: {Permission.READ_CUSTODY: _OWN},
    Role.TENANT_ADMIN: {
        Permission.READ_CUSTODY: _OWN,
        Permission.ERASE: _OWN,
        Permission.CERTIFY: _OWN,
        Permission.READ_CERTIFICATE: _OWN,
        Permission.CONSENT: _OWN,
    },
    Role.DPO: {
        Permission.READ_CUSTODY: _ALL,
        Permission.READ_HEALTH: _ALL,
        Permission.ERASE: _ALL,
        Permission.CERTIFY: _ALL,
        Permission.READ_CERTIFICATE: _ALL,
    },
    Role.AUDITOR: {
        Permission.READ_CUSTODY: _ALL,
        Permission.READ_CERTIFICATE: _ALL,
        Permission.READ_HEALTH: _ALL,
        Permission.READ_POLICY: _ALL,
        Permission.READ_OPERATIONS: _ALL,
    },
    Role.AUTHOR: {Permission.READ_POLICY: _ALL, Permission.WRITE_POLICY: _ALL},
    Role.APPROVER: {
        Permission.READ_POLICY: _ALL,
        Permission.WRITE_POLICY: _ALL,
        Permission.APPROVE_POLICY: _ALL,
        Permission.ACTIVATE_POLICY: _ALL,
        Permission.STAGE_POLICY: _ALL,
        Permission.NARROW_POLICY: _ALL,
    },
    Role.OPERATOR: {
        Permission.READ_HEALTH: _ALL,
        Permission.STAGE_POLICY: _ALL,
        Permission.READ_OPERATIONS: _ALL,
        Permission.OPERATE: _ALL,
    },
    Role.KEY_CUSTODIAN: {Permission.MANAGE_KEYS: _ALL},
    Role.WORKER: {Permission.WORK: _ALL, Permission.HAND_IN: _ALL},
    Role.DOOR: {Permission.HAND_IN: _ALL},
    Role.BREAK_GLASS: {Permission.NARROW_POLICY: _ALL},
    Role.BOOTSTRAP: {Permission.ENROL: _ALL},
}
for _role in Role:
    if _role is not Role.BOOTSTRAP:  # the bootstrap key enrols and expires; it cannot even renew itself
        PERMISSIONS[_role][Permission.SELF] = _ALL

OF_TENANTS = frozenset({Role.TENANT_VIEWER, Role.TENANT_ADMIN})
APART: tuple[tuple[Role, Role], ...] = ((Role.AUTHOR, Role.APPROVER),)
PROCESSES = frozenset({Role.WORKER, Role.DOOR})  # programs of the fleet: a key of theirs may be bound to a certificate
ALONE = PROCESSES | {Role.BOOTSTRAP}  # machines: these combine with no other role
RECORDED = frozenset({Role.DPO, Role.AUDITOR, Role.TENANT_ADMIN})  # whose reads of the ledger are events


@cache
def reach(roles: frozenset[Role], action: Permission) -> Reach:
    """Return the reach of these roles together."""
    best = Reach.NONE
    for role in roles:
        found = PERMISSIONS[role].get(action, Reach.NONE)
        if found.value > best.value:
            best = found
    return best


@cache
def roles_with(actions: tuple[Permission, ...], least: Reach) -> tuple[Role, ...]:
    """Return the roles that permit one of these actions with at least this reach, in alphabetical order."""
    return tuple(
        role for role in sorted(Role) if any(reach(frozenset({role}), each).value >= least.value for each in actions)
    )


def check_roles(roles: Iterable[Role], tenant: str | None) -> frozenset[Role]:
    """Return the roles if one principal may hold them together; raises `IdentityError` otherwise (rule 3)."""
    held = frozenset(roles)
    if not held:
        raise _refused("must hold at least one role")
    for one, other in APART:
        if one in held and other in held:
            raise _refused(f"`{one}` and `{other}` cannot be held by one principal")
    for role in sorted(ALONE & held):
        if len(held) > 1:
            raise _refused(f"`{role}` cannot be combined with other roles")
    if held & OF_TENANTS and tenant is None:
        raise _refused(f"`{min(held & OF_TENANTS)}` needs a tenant")
    if tenant is not None and not held <= OF_TENANTS:
        raise _refused(f"`{min(held - OF_TENANTS)}` is not a role inside one tenant")
    return held


def _refused(reason: str) -> IdentityError:
    return IdentityError(f"roles: {reason}", field="roles", reason=reason)
