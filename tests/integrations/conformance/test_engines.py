"""The kit over both kinds of adapter: an engine that allocates by itself, and one on our block manager."""

import pytest

from kvcustody.integrations.conformance import check, conformance_cases, run
from kvcustody.integrations.conformance.native_engine import NativeEngine
from kvcustody.integrations.conformance.reference_engine import ReferenceEngine


@conformance_cases()
@pytest.mark.parametrize("factory", [ReferenceEngine, NativeEngine])
def test_conformance(factory, case):
    check(factory, case)


@pytest.mark.parametrize("seed", [1, 2])
def test_other_seeds_ask_other_things_and_pass_too(seed):
    report = run(ReferenceEngine, seed=seed)
    assert report.passed, str(report)
    assert not report.of("skip"), "the reference engine lacks nothing"


def test_what_the_native_engine_lacks_is_said():
    for verdict in run(NativeEngine).of("skip"):
        assert "our block manager" in verdict.reason
