"""From what happened in an engine's own pool to events for the ledger (governance.evidence, V1–V3)."""

from __future__ import annotations

from collections.abc import Iterator, Sequence

import numpy as np

from kvcustody.allocator.external.pool import ExternalPool
from kvcustody.allocator.external.residency import ExternalResidency
from kvcustody.allocator.pool.records import ReleasedBlocks, Scrubbed
from kvcustody.audit.events import (
    BlocksReleased,
    Event,
    ResidencyOpened,
    ResidencyReleased,
    Runs,
)
from kvcustody.audit.events.block_runs import Run
from kvcustody.governance.decisions.access_plan import Plan, label_of
from kvcustody.governance.decisions.reuse_decision import via_reasons
from kvcustody.governance.governor import custody_events as evidence
from kvcustody.governance.lazy_runs import FlatRuns

NO_TIME_US = 0
NO_IDENTITY = ("no-identity",)


def opened(residency: ExternalResidency, pool: ExternalPool, revision: int) -> ResidencyOpened:
    """The residency as it began. Everything it was handed so far is on record with it."""
    plan = residency.facts if isinstance(residency.facts, Plan) else None
    domain = residency.domain
    label = label_of(domain)
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
    principal = plan.principal if plan is not None else None
    return ResidencyOpened(
        residency.began_us,
        residency.id,
        residency.tenant,
        principal.subject if principal is not None else None,
        principal.session if principal is not None else None,
        principal is not None and (principal.subject_asserted or principal.session_asserted),
        label.classification,
        domains,
        FlatRuns(attached, residency.attached_generations, pool.number) if len(attached) else (),
        reasons,
        revision,
        residency.began_us + domain.absolute_us if domain.cacheable else NO_TIME_US,
        tuple(Run(blocks, first, pool.number) for blocks, first in residency.handed),
        plan.model if plan is not None else "",
        residency.trace,
    )


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


def released(residency: ExternalResidency, runs: Runs, cause: str, now_us: int) -> ResidencyReleased:
    """The residency as it left: what it wrote, and until when it holds."""
    hold_us = residency.deadline_us if residency.is_held else NO_TIME_US
    return ResidencyReleased(
        now_us, residency.id, residency.tenant, cause, runs, hold_us, "", residency.trace
    )


def ends(pool: ExternalPool, now_us: int) -> list[Event]:
    """What running requests let go of, then the ends of custody, since the last call."""
    events: list[Event] = []
    if pool.released:
        passed, pool.released = pool.released, []
        for gone in passed:
            events += _released_blocks(gone, pool.number)
    events += [evidence.ended(custody, pool.number, now_us) for custody in pool.queue.take_ended()]
    return events


def _released_blocks(gone: ReleasedBlocks, pool: int) -> Iterator[Event]:
    residency = gone.residency
    head = (gone.at_us, residency.id, residency.account.name, "passed")
    own = gone.generations >= gone.recorded_until
    for chosen, is_own in ((own, True), (~own, False)):
        if chosen.any():
            runs = FlatRuns(gone.blocks[chosen], gone.generations[chosen], pool)
            yield BlocksReleased(*head, runs, is_own, NO_TIME_US, trace=residency.trace)


def receipts(launches: Sequence[Scrubbed], first: int, pool: ExternalPool, now_us: int) -> list[Event]:
    """One receipt per launch and owner; launches are numbered from `first` + 1."""
    events: list[Event] = []
    for number, scrubbed in enumerate(launches, first + 1):
        events += evidence.receipts(scrubbed, number, pool.number, pool.bytes_per_block, now_us)
    return events
