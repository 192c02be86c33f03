"""What a report has for each control: evidence, none in the period, or nothing that is ours to give.

1. A section carries evidence where the period has something in it: a proof that nobody supplied, a scan that nobody
   ran, a limit that no custody had are no evidence. A list of exceptions is evidence where anything was due.
2. What evidence shows counts where every section that it needs carries some. A control has evidence where at least one
   of the things that show it counts, and cites the sections of those alone.
3. Replayed history says nothing of any clock.
"""

from __future__ import annotations

from kvcustody.audit.reports.framework import NOT_OURS, OURS, Control, ControlStatus
from kvcustody.audit.reports.model import EVIDENCE_PRESENT, Report

NONE_IN_PERIOD, ADDRESSED_NOT, OURS_NOT = "none in the period", "not addressed", "not ours"
KEY_EVENTS = ("key-event", "keys-ordered")


def control_statuses(report: Report) -> tuple[ControlStatus, ...]:
    """The status of every control of the report's framework."""
    carrying = carrying_sections(report)
    return tuple(
        _status(control, carrying, is_history=bool(report.boundary.history))
        for control in report.framework.controls
    )


def carrying_sections(report: Report) -> frozenset[str]:
    """The sections that carry evidence (rule 1)."""
    kinds = {each.kind for each in report.activity.kinds}
    due = report.total.due > 0
    carries = {
        "checkpoint": True,
        "policies": bool(report.boundary.policies),
        "release": bool(report.activity.release),
        "proof": report.proof is not None and report.proof.holds and report.proof.is_active,
        "population": report.population.custodies > 0,
        "reconciliation": due and bool(report.population.balances),
        "coverage": due,
        "timeliness": any(lag.custodies for lag in report.timeliness.lags),
        "recount": report.recount is not None and report.recount.leaves > 0,
        "sample": bool(report.sample),
        "exceptions": due,
        "decisions": bool(report.decided.counts or report.decided.residencies),
        "erasures": bool(report.activity.erasures),
        "cases": bool(report.activity.cases),
        "findings": "orphan-scanned" in kinds or bool(report.activity.findings),
        "activity": bool(kinds),
        "losses": bool(kinds),
        "witness": report.boundary.witnessed.age_us is not None,
        "storage": any(row.custodies and row.absolute_us_max for row in report.storage),
        "opinion": due,
        "read_back": any(row.blocks_read for row in report.read_back),
        "tiers": any(row.due for row in report.tiers.rows),
        "keys": bool(kinds.intersection(KEY_EVENTS)),
    }
    return frozenset(name for name, is_there in carries.items() if is_there)


def _status(control: Control, carrying: frozenset[str], *, is_history: bool) -> ControlStatus:
    if control.scope != OURS:
        return ControlStatus(control.id, OURS_NOT if control.scope == NOT_OURS else ADDRESSED_NOT, ())
    counts = [
        each for each in control.shows if carrying.issuperset(each.needs) and not (each.clock and is_history)
    ]
    cited = dict.fromkeys(name for each in counts for name in (*each.needs, *each.also) if name in carrying)
    return ControlStatus(control.id, EVIDENCE_PRESENT if counts else NONE_IN_PERIOD, tuple(cited))
