"""What the console renders for the service: reports in every format, certificates and letters as pages.

A service has it from its start, so what renders is imported when something is rendered.
"""

from __future__ import annotations

from collections.abc import Sequence
from importlib.util import find_spec
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from kvcustody.audit.reports.model import Report


class ConsoleDocuments:
    """Renders by the same code as `kvcustody report make` and `kvcustody erasure certificate`."""

    def formats(self) -> tuple[str, ...]:
        """The formats that this installation can write: PDF needs an extra."""
        from kvcustody.console.report.document import FORMATS

        return tuple(name for name in FORMATS if name != "pdf" or find_spec("reportlab") is not None)

    def report(self, report: Report, formats: Sequence[str]) -> dict[str, bytes]:
        """The files of a report by name."""
        from kvcustody.console.report.document import render_all

        return render_all(report, formats)

    def certificate(self, document: dict[str, Any]) -> bytes:
        """The page of an erasure's certificate."""
        from kvcustody.console.erasure.page import render

        return render(document).encode()

    def letter_forms(self) -> tuple[str, ...]:
        """What a letter to a person can be written as: PDF needs an extra."""
        from kvcustody.console.case.letter import LETTER_FORMS

        return tuple(form for form in LETTER_FORMS if form != "pdf" or find_spec("reportlab") is not None)

    def letter(self, case: dict[str, Any], details: dict[str, str], form: str) -> bytes:
        """The letter of a case, by the template of `kvcustody case letter`."""
        from kvcustody.console.case.letter import LETTER_FORMS, LetterDetails, letter_files

        return letter_files(case, LetterDetails(**details), (form,))[LETTER_FORMS[form]]
