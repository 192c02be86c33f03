"""Makes a report: one reading of the ledger as a checkpoint left it, every section from that reading.

1. Nothing of another tenant is in a tenant's own report: its custody, its log, counts of its own, and of what all
   share (workers, policies, the root log) only what names nobody.
2. Every section is made in a fixed order from sorted facts, so that SQLite and PostgreSQL give the same bytes.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Sequence

import numpy as np
from sqlalchemy import Connection, func, select

from kvcustody._version import __version__
from kvcustody.audit.evidence.copies.copy_coverage import CopyCoverage, JudgedCopies, copy_coverage
from kvcustody.audit.evidence.coverage.block_uses import NEVER
from kvcustody.audit.evidence.coverage.custody_units import (
    CustodySelection,
    LifeUnits,
    lives_of,
    read_units,
    within_period,
)
from kvcustody.audit.evidence.coverage.recount_process import (
    RecountProcess,
    copy_differences,
    differences,
    open_recount,
)
from kvcustody.audit.evidence.coverage.summary import CoverageRow, CoverageSummary, is_covered, summary
from kvcustody.audit.evidence.erasure.erasure_state import STATES_OF_LEAVES
from kvcustody.audit.evidence.processes.marked_processes import marked_processes
from kvcustody.audit.evidence.processes.work_periods import LIVES, work_periods
from kvcustody.audit.kinds import log_of
from kvcustody.audit.reports.activity import Activity, read_activity
from kvcustody.audit.reports.control_status import control_statuses
from kvcustody.audit.reports.exceptions import exceptions
from kvcustody.audit.reports.framework import Framework, load_framework
from kvcustody.audit.reports.gaps_and_spills import GapsAndSpills, read_gaps_and_spills
from kvcustody.audit.reports.leaf_counts import LeafCounts, read_leaf_counts
from kvcustody.audit.reports.limitations import limitations
from kvcustody.audit.reports.model import (
    Bin,
    Change,
    Lag,
    PolicyProof,
    PopulationFacts,
    Recounted,
    Report,
    ReportParameters,
    Timeliness,
)
from kvcustody.audit.reports.opinion.opinion import opinion_of
from kvcustody.audit.reports.opinion.opinion_model import Response
from kvcustody.audit.reports.reconciliation import reconcile
from kvcustody.audit.reports.sampling.attribute_size import RISK_PPM
from kvcustody.audit.reports.sampling.population import CustodyPopulation
from kvcustody.audit.reports.sampling.sample import draw_sample
from kvcustody.audit.reports.sections.board import TrendPeriod, board_facts, trend_of, trend_start_us
from kvcustody.audit.reports.sections.decisions import read_decisions
from kvcustody.audit.reports.sections.read_back import read_back
from kvcustody.audit.reports.sections.signature_window import signature_window
from kvcustody.audit.reports.sections.storage_limitation import storage_limitation
from kvcustody.audit.reports.system_boundary import newest_leaf_us, read_boundary
from kvcustody.audit.reports.tiers import read_tiers
from kvcustody.audit.store.database.snapshot import AsOf, as_of_sizes
from kvcustody.audit.store.schema.all_tables import has_leaf
from kvcustody.audit.store.schema.ledger import events, logs
from kvcustody.audit.tlog.database_proofs import LedgerProofs
from kvcustody.errors import ConfigError
from kvcustody.times import iso

Progress = Callable[[str], None]
LAG_LIMITS_US = (1_000, 10_000, 100_000, 250_000, 1_000_000, 5_000_000, 30_000_000, 300_000_000)
_BINS_MAX = 32
_BIN_SECONDS = (1, 5, 15, 60, 300, 900, 3600, 21_600, 86_400, 7 * 86_400, 30 * 86_400, 365 * 86_400)
QUERY = """\
custody = for each (incarnation, pool, generation) that a custody-ended leaf names, its first end;
          and each that a leaf lists as handed out, that is due, and that no custody-ended leaf names
