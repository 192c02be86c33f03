"""The assertion: what is asserted, about what, and by whom."""

from __future__ import annotations

from kvcustody.audit.reports.section import PagePart, Section, no_facts

SECTION = Section(
    "assertion",
    "Assertion",
    no_facts,
    order=30,
    about=("the assertion, its scope and period, its author (`--prepared-by`), and the signing key"),
    part=PagePart.FRONT,
)
