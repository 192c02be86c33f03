"""The ledger's keys, as the API shows and takes them: public halves and orders, never a secret."""

from __future__ import annotations

from typing import Annotated, Literal

from pydantic import Field

from kvcustody.audit.evidence.query.key_orders import KeyOrderStanding
from kvcustody.audit.keep.unlink_subject import UnlinkedSubject
from kvcustody.governance.api.models.base import Model, Name, TenantName, Whole, example
from kvcustody.governance.api.models.shown import page_of, shown

_PERIOD = {"key": "kvcustody.example/ledger+6b0f2c1e+Ab3…", "first_size": 0, "last_size": None}
_EXAMPLE = {
    "order": 4711, "at_us": 1_780_000_000_000_000, "tenant": "acme", "action": "rotate", "actor": "carl",
    "reason": "yearly", "state": "open", "waiting": ["gpu-2"], "in_service": 0, "pending_until_us": None,
}  # fmt: skip
Reason = Annotated[str, Field(min_length=1, max_length=200)]

KeyOrderModel = shown(KeyOrderStanding, "KeyOrder", _EXAMPLE)
KeyOrderPage = page_of(KeyOrderModel, "KeyOrders")
UnlinkedModel = shown(UnlinkedSubject, "Unlinked", {"pseudonyms": 3, "keys": 1, "remains": []})


class SigningPeriodModel(Model):
    """A public key (C2SP) and the sizes of trees that it may sign; `last_size` null: it signs now."""

    model_config = example(_PERIOD)

    key: str
    first_size: int
    last_size: int | None


class SigningKeys(Model):
    """The keys that sign or signed the ledger, oldest first."""

    model_config = example({"items": [_PERIOD]})

    items: list[SigningPeriodModel]


class HandoverModel(Model):
    """The kind of the next signing key; without one, the kind stays the same."""

    model_config = example({"kind": "ed25519"})

    kind: Literal["ed25519", "ml-dsa-44"] | None = None


class BreakReason(Model):
    """Why the ledger lost leaves that its key had signed; the reason goes on record."""

    model_config = example({"reason": "failover of 3 May"})

    reason: Reason


class BreakModel(Model):
    """Sizes of the root log: the signed size that is lost, the size found, and the newest signed size that is left.

    `replayed` leaves were brought back by replays since.
    """

    model_config = example({"lost": 4711, "found": 4650, "base": 4640, "replayed": 71})

    lost: Whole
    found: Whole
    base: Whole
    replayed: Whole


class TenantNamed(Model):
    """A tenant, and the reason, which goes on record."""

    model_config = example({"tenant": "acme", "reason": "yearly"})

    tenant: TenantName
    reason: Reason


class SubjectNamed(TenantNamed):
    """A subject of a tenant, as its requests name it, and the reason. The name does not go on record."""

    model_config = example({"tenant": "acme", "subject": "user-17", "reason": "erasure request 12"})

    subject: Name
