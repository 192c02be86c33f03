"""Runs the cases over an engine: `run(factory)` returns a report; `conformance_cases()` parametrises a pytest function.

@conformance_cases()
def test_conformance(case):
    check(my_factory, case)
"""

from __future__ import annotations

import time
from collections.abc import Callable, Iterable
from functools import lru_cache
from typing import Any

from kvcustody.clock import VirtualClock
from kvcustody.integrations.vllm.conformance_record import FAIL, PASS, SKIP
from kvcustody.testkit.conformance.case import Bench, Case
from kvcustody.testkit.conformance.cases import ALL
from kvcustody.testkit.conformance.engine_protocol import Capabilities, EngineFactory, Setup
from kvcustody.testkit.conformance.policy import policy
from kvcustody.testkit.conformance.report import CaseVerdict, ConformanceReport

SEED = 20_260_301


def run(
    engine_factory: EngineFactory,
    cases: Iterable[Case] = ALL,
    on_progress: Callable[[CaseVerdict], None] | None = None,
    *,
    seed: int = SEED,
) -> ConformanceReport:
    """Run every case over a fresh engine each; a case fails on its own check and on any error from the engine."""
    capabilities = capabilities_of(engine_factory)
    verdicts = []
    for case in cases:
        verdict = judge(engine_factory, case, capabilities, seed)
        verdicts.append(verdict)
        if on_progress is not None:
            on_progress(verdict)
    return ConformanceReport(capabilities.engine, tuple(verdicts))


def judge(factory: EngineFactory, case: Case, capabilities: Capabilities, seed: int = SEED) -> CaseVerdict:
    """Run one case and return its verdict."""
    skipped = why_skipped(case, capabilities)
    if skipped:
        return CaseVerdict(case.name, SKIP, skipped, 0.0, seed)
    started = time.perf_counter()
    bench = Bench(factory, seed)
    verdict, reason = PASS, ""
    try:
        case.run(bench)
        bench.close()
    except Exception as error:
        verdict, reason = FAIL, f"{type(error).__name__}: {error}"
        bench.abandon()
    return CaseVerdict(case.name, verdict, reason, round(time.perf_counter() - started, 3), seed)


def why_skipped(case: Case, capabilities: Capabilities) -> str:
    """Return the engine's reasons for lacking a feature that the case needs; empty where it lacks none."""
    return "; ".join(f"no {need}: {capabilities.lacks[need]}" for need in case.needs if need in capabilities.lacks)


@lru_cache(maxsize=16)
def capabilities_of(factory: EngineFactory) -> Capabilities:
    """Return the properties of a factory's engine; one engine is made to read them."""
    engine = factory(Setup(policy(), VirtualClock()))
    capabilities = engine.capabilities
    engine.close()
    return capabilities


def check(factory: EngineFactory, case: Case, *, seed: int = SEED) -> None:
    """Run one case under pytest: skip with the engine's reason, fail with the case's error and the seed."""
    import pytest

    skipped = why_skipped(case, capabilities_of(factory))
    if skipped:
        pytest.skip(skipped)
    bench = Bench(factory, seed)
    try:
        case.run(bench)
        bench.close()
    except BaseException as error:
        bench.abandon()
        error.add_note(f"conformance case `{case.name}`, seed {seed}: {case.proves}")
        raise


def conformance_cases(cases: Iterable[Case] = ALL) -> Any:
    """Return `pytest.mark.parametrize` over `case`, with the cases' names as ids."""
    import pytest

    chosen = list(cases)
    return pytest.mark.parametrize("case", chosen, ids=[case.name for case in chosen])
