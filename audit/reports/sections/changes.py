"""Changes since an earlier checkpoint in the figures of the same period."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterator
from typing import NamedTuple

from sqlalchemy import Connection

from kvcustody.audit.evidence.coverage.custody_units import read_units
from kvcustody.audit.evidence.coverage.summary import CoverageRow, summary
from kvcustody.audit.evidence.erasure.erasure_state import STATES_OF_LEAVES
from kvcustody.audit.reports.leaf_counts import newest_leaf_us
from kvcustody.audit.reports.section import ReportFacts, ReportReading, Section
from kvcustody.audit.reports.sections.activity import SECTION as ACTIVITY
from kvcustody.audit.reports.sections.activity import Activity, read_activity
from kvcustody.audit.reports.sections.coverage import SECTION as COVERAGE
from kvcustody.audit.reports.sections.losses import SECTION as LOSSES
from kvcustody.audit.reports.sections.losses import GapsAndSpills, read_gaps_and_spills
from kvcustody.audit.store.database.snapshot import AsOf, as_of_sizes
from kvcustody.audit.tlog.database_proofs import LedgerProofs


class Change(NamedTuple):
    """A figure of the period at the earlier checkpoint and at this one."""

    figure: str
    before: int
    after: int


def changes(reading: ReportReading) -> tuple[Change, ...]:
    """Return the changes since the checkpoint that the report extends; empty if it extends none."""
    extends, connection = reading.asked.extends, reading.connection
    if extends is None:
        return ()
    state = as_of_sizes(connection, LedgerProofs(connection).sizes(extends))
    return changes_since(connection, reading, state, newest_leaf_us(connection, extends))


def changes_since(connection: Connection, report: ReportFacts, state: AsOf, now_us: int) -> tuple[Change, ...]:
    """Return the figures of a report's period that differ in an earlier state, whose last leaf is of `now_us`."""
    earlier = ReportReading(connection, report.asked, report.framework, state=state, now_us=now_us)
    lives = read_units(connection, earlier.selection, now_us=now_us, as_of=state)
    before = _figures(summary(list(lives)).total, read_activity(earlier), read_gaps_and_spills(earlier))
    after = _figures(report[COVERAGE].total, report[ACTIVITY], report[LOSSES])
    listed = (Change(name, before[name], after[name]) for name in after)
    return tuple(each for each in listed if each.before != each.after)


def _figures(total: CoverageRow, activity: Activity, losses: GapsAndSpills) -> dict[str, int]:
    """What later leaves can change of a period, by name."""
    verdicts = ("due", "covered", "late", "failed", "missing", "unproven", "overdue", "disputed")
    states = Counter(one.state for one in activity.erasures)
    kinds = {each.kind: each.leaves for each in activity.kinds}
    return {
        **{f"units {name}": int(getattr(total, name)) for name in verdicts},
        **{f"erasures {state.value}": states[state] for state in STATES_OF_LEAVES},
        "processes that ended without saying so": kinds.get("worker-died", 0),
        "gaps": losses.gaps,
        "leaves of the period": sum(kinds.values()),
    }


def _disagreements(report: ReportFacts) -> Iterator[str]:
    if report[SECTION] and report.asked.extends is None:
        yield "changes are stated, and the report extends no earlier checkpoint"
    figures = _figures(report[COVERAGE].total, report[ACTIVITY], report[LOSSES])
    for change in report[SECTION]:
        if change.after != figures.get(change.figure) or change.before == change.after:
            yield f"the change of `{change.figure}` is not one to the report's own figure"


SECTION: Section[tuple[Change, ...]] = Section(
    "changes",
    "Changes since the earlier checkpoint",
    changes,
    order=52,
    about=("if the report extends an earlier one: figures of the period that later records changed"),
    part=None,
    printed_in="boundary",
    fields={"changes": "what the figures were at the earlier checkpoint"},
    is_shown=lambda report: report.asked.extends is not None,
    disagreements=_disagreements,
)
