"""Sections that list evidence: the sample, the exceptions, what was recorded, what is missing."""

from __future__ import annotations

import hashlib
from collections.abc import Sequence

from kvcustody.audit.evidence.cases.case_record import CaseState
from kvcustody.audit.evidence.coverage.custody_units import DEVICE_TIER
from kvcustody.audit.reports.activity import ReportedErasure
from kvcustody.audit.reports.model import Report
from kvcustody.audit.reports.sampling.population import PopulationMember
from kvcustody.audit.reports.sections.cases import ReportedCase
from kvcustody.audit.reports.sections.decisions import MEANINGS
from kvcustody.console.report.render.number_format import count, duration, moment, second
from kvcustody.console.report.render.page_model import Block, Facts, Paragraph, Section, Table
from kvcustody.plurals import several

_LISTED = 60
_DRAW = (
    "Strata are by tier, tenant, classification and what ended the custody, in this order. The largest get one draw "
    "each, as far as there are draws; the rest is shared in proportion. Turn t of stratum s takes the place "
    "SHA-256(seed, ':', s, ':', t) modulo its size; a place that was drawn before is passed over, and counted as a "
    "duplicate."
)


def sample_section(report: Report) -> Section:
    """The strata, the drawn members, their verdicts and their leaves."""
    sampling = report.sampling
    rows = [
        (
            count(item.number),
            _name_of(item.custody),
            item.custody.tenant,
            item.custody.classification,
            item.custody.verdict.replace("_", " "),
            "yes" if item.custody.covered else "no",
            moment(item.custody.due_us)[:23].rstrip("Z"),
            item.custody.level,
        )
        for item in report.sample
    ]
    leaves = [
        (
            count(item.number),
            f"{leaf.log} {leaf.idx}",
            leaf.kind,
            hashlib.sha256(b"\0" + leaf.leaf.encode()).hexdigest(),
        )
        for item in report.sample
        for leaf in item.leaves
    ]
    return Section(
        "Annex: sample",
        (
            Facts(
                [
                    ("seed", report.asked.seed),
                    ("size", f"{len(report.sample)} of {count(sum(one.members for one in sampling.strata))}"),
                    ("stated risk", _risk(report)),
                    ("not covered among those drawn", count(sampling.deviations)),
                    (
                        "so at most, with that risk of being wrong",
                        f"{sampling.upper_limit_ppm // 10_000}.{sampling.upper_limit_ppm // 100 % 100:02d} % of all",
                    ),
                ]
            ),
            Paragraph(_DRAW, "quiet"),
            Table(
                (
                    "stratum",
                    "tier",
                    "tenant",
                    "class",
                    "ended by",
                    "members",
                    "drawn",
                    "duplicates",
                    "not covered",
                ),
                [
                    (str(number), *one[:4], *(count(value) for value in one[4:]))
                    for number, one in enumerate(sampling.strata[:_LISTED])
                ],
                left=5,
                widths=(0.08, 0.09, 0.15, 0.13, 0.17, 0.1, 0.08, 0.11, 0.09),
            ),
            *_more(len(sampling.strata) - _LISTED, "strata"),
            Table(
                (
                    "number",
                    "incarnation, pool/block/generation",
                    "tenant",
                    "class",
                    "verdict",
                    "covered",
                    "due",
                    "level",
                ),
                rows,
                left=8,
                widths=(0.08, 0.2, 0.12, 0.1, 0.09, 0.08, 0.24, 0.09),
                bad=frozenset(place for place, item in enumerate(report.sample) if not item.custody.covered),
            ),
            Paragraph(
                "Leaves of the sample. Their text and their inclusion proofs under the checkpoint are in report.json; "
                "`kvcustody report verify report.json --key FILE` checks them offline."
            ),
            Table(
                ("of", "log, idx", "kind", "leaf hash (RFC 6962)"),
                leaves[: 2 * _LISTED],
                left=4,
                widths=(0.08, 0.19, 0.16, 0.57),
            ),
            *_more(len(leaves) - 2 * _LISTED, "leaves"),
        ),
        begins_page=True,
    )


def _name_of(member: PopulationMember) -> str:
    if member.tier != DEVICE_TIER:
        return f"{member.incarnation[:8]} {member.tier} copy {member.copy}"
    return f"{member.incarnation[:8]} {member.pool}/{member.block}/{member.generation}"


def _risk(report: Report) -> str:
    asked, risk = report.asked, report.sampling.risk_ppm / 10_000
    if not (asked.risk_ppm and asked.tolerable_ppm):
        return f"{risk:g} % (none was stated, and the size was given)"
    return f"{risk:g} %, for a tolerable rate of {asked.tolerable_ppm / 10_000:g} % and {asked.expected} expected"


