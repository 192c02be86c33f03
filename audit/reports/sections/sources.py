"""The information behind each test: its source, its query, and why it is complete."""

from __future__ import annotations

from kvcustody.audit.reports.section import Section, no_facts

SECTION = Section(
    "sources",
    "Sources of the information",
    no_facts,
    order=150,
    about=("for each body of information: source, question and parameters, why it is complete and accurate"),
)
