"""Documents for readers outside: their kinds, their canonical bytes, and what their signatures cover.

    document = CERTIFICATE.document(facts)
    signed = document._replace(signature=sign_document(connection, document, key))
    again = read_document(signed.to_bytes(), [CERTIFICATE])

1. A document is a JSON object: its facts, `schema`, and `signature` where it has one. Keys are in order, there is no
   white space but the last newline, and there are no floats. Other bytes of the same values are no document.
2. Its digest is the SHA-256 of these bytes without the signature.
3. What is signed is a statement of three lines: the key's name, the schema, the digest. So no signature counts for a
   document of another kind, and none for a checkpoint, whose second line is a number.
4. A kind says whose key signs it: the log's own, which a reader trusts, or the key of reports, which leaves name.
"""

from __future__ import annotations

import hashlib
from collections.abc import Mapping, Sequence
from typing import Any, Literal, NamedTuple

from kvcustody.audit.tlog.backend import canonical_json, parse_json
from kvcustody.errors import LedgerError

DOCUMENT_BYTES_MAX = 256 << 20
Facts = Mapping[str, Any]
_ENVELOPE = ("schema", "signature")


class KeyEnrolment(NamedTuple):
    """A leaf that names a report key, as text, and the text of its proof."""

    leaf: str
    proof: str


class Signature(NamedTuple):
    """The signer of a document. `key` is the public key, `data` base64, `key_id` hexadecimal.

    `enrolments` are the leaves that name the key; a key of the log itself has none.
    """

    key: str
    key_id: str
    data: str
    enrolments: tuple[KeyEnrolment, ...] = ()

    def facts(self) -> dict[str, Any]:
        """Return the signature as JSON values."""
        return self._asdict() | {"enrolments": [each._asdict() for each in self.enrolments]}


class DocumentKind(NamedTuple):
    """A kind of document: its name, its schema, its signer, and the path of the checkpoint in its facts."""

    name: str
    schema: str
    signer: Literal["log", "reports"] = "reports"
    checkpoint_path: tuple[str, ...] = ("checkpoint",)

    def document(self, facts: Facts, signature: Signature | None = None) -> Document:
        """Return the document of these facts; raises `LedgerError` if they name no checkpoint."""
        found: Any = facts
        for name in self.checkpoint_path:
            found = found.get(name) if isinstance(found, Mapping) else None
        if type(found) is not int:
            raise LedgerError(f"this is no {self.name}: `{'.'.join(self.checkpoint_path)}` is no number")
        return Document(self, facts, found, signature)


class Document(NamedTuple):
    """A document. `checkpoint` is the root log's size for its facts (0: nothing was signed)."""

    kind: DocumentKind
    facts: Facts
    checkpoint: int
    signature: Signature | None = None

    def body(self) -> dict[str, Any]:
        """Return the whole document as JSON values (rule 1)."""
        signed = {} if self.signature is None else {"signature": self.signature.facts()}
        return {**self.facts, "schema": self.kind.schema, **signed}

    def to_bytes(self) -> bytes:
        """Return its canonical bytes (rule 1)."""
        return canonical_json(self.body())

    def digest(self) -> str:
        """Return the signed digest, hexadecimal (rule 2)."""
        return hashlib.sha256(self._replace(signature=None).to_bytes()).hexdigest()

    def statement(self, key_name: str) -> str:
        """Return the text that a key of this name signs (rule 3)."""
        return f"{key_name}\n{self.kind.schema}\n{self.digest()}\n"


def read_document(data: bytes, kinds: Sequence[DocumentKind]) -> Document:
    """Return the document in a file, of one of these kinds; raises `LedgerError` for bytes that are not canonical."""
    if len(data) > DOCUMENT_BYTES_MAX:
        raise LedgerError(f"the document has {len(data)} bytes, over {DOCUMENT_BYTES_MAX}")
    try:
        body = parse_json(data)
    except ValueError as problem:
        raise LedgerError(f"this is no JSON: {problem}") from None
    schema = body.get("schema") if isinstance(body, dict) else None
    kind = next((each for each in kinds if each.schema == schema), None)
    if kind is None:
        known = ", ".join(f"`{each.schema}`" for each in kinds)
        raise LedgerError(f"its schema is `{str(schema)[:80]}`, not {known}")
    facts = {name: value for name, value in body.items() if name not in _ENVELOPE}
    document = kind.document(facts, _signature(body["signature"]) if "signature" in body else None)
    if document.to_bytes() != data:
        raise LedgerError(f"the {kind.name} is not in canonical form: sorted keys, no white space")
    return document


def schema_of(data: bytes) -> str:
    """Return the schema that a file states, without its version; empty if it states none."""
    try:
        body = parse_json(data)
    except ValueError:
        return ""
    return str(body.get("schema", "")).partition("@")[0] if isinstance(body, dict) else ""


def _signature(form: Any) -> Signature:
    """Return a signature from its JSON form; raises `LedgerError`."""
    try:
        enrolments = tuple(KeyEnrolment(**each) for each in form["enrolments"])
        signature = Signature(**(form | {"enrolments": enrolments}))
    except (TypeError, KeyError):
        raise LedgerError("the signature has unknown parts, or lacks some") from None
    texts = (*signature[:3], *(text for each in enrolments for text in each))
    if not all(isinstance(text, str) for text in texts):
        raise LedgerError("a part of the signature is no text")
    return signature
