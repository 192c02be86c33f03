"""How to reproduce and verify the report, its digest, its signature, and lines for people to sign."""

from __future__ import annotations

from kvcustody.audit.reports.section import Section, no_facts

SECTION = Section(
    "sign_off",
    "Sign-off and re-run",
    no_facts,
    order=180,
    about=(
        "the command and its expected SHA-256; what a reader needs to verify the report, and the command for each check"
    ),
)
