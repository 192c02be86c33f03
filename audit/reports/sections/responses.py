"""People's answers to exceptions of the report."""

from __future__ import annotations

from kvcustody.audit.reports.given import Response
from kvcustody.audit.reports.section import ReportReading, Section


def given_responses(reading: ReportReading) -> tuple[Response, ...]:
    """Return the answers, by the ids of exceptions."""
    return tuple(sorted(reading.responses))


SECTION: Section[tuple[Response, ...]] = Section(
    "responses",
    "Responses",
    given_responses,
    order=21,
    about="what people answered to exceptions",
    part=None,
    printed_in="opinion",
    fields={"responses": "what people answered"},
)
