"""The result of a run of the kit: one verdict per case, and the seed that reproduces it."""

from __future__ import annotations

import json
from dataclasses import asdict, dataclass

from kvcustody.integrations.vllm.conformance_record import FAIL, PASS, SCHEMA, SKIP, Subject


@dataclass(frozen=True, slots=True)
class CaseVerdict:
    """One case: pass; fail, with what was seen; or skip, with the reason that the engine stated."""

    case: str
    verdict: str
    reason: str
    seconds: float
    seed: int


@dataclass(frozen=True, slots=True)
class ConformanceReport:
    """A whole run over one engine."""

    engine: str
    verdicts: tuple[CaseVerdict, ...]

    @property
    def passed(self) -> bool:
        """Whether no case failed and at least one passed."""
        return bool(self.of(PASS)) and not self.of(FAIL)

    def of(self, verdict: str) -> list[CaseVerdict]:
        """Return the cases with this verdict."""
        return [one for one in self.verdicts if one.verdict == verdict]

    def to_json(self) -> str:
        """Return the report as JSON text."""
        body = {
            "schema": "kvcustody/conformance@1",
            "engine": self.engine,
            "passed": self.passed,
            "counts": {verdict: len(self.of(verdict)) for verdict in (PASS, FAIL, SKIP)},
            "cases": [asdict(one) for one in self.verdicts],
        }
        return json.dumps(body, indent=2)

    def __str__(self) -> str:
        lines = [f"{self.engine}: {len(self.of(PASS))} passed, {len(self.of(FAIL))} failed"]
        lines += [f"  {one.verdict:4} {one.case}{': ' if one.reason else ''}{one.reason}" for one in self.verdicts]
        return "\n".join(lines)


def record(report: ConformanceReport, subject: Subject) -> bytes:
    """Return the record of a run as the bytes whose digest a setting names."""
    verdicts = {one.case: one.verdict for one in report.verdicts}
    body = {
        "schema": SCHEMA,
        "subject": asdict(subject),
        "engine": report.engine,
        "seeds": sorted({one.seed for one in report.verdicts}),
        "cases": verdicts,
    }
    return json.dumps(body, indent=1, sort_keys=True).encode() + b"\n"
