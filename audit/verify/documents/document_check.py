"""What a check of a document says, and what each kind of document gives the verifier."""

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
    """A part of a document that was not checked, by its path in the JSON, and why.

    `is_exact`: the reason is about a list or an object as a whole, and not about what is in it.
    """

    path: str
    why: str
    is_exact: bool = False

    def is_about(self, path: str) -> bool:
        """Return whether a field is among it."""
        inside = not self.is_exact and path.startswith((f"{self.path}.", f"{self.path}["))
        return path == self.path or inside


def is_unchecked(path: str, unchecked: Sequence[Unchecked]) -> bool:
    """Return whether a field is among the parts that were not checked."""
    return any(each.is_about(path) for each in unchecked)


def differing(value: Any, other: Any, path: str = "") -> Iterator[tuple[str, Any, Any]]:
    """Where two JSON values differ: the path, and both values."""
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
    """Whom a document's reader believes: keys of the log, and keys that may give orders (None: nobody says)."""

    vkeys: tuple[str, ...]
    keys: tuple[VerifierKey, ...]
    orders: SignedOrders | None = None


class MadeAgain(NamedTuple):
    """The facts of a document that was made again, from what, and which of its parts were taken from the document.

    `refused`: orders that do not count, by the keys that its reader trusts; None: the reader named none.
    """

    facts: Facts
    source: str
    unchecked: tuple[Unchecked, ...]
    refused: tuple[RefusedOrder, ...] | None = None
    problems: tuple[str, ...] = ()


class ShownAlone(NamedTuple):
    """What a document shows by itself: what is wrong, how many leaves are proved, and what nothing can show.

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
    """What one kind of document gives the verifier; `orders` is the path of what it says of orders.

    `may_be_unsigned`: without a signature it counts where it was made again.
    """

    kind: DocumentKind
    orders: str | None = None
    may_be_unsigned = False

    @abstractmethod
    def read(self, document: Document) -> Any:
        """Its facts as the kind's model; raises `LedgerError` where they are none."""

    @abstractmethod
    def check(self, opened: OpenedDocument, trust: ReaderTrust) -> ShownAlone:
        """What it shows by itself."""

    def alone(self, opened: OpenedDocument) -> tuple[Unchecked, ...]:
        """What is not checked where it was not made again."""
        return ()

    def seal(self, opened: OpenedDocument) -> SealedAs:
        """Return the checkpoint that an export must be of."""
        return SealedAs(opened.document.checkpoint)

    @abstractmethod
    def from_ledger(self, opened: OpenedDocument, connection: Connection, trust: ReaderTrust) -> MadeAgain:
        """Return the document again, from the ledger that it is of."""

    @abstractmethod
    def from_export(
        self, opened: OpenedDocument, folder: Path, connection: Connection, trust: ReaderTrust
    ) -> MadeAgain:
        """Return the document again, from the ledger that was made of an export's leaves."""

    def comparable(self, facts: Facts) -> Any:
        """Its facts without what is checked by itself."""
        return facts


@dataclass(frozen=True, slots=True, kw_only=True)
class DocumentCheck:
    """What was looked at, what is wrong with it, and what was not checked.

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
        """No problem was found, and what was given beside it could be used."""
        return not (self.problems or self.source_rejected)
