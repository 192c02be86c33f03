"""What a tenant is called: one name, made here alone, from an issuer of identities and the id that it gives.

    Issuers("corp", ("partner",)).name("partner", "acme")    # `acme^partner`
    Issuers("corp", ("partner",)).name("corp", "acme")       # `acme`

1. No two (issuer, id) have one name: `^` stands in no id and in no issuer.
2. The first issuer of a deployment is its home: its tenants go by their bare ids. Every other tenant's name says whose
   it is.
3. What somebody types is resolved here too: an id alone is a name only where there is one issuer.
"""

from __future__ import annotations

from collections.abc import Collection
from typing import NamedTuple

from kvcustody.errors import ConfigError
from kvcustody.ids import TenantId

SEPARATOR = "^"
ANONYMOUS = "(anonymous)"  # who has no identity: no tenant can be called so, for ids have no parentheses
OWN = "kvcustody"  # the issuer of what is nobody's: its tenants are known without being declared, and no other's
NAME_CHARACTERS_MAX = 257  # an id, the separator, an issuer
_SHOWN_MAX = 8


class Issuers(NamedTuple):
    """Whose tenants there are: the `home` issuer (empty: none is known yet), and those beside it."""

    home: str = ""
    others: tuple[str, ...] = ()

    @property
    def all(self) -> tuple[str, ...]:
        """Every issuer, the home first."""
        return (self.home, *self.others) if self.home else self.others

    def name(self, issuer: str, tenant: str) -> TenantId:
        """What the tenant is called everywhere behind the door."""
        return TenantId(tenant if issuer == self.home else f"{tenant}{SEPARATOR}{issuer}")

    def knows(self, issuer: str) -> bool:
        """Whether tenants of this issuer may be named here."""
        return issuer == OWN or issuer in self.all

    def parts(self, name: str) -> tuple[str, str]:
        """The issuer and the id behind a name."""
        tenant, _, issuer = name.partition(SEPARATOR)
        return issuer or self.home, tenant

    def full(self, name: str) -> str:
        """A name as `resolve` takes it: with its issuer, where there is more than one."""
        if len(self.all) < 2 or SEPARATOR in name:
            return name
        return f"{name}{SEPARATOR}{self.home}"

    def resolve(self, written: str, known: Collection[str] = ()) -> TenantId:
        """The name behind what somebody typed; `known` names are shown where it could be several tenants.

        Raises `ConfigError` for an id alone where there are several issuers, and for an issuer that is none.
        """
        tenant, separated, issuer = written.partition(SEPARATOR)
        if separated and not self.knows(issuer):
            listed = ", ".join(f"`{one}`" for one in self.all[:_SHOWN_MAX]) or "none"
            raise ConfigError(f"tenant `{written}`: `{issuer}` is no issuer here; there are {listed}", tenant=written)
        if separated:
            return self.name(issuer, tenant)
        if len(self.all) < 2:
            return TenantId(written)
        candidates = [one for one in self.all if self.name(one, tenant) in known] or list(self.all)
        listed = " or ".join(f"`{tenant}{SEPARATOR}{one}`" for one in candidates[:_SHOWN_MAX])
        raise ConfigError(
            f"tenant `{written}`: {len(self.all)} issuers name tenants here; say whose it is: {listed}",
            tenant=written,
        )


def issuers_of(listed: tuple[str, ...]) -> Issuers:
    """The issuers that a document lists, its home first."""
    return Issuers(listed[0], listed[1:]) if listed else Issuers()
