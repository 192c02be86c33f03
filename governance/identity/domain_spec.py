"""The unit of reuse: who may read, at which classification, on which model, under which key epoch.

- A domain's `info` bytes name every field, absent ones included; equal bytes, equal domain.
- A scope has exactly the identifiers it needs and no others; a subject or session never stands without its
  tenant.
- A domain belongs to one key owner, whose secret its key is derived from. Public and group domains have
  their own owners, so no tenant's secret reaches outside the tenant.
- A caller's salt can only narrow: it is one more field under the owner's secret.
"""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass, field
from enum import Enum
from typing import NamedTuple

from kvcustody.errors import IdentityError
from kvcustody.governance.identity import tlv
from kvcustody.governance.identity.model_identity import DIGEST_BYTES
from kvcustody.governance.identity.principal import Principal, check_identifier

SCHEMA = "kvcustody/domain"
VERSION = 1


class ScopeKind(Enum):
    """Who may reuse, from wide to narrow. A segment is a tenant's declared prefix, for the readers of its rule."""

    PUBLIC = "public"
    GROUP = "group"
    SEGMENT = "segment"
    TENANT = "tenant"
    SUBJECT = "subject"
    SESSION = "session"


class KeyOwner(NamedTuple):
    """The owner of the random secret from which a key derives: `kind` is `tenant`, `group` or `public`."""

    kind: str
    issuer: str
    name: str

    def __str__(self) -> str:
        return f"{self.kind} `{self.issuer}` `{self.name}`" if self.kind == "tenant" else f"{self.kind} `{self.name}`"


PUBLIC_OWNER = KeyOwner("public", "", "public")

# Scope -> the identifiers it must have; every other identifier must be absent, except a session's subject
# (optional).
_REQUIRED = {
    ScopeKind.PUBLIC: frozenset[str](),
    ScopeKind.GROUP: frozenset({"group"}),
    ScopeKind.SEGMENT: frozenset({"issuer", "tenant", "segment"}),
    ScopeKind.TENANT: frozenset({"issuer", "tenant"}),
    ScopeKind.SUBJECT: frozenset({"issuer", "tenant", "subject"}),
    ScopeKind.SESSION: frozenset({"issuer", "tenant", "session"}),
}
_IDENTIFIERS = ("issuer", "tenant", "group", "segment", "subject", "session")


@dataclass(frozen=True, slots=True, eq=False, kw_only=True)
class DomainSpec:
    """One domain. `info` is its HKDF input; hash and equality go by it: a cheap dictionary key once built."""

    scope: ScopeKind
    classification: str
    model: bytes
    key_epoch: int
    issuer: str | None = None
    tenant: str | None = None
    group: str | None = None
    segment: str | None = None
    subject: str | None = None
    session: str | None = None
    labels: tuple[tuple[str, str], ...] = ()
    salt: str | None = None
    tenant_name: str | None = None  # what policy, accounts and ledger call the tenant; keys nothing
    info: bytes = field(init=False, repr=False)
    owner: KeyOwner = field(init=False, repr=False)
    _hash: int = field(init=False, repr=False)

    def __post_init__(self) -> None:
        self._check_identifiers()
        check_identifier("classification", self.classification)
        if type(self.model) is not bytes or len(self.model) != DIGEST_BYTES:
            raise IdentityError(f"domain: `model` must be a {DIGEST_BYTES}-byte digest", field="model")
        if type(self.key_epoch) is not int or self.key_epoch < 1:
            raise IdentityError("domain: `key_epoch` must be a positive integer", field="key_epoch")
        object.__setattr__(self, "labels", _sorted_labels(self.labels))
        object.__setattr__(self, "tenant_name", self.tenant_name or self.tenant)
        if self.salt is not None:
            check_identifier("salt", self.salt)
        info = tlv.encode(SCHEMA, VERSION, self.encoded_fields())
        object.__setattr__(self, "info", info)
        object.__setattr__(self, "_hash", hash(info))
        object.__setattr__(self, "owner", self._key_owner())

    def encoded_fields(self) -> dict[int, tlv.Value]:
        """Tag to value; tags are part of the format and are never reused."""
        return {
            1: self.scope.value,
            2: self.issuer,
            3: self.tenant,
            4: self.group,
            5: self.segment,
            6: self.subject,
            7: self.session,
            8: self.classification,
            9: self.labels,
            10: self.model,
            11: self.key_epoch,
            12: self.salt,
        }

    def _check_identifiers(self) -> None:
        required = _REQUIRED[self.scope]
        for name in _IDENTIFIERS:
            value = getattr(self, name)
            if value is not None:
                check_identifier(name, value)
            if name in required and value is None:
                raise IdentityError(f"domain: `{self.scope.value}` scope needs a {name}", field=name)
            optional = name == "subject" and self.scope is ScopeKind.SESSION
            if name not in required and value is not None and not optional:
                raise IdentityError(f"domain: `{self.scope.value}` scope takes no {name}", field=name)

    def _key_owner(self) -> KeyOwner:
        if self.scope is ScopeKind.PUBLIC:
            return PUBLIC_OWNER
        if self.scope is ScopeKind.GROUP:
            assert self.group is not None
            return group_owner(self.group)
        assert self.issuer is not None and self.tenant is not None
        return tenant_owner(self.issuer, self.tenant)

    def __eq__(self, other: object) -> bool:
        return isinstance(other, DomainSpec) and self.info == other.info

    def __hash__(self) -> int:
        return self._hash


