"""The service's users' own responsibilities, and the services it depends on."""

from __future__ import annotations

from kvcustody.audit.reports.section import Section, no_facts

SECTION = Section(
    "roles",
    "User-entity controls and subservice organisations",
    no_facts,
    order=160,
    about="the users' own responsibilities; the services it depends on, included or carved out",
)
