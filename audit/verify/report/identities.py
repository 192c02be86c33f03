"""What a report has to agree with itself about: sums, draws, and the parts that follow from its other parts."""

from __future__ import annotations

from collections.abc import Iterator

from kvcustody.audit.evidence.coverage.custody_units import DEVICE_TIER
from kvcustody.audit.evidence.coverage.summary import CoverageRow, add_rows
from kvcustody.audit.reports.control_status import control_statuses
from kvcustody.audit.reports.exceptions import MEANINGS
from kvcustody.audit.reports.framework import NAMES, load_framework
from kvcustody.audit.reports.limitations import limitations
from kvcustody.audit.reports.model import Report
from kvcustody.audit.reports.opinion.opinion import opinion_of
from kvcustody.audit.reports.sampling.attribute_size import RISK_PPM
from kvcustody.audit.reports.sampling.strata import concluded, draw_strata
from kvcustody.audit.reports.sections.board import tenants_of
from kvcustody.audit.reports.sections.signature_window import NO_WINDOW

_VERDICTS = ("in_time", "late", "failed", "missing", "unproven", "overdue")


def disagreements(report: Report) -> list[str]:
    """Every identity that does not hold."""
    found: list[str] = []
    checks = (
        *(_framework, _checkpoint, _coverage, _parts, _population),
        *(_tiers, _read, _storage, _board, _window, _follows),
    )
    for each in checks:
        found += each(report)
    return found


def _framework(report: Report) -> Iterator[str]:
    name = report.asked.framework
    if name not in NAMES:  # a file of the preparer's, which is listed as unchecked
        if report.framework.id != name:
            yield f"the controls are those of framework `{report.framework.id}`, not `{name}`"
    elif report.framework != load_framework(name):
        yield f"the controls are not those of framework `{report.asked.framework}`"


def _checkpoint(report: Report) -> Iterator[str]:
    if report.boundary.checkpoint.size != report.asked.checkpoint:
        yield "the report was asked for as of another checkpoint"
    if report.boundary.extends != report.asked.extends:
        yield "the report was asked to extend another checkpoint"
    if report.asked.since_us >= report.asked.until_us:
        yield "the period ends before it begins"


def _coverage(report: Report) -> Iterator[str]:
    if add_rows(report.coverage) != report.total:
        yield "the total is not the sum of the coverage by tenant and classification"
    for row in report.coverage:
        yield from _row(row)


def _row(row: CoverageRow) -> Iterator[str]:
    who = f"`{row.tenant}`, `{row.classification}`"
    if sum(getattr(row, name) for name in _VERDICTS) != row.due:
        yield f"verdicts of {who} do not add up to what was due"
    if not 0 <= row.covered <= row.in_time or row.in_time - row.covered > row.disputed:
        yield f"covered units of {who} are not those in time and not disputed"
    if any(value < 0 for value in row[2:]):
        yield f"a figure of {who} is below zero"


def _parts(report: Report) -> Iterator[str]:
    total, bins = report.total, report.timeline
    if (sum(item.due for item in bins), sum(item.covered for item in bins)) != (total.due, total.covered):
        yield "the parts of the period do not add up to the total"
    if any(item.due != item.covered + item.uncovered for item in bins):
        yield "a part of the period is not covered and uncovered together"
    uncovered = sum(item.units for item in report.exceptions)
    if uncovered > total.due - total.covered or (
        not report.exceptions_left_out and uncovered != total.due - total.covered
    ):
        yield "the exceptions do not add up to what is not covered"
    if any(item.meaning != MEANINGS.get(item.verdict) for item in report.exceptions):
        yield "an exception is explained by other words than those of its verdict"
    lags = report.timeliness
    if not lags.p50_us <= lags.p99_us <= lags.max_us:
        yield "the times from due to destroyed are out of order"


def _population(report: Report) -> Iterator[str]:
    facts, asked = report.population, report.asked
    if facts.units != report.total.due:
        yield "the population has other units than coverage"
    if not 0 <= facts.custodies <= facts.units:
        yield "the population has more custodies than units"
    yield from _sample(report)
    again = report.recount
    if (again is None) == asked.recount:
        yield "a recount is there that was not asked for, or the reverse"
    if again is not None and not again.differences and again.digest != facts.digest:
        yield "the recount names no difference, and has another digest"


def _sample(report: Report) -> Iterator[str]:
    asked, sampling = report.asked, report.sampling
    members = [stratum.members for stratum in sampling.strata]
    if not asked.is_risk_whole():
        yield "a risk is stated without a tolerable rate, or the reverse"
    if sum(members) != report.population.custodies + sum(row.due for row in report.tiers.rows):
        yield "the strata are not the population"
    if sampling.size != asked.sample_size() or sampling.risk_ppm != (asked.risk_ppm or RISK_PPM):
        yield "the sample is of another size than was asked for"
        return
    draws = draw_strata(asked.seed, sampling.size, members)
    drawn = [(number, place) for number, draw in enumerate(draws) for place in draw.places]
    counted = [(stratum.drawn, stratum.duplicates) for stratum in sampling.strata]
    if counted != [(len(draw.places), draw.duplicates) for draw in draws] or drawn != [
        (item.stratum, item.place) for item in report.sample
    ]:
        yield "the sample is not the one that the seed draws from the population"
        return
    for number, stratum in enumerate(sampling.strata):
        mine = [item.custody for item in report.sample if item.stratum == number]
        if any((each.tier, each.tenant, each.classification, each.cause) != stratum[:4] for each in mine):
            yield f"a drawn member is of another stratum than number {number}"
        if stratum.deviations != sum(not each.covered for each in mine):
            yield f"deviations of stratum {number} are not those of its drawn members"
    if concluded(sampling.size, sampling.risk_ppm, sampling.strata) != sampling:
        yield "what the sample says of the population does not follow from it"


