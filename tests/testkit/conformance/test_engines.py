"""The kit over both kinds of adapter: an engine that allocates by itself, and one on our block manager."""

import pytest

from kvcustody.testkit.conformance import ALL, check, conformance_cases, run
from kvcustody.testkit.conformance.engines.native_engine import NativeEngine
from kvcustody.testkit.conformance.engines.reference_engine import ReferenceEngine
from kvcustody.testkit.conformance.kit import capabilities_of, why_skipped


@conformance_cases()
@pytest.mark.parametrize("factory", [ReferenceEngine, NativeEngine])
def test_conformance(factory, case):
    check(factory, case)


@pytest.mark.system("the kit passes with its one seed alone")
def test_another_seed_asks_other_things_and_passes_too():
    report = run(ReferenceEngine, seed=1)
    assert report.passed, str(report)
    assert not report.of("skip"), "the reference engine lacks nothing"


def test_what_the_native_engine_lacks_is_said():
    capabilities = capabilities_of(NativeEngine)
    reasons = [why_skipped(case, capabilities) for case in ALL]
    assert 0 < sum(map(bool, reasons)) < 10
    assert all("our block manager" in reason for reason in reasons if reason)
