"""The conformance kit over vLLM's engine core in this process, and the historic bugs that it must notice there."""

from __future__ import annotations

import pytest

from kvcustody.testkit.conformance.case import Case
from kvcustody.testkit.conformance.cases import BY_NAME
from kvcustody.testkit.conformance.kit import capabilities_of, check, conformance_cases, why_skipped
from kvcustody.testkit.conformance.mutants.catalogue import FAULTS
from kvcustody.testkit.conformance.mutants.governance import ANYWHERE, PORT
from kvcustody.testkit.conformance.mutants.runner import Mutant, kill, unaccounted
from kvcustody.testkit.vllm.conformance import engine
from kvcustody.testkit.vllm.mutants import MUTANTS, NOT_APPLICABLE


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
