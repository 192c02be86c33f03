"""How to reproduce and verify the report, its digest, its signature, and lines for people to sign."""

from __future__ import annotations

from kvcustody.audit.reports.section import Section, no_facts

SECTION = Section(
    "sign_off",
    "Sign-off and re-run",
    no_facts,
    order=180,
    about=(
        "the command and the SHA-256 that it has to give; what a reader needs to verify the report, and which "
        "command shows what"
    ),
)
