"""Which blocks a request of an engine's own pool attached and wrote, as events for the ledger."""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np
from numpy.typing import NDArray

from kvcustody.allocator.external.pool import ExternalPool
from kvcustody.allocator.external.residency import ExternalResidency
from kvcustody.allocator.pool.accounting import Domain
from kvcustody.allocator.pool.records import Scrubbed
from kvcustody.audit.kinds import Event, ResidencyOpened, Runs
from kvcustody.audit.kinds.block_runs import FlatRuns, Run
from kvcustody.governance.custody_events import (
    blocks_assigned,
    blocks_passed,
    custody_ended,
    residency_opened,
    scrub_receipts,
)
from kvcustody.governance.decisions.access_plan import AdmissionFacts, Plan, label_of
from kvcustody.governance.decisions.reuse_decision import via_reasons
from kvcustody.tenants import ANONYMOUS

NO_IDENTITY = ("no-identity",)


def opened(residency: ExternalResidency, pool: ExternalPool, revision: int) -> ResidencyOpened:
    """The residency as it began. Everything it was handed so far is on record with it."""
    plan = residency.facts if isinstance(residency.facts, Plan) else None
    domain = residency.domain
    domains: tuple[int, ...] = (domain.tag,)
    reasons = residency.reasons if plan is not None else NO_IDENTITY
    attached = residency.attached
    if len(attached):
        others = [tag for tag in set(pool.tag[attached].tolist()) if tag != domain.tag]
        domains = (domain.tag, *sorted(others))
        if plan is not None:
            for tag in others:
                reasons = (*reasons, *via_reasons(plan, pool.domains[tag]))
    residency.recorded = len(residency.handed)
    residency.recorded_until = pool.next_generation
    return residency_opened(
        plan.facts if plan is not None else _anonymous(domain),
        residency,
        residency.began_us,
        domains=domains,
        attached=FlatRuns(attached, residency.attached_generations, pool.number) if len(attached) else (),
        written=tuple(Run(blocks, first, pool.number) for blocks, first in residency.handed),
        reasons=reasons,
        revision=revision,
        earlier_blocks=residency.earlier_blocks,
    )


def assigned(residency: ExternalResidency, pool: ExternalPool, among: NDArray[np.int64] | None = None) -> list[Event]:
    """What it was handed for a segment of another tenant, as leaves list it: once, or only what is `among` these."""
    pending, residency.assigned = residency.assigned, []
    events: list[Event] = []
    for blocks, first, domain in pending:
        generations = np.arange(first, first + len(blocks))
        chosen = np.ones(len(blocks), np.bool_) if among is None else np.isin(generations, among)
        if chosen.any():
            runs = FlatRuns(blocks[chosen], generations[chosen], pool.number)
            events.append(blocks_assigned(residency.began_us, residency, domain, runs))
        rest = np.flatnonzero(~chosen)
        residency.assigned += [(blocks[at : at + 1], first + int(at), domain) for at in rest]
    return events


def _anonymous(domain: Domain) -> AdmissionFacts:
    return AdmissionFacts(ANONYMOUS, None, None, False, label_of(domain).classification, "")


def written(residency: ExternalResidency, pool: ExternalPool) -> Runs:
    """Every block it was handed since its opening was recorded, less those it let go of before."""
    later = residency.handed[residency.recorded :]
    if not later:
        return ()
    if not residency.passed and len(later) == 1:
        return (Run(later[0][0], later[0][1], pool.number),)
    blocks = np.concatenate([run for run, _ in later])
    generations = np.concatenate([np.arange(first, first + len(run)) for run, first in later])
    if residency.passed:
        kept = ~np.isin(generations, np.concatenate(residency.passed))
        blocks, generations = blocks[kept], generations[kept]
    return FlatRuns(blocks, generations, pool.number)


def unreported(residency: ExternalResidency) -> int:
    """How many blocks no leaf lists yet."""
    later = residency.handed[residency.recorded :]
    count = sum(len(run) for run, _ in later)
    if count and residency.passed:
        passed = np.concatenate(residency.passed)
        count -= int(np.count_nonzero(passed >= residency.recorded_until))
    return count


def ends(pool: ExternalPool, now_us: int) -> list[Event]:
    """Return blocks that running requests released, then the ends of custody, since the last call."""
    events: list[Event] = []
    if pool.released:
        passed, pool.released = pool.released, []
        for gone in passed:
            events += blocks_passed(gone, pool.number)
            if isinstance(gone.residency, ExternalResidency) and gone.residency.assigned:
                events += assigned(gone.residency, pool, gone.generations)
    events += [custody_ended(custody, pool.number, now_us) for custody in pool.queue.take_ended()]
    return events


def receipts(launches: Sequence[Scrubbed], first: int, pool: ExternalPool, now_us: int) -> list[Event]:
    """Return one receipt per launch and owner; launches are numbered from `first` + 1."""
    events: list[Event] = []
    for number, scrubbed in enumerate(launches, first + 1):
        events += scrub_receipts(scrubbed, number, pool.number, pool.bytes_per_block, now_us)
    return events
