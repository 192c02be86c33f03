"""The result of a document's check, and the interface between each kind of document and the verifier."""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, NamedTuple

from sqlalchemy import Connection

from kvcustody.audit.reports.document import Document, DocumentKind, Facts
from kvcustody.audit.store.database.signed_orders import RefusedOrder, SignedOrders
from kvcustody.audit.tlog.signed_note import VerifierKey
from kvcustody.audit.verify.documents.made_again import SealedAs

LISTED_MAX = 100
GIVE = "not compared with the ledger: give `--export` or `--ledger`"


class Unchecked(NamedTuple):
    """An unchecked part of a document, by its path in the JSON, and the reason.

    `is_exact`: the reason is about a list or an object as a whole, and not about what is in it.
    """

    path: str
    why: str
    is_exact: bool = False

    def is_about(self, path: str) -> bool:
        """Return whether a field belongs to it."""
        inside = not self.is_exact and path.startswith((f"{self.path}.", f"{self.path}["))
        return path == self.path or inside


def is_unchecked(path: str, unchecked: Sequence[Unchecked]) -> bool:
    """Return whether a field belongs to the unchecked parts."""
    return any(each.is_about(path) for each in unchecked)


def differing(value: Any, other: Any, path: str = "") -> Iterator[tuple[str, Any, Any]]:
    """Yield the differences of two JSON values: the path, and both values."""
    if isinstance(value, dict) and isinstance(other, dict):
        for name in sorted({*value, *other}):
            below = f"{path}.{name}" if path else str(name)
            yield from differing(value.get(name, _MISSING), other.get(name, _MISSING), below)
    elif isinstance(value, list) and isinstance(other, list):
        for place in range(max(len(value), len(other))):
            here, there = (side[place] if place < len(side) else _MISSING for side in (value, other))
            yield from differing(here, there, f"{path}[{place}]")
    elif value != other or type(value) is not type(other):
        yield path, value, other


_MISSING = "not there"


class ReaderTrust(NamedTuple):
    """A document's reader's trust: keys of the log, and keys that may give orders (None: unspecified)."""

    vkeys: tuple[str, ...]
    keys: tuple[VerifierKey, ...]
    orders: SignedOrders | None = None


class MadeAgain(NamedTuple):
    """The facts of a remade document, its source, and the parts that were copied from the document.

    `refused`: orders that do not count, by the keys that its reader trusts; None: the reader named none.
    """

    facts: Facts
    source: str
    unchecked: tuple[Unchecked, ...]
    refused: tuple[RefusedOrder, ...] | None = None
    problems: tuple[str, ...] = ()


class ShownAlone(NamedTuple):
    """A document's own evidence: problems, the number of proved leaves, and what nothing can show.

    `shown` is what a kind's own command says of it.
    """

    problems: Sequence[str]
    leaves: int = 0
    unchecked: tuple[Unchecked, ...] = ()
    shown: Mapping[str, Any] = {}


class OpenedDocument(NamedTuple):
    """A document, and its facts as the model of its kind."""

    document: Document
    model: Any

    @property
    def facts(self) -> Facts:
        """Its facts as JSON values."""
        return self.document.facts


class DocumentRules(ABC):
    """The verifier's interface to one kind of document; `orders` is the path of its statement about orders.

    `may_be_unsigned`: without a signature it counts where it was made again.
    """

    kind: DocumentKind
    orders: str | None = None
    may_be_unsigned = False

    @abstractmethod
    def read(self, document: Document) -> Any:
        """Return its facts as the kind's model; raises `LedgerError` if they are not."""

    @abstractmethod
    def check(self, opened: OpenedDocument, trust: ReaderTrust) -> ShownAlone:
        """Check the document by itself."""

    def alone(self, opened: OpenedDocument) -> tuple[Unchecked, ...]:
        """Return what is unchecked unless the document was remade."""
        return ()

    def seal(self, opened: OpenedDocument) -> SealedAs:
        """Return the checkpoint that an export must have."""
        return SealedAs(opened.document.checkpoint)

    @abstractmethod
    def from_ledger(self, opened: OpenedDocument, connection: Connection, trust: ReaderTrust) -> MadeAgain:
        """Return the document remade from its ledger."""

    @abstractmethod
    def from_export(
        self, opened: OpenedDocument, folder: Path, connection: Connection, trust: ReaderTrust
    ) -> MadeAgain:
        """Return the document remade from a ledger built from an export's leaves."""

    def comparable(self, facts: Facts) -> Any:
        """Return its facts without those checked separately."""
        return facts


@dataclass(frozen=True, slots=True, kw_only=True)
class DocumentCheck:
    """The examined document, its problems, and its unchecked parts.

    `source`: what it was made again from; `source_rejected`: why it could not be compared with what was given.
    """

    kind: str = ""
    digest: str = ""
    checkpoint: int = 0
    leaves: int = 0
    problems: tuple[str, ...] = ()
    unchecked: tuple[Unchecked, ...] = ()
    signed_by: str = ""
    source: str = ""
    source_rejected: str = ""
    shown: Mapping[str, Any] = field(default_factory=dict)

    @property
    def ok(self) -> bool:
        """Whether no problem was found, and the given source could be used."""
        return not (self.problems or self.source_rejected)
