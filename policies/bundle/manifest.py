"""The manifest of a policy bundle: the facts that its signatures cover, in memory and as JSON."""

from __future__ import annotations

from typing import Annotated, Any

import msgspec

from kvcustody.signed_document import Digest, KeyName, convert, digest, encode, signed_bytes

SCHEMA = "kvcustody/policy-bundle@1"
_Positive = Annotated[int, msgspec.Meta(gt=0)]


class BundleManifest(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """The signed facts. Times are UTC microseconds; digests are `sha256:` and 64 hex digits; `revoked` is sorted."""

    audience: KeyName
    name: KeyName
    revision: _Positive
    digest: Digest
    document: Digest
    issued_us: _Positive
    expires_us: _Positive
    revoked: tuple[str, ...]

    def __post_init__(self) -> None:
        if self.expires_us <= self.issued_us:
            raise ValueError("it expires before it is issued")
        if list(self.revoked) != sorted(set(self.revoked)):
            raise ValueError("`revoked` is not sorted")

    def form(self) -> dict[str, Any]:
        """Return the manifest as JSON data."""
        made: dict[str, Any] = msgspec.to_builtins(self)
        return {**made, "revoked": list(self.revoked)}

    def message(self) -> bytes:
        """Return the bytes that a signature covers."""
        return signed_bytes(SCHEMA, self.form())

    @property
    def id(self) -> str:
        """The digest that approvals name."""
        return digest(encode(self.form()))


def read_manifest(form: object) -> BundleManifest:
    """Return a manifest from its JSON form after checking every field; raises `DocumentRejected`."""
    return convert(form, BundleManifest, "manifest")
