"""The service, described in the terms of the tests."""

from __future__ import annotations

from kvcustody.audit.reports.section import PagePart, Section, no_facts

SECTION = Section(
    "service",
    "Description of the service",
    no_facts,
    order=40,
    about="its function, in the terms of the tests; processes, software, policies, tiers, logs",
    part=PagePart.FRONT,
)
