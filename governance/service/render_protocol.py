"""The interface to a console's pages and papers: the API asks for them and knows no HTML.

1. Without a renderer there is JSON alone; another form is `not-acceptable`, never an empty file.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING, Any, Protocol

from kvcustody.governance.service.problem_details import ProblemError

if TYPE_CHECKING:
    from kvcustody.audit.reports.document import Document
    from kvcustody.audit.reports.model import Report


class DocumentRenderer(Protocol):
    """Renders reports, certificates and letters for people."""

    def formats(self) -> tuple[str, ...]:
        """The report formats that this installation can write."""

    def report(self, report: Report, formats: Sequence[str]) -> dict[str, bytes]:
        """Return the files of a report by name."""

    def certificate(self, document: Document) -> bytes:
        """Return the page of an erasure certificate."""

    def letter_forms(self) -> tuple[str, ...]:
        """The formats of a letter to a person."""

    def letter(self, case: dict[str, Any], details: dict[str, str], form: str) -> bytes:
        """Return the letter of a case: `details` are its kind, addressee, sender and date."""


class JsonDocuments:
    """JSON only: the renderer of a service without a console (rule 1)."""

    def formats(self) -> tuple[str, ...]:
        """JSON."""
        return ("json",)

    def report(self, report: Report, formats: Sequence[str]) -> dict[str, bytes]:
        """Return the report's own bytes."""
        return {"report.json": report.to_bytes()}

    def certificate(self, document: Document) -> bytes:
        """Return no page."""
        raise ProblemError("not-acceptable", "this service renders no pages; ask for the certificate's JSON")

    def letter_forms(self) -> tuple[str, ...]:
        """None: a letter is for people."""
        return ()

    def letter(self, case: dict[str, Any], details: dict[str, str], form: str) -> bytes:
        """Return no letter."""
        raise ProblemError("not-acceptable", "this service writes no letters; `kvcustody case letter` does")
