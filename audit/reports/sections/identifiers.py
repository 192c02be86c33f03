"""Identifiers that the text abbreviates, in full: incarnations, policies, erasures, cases and pseudonyms."""

from __future__ import annotations

from kvcustody.audit.reports.section import PagePart, Section, no_facts

SECTION = Section(
    "identifiers",
    "Annex: identifiers",
    no_facts,
    order=205,
    about="the identifiers that the text abbreviates, in full",
    part=PagePart.ANNEX,
)
