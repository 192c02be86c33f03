"""Each body of information that a test rests on: its source, its question, why it is whole."""

from __future__ import annotations

from kvcustody.audit.reports.section import Section, no_facts

SECTION = Section(
    "sources",
    "Sources of the information",
    no_facts,
    order=150,
    about=("for each body of information: source, question and parameters, why it is complete and accurate"),
)
