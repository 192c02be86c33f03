"""One replay from start to end: open the environment, run the workload, close, and report what the ledger proves.

1. However the replay ends, the Governor is closed, the ledger flushed, and the report covers what ran; `error` says
   what stopped it.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Mapping
from dataclasses import dataclass, replace

from kvcustody.audit.evidence.coverage.conservation import PoolCounts, conservation
from kvcustody.audit.evidence.coverage.summary import CoverageRow, coverage
from kvcustody.audit.evidence.query.evidence_size import EvidenceSize, evidence_size
from kvcustody.audit.store.database.dialect import dialect_of
from kvcustody.audit.write.event_writer import EventWriter
from kvcustody.errors import CustodyError, LedgerError
from kvcustody.governance.custody_events import worker_stopped
from kvcustody.governance.observability.metrics import worker_status
from kvcustody.governance.observability.stats import PoolStats, Stats
from kvcustody.lab.replay.answers import PoolNeed, ReplayAnswers, answers_of
from kvcustody.lab.replay.options import EnvironmentOptions, RunnerOptions
from kvcustody.lab.replay.report import ORPHANS, ReplayCoverage, ReplayIdentity, ReplayReport, Spread
from kvcustody.lab.replay.run.environment import WORKER, ReplayEnvironment, open_environment, shape_for
from kvcustody.lab.replay.run.runner import Runner, duration_us
from kvcustody.lab.replay.sharing import SharingCounter
from kvcustody.lab.replay.summary import AGE_EDGES_US, LAG_EDGES_US
from kvcustody.lab.replay.workload.model import Workload
from kvcustody.lab.replay.workload.tenant_assignment import LabelledPrincipals

FLUSH_SECONDS = 30.0
OUTAGE_SECONDS = 2.0


def run_job(
    workload: Workload,
    options: EnvironmentOptions,
    runner_options: RunnerOptions,
    *,
    progress: Callable[[], None] = lambda: None,
) -> ReplayReport:
    """Replay `workload` and return its report."""
    started = time.monotonic()
    proved: _Proofs | None = None
    sharing = SharingCounter(options.block_tokens, has_content=workload.has_content)
    try:
        with open_environment(
            options, workload.house_prompt, origin=workload.origin, past_us=duration_us(workload)
        ) as stand:
            size_before = _disk_bytes(stand)
            population = LabelledPrincipals(stand.policy, workload.tenants, workload.tenant_names)
            runner = Runner(stand.governor, stand.cache, stand.clock, stand.model, population, options=runner_options)
            begin_us = stand.clock.now_us()
            error = _run(runner, replace(workload, jobs=sharing.passing(workload.jobs)), progress)
            virtual_seconds = (stand.clock.now_us() - begin_us) / 1e6
            running = stand.governor.stats()
            offloading = stand.governor.offload
            tiers = [] if offloading is None else offloading.transfers.uses()
            identities = _scanned(stand)
            stand.governor.close()
            pool = stand.governor.stats().pools[0]
            proved, proof_error = _prove(stand, pool, stand.governor.counts(), size_before)
            error = error or proof_error
    except LedgerError as problem:
        if proved is None:
            raise
        error = error or problem  # closing could not keep everything: the figures stand all the same (rule 1)
    _fill(runner, stand, running, options.block_tokens)
    status = worker_status(running, options.block_tokens, stand.cache.memory.bytes_per_block)
    return ReplayReport(
        title=workload.title,
        origin=workload.origin,
        settings=_settings(workload, stand, options),
        tenants=runner.results,
        samples=runner.samples,
        coverage=proved.coverage,
        identities=proved.identities + identities,
        scrub_lag=proved.lag,
        retention_age={name: ages.spread() for name, ages in stand.observer.age.items()},
        age_histogram=stand.observer.ages.histogram(AGE_EDGES_US),
        lag_histogram=stand.observer.scrub_lag.histogram(LAG_EDGES_US),
        residue_checked_blocks=stand.cache.checked_blocks,
        residue_bytes=stand.cache.residue_bytes,
        read_tokens=stand.cache.read_tokens,
        wrong_tokens=stand.cache.wrong_tokens,
        drift_blocks=pool.total - pool.by_state["clean"],
        expired_residencies=running.pools[0].expired_residencies,
        evicted_blocks=running.pools[0].evicted,
        status=status,
        charged=running.charged,
        lineages=runner.lineages,
        tiers=tiers,
        seconds=time.monotonic() - started,
        virtual_seconds=virtual_seconds,
        error=error,
        remarks=workload.remarks,
        answers=_answers(workload, runner, sharing, status, proved.size),
    )


def _answers(
    workload: Workload,
    runner: Runner,
    sharing: SharingCounter,
    status: Mapping[str, float],
    ledger: EvidenceSize | None,
) -> ReplayAnswers:
    most_used = max((sample.active + sample.cached for sample in runner.samples), default=0)
    pool = PoolNeed(int(status.get("blocks.total", 0)), most_used, int(status.get("advised_blocks", 0)), sharing.blocks)
    return answers_of(
        sharing,
        found_tokens=sum(row.hit_tokens for row in runner.results),
        pool=pool,
        ledger=ledger,
        requests=sum(row.requests for row in runner.results),
        span_us=workload.span_us,
    )


def _run(runner: Runner, workload: Workload, progress: Callable[[], None]) -> BaseException | None:
    """Run the workload. What stops it is returned, because the figures until then still count (rule 1)."""
    try:
        runner.run(workload.jobs, workload.span_us, workload.origin_us, progress)
    except (CustodyError, KeyboardInterrupt) as error:
        return error
    return None


def _outage(writer: EventWriter) -> str:
    """Return why the ledger lacks some of the submitted events, or an empty text. Spilled events count as lacking."""
    begun = time.monotonic()
    down_since: float | None = None
    while time.monotonic() - begun < FLUSH_SECONDS:
        if writer.flush(0.2) and writer.status().healthy:
            return ""
        status = writer.status()
        if status.healthy:
            down_since = None
        elif down_since is None:
            down_since = time.monotonic()
        elif time.monotonic() - down_since > OUTAGE_SECONDS:
            break
    status = writer.status()
    kept = "; what is missing is in the spill, and the next process adds it" if status.spilled_bytes else ""
    return (status.cause or "the ledger is slow") + kept


@dataclass(frozen=True, slots=True)
class _Proofs:
    coverage: ReplayCoverage
    lag: Spread
    identities: list[ReplayIdentity]
    size: EvidenceSize | None = None


def _disk_bytes(stand: ReplayEnvironment) -> int:
    with stand.engine.connect() as connection:
        return dialect_of(connection).size_bytes(connection)


def _prove(
    stand: ReplayEnvironment, pool: PoolStats, counts: PoolCounts, size_before: int
) -> tuple[_Proofs, CustodyError | None]:
    """Return the ledger's proof of this replay, once it has every event."""
    now_us = stand.clock.now_us()
    cause = "end of the replay"
    stand.writer.submit([worker_stopped(now_us, WORKER, cause, pool.allocated, pool.scrubbed, counts.tiers)])
    nothing = _Proofs(ReplayCoverage(), Spread(0, None, None, None), [])
    cause = _outage(stand.writer)
    if cause:
        return nothing, LedgerError(f"the ledger is incomplete: {cause}; coverage is not shown", cause=cause)
    with stand.engine.connect() as connection:
        found = coverage(connection, incarnation=stand.writer.incarnation)
        equations = conservation(connection, stand.writer.incarnation, counts)
        size = evidence_size(connection, stand.writer.incarnation)
    total = found.total
    identities = [ReplayIdentity(row.name, row.left, row.right, "ledger; pool; device") for row in equations]
    lag = Spread(total.ended, found.lag_us_p50, found.lag_us_p99, found.lag_us_max)
    broken = [row.name for row in equations if row.difference]
    proofs = _Proofs(_coverage(total), lag, identities, size._replace(disk_bytes=size.disk_bytes - size_before))
    return proofs, LedgerError(f"conservation does not hold: {'; '.join(broken)}") if broken else None


