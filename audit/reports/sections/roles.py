"""The service's users' own responsibilities, and the services it depends on."""

from __future__ import annotations

from kvcustody.audit.reports.section import Section, no_facts

SECTION = Section(
    "roles",
    "User-entity controls and subservice organisations",
    no_facts,
    order=160,
    about="what who uses the service has to do; whose services it rests on, included or carved out",
)
