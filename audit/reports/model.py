"""A report: its parameters, the facts of its sections, and their canonical JSON.

1. The JSON has keys in order and no floats; the SHA-256 of it without its signature is what a re-run must give.
2. Times are UTC microseconds unless a name says `boot`; a unit is (block, generation, shard).
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, replace
from typing import Any, TypeVar, overload

from kvcustody.audit.reports.document import Document, DocumentKind, Signature
from kvcustody.audit.reports.framework import EVIDENCE_PRESENT, Control, Framework
from kvcustody.audit.reports.parameters import ReportParameters
from kvcustody.audit.reports.section import Section
from kvcustody.audit.reports.sections.controls import SECTION as CONTROLS
from kvcustody.audit.reports.sections.proof import SECTION as PROOF
from kvcustody.audit.reports.sections.responses import SECTION as RESPONSES
from kvcustody.times import iso

REPORT = DocumentKind("report", "kvcustody/report@4", checkpoint_path=("asked", "checkpoint"))
T = TypeVar("T")


@dataclass(frozen=True)
class Report:
    """The whole report. `facts` has every field of every section (`section.Section.fields`).

    `report[SECTION]` is what a section says, with its type; `report["total"]` is one field by its name in the JSON.
    """

    version: str
    asked: ReportParameters
    framework: Framework
    facts: Mapping[str, Any]
    signature: Signature | None = None

    @overload
    def __getitem__(self, section: Section[T], /) -> T: ...

    @overload
    def __getitem__(self, section: str, /) -> Any: ...

    def __getitem__(self, section: Section[T] | str, /) -> Any:
        return self.facts[section] if isinstance(section, str) else section.of_fields(self.facts)

    def replace(self, **changes: Any) -> Report:
        """Return a report with some facts replaced, by the names of fields, or its signature, parameters or
        framework.
        """
        own = {name: changes.pop(name) for name in ("version", "asked", "framework", "signature") if name in changes}
        if unknown := changes.keys() - self.facts.keys():
            raise KeyError(min(unknown))
        return replace(self, **own, facts={**self.facts, **changes})

    def document(self) -> Document:
        """Return the report as a document: its facts, with the statement about every control written out."""
        facts = {
            **{name: _plain(value) for name, value in self.facts.items()},
            "version": self.version,
            "asked": _plain(self.asked),
            "framework": _plain(self.framework),
            "rerun": self.rerun(),
            "statements": [
                {"control": control.id, "statement": self.statement(control.id)} for control in self.cited()
            ],
        }
        return REPORT.document(facts, self.signature)

    def to_json(self) -> dict[str, Any]:
        """Return the whole report as JSON values."""
        return self.document().body()

    def to_bytes(self) -> bytes:
        """Return the canonical JSON."""
        return self.document().to_bytes()

    def rerun(self) -> str:
        """Return the command that reproduces this report."""
        proof = self[PROOF]
        proved = "" if proof is None else f" --policy {proof.policy}.yaml"
        answered = " --responses responses.toml" if self[RESPONSES] else ""
        return self.asked.command() + proved + answered

    def digest(self) -> str:
        """Return the signed digest: SHA-256 (hexadecimal) of `to_bytes` without a signature."""
        return self.document().digest()

    def cited(self) -> tuple[Control, ...]:
        """Return the controls for which it has evidence in the period."""
        present = {each.control for each in self[CONTROLS] if each.status == EVIDENCE_PRESENT}
        return tuple(each for each in self.framework.controls if each.id in present)

    def sections_of(self, control: str) -> tuple[str, ...]:
        """Return the sections that carry a control's evidence, by the names that controls cite."""
        return next((each.sections for each in self[CONTROLS] if each.control == control), ())

    def statement(self, control: str) -> str:
        """Return the statement about a control."""
        scope = f"tenant {self.asked.tenant}" if self.asked.tenant else "all tenants of the boundary"
        return (
            f"Evidence supporting {control}, for {scope}, from {iso(self.asked.since_us)} to "
            f"{iso(self.asked.until_us)}, under the limitations listed."
        )


def _plain(value: Any) -> Any:
    """Named tuples as objects, other tuples as lists."""
    if hasattr(value, "_asdict"):
        return {name: _plain(item) for name, item in value._asdict().items()}
    if isinstance(value, tuple | list):
        return [_plain(item) for item in value]
    return value
