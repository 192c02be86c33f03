"""Names of principals' tenants, and which tenants are admitted: the one place where issuers count.

1. Under a policy that lists `issuers`, the first of them owns the bare ids, and only tenants of listed issuers are
   admitted. Under a policy without `issuers`, only tenants of one issuer are admitted: the one that the ledger, or else
   this worker's keys, have ever had.
2. An issuer is on record, durably, before a tenant of its is named for the first time. The ledger's bare ids are for
   good whose they were first, so a policy or a principal that says otherwise is refused.
3. While the ledger is away, those issuers go on whose tenants have keys here: they were recorded, or are about to be.
4. A ledger that did not answer is not asked again for `_REST_US`: the owning thread waits for each question.
5. A name is made when a plan is made, never for a request that has one.
"""

from __future__ import annotations

from kvcustody.audit.kinds import BARE, GOVERNOR, QUALIFIED, IssuerAssigned
from kvcustody.clock import Clock
from kvcustody.errors import ConfigError, LedgerUnavailable, UnsignedOrderError
from kvcustody.governance.identity.domain_spec import KeyOwner
from kvcustody.governance.identity.principal import Principal
from kvcustody.governance.keys.keyring import Keyring
from kvcustody.governance.ledger_protocol import Ledger
from kvcustody.ids import TenantId
from kvcustody.logger import get_logger
from kvcustody.tenants import OWN, Issuers
from kvcustody.times import SECOND_US

_log = get_logger(__name__)
_REST_US = 8 * SECOND_US
_STRANGERS_MAX = 100  # issuers that a refusal is logged for, once each


class TenantNames:
    """The names of one worker's tenants. Belongs to the owning thread."""

    def __init__(self, ledger: Ledger, keyring: Keyring, clock: Clock, listed: tuple[str, ...]) -> None:
        """`listed`: the issuers of the policy. Raises `ConfigError` where the ledger's bare ids are another's."""
        self._ledger = ledger
        self._keyring = keyring
        self._clock = clock
        self._listed: tuple[str, ...] = ()
        self._on_record = Issuers()
        self._met: set[str] = {OWN}
        self._strangers: set[str] = set()
        self._away, self._away_until_us = (
            "",
            0,
        )  # why the ledger did not answer, and until when it is not asked
        self.list(listed)

    def list(self, listed: tuple[str, ...]) -> None:
        """Admit these issuers' tenants from now on; raises `ConfigError` as `check` does."""
        self.check(listed)
        self._listed = listed
        self._met &= {OWN, *listed} if listed else {OWN, self._on_record.home}

    def check(self, listed: tuple[str, ...]) -> None:
        """Raise `ConfigError` where a policy that lists these issuers gives away another's bare ids."""
        if not listed:
            return
        try:
            self._look()
        except LedgerUnavailable:
            return  # looked at again before the first of their tenants is named
        home = self._on_record.home
        if home and listed[0] != home:
            raise ConfigError(
                f"the policy lists issuer `{listed[0]}` first, but this ledger's bare tenant ids are issuer `{home}`'s "
                f"for good; list `{home}` first",
                issuer=home,
            )

    def met(self, principal: Principal) -> TenantId | None:
        """Return the name of a principal's tenant, with its issuer on record; None where its issuer is not admitted.

        Raises `LedgerUnavailable` where the issuer is new and cannot be recorded now.
        """
        issuer = principal.issuer
        if issuer not in self._met and not self._meet(issuer):
            return None
        return self.called(issuer, principal.tenant)

    def called(self, issuer: str, tenant: str) -> TenantId:
        """Return the name that a tenant has, or would have."""
        return Issuers(self._home()).name(issuer, tenant)

    def owner(self, name: str) -> KeyOwner:
        """Return the owner of the keys behind a name; nobody while no issuer is known."""
        issuer, tenant = Issuers(self._home()).parts(name)
        return KeyOwner("tenant", issuer, tenant)

    def named(self, owner: KeyOwner) -> str:
        """Return the name of the tenant that owns a key."""
        return self.called(owner.issuer, owner.name)

    def _home(self) -> str:
        """Whose the bare ids are, as far as this worker can tell."""
        if self._on_record.home or self._listed:
            return self._on_record.home or self._listed[0]
        keyed = self._keyed()
        return keyed.pop() if len(keyed) == 1 else ""

    def _look(self) -> None:
        """What the ledger knows, beside what this worker has recorded there; raises `LedgerUnavailable` (rule 4)."""
        if self._clock.now_us() < self._away_until_us:
            raise LedgerUnavailable(self._away)
        try:
            found, mine = self._ledger.issuers(), self._on_record
        except LedgerUnavailable as away:
            self._away, self._away_until_us = away.message, self._clock.now_us() + _REST_US
            raise
        self._on_record = Issuers(found.home or mine.home, tuple(dict.fromkeys((*found.others, *mine.others))))

    def _meet(self, issuer: str) -> bool:
        """Have an issuer on record; whether its tenants are admitted."""
        if not self._may_come(issuer, self._on_record.home):
            return self._refuse(issuer)
        try:
            self._look()
        except LedgerUnavailable:
            if issuer in self._keyed() and issuer in (self._listed or (self._home(),)):
                return True
            raise
        home = self._on_record.home or (self._listed or (self._alone(issuer),))[0]
        if not home or not self._may_come(issuer, home):
            return self._refuse(issuer)
        for one, tenants in ((home, BARE), (issuer, QUALIFIED)):
            if one not in self._on_record.all:
                try:
                    self._ledger.submit_durable(IssuerAssigned(self._clock.now_us(), one, tenants, GOVERNOR))
                except UnsignedOrderError as refused:
                    return self._refuse(issuer, f"{refused}, or assign `{one}`: kvcustody policy assign-issuer")
                others = (*self._on_record.others, one) if tenants == QUALIFIED else self._on_record.others
                self._on_record = Issuers(home, others)
                self._look()  # another worker may have been first
                if self._on_record.home != home:
                    return self._refuse(issuer)
        self._met.add(issuer)
        return True

    def _may_come(self, issuer: str, home: str) -> bool:
        if self._listed:
            return issuer in self._listed and home in ("", self._listed[0])
        return home in ("", issuer)

    def _alone(self, issuer: str) -> str:
        """The issuer, where no other's tenants have keys here: then the ids of a ledger from before are its own."""
        return "" if self._keyed() - {issuer} else issuer

    def _keyed(self) -> set[str]:
        """Whose tenants have keys here."""
        return {owner.issuer for owner in self._keyring.owners() if owner.kind == "tenant"} - {OWN}

    def _refuse(self, issuer: str, why: str = "list it under `issuers` in the policy") -> bool:
        if issuer not in self._strangers and len(self._strangers) < _STRANGERS_MAX:
            self._strangers.add(issuer)
            _log.error(
                "tenants of this issuer are not admitted",
                why=why,
                issuer=issuer,
                listed=list(self._listed),
                home=self._on_record.home,
            )
        return False
