"""A report's evidence for each control: present, absent in the period, or not ours to give.

1. A section carries evidence where the period has something in it: a proof that nobody supplied, a scan that nobody
   ran, a limit that no custody had are no evidence. A list of exceptions is evidence where anything was due.
2. What evidence shows counts where every section that it needs carries some. A control has evidence where at least one
   of the things that show it counts, and cites the sections of those alone.
3. Replayed history says nothing of any clock.
"""

from __future__ import annotations

from kvcustody.audit.reports.framework import EVIDENCE_PRESENT, NOT_OURS, OURS, Control, ControlStatus
from kvcustody.audit.reports.section import FactStage, PagePart, ReportFacts, Section, citations
from kvcustody.audit.reports.sections.boundary import SECTION as BOUNDARY

NONE_IN_PERIOD, ADDRESSED_NOT, OURS_NOT = "none in the period", "not addressed", "not ours"


def control_statuses(report: ReportFacts) -> tuple[ControlStatus, ...]:
    """Return the status of every control of the report's framework."""
    carrying = carrying_sections(report)
    return tuple(
        _status(control, carrying, is_history=bool(report[BOUNDARY].history)) for control in report.framework.controls
    )


def carrying_sections(report: ReportFacts) -> frozenset[str]:
    """Return the sections that carry evidence, by the names that controls cite (rule 1)."""
    return frozenset(name for name, cited in citations().items() if cited.carries(report))


def _status(control: Control, carrying: frozenset[str], *, is_history: bool) -> ControlStatus:
    if control.scope != OURS:
        return ControlStatus(control.id, OURS_NOT if control.scope == NOT_OURS else ADDRESSED_NOT, ())
    counts = [each for each in control.shows if carrying.issuperset(each.needs) and not (each.clock and is_history)]
    cited = dict.fromkeys(name for each in counts for name in (*each.needs, *each.also) if name in carrying)
    return ControlStatus(control.id, EVIDENCE_PRESENT if counts else NONE_IN_PERIOD, tuple(cited))


SECTION: Section[tuple[ControlStatus, ...]] = Section(
    "controls",
    "Controls",
    control_statuses,
    order=60,
    about="evidence, sections and limit of each",
    part=PagePart.FRONT,
    fields={"statuses": "whether the facts are those that they follow from"},
    stage=FactStage.CONCLUSION,
)
