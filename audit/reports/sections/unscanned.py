"""Workers at work in the period whose pools no scan for orphans examined in it."""

from __future__ import annotations

from kvcustody.audit.reports.section import ReportReading, Section


def unscanned(reading: ReportReading) -> tuple[str, ...]:
    """Return these workers, by name and the short id of the process."""
    if reading.asked.tenant is not None:
        return ()  # scans are in the system log, and no tenant's
    scanned = {item.incarnation for item in reading.counts.counted if item.kind == "orphan-scanned" and item.in_period}
    return tuple(
        sorted(
            reading.name_of(period.worker, life)
            for life, period in reading.periods.items()
            if life not in scanned
            and period.started_us < reading.until_us
            and (period.ended_us is None or period.ended_us >= reading.since_us)
        )
    )


SECTION: Section[tuple[str, ...]] = Section(
    "unscanned",
    "Pools not scanned",
    unscanned,
    order=131,
    about="workers at work in the period whose pools no scan for orphans examined",
    part=None,
    printed_in="opinion",
    fields={"unscanned": "which pools were not scanned"},
)
