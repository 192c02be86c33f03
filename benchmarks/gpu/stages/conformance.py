"""The conformance kit over the reference engine, and every historic bug of its catalogue killed as a mutant."""

from __future__ import annotations

from typing import Any

from gpu.report import Reason, Report, missing

NEEDS = ("sqlalchemy", "cryptography", "pydantic", "orjson", "structlog", "yaml", "alembic")


def run(report: Report, lab: Any) -> None:
    """The kit's engines keep their blocks in host memory: what the device adds is asked by the stages before."""
    if absent := missing(*NEEDS):
        report.skip("the kit", Reason.NOT_INSTALLED, ", ".join(absent))
        return
    from kvcustody.integrations.vllm.conformance_record import FAIL
    from kvcustody.testkit.conformance import kill
    from kvcustody.testkit.conformance.engines.native_engine import NativeEngine
    from kvcustody.testkit.conformance.engines.reference_engine import ReferenceEngine
    from kvcustody.testkit.conformance.kit import run as run_kit
    from kvcustody.testkit.conformance.mutants import native, reference

    with lab.by_torch():  # as where there is no device: the kit's blocks are the host's
        for engine, mutants in ((ReferenceEngine, reference.MUTANTS), (NativeEngine, native.MUTANTS)):
            found = run_kit(engine)
            failed = [one.case for one in found.of(FAIL)]
            name = engine.__name__
            report.check(f"the kit over {name}", not failed, ", ".join(failed), cases=len(found.verdicts))
            chosen = mutants[: lab.size(len(mutants), 2)]
            survivors = [one.fault for one in chosen if not kill(engine, one).killed]
            report.control(f"mutants of {name} are killed", not survivors, ", ".join(survivors), of=len(chosen))
