"""The starting points of a check: the signed note, the root of every log, the population's digest."""

from __future__ import annotations

from kvcustody.audit.reports.section import PagePart, Section, no_facts

SECTION = Section(
    "hashes",
    "Annex: hashes",
    no_facts,
    order=210,
    about="the signed note, every log's root, the population's digest",
    part=PagePart.ANNEX,
)
