"""People's requests for erasure or answers, and their state; printed from the section on activity."""

from __future__ import annotations

from kvcustody.audit.reports.section import Citation, Section, no_facts
from kvcustody.audit.reports.sections.activity import SECTION as ACTIVITY

SECTION = Section(
    "erasures",
    "Erasures and requests of persons",
    no_facts,
    order=128,
    about="erasures with deadline, answer and what remained; requests of persons with their state",
    cited={
        "erasures": Citation("Erasures", lambda report: bool(report[ACTIVITY].erasures)),
        "cases": Citation("Requests of persons", lambda report: bool(report[ACTIVITY].cases)),
    },
)
