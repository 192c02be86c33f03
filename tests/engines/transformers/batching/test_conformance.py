"""The conformance kit over the real engine: cases and historic bugs that take a moment here, all of them under soak."""

from __future__ import annotations

import pytest

from kvcustody.testkit.conformance.case import Case
from kvcustody.testkit.conformance.cases import ALL, BY_NAME
from kvcustody.testkit.conformance.kit import capabilities_of, check, conformance_cases, why_skipped
from kvcustody.testkit.conformance.mutants.catalogue import FAULTS
from kvcustody.testkit.conformance.mutants.governance import ANYWHERE
from kvcustody.testkit.conformance.mutants.runner import Mutant, kill, unaccounted
from kvcustody.testkit.transformers.conformance import engine
from kvcustody.testkit.transformers.mutants import MUTANTS, NOT_APPLICABLE

QUICK = (
    "scope/look-up",
    "scope/salt",
    "scope/preempt-resume",
    "residue/in-time",
    "time/idle",
    "time/never-cached",
    "policy/shorter",
    "lifecycle/stale-handle",
    "events/truth",
    "events/scope",
)
QUICK_MUTANTS = (
    "scope dropped at admission",
    "no identity falls to a tenant",
    "TTL does not fire while idle",
    "erase misses cached",
    "removal not told",
    "unscoped removal",
)


@conformance_cases(BY_NAME[name] for name in QUICK)
def test_conformance(case: Case) -> None:
    check(engine, case)


@pytest.mark.soak
@conformance_cases(case for case in ALL if case.name not in QUICK)
def test_the_rest_of_the_kit(case: Case) -> None:
    check(engine, case)


def runnable(fault: str) -> list[str]:
    """The cases that must notice a fault and that this engine can run."""
    return [name for name in FAULTS[fault].cases if not why_skipped(BY_NAME[name], capabilities_of(engine))]


def dies(mutant: Mutant) -> None:
    death = kill(engine, mutant)
    assert death.case == runnable(mutant.fault)[0], death


@pytest.mark.parametrize("fault", QUICK_MUTANTS)
def test_a_historic_bug_fails(fault: str) -> None:
    (mutant,) = (mutant for mutant in MUTANTS if mutant.fault == fault)
    dies(mutant)


@pytest.mark.soak
@pytest.mark.parametrize(
    "mutant",
    [mutant for mutant in MUTANTS if mutant.fault not in QUICK_MUTANTS],
    ids=lambda mutant: mutant.fault.replace(" ", "-"),
)
def test_every_historic_bug_fails(mutant: Mutant) -> None:
    dies(mutant)


@pytest.mark.parametrize("mutant", MUTANTS, ids=lambda mutant: mutant.fault.replace(" ", "-"))
def test_what_a_mutant_replaces_is_still_there(mutant: Mutant) -> None:
    """At every run, though most of them are put to work under soak alone."""
    with mutant.patch():
        pass


def test_every_fault_is_injected_or_told_why_not() -> None:
    faults = {mutant.fault for mutant in MUTANTS}
    assert unaccounted(MUTANTS, NOT_APPLICABLE) == []
    assert set(unaccounted(MUTANTS, {})) == set(NOT_APPLICABLE)
    assert len(faults) == len(MUTANTS) >= 28
    assert {mutant.fault for mutant in ANYWHERE} - faults == {
        f"{what} identity accepted" for what in ("forged", "expired", "replayed")
    }


def test_a_fault_that_a_case_could_notice_is_left_out_only_where_the_engine_has_no_such_path() -> None:
    assert {fault for fault in NOT_APPLICABLE if runnable(fault)} == {
        "late answer of a preempted request",
        "release not idempotent",
        "order to forget ignored",
        "scrub after hand-out",
    }
