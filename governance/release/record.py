"""One step of a release, signed by who took it and chained to the step before.

1. The signature covers the whole record but itself, the audience and the digest of the preceding record included.
2. Bytes have one spelling (`policies.bundle_json`); what is read is checked before it is believed.
"""

from __future__ import annotations

import hashlib
from collections.abc import Mapping
from dataclasses import dataclass
from enum import StrEnum
from fractions import Fraction
from typing import Any

from kvcustody.governance.decisions.staged_table import Stage
from kvcustody.policies.bundle.canonical_json import BundleRejected, decode, encode
from kvcustody.policies.bundle.manifest import BundleSignature, read_signature, signature_form, signed_bytes
from kvcustody.policies.bundle.trust import Signer

SCHEMA = "kvcustody/policy-release@1"
RECORD_BYTES_MAX = 8 << 20
NOTHING_BEFORE = "sha256:" + "0" * 64
_FIELDS = {"action", "at_us", "audience", "body", "number", "previous", "schema", "signature"}


class ReleaseError(BundleRejected):
    """A step of a release is not allowed, or its records do not hold together."""

    code = "KVC112"


class ReleaseAction(StrEnum):
    """What a record says was done."""

    PROPOSED = "proposed"
    APPROVED = "approved"
    CONSENTED = "consented"
    ACTIVATED = "activated"
    REVOKED = "revoked"
    BROKE_GLASS = "broke-glass"


@dataclass(frozen=True, slots=True)
class ReleaseRecord:
    """A step. `number` counts from 1; `at_us` is UTC; `body` depends on the action (`release.state`)."""

    number: int
    previous: str
    audience: str
    action: ReleaseAction
    at_us: int
    body: Mapping[str, Any]
    signature: BundleSignature

    @property
    def actor(self) -> str:
        """The name of the key that signed."""
        return self.signature.key

    def message(self) -> bytes:
        """What the signature covers."""
        return _message(self.number, self.previous, self.audience, self.action, self.at_us, self.body)

    def to_bytes(self) -> bytes:
        """As it is stored."""
        form = _form(self.number, self.previous, self.audience, self.action, self.at_us, self.body)
        return encode({**form, "signature": signature_form(self.signature)})


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
    """A signed record."""
    message = _message(number, previous, audience, action, at_us, body)
    return ReleaseRecord(
        number, previous, audience, action, at_us, body, BundleSignature(signer.name, signer.sign(message))
    )


def read_record(data: bytes) -> ReleaseRecord:
    """The record in `data`, its signature not yet checked; raises `ReleaseError`."""
    if len(data) > RECORD_BYTES_MAX:
        raise ReleaseError(f"release record of `{len(data)}` bytes is larger than {RECORD_BYTES_MAX}")
    try:
        form = decode(data, "release record")
        if set(form) != _FIELDS or form["schema"] != SCHEMA or form["action"] not in set(ReleaseAction):
            raise ReleaseError(f"release record is not a `{SCHEMA}`")
        texts, numbers = (form["previous"], form["audience"]), (form["number"], form["at_us"])
        if not all(type(text) is str for text in texts) or not all(type(n) is int for n in numbers):
            raise ReleaseError("release record has a field of the wrong type")
        if not isinstance(form["body"], dict):
            raise ReleaseError("release record has no body")
        signature = read_signature(form["signature"])
    except ReleaseError:
        raise
    except BundleRejected as error:
        raise ReleaseError(error.message) from None
    return ReleaseRecord(
        form["number"],
        form["previous"],
        form["audience"],
        ReleaseAction(form["action"]),
        form["at_us"],
        form["body"],
        signature,
    )


def digest_of(data: bytes) -> str:
    """The digest by which the next record names this one."""
    return "sha256:" + hashlib.sha256(data).hexdigest()


def _form(
    number: int, previous: str, audience: str, action: ReleaseAction, at_us: int, body: Mapping[str, Any]
) -> dict[str, Any]:
    return {
        "action": action.value,
        "at_us": at_us,
        "audience": audience,
        "body": dict(body),
        "number": number,
        "previous": previous,
        "schema": SCHEMA,
    }


def _message(
    number: int, previous: str, audience: str, action: ReleaseAction, at_us: int, body: Mapping[str, Any]
) -> bytes:
    return signed_bytes(SCHEMA, _form(number, previous, audience, action, at_us, body))


def stage_form(stage: Stage | None) -> dict[str, object] | None:
    """A stage as JSON; None is everybody."""
    if stage is None:
        return None
    return {"tenants": sorted(stage.tenants), "share": f"{stage.share.numerator}/{stage.share.denominator}"}


def read_stage(form: object) -> Stage | None:
    """A stage from its JSON form; raises `ReleaseError`."""
    if form is None:
        return None
    if not isinstance(form, dict) or set(form) != {"tenants", "share"}:
        raise ReleaseError("a stage is not `tenants` and `share`")
    share = Fraction(form["share"])
    if not 0 <= share <= 1 or not all(type(tenant) is str for tenant in form["tenants"]):
        raise ReleaseError("a stage's share is not between 0 and 1")
    return Stage(frozenset(form["tenants"]), share)
