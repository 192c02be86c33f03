"""The parameters of a report: its period, its checkpoint, its sample."""

from __future__ import annotations

import shlex
from typing import NamedTuple

from kvcustody.audit.reports.framework import NAMES
from kvcustody.audit.reports.sampling.attribute_size import attribute_sample_size
from kvcustody.times import iso

THRESHOLD_PPM = 999_000  # the share that should be covered, where the reader asks for none


class ReportParameters(NamedTuple):
    """Everything that a report depends on besides the ledger: equal parameters give equal bytes."""

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
    organisation: str = ""  # whose report it is, as its preparer says
    zone: str = "UTC"  # IANA name; its times stand beside UTC

    def is_risk_whole(self) -> bool:
        """Return whether risk and tolerable rate are both given, or neither, and expected deviations only with them."""
        return bool(self.risk_ppm) == bool(self.tolerable_ppm) and (not self.expected or self.risk_ppm > 0)

    def sample_size(self) -> int:
        """Return the sample size; derived from the stated risk if there is one."""
        if not (self.risk_ppm and self.tolerable_ppm):
            return self.sample
        return attribute_sample_size(self.risk_ppm, self.tolerable_ppm, self.expected)

    def command(self) -> str:
        """Return the command that reproduces the report; the ledger is named by `--ledger`."""
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
        if self.organisation:
            parts.append(f"--organisation {shlex.quote(self.organisation)}")
        if self.zone != "UTC":
            parts.append(f"--zone {shlex.quote(self.zone)}")
        return " ".join(parts)
