"""The contents of a report: plain facts, section by section, and their canonical JSON.

1. The JSON has keys in order and no floats; the SHA-256 of it without its signature is what a re-run must give.
2. Times are UTC microseconds unless a name says `boot`; a unit is (block, generation, shard).
"""

from __future__ import annotations

import hashlib
import shlex
from typing import Any, NamedTuple

import orjson

from kvcustody.audit.evidence.coverage.recount_process import Difference
from kvcustody.audit.evidence.coverage.summary import CoverageRow
from kvcustody.audit.reports.activity import Activity
from kvcustody.audit.reports.framework import NAMES, Control, ControlStatus, Framework
from kvcustody.audit.reports.gaps_and_spills import GapsAndSpills
from kvcustody.audit.reports.opinion.opinion_model import Opinion, Response
from kvcustody.audit.reports.reconciliation import Balance
from kvcustody.audit.reports.sampling.attribute_size import attribute_sample_size
from kvcustody.audit.reports.sampling.sample import SampleItem
from kvcustody.audit.reports.sampling.strata import Sampling
from kvcustody.audit.reports.sections.board import NO_FACTS, THRESHOLD_PPM, BoardFacts
from kvcustody.audit.reports.sections.decisions import Decided
from kvcustody.audit.reports.sections.read_back import ReadBack
from kvcustody.audit.reports.sections.signature_window import NO_WINDOW, SignatureWindow
from kvcustody.audit.reports.sections.storage_limitation import StorageRow
from kvcustody.audit.reports.signing.report_signature import ReportSignature
from kvcustody.audit.reports.system_boundary import Boundary
from kvcustody.audit.reports.tiers import TierFacts
from kvcustody.times import iso

SCHEMA = "kvcustody/report@4"
EVIDENCE_PRESENT = "evidence present"


class ReportParameters(NamedTuple):
    """Everything that a report depends on besides the ledger: the same again gives the same bytes."""

    framework: str
    checkpoint: int
    since_us: int
    until_us: int
    seed: str = "kvcustody"
    sample: int = 25
    tenant: str | None = None
    extends: int | None = None
    recount: bool = True
    risk_ppm: int = 0
    tolerable_ppm: int = 0
    expected: int = 0
    threshold_ppm: int = THRESHOLD_PPM
    preparer: str = ""

    def is_risk_whole(self) -> bool:
        """Whether risk and tolerable rate are both stated, or neither, and expected deviations only with them."""
        return bool(self.risk_ppm) == bool(self.tolerable_ppm) and (not self.expected or self.risk_ppm > 0)

    def sample_size(self) -> int:
        """How many are drawn: what the stated risk asks for, where one is stated."""
        if not (self.risk_ppm and self.tolerable_ppm):
            return self.sample
        return attribute_sample_size(self.risk_ppm, self.tolerable_ppm, self.expected)

    def command(self) -> str:
        """The command that makes the report again; where the ledger is, `--ledger` says."""
        framework = self.framework if self.framework in NAMES else f"{self.framework}.toml"
        parts = [f"kvcustody report make --framework {shlex.quote(framework)} --as-of {self.checkpoint}"]
        parts.append(f"--since {iso(self.since_us)} --until {iso(self.until_us)}")
        parts.append(f"--seed {shlex.quote(self.seed)} --sample {self.sample}")
        if self.risk_ppm and self.tolerable_ppm:
            parts.append(f"--risk {self.risk_ppm / 10_000:g} --tolerable {self.tolerable_ppm / 10_000:g}")
            parts.append(f"--expected {self.expected}")
        if self.tenant is not None:
            parts.append(f"--tenant {self.tenant}")
        if self.extends is not None:
            parts.append(f"--extends {self.extends}")
        if not self.recount:
            parts.append("--no-recount")
        if self.threshold_ppm != THRESHOLD_PPM:
            parts.append(f"--threshold {self.threshold_ppm / 10_000:g}")
        if self.preparer:
            parts.append(f"--prepared-by {shlex.quote(self.preparer)}")
        return " ".join(parts)


class ReportedProperty(NamedTuple):
    """One property of a policy proof, and over how many cells it was looked at."""

    id: str
    title: str
    holds: bool
    cells: int


class PolicyProof(NamedTuple):
    """A proof of the policy that was supplied; `is_active`: the ledger activated a policy of this digest."""

    policy: str
    digest: str
    holds: bool
    is_active: bool
    proof_digest: str
    properties: tuple[ReportedProperty, ...]


class PopulationFacts(NamedTuple):
    """What was counted, by which query, and how it can be reconciled."""

    query: str
    custodies: int
    units: int
    digest: str
    balances: tuple[Balance, ...]


