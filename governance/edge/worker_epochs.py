"""A worker's erase epochs, and what they mean for a request that came through a door.

    epochs = WorkerEpochs()
    epochs.take(known)                        # the newest snapshot that was heard; says what was raised
    epochs.agree(principal, token_epochs)     # whether door and worker know the same
    epoch_salt(salt, token_epochs, ...)       # what separates what was before an erasure from what is after it

1. A request whose token has other epochs than the worker is served, but finds nothing and leaves nothing that can be
   found. Either it began before an erasure, or the door or the worker is behind.
2. Where they agree, the epochs are part of the key of the request's own domain. So blocks written before an erasure are
   unreachable from the raise on, in every pool, tier and engine. This holds even where the erasure itself arrives
   later.
3. A tenant-wide domain has only the epochs of fleet and tenant. The erasure itself ends what one subject wrote in it.
4. A request that came through no door has no epochs, and keeps the domain without them.
"""

from __future__ import annotations

import hashlib

from kvcustody.governance.edge.erase_epochs import NO_EPOCHS, Epochs, KnownEpochs
from kvcustody.governance.identity import tlv
from kvcustody.governance.identity.principal import Principal

OTHER_EPOCH = "erase-epoch"  # the rule that denies reuse where door and worker know otherwise
_SALT_BYTES = 16


class WorkerEpochs:
    """The newest snapshot that a worker has. Used on the thread that owns the blocks."""

    def __init__(self) -> None:
        self.known: KnownEpochs | None = None
        self.are_awaited = False  # a control plane gives them out: before its first answer nothing agrees

    def take(self, known: KnownEpochs) -> frozenset[bytes] | None:
        """Act by this snapshot, unless a newer one came before; returns the tags raised since. None: any may
        be raised.
        """
        before = self.known
        if before is None or not known.has_key_of(before):  # under another key the whole fleet was raised
            self.known = known
            return None
        if known.epochs.version < before.epochs.version:
            return frozenset()
        self.known = known
        if known.epochs.floor > before.epochs.version:
            return None
        return known.epochs.raised_after(before.epochs.version)

    def tags(self, principal: Principal) -> frozenset[bytes]:
        """Return the tags of the scopes that apply to a request of this principal; none without a snapshot."""
        if self.known is None:
            return frozenset()
        return frozenset(self.known.tags_of(*_scope(principal)))

    def tags_of_tenant(self, issuer: str, tenant: str) -> frozenset[bytes]:
        """Return the tags of fleet and tenant, which apply to a tenant-wide domain."""
        return frozenset() if self.known is None else frozenset(self.known.tags_of(issuer, tenant)[:2])

    def of(self, issuer: str, tenant: str, subject: str | None = None, session: str | None = None) -> Epochs:
        """Return the epochs as `KnownEpochs.of` does; none without a snapshot."""
        return NO_EPOCHS if self.known is None else self.known.of(issuer, tenant, subject, session)

    def agree(self, principal: Principal, epochs: Epochs) -> bool:
        """Whether a token's epochs equal those known here."""
        if self.known is None and self.are_awaited:
            return False
        return self.of(*_scope(principal)) == epochs


def epoch_salt(salt: str | None, epochs: Epochs, *, is_tenant_wide: bool) -> str | None:
    """Return the salt of a request's own domain from the caller's; the same on every worker, and `salt` at
    epoch none.
    """
    if is_tenant_wide:
        epochs = epochs._replace(private=0)
    if epochs == NO_EPOCHS:
        return salt
    fields: dict[int, tlv.Value] = {1: salt, 2: epochs.fleet, 3: epochs.tenant, 4: epochs.private}
    encoded = tlv.encode("kvcustody/epoch-salt", 1, fields)
    return "epoch-" + hashlib.blake2b(encoded, digest_size=_SALT_BYTES).hexdigest()


def _scope(principal: Principal) -> tuple[str, str, str | None, str | None]:
    return principal.issuer, principal.tenant, principal.subject, principal.session
