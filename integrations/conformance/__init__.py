"""The conformance kit: what every engine adapter, ours or a third party's, must pass.

Implement `EngineUnderTest` for your engine once, then `run(factory)`; docs/engine-port.md shows how.
"""

from __future__ import annotations

from kvcustody.integrations.conformance.case import Case, Failed
from kvcustody.integrations.conformance.cases import ALL, BY_NAME
from kvcustody.integrations.conformance.engine_protocol import (
    FEATURES,
    Ask,
    Capabilities,
    EngineFactory,
    EngineUnderTest,
    FirstWrite,
    Outcome,
    Setup,
    TierObject,
)
from kvcustody.integrations.conformance.kit import check, conformance_cases, run
from kvcustody.integrations.conformance.mutants.catalogue import FAULTS, Fault
from kvcustody.integrations.conformance.mutants.runner import Death, Mutant, kill, kill_all, unaccounted
from kvcustody.integrations.conformance.report import Report, Verdict

__all__ = [
    "ALL",
    "BY_NAME",
    "FAULTS",
    "FEATURES",
    "Ask",
    "Capabilities",
    "Case",
    "Death",
    "EngineFactory",
    "EngineUnderTest",
    "Failed",
    "Fault",
    "FirstWrite",
    "Mutant",
    "Outcome",
    "Report",
    "Setup",
    "TierObject",
    "Verdict",
    "check",
    "conformance_cases",
    "kill",
    "kill_all",
    "run",
    "unaccounted",
]
