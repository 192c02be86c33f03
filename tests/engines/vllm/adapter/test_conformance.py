"""The conformance kit over vLLM's engine core in this process, and the historic bugs that it must notice there."""

from __future__ import annotations

import pytest

from kvcustody.integrations.conformance.case import Case
from kvcustody.integrations.conformance.cases import BY_NAME
from kvcustody.integrations.conformance.kit import capabilities_of, check, conformance_cases, why_skipped
from kvcustody.integrations.conformance.mutants.catalogue import FAULTS
from kvcustody.integrations.conformance.mutants.governance import ANYWHERE, PORT
from kvcustody.integrations.conformance.mutants.runner import Mutant, kill, unaccounted
from kvcustody.integrations.vllm.testing.conformance import engine
from kvcustody.integrations.vllm.testing.mutants import MUTANTS, NOT_APPLICABLE


@conformance_cases()
def test_conformance(case: Case) -> None:
    check(engine, case)


@pytest.mark.parametrize(
    "mutant",
    MUTANTS,
    ids=[f"{at:02}-{mutant.fault.replace(' ', '-')}" for at, mutant in enumerate(MUTANTS)],
)
def test_a_historic_bug_fails(mutant: Mutant) -> None:
    assert kill(engine, mutant).killed


def test_every_fault_is_injected_or_told_why_not() -> None:
    faults = {mutant.fault for mutant in MUTANTS}
    assert unaccounted(MUTANTS, NOT_APPLICABLE) == []
    assert set(unaccounted(MUTANTS, {})) == set(NOT_APPLICABLE)
    assert {mutant.fault for mutant in (*ANYWHERE, *PORT)} <= faults


def test_no_fault_is_left_out_that_a_case_could_notice() -> None:
    capabilities = capabilities_of(engine)
    for fault in NOT_APPLICABLE:
        assert all(why_skipped(BY_NAME[name], capabilities) for name in FAULTS[fault].cases), fault
