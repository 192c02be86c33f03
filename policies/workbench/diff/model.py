"""The parts of a semantic difference: changed cells, openings, duties and settings, and a verdict.

1. `wider` and `narrower` speak of access and obligations alone; quotas, eviction and texts are settings, told apart.
2. `PolicyDiff.cells_digest` names exactly what widens: two differences with equal widening have equal digests.
"""

from __future__ import annotations

from dataclasses import dataclass
from enum import StrEnum
from typing import Any, NamedTuple

from kvcustody.plurals import several
from kvcustody.policies.document.model import Action, Scope, Via
from kvcustody.policies.workbench.request import instant
from kvcustody.signed_document import digest, encode_ascii

SCHEMA = "kvcustody/policy-diff@1"


class DiffVerdict(StrEnum):
    """How the new revision compares with the old one."""

    EQUIVALENT = "equivalent"
    NARROWER = "narrower"
    WIDER = "wider"
    INCOMPARABLE = "incomparable"


class CellEffect(NamedTuple):
    """The effect of a cell and what determined it."""

    permitted: bool
    reasons: tuple[str, ...]


class CellChange(NamedTuple):
    """One decision cell whose effect changes, between two instants (UTC microseconds, exclusive end)."""

    action: Action
    reader: str
    owner: str
    classification: str
    scope: Scope
    via: Via
    start_us: int
    end_us: int
    before: CellEffect
    after: CellEffect

    @property
    def opens(self) -> bool:
        """Whether a deny becomes a permit."""
        return self.after.permitted and not self.before.permitted

    @property
    def crosses(self) -> bool:
        """Whether reader and owner are different tenants."""
        return self.reader != self.owner

    def data(self) -> dict[str, Any]:
        """Return the cell in words."""
        return {
            "action": self.action.name.lower(),
            "reader": self.reader,
            "owner": self.owner,
            "classification": self.classification,
            "scope": self.scope.name.lower(),
            "via": self.via.name.lower(),
            "from": instant(self.start_us),
            "until": instant(self.end_us),
            "before": "permit" if self.before.permitted else "deny",
            "before_by": list(self.before.reasons),
            "after": "permit" if self.after.permitted else "deny",
            "after_by": list(self.after.reasons),
        }


class WidenedAccess(NamedTuple):
    """A grant or segment through which a reader may do more than before; its owner must consent.

    `content` is what a segment shares where that is new (its digest, length and model), else empty. `labels` are those
    that may differ between the two. `without_effect`: why it opens nothing all the same.
    """

    id: str
    via: Via
    owner: str
    reader: str
    classifications: tuple[str, ...]
    start_us: int
    end_us: int
    content: str = ""
    labels: tuple[str, ...] = ()
    without_effect: str = ""

    @property
    def crosses(self) -> bool:
        """Whether reader and owner are different tenants."""
        return self.reader != self.owner

    def data(self) -> dict[str, Any]:
        """Return the opening in words."""
        return {
            "id": self.id,
            "via": self.via.name.lower(),
            "owner": self.owner,
            "reader": self.reader,
            "classifications": list(self.classifications),
            "from": instant(self.start_us),
            "until": instant(self.end_us),
            "content": self.content,
            "labels": list(self.labels),
            "without_effect": self.without_effect,
        }


class DutyChange(NamedTuple):
    """One obligation, classification or label set that changes; `loosens` None means that they are incomparable."""

    tenant: str
    subject: str
    field: str
    before: str
    after: str
    loosens: bool | None

    def data(self) -> dict[str, Any]:
        """Return the change in words."""
        direction = {True: "looser", False: "stricter", None: "incomparable"}[self.loosens]
        return {**self._asdict(), "loosens": self.loosens, "direction": direction}


class SettingChange(NamedTuple):
    """A change that neither opens nor closes anything: quotas, eviction, names, reasons."""

    subject: str
    field: str
    before: str
    after: str


@dataclass(frozen=True, slots=True)
class PolicyDiff:
    """Everything that a new revision changes."""

    old_digest: str
    new_digest: str
    cells: tuple[CellChange, ...]
    openings: tuple[WidenedAccess, ...]
    closings: tuple[WidenedAccess, ...]
    duties: tuple[DutyChange, ...]
    settings: tuple[SettingChange, ...]

    @property
    def verdict(self) -> DiffVerdict:
        """Equivalent, narrower, wider, or some of both."""
        if self.widens:
            return DiffVerdict.INCOMPARABLE if self.narrows else DiffVerdict.WIDER
        return DiffVerdict.NARROWER if self.narrows else DiffVerdict.EQUIVALENT

    @property
    def widens(self) -> bool:
        """Whether anything is permitted, shared or kept that was not before."""
        return (
            bool(self.openings)
            or any(cell.opens for cell in self.cells)
            or any(duty.loosens is not False for duty in self.duties)
        )

    @property
    def narrows(self) -> bool:
        """Whether anything that was permitted, shared or kept no longer is."""
        return (
            bool(self.closings)
            or any(not cell.opens for cell in self.cells)
            or any(duty.loosens is not True for duty in self.duties)
        )

    @property
    def new_access(self) -> tuple[CellChange, ...]:
        """The cells that open, cells across tenants first."""
        return tuple(sorted((cell for cell in self.cells if cell.opens), key=lambda cell: not cell.crosses))

    @property
    def consents(self) -> tuple[WidenedAccess, ...]:
        """The openings across tenants: each needs its owner's consent."""
        return tuple(opening for opening in self.openings if opening.crosses)

    def widening(self) -> dict[str, Any]:
        """Return exactly what widens, in words: the statement that an approver of a widening change signs."""
        return {
            "schema": SCHEMA,
            "old_digest": self.old_digest,
            "new_digest": self.new_digest,
            "cells": [cell.data() for cell in self.cells if cell.opens],
            "openings": [opening.data() for opening in self.openings],
            "duties": [duty.data() for duty in self.duties if duty.loosens is not False],
        }

    def widening_text(self) -> str:
        """Return in a sentence's words how much widens: "widens 81 cells and loosens 6 obligations"."""
        counts = (
            (len(self.new_access), "widens", "cell"),
            (len(self.openings), "opens", "way"),
            (sum(duty.loosens is not False for duty in self.duties), "loosens", "obligation"),
        )
        return " and ".join(f"{verb} {several(count, noun)}" for count, verb, noun in counts if count)

    @property
    def cells_digest(self) -> str:
        """`sha256:` over the canonical form of `widening()`."""
        return digest(encode_ascii(self.widening()))

    @property
    def approval_digest(self) -> str:
        """The digest that an approver repeats: of exactly what widens; empty if nothing does."""
        return self.cells_digest if self.widens else ""

    def data(self) -> dict[str, Any]:
        """Return all changes in words."""
        return {
            **self.widening(),
            "verdict": self.verdict.value,
            "cells_digest": self.cells_digest,
            "cells": [cell.data() for cell in self.cells],
            "closings": [closing.data() for closing in self.closings],
            "duties": [duty.data() for duty in self.duties],
            "settings": [setting._asdict() for setting in self.settings],
        }
