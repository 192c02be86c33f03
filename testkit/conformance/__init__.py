"""The conformance kit: what every engine adapter, ours or a third party's, must pass.

Implement `EngineUnderTest` for your engine once, then `run(factory)`; docs/build/engine-port.md shows how.
"""

from __future__ import annotations

from kvcustody.testkit.conformance.case import Case, Failed
from kvcustody.testkit.conformance.cases import ALL, BY_NAME
from kvcustody.testkit.conformance.engine_protocol import (
    FEATURES,
    Capabilities,
    EngineFactory,
    EngineUnderTest,
    FirstWrite,
    RequestOutcome,
    RequestSpec,
    Setup,
    TierObject,
)
from kvcustody.testkit.conformance.kit import check, conformance_cases, run
from kvcustody.testkit.conformance.mutants.catalogue import FAULTS, Fault
from kvcustody.testkit.conformance.mutants.runner import Death, Mutant, kill, kill_all, unaccounted
from kvcustody.testkit.conformance.report import CaseVerdict, ConformanceReport

__all__ = [
    "ALL",
    "BY_NAME",
    "FAULTS",
    "FEATURES",
    "Capabilities",
    "Case",
    "CaseVerdict",
    "ConformanceReport",
    "Death",
    "EngineFactory",
    "EngineUnderTest",
    "Failed",
    "Fault",
    "FirstWrite",
    "Mutant",
    "RequestOutcome",
    "RequestSpec",
    "Setup",
    "TierObject",
    "check",
    "conformance_cases",
    "kill",
    "kill_all",
    "run",
    "unaccounted",
]