def exceptions_section(report: Report) -> Section:
    """Everything that is not covered, with its cause, and room for a response."""
    if not report.exceptions:
        none = Paragraph("None: every unit that was due is covered.", "good")
        return Section("Units not covered", (none, *_cases(report)))
    return Section(
        "Units not covered",
        (
            Table(
                (
                    "what",
                    "tenant",
                    "class",
                    "ended by",
                    "incarnation",
                    "units",
                    "first due",
                    "meaning",
                    "response",
                ),
                [
                    (
                        f"{item.verdict.replace('_', ' ')}{', disputed' if item.disputed else ''}",
                        *(
                            item.tenant,
                            item.classification,
                            item.cause,
                            item.incarnation[:8],
                            count(item.units),
                        ),
                        *(second(item.first_due_us), item.meaning, ""),
                    )
                    for item in report.exceptions[:_LISTED]
                ],
                left=9,
                widths=(0.08, 0.1, 0.09, 0.11, 0.09, 0.06, 0.17, 0.19, 0.11),
            ),
            *_more(len(report.exceptions) - _LISTED + report.exceptions_left_out, "groups"),
            *_cases(report),
        ),
    )


def _cases(report: Report) -> tuple[Block, ...]:
    """Requests of people whose deadline is near, or was not kept; nothing where the framework has no such deadline."""
    found = [one for one in report.activity.cases if one.state in (CaseState.NEAR, *_NOT_IN_TIME)]
    if not found or not report.framework.has_answer_deadline:
        return ()
    bad = frozenset(place for place, one in enumerate(found[:_LISTED]) if one.state in _NOT_IN_TIME)
    says = "Requests of people that are to be answered within a week, or were not answered in time."
    return (Paragraph(says, "bad" if bad else ""), _case_table(found, bad, has_deadline=True))


_NOT_IN_TIME = (CaseState.MISSED, CaseState.LATE)


def _case_table(
    found: Sequence[ReportedCase], bad: frozenset[int] = frozenset(), *, has_deadline: bool
) -> Table:
    """Cases; their deadline, and states that follow from it, only where the framework has it."""
    columns = ("case", "tenant", "asks for", "pseudonym", "received", "due before", "state", "decided")
    widths = (0.18, 0.1, 0.09, 0.18, 0.15, 0.15, 0.07, 0.08)
    shown = [place for place, name in enumerate(columns) if has_deadline or name != "due before"]
    rows = [
        (
            one.case_id,
            one.tenant,
            one.subject_right,
            one.pseudonym or "",
            second(one.received_us),
            f"{second(one.due_us)}{', extended' if one.extended else ''}",
            one.state if has_deadline else "answered" if one.answered_us else "open",
            f"{one.outcome or 'not decided'}{', restricted' if one.restricted else ''}",
        )
        for one in found[:_LISTED]
    ]
    whole = sum(widths[place] for place in shown)
    return Table(
        tuple(columns[place] for place in shown),
        [tuple(row[place] for place in shown) for row in rows]
        or [("none came in", *[""] * (len(shown) - 1))],
        left=len(shown),
        widths=tuple(widths[place] / whole for place in shown),
        bad=bad,
    )


def listed_erasures(report: Report) -> list[ReportedErasure]:
    """Every one that is late, answered or not, and others while there is room."""
    every = report.activity.erasures
    late = [item for item in every if item.is_late]
    others = [item for item in every if not item.is_late]
    return [*late, *others[: max(0, _LISTED - len(late))]]


def _erasure_table(report: Report) -> Table:
    listed = listed_erasures(report)
    columns = ("erasure", "tenant", "selector", "pseudonym", "asked", "due", "answered", "state")
    rows = [
        (
            *(item.erasure, item.tenant or "", item.selector, item.pseudonym or "", second(item.at_us)),
            second(item.due_us) or "no deadline",
            second(item.completed_us) or f"not by {', '.join(item.unanswered[:3])}",
            item.state,
            *(count(item.blocks), count(item.remaining), item.reason),
        )
        for item in listed
    ]
    return Table(
        (*columns, "blocks ended", "remaining", "why"),
        rows or [("none asked for", *[""] * 10)],
        left=8,
        widths=(0.1, 0.08, 0.07, 0.12, 0.12, 0.12, 0.12, 0.07, 0.06, 0.07, 0.07),
        bad=frozenset(place for place, item in enumerate(listed) if item.is_late),
    )