class Bin(NamedTuple):
    """Units due in one part of the period."""

    start_us: int
    due: int
    covered: int
    uncovered: int


class Lag(NamedTuple):
    """Custodies whose destruction ended within `up_to_us` of when it was due (0: more than any limit)."""

    up_to_us: int
    custodies: int


class Timeliness(NamedTuple):
    """The time from due (or the fence's retirement, if later) to the last receipt."""

    p50_us: int
    p99_us: int
    max_us: int
    lags: tuple[Lag, ...]


class Exceptional(NamedTuple):
    """Custodies of one kind that are not covered: how many, of whom, and why."""

    verdict: str
    disputed: bool
    tenant: str
    classification: str
    cause: str
    incarnation: str
    custodies: int
    units: int
    first_due_us: int
    last_due_us: int
    meaning: str


class Recounted(NamedTuple):
    """The same figures once more, from leaf bytes alone."""

    leaves: int
    digest: str
    unaccounted_residencies: int
    unaccounted_generations: int
    unaccounted_receipts: int
    differences: tuple[Difference, ...]


class Change(NamedTuple):
    """A figure of the period as the earlier checkpoint gave it, and as this one does."""

    figure: str
    before: int
    after: int


class Report(NamedTuple):
    """The whole report.

    With an earlier checkpoint (`asked.extends`) it is a new edition of the report as of that one: `changes` lists every
    figure that what was recorded since has changed.
    """

    version: str
    asked: ReportParameters
    framework: Framework
    boundary: Boundary
    proof: PolicyProof | None
    population: PopulationFacts
    coverage: tuple[CoverageRow, ...]
    total: CoverageRow
    timeline: tuple[Bin, ...]
    timeliness: Timeliness
    recount: Recounted | None
    sampling: Sampling
    sample: tuple[SampleItem, ...]
    exceptions: tuple[Exceptional, ...]
    exceptions_left_out: int
    activity: Activity
    decided: Decided
    read_back: tuple[ReadBack, ...]
    losses: GapsAndSpills
    limitations: tuple[str, ...]
    tiers: TierFacts = TierFacts((), "", (), ())
    storage: tuple[StorageRow, ...] = ()
    window: SignatureWindow = NO_WINDOW
    unscanned: tuple[str, ...] = ()  # workers at work in the period whose pools no scan for orphans looked at
    responses: tuple[Response, ...] = ()
    opinion: Opinion = Opinion("", 0, 0, 0, ())
    statuses: tuple[ControlStatus, ...] = ()
    board: BoardFacts = NO_FACTS
    changes: tuple[Change, ...] = ()
    signature: ReportSignature | None = None

    def to_json(self) -> dict[str, Any]:
        """Plain data, with the statement about every control spelled out."""
        made: dict[str, Any] = _plain(self)
        if self.signature is None:
            del made["signature"]
        made["schema"] = SCHEMA
        made["rerun"] = self.rerun()
        made["statements"] = [
            {"control": control.id, "statement": self.statement(control.id)} for control in self.cited()
        ]
        return made

    def to_bytes(self) -> bytes:
        """The canonical JSON."""
        return orjson.dumps(self.to_json(), option=orjson.OPT_SORT_KEYS | orjson.OPT_STRICT_INTEGER) + b"\n"

    def rerun(self) -> str:
        """The command that makes this report again."""
        proved = "" if self.proof is None else f" --policy {self.proof.policy}.yaml"
        answered = " --responses responses.toml" if self.responses else ""
        return self.asked.command() + proved + answered

    def digest(self) -> str:
        """SHA-256 of `to_bytes` without a signature, hexadecimal: what is signed."""
        return hashlib.sha256(self._replace(signature=None).to_bytes()).hexdigest()

    def cited(self) -> tuple[Control, ...]:
        """The controls that it has evidence for in the period."""
        present = {each.control for each in self.statuses if each.status == EVIDENCE_PRESENT}
        return tuple(each for each in self.framework.controls if each.id in present)

    def sections_of(self, control: str) -> tuple[str, ...]:
        """The sections that carry the evidence for a control."""
        return next((each.sections for each in self.statuses if each.control == control), ())

    def statement(self, control: str) -> str:
        """What may be said of a control."""
        scope = f"tenant {self.asked.tenant}" if self.asked.tenant else "all tenants of the boundary"
        return (
            f"Evidence supporting {control}, for {scope}, from {iso(self.asked.since_us)} to "
            f"{iso(self.asked.until_us)}, under the limitations listed."
        )


def _plain(value: Any) -> Any:
    """Named tuples as objects, other tuples as lists."""
    if hasattr(value, "_asdict"):
        return {name: _plain(item) for name, item in value._asdict().items()}
    if isinstance(value, tuple | list):
        return [_plain(item) for item in value]
    return value
