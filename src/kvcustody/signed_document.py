"""Signed JSON documents: their canonical bytes, their digests, what a signature covers, and whose key made it.

1. `encode` writes RFC 8785 without floats: objects with ASCII keys, arrays, strings, booleans, null, and integers below
   2^53. `decode` accepts exactly those bytes, so no white space, duplicate key or other spelling reaches a reader.
2. A model (`msgspec.Struct`) says what a document holds; `convert` checks a value against it and names the place.
3. A signature covers a schema's name and a canonical form, so no two kinds of statement share one. It has one spelling.
4. A signature by a key that the trust store does not name, or that does not fit, is an error, not something to skip.
"""

from __future__ import annotations

import base64
import hashlib
import json
from collections.abc import Mapping
from typing import Annotated, Any, Protocol, TypeVar

import msgspec

from kvcustody.errors import PolicyError

EXACT = 1 << 53
_DEPTH_MAX = 16

KeyName = Annotated[str, msgspec.Meta(pattern=r"\A[!-*,-~]{1,128}\Z")]
"""Printable ASCII without `+`, which separates the parts of a key."""
Digest = Annotated[str, msgspec.Meta(pattern=r"\Asha256:[0-9a-f]{64}\Z")]

Model = TypeVar("Model")


class DocumentRejected(PolicyError):  # noqa: N818, a verdict, as in the tree's `LedgerUnavailable`
    """Bytes that were to be trusted are malformed, not signed by whom the trust configuration asks, or out of date."""

    code = "KVC111"


class DocumentSignature(msgspec.Struct, frozen=True, order=True, forbid_unknown_fields=True):
    """Who signed, and the 64 bytes; in JSON `key` and `signature`."""

    key: KeyName
    data: Annotated[bytes, msgspec.Meta(min_length=64, max_length=64)] = msgspec.field(name="signature")

    def form(self) -> dict[str, str]:
        """As JSON."""
        return {"key": self.key, "signature": base64.b64encode(self.data).decode()}


class PublicKey(Protocol):
    """An Ed25519 key that a trust store names."""

    @property
    def public(self) -> bytes:
        """Its 32 bytes."""


Key = TypeVar("Key", bound=PublicKey)


def encode(value: object) -> bytes:
    """The canonical bytes of a value; raises `DocumentRejected` where the subset has none for it."""
    _check(value, 0)
    try:
        text = json.dumps(value, sort_keys=True, separators=(",", ":"), ensure_ascii=False, allow_nan=False)
        return text.encode()
    except UnicodeEncodeError:
        raise DocumentRejected("canonical form: a text holds half of a surrogate pair") from None


def encode_ascii(value: object) -> bytes:
    """The same order and separators with every other character escaped, for what was first signed or named so."""
    return json.dumps(value, sort_keys=True, separators=(",", ":"), ensure_ascii=True).encode()


def digest(data: bytes) -> str:
    """`sha256:` and the hex digest."""
    return "sha256:" + hashlib.sha256(data).hexdigest()


def decode(data: bytes, what: str, bytes_max: int | None = None) -> dict[str, Any]:
    """The object that these canonical bytes are; `what` is how a refusal calls them. Raises `DocumentRejected`."""
    if bytes_max is not None and len(data) > bytes_max:
        raise DocumentRejected(f"{what} of `{len(data)}` bytes is larger than {bytes_max}")
    try:
        value = json.loads(data.decode())
        canonical = encode(value)
    except (ValueError, RecursionError):
        raise DocumentRejected(f"{what} is not JSON") from None
    except DocumentRejected as error:
        raise DocumentRejected(f"{what}: {error.message}") from None
    if canonical != data:
        raise DocumentRejected(
            f"{what} is not in canonical form: it was edited, or written by something else than kvcustody"
        )
    if not isinstance(value, dict):
        raise DocumentRejected(f"{what} is not an object")
    return value


def convert(form: object, model: type[Model], what: str) -> Model:
    """A value as a model; raises `DocumentRejected` with the place of what does not fit."""
    try:
        return msgspec.convert(form, model)
    except msgspec.ValidationError as error:
        raise DocumentRejected(f"{what}: {error}; take the document from who made it") from None


def read_signature(form: object) -> DocumentSignature:
    """A signature from its JSON form: one spelling only. Raises `DocumentRejected`."""
    signature = convert(form, DocumentSignature, "signature")
    if signature.form() != form:
        raise DocumentRejected(f"the signature of `{signature.key}` is not in the one spelling of base64")
    return signature


def signed_bytes(schema: str, form: Mapping[str, Any]) -> bytes:
    """What a signature covers: the schema's name on a line of its own, then the canonical form.

    The second line of an audit checkpoint is a number and here it begins with a brace: neither passes for the other.
    """
    return schema.encode() + b"\n" + encode(form)


def check_signature(keys: Mapping[str, Key], signature: DocumentSignature, message: bytes, what: str) -> Key:
    """The trusted key that made this signature of `message`; raises `DocumentRejected`."""
    key = keys.get(signature.key)
    if key is None:
        raise DocumentRejected(
            f"{what} is signed by `{signature.key}`, which the trust configuration does not name: have it signed by a "
            "key that is named there"
        )
    if not ed25519_verifies(key.public, signature.data, message):
        raise DocumentRejected(
            f"{what} is not signed by `{signature.key}`: the signature does not fit; take the document from who made it"
        )
    return key


def ed25519_verifies(public: bytes, signature: bytes, message: bytes) -> bool:
    """Whether the 64-byte signature is the key's over the message."""
    from cryptography.exceptions import InvalidSignature
    from cryptography.hazmat.primitives.asymmetric.ed25519 import Ed25519PublicKey

    try:
        Ed25519PublicKey.from_public_bytes(public).verify(signature, message)
    except (InvalidSignature, ValueError):
        return False
    return True


def _check(value: Any, depth: int) -> None:
    kind = type(value)
    if depth > _DEPTH_MAX:
        raise DocumentRejected(f"canonical form: deeper than {_DEPTH_MAX} levels")
    if kind is dict:
        for key, item in value.items():
            if type(key) is not str or not key.isascii():
                raise DocumentRejected("canonical form: a key is not ASCII text")
            _check(item, depth + 1)
    elif kind in (list, tuple):
        for item in value:
            _check(item, depth + 1)
    elif kind is int:
        if not -EXACT < value < EXACT:
            raise DocumentRejected(f"canonical form: the integer `{value}` is not below 2^53")
    elif kind not in (str, bool, type(None)):
        raise DocumentRejected(f"canonical form: `{kind.__name__}` is not part of it")
