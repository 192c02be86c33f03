"""The opinion on the first page, what qualifies it, and the chapter on storage limitation."""

from __future__ import annotations

from kvcustody.audit.reports.model import Report
from kvcustody.audit.reports.opinion.opinion_model import ADVERSE, UNQUALIFIED, Opinion
from kvcustody.audit.reports.sections.storage_limitation import StorageRow
from kvcustody.console.report.render.number_format import count, duration, second
from kvcustody.console.report.render.page_model import Block, Facts, Paragraph, Section, Table, Tile

_LISTED = 40
_MEANS = {
    UNQUALIFIED: "Everything that was due ended in time with evidence, every identity holds, and nothing is missing.",
    ADVERSE: "What is wrong is so much, or of such a kind, that the figures of this report should not be relied on.",
    "qualified": "The figures hold but for the exceptions below.",
}


def share_text(opinion: Opinion) -> str:
    """The covered share, as a range where some of it is unknown; never rounded up."""
    low, high = (
        f"{value // 10_000}.{value // 100 % 100:02d}" for value in (opinion.low_ppm, opinion.high_ppm)
    )
    return f"{low} %" if low == high and not opinion.unknown else f"{low}–{high} %"


def opinion_tile(report: Report) -> Tile:
    """What is read first of all."""
    kind = report.opinion.kind
    return Tile(kind, "opinion on the figures", "good" if kind == UNQUALIFIED else "bad")


def opinion_section(report: Report) -> Section:
    """The opinion, its range, and every exception with who answers for it."""
    opinion = report.opinion
    blocks: list[Block] = [
        Paragraph(
            f"The opinion is {opinion.kind}. {_MEANS[opinion.kind]}",
            "good" if opinion.kind == UNQUALIFIED else "bad",
        ),
        Facts(
            [
                ("units that ended in time, with evidence", share_text(opinion)),
                ("units whose outcome is unknown", count(opinion.unknown)),
                ("longest time between a leaf and the signature that covers it", _window(report)),
            ]
        ),
    ]
    if opinion.exceptions:
        blocks.append(
            Table(
                ("exception", "risk", "owner", "by", "response", "compensating control"),
                [
                    (
                        f"{'Adverse: ' if item.is_adverse else ''}{item.cause}",
                        *(item.risk, item.owner, item.date, item.response, item.compensating_control),
                    )
                    for item in opinion.exceptions[:_LISTED]
                ],
                left=6,
                widths=(0.34, 0.22, 0.1, 0.1, 0.12, 0.12),
                bad=frozenset(
                    place for place, item in enumerate(opinion.exceptions[:_LISTED]) if item.is_adverse
                ),
            )
        )
    if len(opinion.exceptions) > _LISTED:
        blocks.append(Paragraph(f"{len(opinion.exceptions) - _LISTED:,} more are in the JSON.", "quiet"))
    return Section("Opinion", tuple(blocks), begins_page=True)


def _window(report: Report) -> str:
    window = report.window
    if not window.longest_us:
        return "none: no leaf of the period counts"
    times = f"written {second(window.at_us)}, signed {second(window.signed_us)}"
    return f"{duration(window.longest_us)}, in {window.log}: {times}"


def storage_section(report: Report) -> Section:
    """How old custody was at its end, what ended it, and the limits beside it."""
    ended = ("deadline", "eviction", "erasure", "pressure", "death", "other")
    return Section(
        "Storage limitation",
        (
            Paragraph(
                "Age is from the request's admission to the end of custody. Limits are those that leaves record for "
                "these custodies. In time is: destroyed with evidence within `scrub.within` of when it was due, or of "
                "the device's last work on it if that was later."
            ),
            Table(
                ("classification", "custodies ended", *(f"by {name}" for name in ended), "overdue"),
                [
                    (
                        row.classification,
                        count(row.custodies),
                        *(count(getattr(row, f"by_{name}")) for name in ended),
                        count(row.overdue),
                    )
                    for row in report.storage
                ],
            ),
            Table(
                (
                    *("classification", "age: median", "99 %", "oldest", "absolute limit", "scrub.within"),
                    *("past ceiling and scrub.within", "age unknown"),
                ),
                [
                    (
                        row.classification,
                        *(duration(row.age_us_p50), duration(row.age_us_p99), duration(row.age_us_max)),
                        *(
                            _range(row.absolute_us_min, row.absolute_us_max),
                            _range(row.within_us_min, row.within_us_max),
                        ),
                        *(count(row.beyond_limit), count(row.unaged)),
                    )
                    for row in report.storage
                ],
                bad=frozenset(place for place, row in enumerate(report.storage) if _is_beyond(row)),
            ),
        ),
    )


def _is_beyond(row: StorageRow) -> bool:
    return bool(row.beyond_limit or row.overdue)


def _range(low: int, high: int) -> str:
    return duration(low) if low == high else f"{duration(low)} to {duration(high)}"
