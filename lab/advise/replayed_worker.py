"""A replayed trace in the form of a worker's status, with the findings that only a trace can give."""

from __future__ import annotations

from pathlib import Path

from kvcustody.governance.observability.serving_summary import SeenWorker
from kvcustody.lab.advise.questions import TraceFindings
from kvcustody.lab.replay.report import ORPHANS, ReplayReport
from kvcustody.lab.sizing.config_file import read_config
from kvcustody.lab.sizing.hf_config import parse_config

_LINEAGES = 5
_OF_AN_ENGINE = ("ttft.", "prefill_", "bytes_per_block")  # a replay's tensors and times are a stand-in's


def as_worker(report: ReplayReport) -> SeenWorker:
    """Return the status that a worker would report after it had served the trace."""
    status = {name: value for name, value in report.status.items() if not name.startswith(_OF_AN_ENGINE)}
    thrashing = {row.tenant: 1.0 for row in report.tenants if row.thrashing_samples}
    return SeenWorker("replay", 0, False, status, report.charged, {"thrashing": thrashing})


def custody_of(report: ReplayReport) -> dict[str, float]:
    """Return the custody figures of the replay's ledger."""
    coverage = report.coverage
    orphans = sum(row.left for row in report.identities if row.name == ORPHANS)
    return {
        "orphan_findings": orphans,
        "deletion_due_units": coverage.due,
        "deletion_covered_units": coverage.in_time,
        "deletion_overdue_units": coverage.overdue,
        "deletion_unproven_units": coverage.unproven,
    }


def trace_findings(report: ReplayReport, model: Path | None, prefill_rate: float | None) -> TraceFindings:
    """Return the findings that the replay and its caller add to the status.

    Raises:
        ConfigError: the model is unknown.
    """
    return TraceFindings(
        lineages=[
            (f"`{tenant}`, lineage {name}", tokens) for (tenant, name), tokens in report.lineages.most_common(_LINEAGES)
        ],
        denials=report.totals.denials,
        room={
            row.tenant: (row.room_blocks, report.advised_blocks(row)) for row in report.tenants if row.thrashing_samples
        },
        model=None if model is None else (str(model), parse_config(read_config(model)).bytes_per_token),
        prefill_tokens_per_second=prefill_rate,
    )
