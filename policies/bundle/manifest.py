"""The manifest of a policy bundle, and signatures, in memory and as JSON.

1. Reading checks every field; a signature has one spelling.
2. A signature covers a schema's name and a canonical form, so no two kinds of statement share one.
"""

from __future__ import annotations

import base64
import binascii
import hashlib
import re
from collections.abc import Mapping
from dataclasses import asdict, dataclass
from typing import Any, NamedTuple

from kvcustody.policies.bundle.canonical_json import BundleRejected, encode

_DIGEST = re.compile(r"sha256:[0-9a-f]{64}")
_NAME = re.compile(r"[!-*,-~]{1,128}")  # printable ASCII without `+`, which separates the parts of a key


class BundleSignature(NamedTuple):
    """Who signed, and the 64 bytes."""

    key: str
    data: bytes


@dataclass(frozen=True, slots=True)
class BundleManifest:
    """What is signed. Times are UTC microseconds; digests are `sha256:` and 64 hex digits; `revoked` is sorted."""

    audience: str
    name: str
    revision: int
    digest: str
    document: str
    issued_us: int
    expires_us: int
    revoked: tuple[str, ...] = ()

    def form(self) -> dict[str, Any]:
        """As JSON."""
        return {**asdict(self), "revoked": list(self.revoked)}

    @property
    def id(self) -> str:
        """The digest that approvals name."""
        return "sha256:" + hashlib.sha256(encode(self.form())).hexdigest()


def signed_bytes(schema: str, form: Mapping[str, Any]) -> bytes:
    """What a signature covers: the schema's name on a line of its own, then the canonical form.

    The second line of an audit checkpoint is a number and here it begins with a brace: neither passes for the other.
    """
    return schema.encode() + b"\n" + encode(form)


def read_manifest(form: Any) -> BundleManifest:
    """A manifest from its JSON form, every field checked; raises `BundleRejected`."""
    if not isinstance(form, dict) or set(form) != set(BundleManifest.__dataclass_fields__):
        raise BundleRejected("manifest does not have the fields of one")
    for field in ("audience", "name"):
        if not isinstance(form[field], str) or not _NAME.fullmatch(form[field]):
            raise BundleRejected(f"manifest: `{field}` is not a name")
    for field in ("digest", "document"):
        if not isinstance(form[field], str) or not _DIGEST.fullmatch(form[field]):
            raise BundleRejected(f"manifest: `{field}` is not a SHA-256 digest")
    for field in ("revision", "issued_us", "expires_us"):
        if type(form[field]) is not int or form[field] <= 0:
            raise BundleRejected(f"manifest: `{field}` is not a positive integer")
    if form["expires_us"] <= form["issued_us"]:
        raise BundleRejected("manifest: it expires before it is issued")
    revoked = form["revoked"]
    if not isinstance(revoked, list) or not all(type(id_) is str for id_ in revoked):
        raise BundleRejected("manifest: `revoked` is not a list of ids")
    if revoked != sorted(set(revoked)):
        raise BundleRejected("manifest: `revoked` is not sorted")
    return BundleManifest(**{**form, "revoked": tuple(revoked)})


def signature_form(signature: BundleSignature) -> dict[str, str]:
    """A signature as JSON."""
    return {"key": signature.key, "signature": base64.b64encode(signature.data).decode()}


def read_signature(form: Any) -> BundleSignature:
    """A signature from its JSON form: one spelling only. Raises `BundleRejected`."""
    if not isinstance(form, dict) or set(form) != {"key", "signature"}:
        raise BundleRejected("a signature is not `key` and `signature`")
    key, text = form["key"], form["signature"]
    if not isinstance(key, str) or not _NAME.fullmatch(key) or not isinstance(text, str):
        raise BundleRejected("a signature is not `key` and `signature`")
    try:
        data = base64.b64decode(text, validate=True)
    except (binascii.Error, ValueError):
        data = b""
    if len(data) != 64 or base64.b64encode(data).decode() != text:
        raise BundleRejected(f"the signature of `{key}` is not 64 bytes in base64")
    return BundleSignature(key, data)
