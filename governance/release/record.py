"""One step of a release, signed by its actor and chained to the step before.

1. The signature covers the whole record but itself, the audience and the digest of the preceding record included.
2. Bytes have one spelling (`signed_document`); what is read is checked before it is believed.
"""

from __future__ import annotations

from collections.abc import Mapping
from enum import StrEnum
from fractions import Fraction
from typing import Any, Final, Literal

import msgspec

from kvcustody.governance.decisions.staged_table import Stage
from kvcustody.policies.bundle.trust import Signer
from kvcustody.signed_document import (
    DocumentRejected,
    DocumentSignature,
    convert,
    decode,
    encode,
    signed_bytes,
)

SCHEMA: Final = "kvcustody/policy-release@1"
RECORD_BYTES_MAX = 8 << 20
NOTHING_BEFORE = "sha256:" + "0" * 64


class ReleaseError(DocumentRejected):
    """A step of a release is not allowed, or its records do not hold together."""

    code = "KVC112"


class ReleaseAction(StrEnum):
    """The act of a record."""

    PROPOSED = "proposed"
    APPROVED = "approved"
    CONSENTED = "consented"
    ACTIVATED = "activated"
    REVOKED = "revoked"
    BROKE_GLASS = "broke-glass"


class ReleaseRecord(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """A step. `number` counts from 1; `at_us` is UTC; `body` depends on the action (`release.state`)."""

    number: int
    previous: str
    audience: str
    action: ReleaseAction
    at_us: int
    body: dict[str, Any]
    signature: DocumentSignature
    schema: Literal["kvcustody/policy-release@1"] = SCHEMA

    @property
    def actor(self) -> str:
        """The name of the key that signed."""
        return self.signature.key

    def message(self) -> bytes:
        """The bytes that the signature covers."""
        form = msgspec.to_builtins(self)
        del form["signature"]
        return signed_bytes(SCHEMA, form)

    def to_bytes(self) -> bytes:
        """Return the stored form."""
        return encode(msgspec.to_builtins(self))


def make_record(
    signer: Signer,
    action: ReleaseAction,
    body: Mapping[str, Any],
    *,
    number: int,
    previous: str,
    audience: str,
    at_us: int,
) -> ReleaseRecord:
    """Return a signed record."""
    unsigned = DocumentSignature(signer.name, b"")
    record = ReleaseRecord(number, previous, audience, action, at_us, dict(body), unsigned)
    signature = DocumentSignature(signer.name, signer.sign(record.message()))
    return msgspec.structs.replace(record, signature=signature)


def read_record(data: bytes) -> ReleaseRecord:
    """Parse a record without checking its signature; raises `ReleaseError`."""
    try:
        record = convert(decode(data, "release record", RECORD_BYTES_MAX), ReleaseRecord, "release record")
    except DocumentRejected as error:
        raise ReleaseError(error.message) from None
    if record.to_bytes() != data:
        raise ReleaseError(f"release record `{record.number}` leaves its schema out, or spells its signature otherwise")
    return record


def stage_form(stage: Stage | None) -> dict[str, object] | None:
    """Return a stage as JSON; None means everybody."""
    if stage is None:
        return None
    return {"tenants": sorted(stage.tenants), "share": f"{stage.share.numerator}/{stage.share.denominator}"}


def read_stage(form: object) -> Stage | None:
    """Parse a stage from JSON; raises `ReleaseError`."""
    if form is None:
        return None
    if not isinstance(form, dict) or set(form) != {"tenants", "share"}:
        raise ReleaseError("a stage is not `tenants` and `share`")
    share = Fraction(form["share"])
    if not 0 <= share <= 1 or not all(type(tenant) is str for tenant in form["tenants"]):
        raise ReleaseError("a stage's share is not between 0 and 1")
    return Stage(frozenset(form["tenants"]), share)