due_at  = max(last release, min(ceiling, end of the last hold, erasure)), from the residencies' own leaves
taken   = leaves with idx < size of their log under the checkpoint
where   {since} <= due_at < {until}{tenant}
order   incarnation, ended before overdue, pool, generation
again   kvcustody audit recompute --as-of {checkpoint} --since {since} --until {until}{option}"""


def newest_checkpoint(connection: Connection) -> int:
    """The newest signed checkpoint; raises `ProofError` where none is signed."""
    return LedgerProofs(connection).signed().size


def period(
    connection: Connection, checkpoint: int, since_us: int | None, until_us: int | None
) -> tuple[int, int]:
    """A period's bounds: by default from the first leaf to the last under the checkpoint, whole seconds outwards."""
    state = as_of_sizes(connection, LedgerProofs(connection).sizes(checkpoint))
    if since_us is None:
        since_us = _first_us(connection, state) // 1_000_000 * 1_000_000
    if until_us is None:
        until_us = (newest_leaf_us(connection, checkpoint) // 1_000_000 + 1) * 1_000_000
    if since_us >= until_us:
        raise ConfigError("the period is empty: it must begin before it ends", since_us=since_us)
    return since_us, until_us


def _first_us(connection: Connection, state: AsOf) -> int:
    """When the earliest first leaf of a log was written; 0 where there is none."""
    column, each = events.c, select(logs.c.id)  # log by log: a place alone is in no index
    first = select(func.min(column.at_us)).where(
        column.idx == 0, column.log.in_(each), state.has(events), has_leaf(events)
    )
    return connection.scalar(first) or 0


def build_report(
    connection: Connection,
    asked: ReportParameters,
    *,
    proof: PolicyProof | None = None,
    progress: Progress | None = None,
    is_proved: bool = True,
    responses: Sequence[Response] = (),
    framework: Framework | None = None,
) -> Report:
    """The report that was asked for; `is_proved`: its sampled leaves come with inclusion proofs.

    `framework` is one that is not of the library, whose id is asked for.

    Raises `ConfigError` for an unknown framework, `ProofError` where the checkpoint is not signed.
    """
    tell = progress or (lambda _: None)
    state = as_of_sizes(connection, LedgerProofs(connection).sizes(asked.checkpoint))
    framework = framework or load_framework(asked.framework)
    if not asked.recount:
        made = _build(connection, asked, state, proof, tell, None, is_proved, framework)
        return _concluded(made, responses)
    chosen = CustodySelection(asked.since_us, asked.until_us, asked.tenant)
    with open_recount(connection, chosen, newest_leaf_us(connection, asked.checkpoint), state) as recount:
        made = _build(connection, asked, state, proof, tell, recount, is_proved, framework)
    return _concluded(made, responses)


def _build(
    connection: Connection,
    asked: ReportParameters,
    state: AsOf,
    proof: PolicyProof | None,
    tell: Progress,
    recount: RecountProcess | None,
    is_proved: bool,
    framework: Framework,
) -> Report:
    tell("boundary")
    overview = read_leaf_counts(connection, state, asked.since_us, asked.until_us, tenant=asked.tenant)
    boundary = read_boundary(
        connection,
        asked.checkpoint,
        overview,
        tenant=asked.tenant,
        extends=asked.extends,
        period=(asked.since_us, asked.until_us),
    )
    now_us = newest_leaf_us(connection, asked.checkpoint)
    tell("custody")
    chosen = CustodySelection(asked.since_us, asked.until_us, asked.tenant)
    lives, trend = _units_and_trend(connection, chosen, now_us, state)
    listed_copies: list[JudgedCopies] = []
    copies = copy_coverage(connection, chosen, as_of=state, as_of_us=now_us, keep=listed_copies)
    offsets = {life.uuid: life.offset_us for life in lives_of(connection)}
    found, population = summary(lives), CustodyPopulation(lives, listed_copies, offsets)
    digest = population.digest()
    tell("sample and proofs")
    sampling, sample = draw_sample(
        connection,
        population,
        state,
        seed=asked.seed,
        size=asked.sample_size(),
        risk_ppm=asked.risk_ppm or RISK_PPM,
        checkpoint=asked.checkpoint,
        tenant=asked.tenant,
        is_proved=is_proved,
    )
    tell("activity and losses")
    listed, left_out = exceptions(lives)
    facts = PopulationFacts(
        _query(asked),
        population.custodies,
        population.units,
        digest,
        reconcile(connection, lives, boundary, found.total, population.units, state, tenant=asked.tenant),
    )
    made = Report(
        version=__version__,
        asked=asked,
        framework=framework,
        boundary=boundary,
        proof=_checked(proof, boundary.policies),
        population=facts,
        coverage=found.rows,
        total=found.total,
        timeline=_timeline(lives, asked),
        timeliness=_timeliness(lives, found),
        recount=None,
        sampling=sampling,
        sample=sample,
        exceptions=listed,
        exceptions_left_out=left_out,
        activity=read_activity(
            connection, state, overview, asked.since_us, asked.until_us, now_us=now_us, tenant=asked.tenant
        ),
        decided=read_decisions(
            connection, lives, state, overview, (asked.since_us, asked.until_us), tenant=asked.tenant
        ),
        read_back=read_back(connection, state, asked.since_us, asked.until_us, tenant=asked.tenant),
        losses=read_gaps_and_spills(connection, state, overview, tenant=asked.tenant),
        limitations=(),
        tiers=read_tiers(
            connection,
            state,
            copies,
            boundary.workers,
            asked.since_us,
            asked.until_us,
            tenant=asked.tenant,
        ),
        storage=storage_limitation(lives),
        window=signature_window(
            connection,
            state,
            asked.checkpoint,
            asked.since_us,
            asked.until_us,
            frozenset(one.incarnation for one in marked_processes(overview.of_kind(*LIVES))),
            tenant=asked.tenant,
        ),
        unscanned=_unscanned(overview, asked),
    )
    made = made._replace(
        board=board_facts(
            (asked.since_us, asked.until_us),
            trend=trend,
            rows=found.rows,
            logs=boundary.logs,
            workers=boundary.workers,
            periods=work_periods(overview.of_kind(*LIVES)),
            unscanned=made.unscanned,
            erasures=made.activity.erasures,
        )
    )
    if asked.extends is not None:
        earlier = as_of_sizes(connection, LedgerProofs(connection).sizes(asked.extends))
        made = made._replace(
            changes=changes_since(connection, made, earlier, newest_leaf_us(connection, asked.extends))
        )
    if recount is not None:
        tell("recount from leaves")
        made = made._replace(recount=_recounted(connection, asked, recount, found, copies))
    return made


def changes_since(connection: Connection, made: Report, state: AsOf, now_us: int) -> tuple[Change, ...]:
    """The figures of a report's period that an earlier state gave otherwise; its last leaf is of `now_us`."""
    before = _edition(connection, made.asked, state, now_us)
    after = _figures(made.total, made.activity, made.losses)
    changes = (Change(name, before[name], after[name]) for name in after)
    return tuple(each for each in changes if each.before != each.after)


def _edition(connection: Connection, asked: ReportParameters, state: AsOf, now_us: int) -> dict[str, int]:
    """The figures of the period as an earlier state gave them."""
    bounds = asked.since_us, asked.until_us
    overview = read_leaf_counts(connection, state, *bounds, tenant=asked.tenant)
    lives = read_units(connection, CustodySelection(*bounds, asked.tenant), now_us=now_us, as_of=state)
    activity = read_activity(connection, state, overview, *bounds, now_us=now_us, tenant=asked.tenant)
    losses = read_gaps_and_spills(connection, state, overview, tenant=asked.tenant)
    return _figures(summary(list(lives)).total, activity, losses)


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


def _units_and_trend(
    connection: Connection, chosen: CustodySelection, now_us: int, state: AsOf
) -> tuple[list[LifeUnits], list[TrendPeriod]]:
    """The units of the period, and the trend, from one reading of the ledger."""
    since_us, until_us = chosen.since_us or 0, chosen.until_us or 0
    start_us = trend_start_us(since_us, until_us, _first_us(connection, state) or since_us)
    wider = chosen._replace(since_us=start_us)
    lives = list(read_units(connection, wider, now_us=now_us, as_of=state, with_rules=True))
    trend = trend_of(lives, start_us, since_us, until_us)
    return [within_period(each, since_us, until_us) for each in lives], trend


def _concluded(made: Report, responses: Sequence[Response]) -> Report:
    """With what follows from its facts: the opinion, beside what people answered, and the limitations."""
    made = made._replace(responses=tuple(sorted(responses)))
    made = made._replace(opinion=opinion_of(made), statuses=control_statuses(made))
    return made._replace(limitations=limitations(made))


def _unscanned(overview: LeafCounts, asked: ReportParameters) -> tuple[str, ...]:
    """Workers that were at work in the period, and whose pools no scan looked at in it."""
    scanned = {
        item.incarnation for item in overview.counted if item.kind == "orphan-scanned" and item.in_period
    }
    if asked.tenant is not None:
        return ()  # scans are in the system log, and no tenant's
    return tuple(
        sorted(
            f"{period.worker} {life[:8]}"
            for life, period in work_periods(overview.of_kind(*LIVES)).items()
            if life not in scanned
            and period.started_us < asked.until_us
            and (period.ended_us is None or period.ended_us >= asked.since_us)
        )
    )


def _query(asked: ReportParameters) -> str:
    tenant = f" and owner = {asked.tenant}" if asked.tenant else ""
    option = f" --tenant {asked.tenant}" if asked.tenant else ""
    return QUERY.format(
        since=iso(asked.since_us),
        until=iso(asked.until_us),
        tenant=tenant,
        checkpoint=asked.checkpoint,
        option=option,
    )


def _checked(proof: PolicyProof | None, policies: Sequence[object]) -> PolicyProof | None:
    if proof is None:
        return None
    return proof._replace(is_active=any(getattr(item, "digest", "") == proof.digest for item in policies))


def _recounted(
    connection: Connection,
    asked: ReportParameters,
    recount: RecountProcess,
    found: CoverageSummary,
    copies: CopyCoverage,
) -> Recounted:
    """The whole state again, from its leaves: a tenant's custody can be used by others, through grants."""
    again = recount.answer()
    differing = differences(found, again.figures) + copy_differences(copies, again.copies)
    if asked.tenant is None:
        return Recounted(again.leaves, again.digest, *again.missing, differing)
    # How much others recorded is theirs to know.
    leaves = LedgerProofs(connection).sizes(asked.checkpoint).get(log_of(asked.tenant), 0)
    return Recounted(leaves, again.digest, 0, 0, 0, differing)


def _timeline(lives: Sequence[LifeUnits], asked: ReportParameters) -> tuple[Bin, ...]:
    span = asked.until_us - asked.since_us
    width = next((s for s in _BIN_SECONDS if s * 1_000_000 * _BINS_MAX >= span), _BIN_SECONDS[-1]) * 1_000_000
    due = np.zeros(-(-span // width), np.int64)
    covered = np.zeros_like(due)
    for each in lives:
        units, shards = each.units, each.life.shards or 1
        claimed = each.ends.column("due_boot_us")[units.row]
        offset_us = each.life.offset_us - asked.since_us
        ended = (np.where(units.due < NEVER, units.due, claimed) + offset_us) // width
        overdue = (each.overdue.due + offset_us) // width
        due += np.bincount(np.concatenate((ended, overdue)), minlength=len(due)) * shards
        covered += np.bincount(ended[is_covered(each) == 1], minlength=len(due)) * shards
    starts = range(asked.since_us, asked.until_us, width)
    return tuple(
        Bin(start, each_due, each_covered, each_due - each_covered)
        for start, each_due, each_covered in zip(starts, due.tolist(), covered.tolist(), strict=True)
    )


def _timeliness(lives: Sequence[LifeUnits], found: CoverageSummary) -> Timeliness:
    lags = np.concatenate([np.empty(0, np.int64), *(each.units.lag[each.units.lag >= 0] for each in lives)])
    places = np.searchsorted(np.array(LAG_LIMITS_US), lags, side="left")
    counts = np.bincount(places, minlength=len(LAG_LIMITS_US) + 1).tolist()
    bins = tuple(Lag(limit, count) for limit, count in zip((*LAG_LIMITS_US, 0), counts, strict=True))
    return Timeliness(found.lag_us_p50, found.lag_us_p99, found.lag_us_max, bins)