def _coverage(total: CoverageRow) -> ReplayCoverage:
    return ReplayCoverage(
        due=total.due,
        in_time=total.in_time,
        late=total.late,
        failed=total.failed,
        missing=total.missing,
        unproven=total.unproven,
        overdue=total.overdue,
        disputed=total.disputed,
        reread_blocks=total.reread_blocks,
        bytes_by_level=(
            ("launched", total.launched_bytes),
            ("retired", total.retired_bytes),
            ("sampled", total.sampled_bytes),
            ("full", total.full_bytes),
        ),
    )


def _scanned(stand: ReplayEnvironment) -> list[ReplayIdentity]:
    """Scan once more and record it, so that a ledger report shows the same scan as this replay."""
    problems = stand.governor.check()
    findings = stand.governor.scan_and_recover().findings
    return [
        ReplayIdentity(ORPHANS, len(findings), 0, "allocator; running requests; holds"),
        ReplayIdentity("broken invariants = 0", len(problems), 0, "recomputed from the state arrays"),
    ]


def _fill(runner: Runner, stand: ReplayEnvironment, running: Stats, block_tokens: int) -> None:
    """Add the Governor's and the events' figures for each tenant to the runner's rows."""
    for row in runner.results:
        tally = running.tenants.get(row.tenant)
        if tally is not None:
            row.denials.update(tally.denials)
            row.deferrals.update(tally.deferred)
            row.recomputed_blocks = tally.recomputed_blocks
            row.shared_hit_tokens = tally.granted_hit_blocks * block_tokens
        row.ended_blocks.update(stand.observer.ended.get(row.tenant, {}))
        row.scrubbed_blocks = stand.observer.scrubbed[row.tenant]


def _settings(workload: Workload, stand: ReplayEnvironment, options: EnvironmentOptions) -> dict[str, str]:
    shape = shape_for(options.block_tokens)
    memory = stand.cache.memory
    size = memory.blocks * memory.bytes_per_block / (1 << 20)
    return {
        "policy": f"{stand.policy.name} (profile {stand.policy.profile.value})",
        "pool": f"{memory.blocks:,} blocks of {options.block_tokens} tokens, {size:,.0f} MiB on {options.device}",
        "KV layout": f"{shape.layers} layers, {shape.kv_heads} kv heads of {shape.head_dim}, float16",
        "ledger": str(options.database),
        **_tier_settings(options),
        **dict(workload.notes),
    }


def _tier_settings(options: EnvironmentOptions) -> dict[str, str]:
    if not options.host_tier_bytes:
        return {}
    return {
        "host tier": f"{options.host_tier_bytes / (1 << 20):,.0f} MiB, sealed; computing again is taken to do "
        f"{options.recompute_tokens_per_second:,.0f} tokens/s"
    }
