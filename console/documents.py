"""Documents that the console renders for the service: reports in every format, certificates and letters as pages.

A service has it from its start, so what renders is imported when something is rendered.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from kvcustody.audit.reports.document import Document
    from kvcustody.audit.reports.model import Report


class ConsoleDocuments:
    """Renders with the code of `kvcustody report make` and `kvcustody erasure certificate`."""

    def formats(self) -> tuple[str, ...]:
        """Return the formats that this installation can write: PDF needs an extra."""
        from kvcustody.console.render.document_forms import FORMATS
        from kvcustody.console.render.pdf import can_make_pdf

        return tuple(name for name in FORMATS if name != "pdf" or can_make_pdf())

    def report(self, report: Report, formats: Sequence[str]) -> dict[str, bytes]:
        """Return a report's files by name."""
        from kvcustody.console.render.document_forms import render_all

        return render_all(report, formats)

    def certificate(self, document: Document) -> bytes:
        """Return the page of an erasure certificate."""
        from kvcustody.console.render.document_forms import render

        return render(document, "html")

    def letter_forms(self) -> tuple[str, ...]:
        """Return the formats for a letter: PDF needs an extra."""
        from kvcustody.console.case.letter import LETTER_FORMS
        from kvcustody.console.render.pdf import can_make_pdf

        return tuple(form for form in LETTER_FORMS if form != "pdf" or can_make_pdf())

    def letter(self, case: dict[str, Any], details: dict[str, str], form: str) -> bytes:
        """Return a case's letter, from the template of `kvcustody case letter`."""
        from kvcustody.console.case.letter import LetterDetails, write_letter
        from kvcustody.console.render.document_forms import render

        return render(write_letter(case, LetterDetails(**details)), form)