def activity_section(report: Report) -> Section:
    """Decisions, erasures, orphan findings and recorded events of the period."""
    activity = report.activity
    blocks: list[Block] = [
        *_decisions(report),
        Table(
            ("step of the policy's release", "revision", "by", "at"),
            [
                (item.action, str(item.revision), item.actor, second(item.at_us))
                for item in activity.release[:_LISTED]
            ]
            or [("none on record in the period", "", "", "")],
            left=4,
        ),
        *_more(len(activity.release) - _LISTED, "steps"),
        _erasure_table(report),
        *_more(len(activity.erasures) - len(listed_erasures(report)), "erasures, none of them late,"),
        _case_table(activity.cases, has_deadline=report.framework.has_answer_deadline),
        *_more(len(activity.cases) - _LISTED, "cases"),
        Table(
            ("orphan findings", "outcome", "findings"),
            [(item.orphan, item.outcome, count(item.findings)) for item in activity.findings]
            or [("none recorded", "", "")],
            left=2,
        ),
        Table(("recorded events", "leaves"), [(item.kind, count(item.leaves)) for item in activity.kinds]),
    ]
    return Section("Decisions, erasures, orphans, recorded events", tuple(blocks))


def _decisions(report: Report) -> list[Block]:
    """What was decided by which rule, beside the residencies that followed, each word explained."""
    decided = report.decided
    return [
        Facts(list(MEANINGS.items())),
        Table(
            ("decision", "action", "rule", "requests", "straddling"),
            [
                (
                    *(item.effect, item.action, item.rule),
                    *(count(item.requests), count(item.straddling)),
                )
                for item in decided.counts[:_LISTED]
            ]
            or [("none recorded", "", "", "", "")],
            left=3,
        ),
        *_more(len(decided.counts) - _LISTED, "decisions"),
        Table(
            ("reader", "owner", "reused through", "requests", "blocks", "tokens"),
            [(*item[:3], *map(count, item[3:])) for item in decided.crossed[:_LISTED]]
            or [("no tenant reused another's blocks", "", "", "", "", "")],
            left=3,
        ),
        *_more(len(decided.crossed) - _LISTED, "pairs of tenants"),
        Table(
            ("rules that the leaves name", "residencies", "of these with a hit at their opening"),
            [
                (item.rules, count(item.residencies), count(item.attached))
                for item in decided.residencies[:_LISTED]
            ]
            or [("none opened", "", "")],
            left=1,
        ),
        *_more(len(decided.residencies) - _LISTED, "sets of rules"),
        Table(
            ("identity", "left", "right", "holds"),
            [
                (item.name, count(item.left), count(item.right), "yes" if item.holds else "no")
                for item in decided.balances
            ],
            left=1,
            widths=(0.6, 0.15, 0.15, 0.1),
            bad=frozenset(place for place, item in enumerate(decided.balances) if not item.holds),
        ),
    ]


def losses_section(report: Report) -> Section:
    """Gaps, spills and witnesses."""
    losses, witnessed = report.losses, report.boundary.witnessed
    blocks: list[Block] = [
        Paragraph(
            f"{several(losses.gaps, 'gap')} and {several(losses.spills, 'spill event')} under the checkpoint."
        )
    ]
    if losses.listed_gaps:
        rows = [
            (item.incarnation[:12], count(item.first_sequence), count(item.last_sequence), item.cause)
            for item in losses.listed_gaps[:_LISTED]
        ]
        blocks.append(Table(("gap in", "from sequence", "to", "cause"), rows, left=4))
    if losses.listed_spills:
        spills = [
            (item.incarnation[:12], moment(item.at_us), item.kind, item.detail)
            for item in losses.listed_spills
        ]
        blocks.append(Table(("spill of", "at", "event", "detail"), spills[:_LISTED], left=4))
    if witnessed.age_us is None:
        blocks.append(Paragraph(f"Witnesses: {witnessed.warning}.", "bad"))
    else:
        names = ", ".join(witnessed.witnesses)
        blocks.append(
            Paragraph(
                f"Witnesses: {names} had signed {count(witnessed.size)} root leaves {duration(witnessed.age_us)} "
                f"before this checkpoint was signed; {witnessed.warning}."
            )
        )
    return Section("Gaps, spills and witnesses", tuple(blocks))


def _more(left_out: int, what: str) -> tuple[Block, ...]:
    if left_out <= 0:
        return ()
    return (Paragraph(f"{count(left_out)} more {what} are not listed here.", "quiet"),)
