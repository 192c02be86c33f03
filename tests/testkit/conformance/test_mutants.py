"""Every historic bug of the catalogue, injected: the kit must fail in the case that is meant for it."""

import pytest

from kvcustody.errors import ConfigError
from kvcustody.testkit.conformance import BY_NAME, FAULTS, Mutant, kill, unaccounted
from kvcustody.testkit.conformance.engines.native_engine import NativeEngine
from kvcustody.testkit.conformance.engines.reference_engine import ReferenceEngine
from kvcustody.testkit.conformance.kit import capabilities_of, why_skipped
from kvcustody.testkit.conformance.mutants import native, reference
from kvcustody.testkit.conformance.mutants.runner import patch


def names(mutants):
    return [mutant.fault.replace(" ", "-") for mutant in mutants]


@pytest.mark.parametrize("mutant", reference.MUTANTS, ids=names(reference.MUTANTS))
def test_the_reference_engine_with_a_historic_bug_fails(mutant):
    death = kill(ReferenceEngine, mutant)
    assert death.case == FAULTS[mutant.fault].cases[0], death or "survived"


@pytest.mark.parametrize("mutant", native.MUTANTS, ids=names(native.MUTANTS))
def test_the_native_engine_with_a_historic_bug_fails(mutant):
    runnable = [
        name for name in FAULTS[mutant.fault].cases if not why_skipped(BY_NAME[name], capabilities_of(NativeEngine))
    ]
    death = kill(NativeEngine, mutant)
    assert death.case == runnable[0], death or "survived"


def test_every_fault_is_injected_or_told_why_not():
    assert len(FAULTS) >= 40
    assert unaccounted(reference.MUTANTS, {}) == []
    assert unaccounted(native.MUTANTS, native.NOT_APPLICABLE) == []
    assert set(unaccounted(native.MUTANTS, {})) == set(native.NOT_APPLICABLE)


def test_the_catalogue_names_cases_that_exist():
    for fault in FAULTS.values():
        assert fault.cases and set(fault.cases) <= set(BY_NAME)


def test_a_harmless_change_survives():
    """The control of the controls: a patch that changes nothing kills nothing."""
    harmless = Mutant("scope dropped at store", patch(ReferenceEngine, "store_name", lambda original: original))
    assert not kill(ReferenceEngine, harmless).killed


def test_a_patch_that_no_longer_applies_is_said():
    gone = Mutant("scope dropped at store", patch(ReferenceEngine, "no_such_method", lambda original: original))
    with pytest.raises(ConfigError, match="no_such_method"):
        kill(ReferenceEngine, gone)


def test_a_patch_is_undone():
    before = dict(vars(ReferenceEngine))
    for mutant in reference.MUTANTS:
        with mutant.patch():
            pass
    assert dict(vars(ReferenceEngine)) == before


def test_an_unknown_fault_is_refused():
    with pytest.raises(ConfigError, match="no fault of the catalogue"):
        kill(ReferenceEngine, Mutant("bad weather", patch(ReferenceEngine, "tick", lambda original: original)))
