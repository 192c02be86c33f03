"""The conformance kit over the real engine: the cases that take a moment; the whole kit runs from the command line."""

from __future__ import annotations

from kvcustody.integrations.conformance.case import Case
from kvcustody.integrations.conformance.cases import BY_NAME
from kvcustody.integrations.conformance.kit import check, conformance_cases
from kvcustody.integrations.transformers.conformance import engine

QUICK = (
    "scope/look-up",
    "scope/salt",
    "scope/preempt-resume",
    "residue/in-time",
    "residue/stuck",
    "time/idle",
    "time/never-cached",
    "erase/running",
    "policy/shorter",
    "lifecycle/stale-handle",
)


@conformance_cases(BY_NAME[name] for name in QUICK)
def test_conformance(case: Case) -> None:
    check(engine, case)