def tenant_owner(issuer: str, tenant: str) -> KeyOwner:
    """The owner of a tenant's own domains and segments."""
    return KeyOwner("tenant", check_identifier("issuer", issuer), check_identifier("tenant", tenant))


def group_owner(group: str) -> KeyOwner:
    """Return the owner of a group's shared domain: it has its own secret, not a member's."""
    return KeyOwner("group", "", check_identifier("group", group))


def own_scope(principal: Principal, scope: ScopeKind) -> ScopeKind | None:
    """Return the scope of the principal's own blocks under a policy that sets this one.

    A subject scope without a subject becomes a session scope; without a session there is none (`None`).
    """
    if scope not in (ScopeKind.TENANT, ScopeKind.SUBJECT, ScopeKind.SESSION):
        raise IdentityError(f"domain: `{scope.value}` is not a principal's own scope", field="scope")
    if scope is ScopeKind.SUBJECT and principal.subject is None:
        scope = ScopeKind.SESSION
    return None if scope is ScopeKind.SESSION and principal.session is None else scope


def own_domain(
    principal: Principal,
    *,
    scope: ScopeKind,
    classification: str,
    model: bytes,
    key_epoch: int,
    labels: Iterable[tuple[str, str]] = (),
    salt: str | None = None,
    tenant_name: str | None = None,
) -> DomainSpec | None:
    """Return the principal's own domain at `tenant`, `subject` or `session` scope, narrowed where an identifier is
    missing.

    None where nothing of that request is reused across requests (`own_scope`).
    """
    kind = own_scope(principal, scope)
    if kind is None:
        return None
    return DomainSpec(
        scope=kind,
        issuer=principal.issuer,
        tenant=principal.tenant,
        subject=None if kind is ScopeKind.TENANT else principal.subject,
        session=principal.session if kind is ScopeKind.SESSION else None,
        classification=classification,
        labels=tuple(labels),
        model=model,
        key_epoch=key_epoch,
        salt=salt,
        tenant_name=tenant_name,
    )


def _sorted_labels(labels: tuple[tuple[str, str], ...]) -> tuple[tuple[str, str], ...]:
    ordered = tuple(
        sorted((check_identifier("label", name), check_identifier("label", value)) for name, value in labels)
    )
    names = [name for name, _ in ordered]
    if len(set(names)) != len(names):
        raise IdentityError("domain: a label is given twice", field="labels")
    return ordered
