"""The first page, for who decides, and what an auditor expects around tests: assertion, description, sources, roles.

1. Every sentence of the first page follows from figures of the report, and from nothing that is not in it.
2. What the organisation says of itself is left to it: where nobody is named, the page says so.
"""

from __future__ import annotations

from kvcustody.audit.reports.model import Report
from kvcustody.audit.reports.opinion.opinion_model import ADVERSE, NOT_GIVEN, UNQUALIFIED
from kvcustody.audit.reports.sections.board import (
    MET,
    MISSED,
    NOTHING_DUE,
    THRESHOLD_PPM,
    TrendPeriod,
    threshold_verdict,
)
from kvcustody.console.report.opinion_pages import share_text
from kvcustody.console.report.render.number_format import count, minute, percent, second
from kvcustody.console.report.render.page_model import Block, Facts, Items, Literal, Paragraph, Section, Table
from kvcustody.plurals import several
from kvcustody.times import iso

_TOP = 5
_NOBODY = "not stated"
_USER_ENTITY = (
    "Give each tenant's requests an identity that the engine's operator verifies; what comes without one is refused or "
    "belongs to nobody.",
    "Classify requests, and set holds, as your own duties ask: kvcustody applies the policy and does not choose it.",
    "Keep witnesses under other people's hands than the ledger's, and compare what they signed.",
    "Keep report, checkpoint and log keys where auditors get them without asking the operator.",
    "Answer exceptions: an owner, a date and a response (`kvcustody report make --responses`).",
    "Delete prompts, outputs, logs and backups by your own means: they are outside this report.",
)


def board_section(report: Report) -> Section:
    """Page one: scope, verdict, three sentences, what is wrong and whose it is, erasures, the trend, what is asked."""
    board, asked, opinion = report.board, report.asked, report.opinion
    verdict = board_verdict(report)
    stated = "" if asked.threshold_ppm != THRESHOLD_PPM else " (kvcustody's own; its reader named none)"
    blocks: list[Block] = [
        Paragraph(
            f"At least {_share(asked.threshold_ppm)} of what was due should end in time, with evidence{stated}: "
            f"{verdict}.",
            "good" if verdict == MET else "bad",
        ),
        Facts(
            [
                ("workers covered", _of(board.workers_covered, board.workers, "at work in the period")),
                ("tenants covered", _of(board.tenants_covered, board.tenants, "with a record")),
                ("units that ended in time, with evidence", share_text(opinion)),
                ("erasures answered on time", _of(board.erasures_on_time, board.erasures, "asked for")),
            ]
        ),
        Items(sentences(report)),
    ]
    if opinion.exceptions:
        blocks.append(
            Table(
                ("first exceptions", "owner", "by"),
                [
                    (("Adverse: " if one.is_adverse else "") + one.cause, one.owner, one.date)
                    for one in opinion.exceptions[:_TOP]
                ],
                left=3,
                widths=(0.68, 0.18, 0.14),
            )
        )
    blocks.append(_trend(board.trend))
    blocks.append(Paragraph(f"Decision asked: {decision(report)}"))
    return Section("For the board", tuple(blocks))


def board_verdict(report: Report) -> str:
    """Whether the share that is asked for was reached."""
    opinion = report.opinion
    return threshold_verdict(report.asked.threshold_ppm, opinion.low_ppm, opinion.high_ppm, report.total.due)


def sentences(report: Report) -> tuple[str, str, str]:
    """What was due and what became of it; what is wrong; how it has been."""
    total, opinion = report.total, report.opinion
    first = (
        f"Due: {several(total.due, 'unit')} of {several(report.population.custodies, 'custody')}. "
        f"{several(total.due - total.covered, 'unit')} did not end in time with evidence."
        if total.due
        else "Nothing was due in the period, so nothing is shown about it."
    )
    named = sum(one.owner != NOT_GIVEN for one in opinion.exceptions)
    second_one = (
        "Nothing qualifies the figures: every identity holds, every erasure is answered, nothing is missing."
        if opinion.kind == UNQUALIFIED
        else f"The opinion is {opinion.kind}: {several(len(opinion.exceptions), 'exception')}, "
        f"{count(named)} with an owner."
    )
    return first, second_one, _trend_sentence(report.board.trend)


