"""The assertion: what is asserted, about what, and by whom."""

from __future__ import annotations

from kvcustody.audit.reports.section import PagePart, Section, no_facts

SECTION = Section(
    "assertion",
    "Assertion",
    no_facts,
    order=30,
    about=("what is asserted, of which scope and period, by whom (`--prepared-by`), signed by which key"),
    part=PagePart.FRONT,
)