def _tiers(report: Report) -> Iterator[str]:
    for row in report.tiers.rows:
        verdicts = row.covered + row.late + row.open + row.unproven + row.disputed
        if verdicts != row.due or not 0 <= row.waiting <= row.open:
            yield f"verdicts of copies in tier `{row.tier}` do not add up to what was due"

    by_tier: dict[tuple[str, str, str], int] = {}
    for stratum in report.sampling.strata:
        if stratum.tier != DEVICE_TIER:
            key = stratum[:3]
            by_tier[key] = by_tier.get(key, 0) + stratum.members
    if by_tier != {row[:3]: row.due for row in report.tiers.rows}:
        yield "the strata of copies are not the copies that were due, by tier, tenant and classification"
    due = {f"copies due in {row.tier} ": 0 for row in report.tiers.rows}
    for row in report.tiers.rows:
        due[f"copies due in {row.tier} "] += row.due
    stated = {
        f"{balance.name.partition(' = ')[0]} ": (balance.left, balance.right)
        for balance in report.tiers.balances
        if balance.name.startswith("copies due in ")
    }
    if stated != {name: (copies, copies) for name, copies in due.items()}:
        yield "the identities of copies that were due are not those of the tiers"


def _storage(report: Report) -> Iterator[str]:
    for row in report.storage:
        causes = (
            row.by_deadline,
            row.by_eviction,
            row.by_erasure,
            row.by_pressure,
            row.by_death,
            row.by_other,
        )
        if sum(causes) != row.custodies or max(row.unaged, row.beyond_limit) > row.custodies:
            yield f"what ended custody of classification `{row.classification}` does not add up"
        if not row.age_us_p50 <= row.age_us_p99 <= row.age_us_max:
            yield f"ages of classification `{row.classification}` are out of order"
    if sum(row.custodies + row.overdue for row in report.storage) != report.population.custodies:
        yield "the classifications do not have the custodies of the population"


def _board(report: Report) -> Iterator[str]:
    """What the first page says follows from the sections behind it, but for when workers were at work."""
    board, erasures = report.board, report.activity.erasures
    if (board.erasures, board.erasures_on_time) != (len(erasures), sum(one.is_on_time for one in erasures)):
        yield "the first page has other erasures than the report"
    due = {row.tenant for row in report.coverage if row.due}
    if (board.tenants, board.tenants_covered) != (len(due | tenants_of(report.boundary.logs)), len(due)):
        yield "the first page has other tenants than logs and coverage"
    seen = [one for one in report.boundary.workers if not one.end.startswith("died")]
    if not 0 <= board.workers_covered <= min(board.workers, len(seen)):
        yield "the first page covers more workers than did not die"
    if not board.workers_covered <= board.workers <= len(report.boundary.workers):
        yield "the first page has more workers than the boundary"
    if report.asked.tenant is None and board.workers - len(report.unscanned) > board.workers_covered + len(
        report.boundary.workers
    ) - len(seen):
        yield "the first page covers fewer workers than were scanned and did not die"
    if board.trend and board.trend[-1] != (
        report.asked.since_us, report.asked.until_us, report.total.due, report.total.covered
    ):  # fmt: skip
        yield "the last period of the trend is not the report's own"


def _window(report: Report) -> Iterator[str]:
    """The signature that closed the window is of this checkpoint or an earlier one, and the leaf of the period."""
    window = report.window
    if window == NO_WINDOW:
        return
    if window.longest_us != window.signed_us - window.at_us or window.longest_us <= 0:
        yield "the longest window is not the time from its leaf to its signature"
    if window.signed_us > report.boundary.checkpoint.signed_us:
        yield "the longest window ends later than the report's checkpoint was signed"
    if not report.asked.since_us <= window.at_us < report.asked.until_us:
        yield "the longest window begins outside the period"
    if window.log not in {log.name for log in report.boundary.logs}:
        yield "the longest window is of a log that is not under the checkpoint"


def _read(report: Report) -> Iterator[str]:
    for row in report.read_back:
        if row.receipts_unread > row.receipts or row.blocks_read > row.blocks or row.bytes_read > row.bytes:
            yield f"more was read back than receipts of level `{row.level}` have"
    for balance in report.decided.balances:
        if balance.right != sum(item.residencies for item in report.decided.residencies):
            yield "residencies by rule are not those of the identity"


def _follows(report: Report) -> Iterator[str]:
    if report.opinion != opinion_of(report):
        yield "the opinion is not the one that follows from the report's own facts"
    if report.statuses != control_statuses(report):
        yield "the status of a control is not the one that follows from the report's own facts"
    if report.limitations != limitations(report):
        yield "the limitations are not those that follow from the report's own facts"