def decision(report: Report) -> str:
    """What the board is asked for, from verdict and opinion."""
    opinion, verdict = report.opinion, board_verdict(report)
    open_ones = sum(one.owner == NOT_GIVEN for one in opinion.exceptions)
    if opinion.kind == ADVERSE:
        return "do not rely on these figures until the adverse exceptions are put right; name who does it, by when."
    if verdict == NOTHING_DUE:
        return "none; ask why nothing was due."
    if verdict == MISSED:
        return "accept the shortfall as a risk, or say what changes and by when."
    if open_ones:
        return f"name an owner and a date where there is none: {several(open_ones, 'exception')}."
    if verdict != MET:
        return "have what is unknown resolved: whether the share was reached cannot be told."
    return "none: take note."


def _trend_sentence(trend: tuple[TrendPeriod, ...]) -> str:
    shares = [one.covered * 1_000_000 // one.due for one in trend if one.due]
    if len(shares) < 2:
        return "There is no earlier period of this length with anything due, so no trend."
    word = "better than" if shares[-1] > shares[-2] else "worse than" if shares[-1] < shares[-2] else "as in"
    return (
        f"The share covered is {word} the period before it ({_share(shares[-1])} after {_share(shares[-2])})."
    )


def _trend(trend: tuple[TrendPeriod, ...]) -> Table:
    return Table(
        ("period from", "to", "due", "covered", "share"),
        [
            (
                minute(one.since_us),
                minute(one.until_us),
                count(one.due),
                count(one.covered),
                percent(one.covered, one.due) if one.due else "nothing due",
            )
            for one in trend
        ],
        left=2,
    )


def _of(part: int, whole: int, what: str) -> str:
    return f"{count(part)} of {count(whole)} {what}"


def _share(ppm: int) -> str:
    return f"{ppm / 10_000:.4f}".rstrip("0").rstrip(".") + " %"


def assertion_section(report: Report) -> Section:
    """What is asserted, about what, by whom."""
    asked = report.asked
    scope = f"tenant {asked.tenant}" if asked.tenant else "every tenant of the boundary"
    return Section(
        "Assertion",
        (
            Paragraph(
                f"It is asserted that the ledger named below records the KV-cache custody of {scope} from "
                f"{iso(asked.since_us)} to {iso(asked.until_us)}; that each custody which was due ended in time with "
                "evidence, but for the exceptions listed; and that the figures were made from that record alone, by "
                "the command under Sign-off and re-run."
            ),
            Facts(
                [
                    ("prepared by", asked.preparer or _NOBODY),
                    ("signed by", _NOBODY if report.signature is None else report.signature.key),
                    ("as of", second(report.boundary.checkpoint.at_us)),
                ]
            ),
            *(
                ()
                if asked.preparer
                else (Paragraph("Nobody is named who answers for this assertion.", "bad"),)
            ),
        ),
    )


def service_section(report: Report) -> Section:
    """What the service is, in the terms that the tests use."""
    boundary = report.boundary
    engines = sorted({worker.software for worker in boundary.workers if worker.software})
    tiers = sorted({row.tier for row in report.tiers.rows})
    return Section(
        "Description of the service",
        (
            Paragraph(
                "An engine that serves language models keeps the keys and values of prompts in blocks of device "
                "memory, to use them again. kvcustody decides, by the policy in effect, whose request may be given a "
                "block that another one filled; ends the block's custody when its deadline, an eviction or an erasure "
                "says so; overwrites it before anybody else is given it; and records each of these acts in an "
                "append-only ledger whose roots are signed."
            ),
            Facts(
                [
                    ("processes", count(len(boundary.workers))),
                    ("software", ", ".join(engines) or "none on record"),
                    ("policies in effect in the record", count(len(boundary.policies))),
                    ("tiers off the device", ", ".join(tiers) or "none"),
                    ("records", f"{several(len(boundary.logs), 'log')} under one signed root"),
                ]
            ),
        ),
    )


def sources_section(report: Report) -> Section:
    """Each body of information that a test rests on: where it is from, what was asked, why it is whole and right."""
    asked = report.asked
    bounds = f"{iso(asked.since_us)} to {iso(asked.until_us)}"
    balances = report.population.balances
    held = f"{count(sum(one.holds for one in balances))} of {several(len(balances), 'identity')} held"
    again = report.recount
    recounted = (
        "not made again from leaves"
        if again is None
        else f"made again from {several(again.leaves, 'leaf')}: {several(len(again.differences), 'difference')}"
    )
    decided = report.decided.balances
    of_decisions = f"{count(sum(one.holds for one in decided))} of {several(len(decided), 'identity')} held"
    gaps = f"{several(report.losses.gaps, 'gap')} on record"
    return Section(
        "Sources of the information",
        (
            Paragraph("Each was made by kvcustody from the ledger; none was typed in or changed by hand."),
            Table(
                ("information", "source", "question and parameters", "complete", "accurate"),
                [
                    (
                        "custody that was due",
                        "openings, releases, ends and receipts of every log",
                        f"the definition under Population; {bounds}",
                        f"{held}; {gaps}",
                        recounted,
                    ),
                    (
                        "sample",
                        "the population above",
                        f"seed `{asked.seed}`, {count(len(report.sample))} drawn",
                        f"{count(sum(one.drawn > 0 for one in report.sampling.strata))} of "
                        f"{several(len(report.sampling.strata), 'stratum')} with a draw",
                        "each leaf has a proof under the checkpoint",
                    ),
                    ("decisions", "decision leaves", bounds, of_decisions, "counted when they were made"),
                    (
                        "erasures",
                        "requests and answers",
                        bounds,
                        f"{count(sum(one.is_late for one in report.activity.erasures))} late",
                        "each answer is its worker's own leaf",
                    ),
                    (
                        "losses",
                        "sequences of each process",
                        "the whole record under the checkpoint",
                        gaps,
                        "a number that no leaf has is a gap",
                    ),
                ],
                left=5,
                widths=(0.14, 0.22, 0.24, 0.2, 0.2),
            ),
            Literal(report.rerun().replace(" --", " \\\n  --")),
        ),
    )


def roles_section(report: Report) -> Section:
    """What whoever uses the service has to do itself, and whose services it rests on."""
    boundary = report.boundary
    devices = sorted({worker.device for worker in boundary.workers if worker.device})
    rows = [
        (
            "the engine and its host",
            f"devices: {', '.join(devices)}" if devices else "no device on record",
            "carved out: its operator's controls",
        ),
        (
            "the database of the ledger",
            f"log {boundary.checkpoint.origin}",
            "carved out: what it alters, proofs show",
        ),
        (
            "witnesses",
            ", ".join(boundary.witnessed.witnesses) or "none",
            "included: their signatures are in the record",
        ),
        (
            "the store of root keys",
            "nothing: its keys are in no leaf",
            "carved out: who holds it opens sealed copies",
        ),
    ]
    return Section(
        "User-entity controls and subservice organisations",
        (
            Paragraph("What this report shows holds only where those who use the service do their part:"),
            Items(_USER_ENTITY),
            Paragraph(
                "Services of others that it rests on, and whether their controls are part of this report:"
            ),
            Table(
                ("service", "what is on record of it", "how it is treated"),
                rows,
                left=3,
                widths=(0.26, 0.34, 0.4),
            ),
        ),
    )
