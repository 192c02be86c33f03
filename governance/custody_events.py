"""Converts an allocator's acts, ours or an engine's, to events for the ledger.

`governor.sequence_events` and `external.residency_events` determine which blocks; their common part is here.

- Every block handed out appears once as written, once as ended, and once per shard in a receipt. It appears as written
  at admission, or at release if it was added later.
- Building an event costs a tuple; runs are gathered on the writer's thread.
- A launch that covers several owners gives one receipt per owner, so that each tenant's log is complete.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from typing import NamedTuple

import numpy as np
from numpy.typing import NDArray

from kvcustody.allocator.pool.accounting import Domain, EndedRun
from kvcustody.allocator.pool.block_state import NEVER_US
from kvcustody.allocator.pool.integrity import MismatchedBlocks
from kvcustody.allocator.pool.records import ReleasedBlocks, Scrubbed
from kvcustody.allocator.pool.residency import Residency
from kvcustody.audit.evidence.coverage.conservation import TierCounts
from kvcustody.audit.kinds import (
    BlocksAssigned,
    BlocksReleased,
    CustodyEnded,
    Event,
    IntegrityMismatch,
    ReceiptRecorded,
    ResidencyOpened,
    ResidencyReleased,
    Runs,
    WorkerStopped,
)
from kvcustody.audit.kinds.block_runs import FlatRuns
from kvcustody.audit.kinds.route_events import RouteFound
from kvcustody.governance.decisions.access_plan import AdmissionFacts, DomainLabel, label_of
from kvcustody.governance.edge.route_receipt import RouteReceipt

NO_TIME_US = 0


class FoundHere(NamedTuple):
    """The cache state that a request met at its worker, for its route receipt."""

    prompt_tokens: int
    found_tokens: int
    queue: int  # requests that were here when it came
    free_blocks: int
    crosses: bool
    agrees: bool


def route_found(receipt: RouteReceipt, facts: AdmissionFacts, found: FoundHere, at_us: int, trace: str) -> list[Event]:
    """The worker's half of a route receipt: written where the door asks, and always for another tenant's blocks."""
    if not (receipt.is_asked or found.crosses):
        return []
    asked = receipt.is_asked
    return [RouteFound(at_us, facts.tenant, receipt.name, asked, *found, facts.model, trace)]


def residency_opened(
    facts: AdmissionFacts,
    residency: Residency,
    began_us: int,
    domains: tuple[int, ...],
    attached: Runs,
    written: Runs,
    reasons: tuple[str, ...],
    revision: int,
    earlier_blocks: int = 0,
) -> ResidencyOpened:
    """The residency at its start: requester, decision, attached blocks and allocated blocks."""
    domain = residency.domain
    tenant, subject, session, asserted, classification, model = facts
    return ResidencyOpened(  # once for every request: by position, because names cost a microsecond
        began_us,
        residency.id,
        tenant,
        subject,
        session,
        asserted,
        classification,
        domains,
        attached,
        reasons,
        revision,
        began_us + domain.absolute_us if domain.cacheable else NO_TIME_US,
        written,
        model,
        residency.trace,
        earlier_blocks,
    )


def blocks_assigned(at_us: int, residency: Residency, domain: Domain, runs: FlatRuns) -> BlocksAssigned:
    """Blocks allocated to the residency in another tenant's domain; that tenant is charged."""
    label = label_of(domain)
    return BlocksAssigned(at_us, residency.id, residency.account.name, label.tenant, label.classification, runs)


def blocks_passed(gone: ReleasedBlocks, pool: int) -> Iterator[Event]:
    """Blocks that a running request stopped using: a copied tail, or a passed window."""
    residency = gone.residency
    head = (gone.at_us, residency.id, residency.account.name, "passed")
    own = gone.generations >= gone.recorded_until
    for chosen, is_own in ((own, True), (~own, False)):
        if chosen.any():
            runs = FlatRuns(gone.blocks[chosen], gone.generations[chosen], pool)
            yield BlocksReleased(*head, runs, is_own, NO_TIME_US, trace=residency.trace)


def residency_released(residency: Residency, written: Runs, cause: str, now_us: int) -> ResidencyReleased:
    """The residency at its end: the blocks that it wrote, and the end of its hold."""
    hold_us = residency.deadline_us if residency.is_held else NO_TIME_US
    return ResidencyReleased(now_us, residency.id, residency.account.name, cause, written, hold_us, "", residency.trace)


def custody_ended(custody: EndedRun, pool: int, now_us: int) -> CustodyEnded:
    """The end of one run's custody."""
    domain = custody.domain
    assert domain is not None
    label = label_of(domain)
    return CustodyEnded(
        now_us,
        label.tenant,
        label.classification,
        FlatRuns(custody.blocks, custody.generations, pool),
        custody.cause,
        custody.due_us,
        custody.ended_us,
        custody.retired_us,
        domain.scrub_within_us,
        custody.ceiling_us if custody.ceiling_us < NEVER_US else NO_TIME_US,
    )


def integrity_mismatch(found: MismatchedBlocks, pool: int) -> IntegrityMismatch:
    """Blocks that changed between publishing and attaching."""
    label = label_of(found.domain)
    runs = FlatRuns(found.blocks, found.generations, pool)
    return IntegrityMismatch(found.at_us, label.tenant, label.classification, runs, found.requests)


def scrub_receipts(scrubbed: Scrubbed, launch: int, pool: int, bytes_per_block: int, now_us: int) -> Iterator[Event]:
    """One receipt for each owner of the launch, and one for blocks that failed verification."""
    result = scrubbed.result
    failed = result.failed
    by_owner: dict[str | None, list[EndedRun]] = {}
    for custody in scrubbed.custodies:
        label = custody.domain.label if custody.domain is not None else None
        by_owner.setdefault(label.tenant if isinstance(label, DomainLabel) else None, []).append(custody)
    for tenant, custodies in by_owner.items():
        blocks = _concatenated([custody.blocks for custody in custodies])
        generations = _concatenated([custody.generations for custody in custodies])
        bad = np.isin(blocks, failed) if len(failed) else None
        for outcome, chosen in (("ok", None if bad is None else ~bad), ("failed", bad)):
            if outcome == "failed" and (bad is None or not bad.any()):
                continue
            part = blocks if chosen is None else blocks[chosen]
            if not len(part):
                continue
            numbers = generations if chosen is None else generations[chosen]
            yield ReceiptRecorded(
                at_us=now_us,
                launch=launch,
                shard=scrubbed.shard,
                tenant=tenant,
                method=result.method,
                device=result.device,
                bytes=bytes_per_block * len(part) if result.bytes else 0,
                started_us=result.started_us,
                ended_us=result.ended_us,
                level=result.level,
                share=scrubbed.share,
                verified=_verified(scrubbed, len(part)),
                result=outcome,
                runs=FlatRuns(part, numbers, pool),
            )


def worker_stopped(
    at_us: int,
    worker: str,
    cause: str,
    allocated: int,
    scrubbed: tuple[int, ...],
    tiers: Sequence[TierCounts] = (),
) -> WorkerStopped:
    """The orderly end of a process, with its own counters and those of its tiers."""
    return WorkerStopped(
        at_us,
        worker,
        cause,
        allocated,
        scrubbed,
        tuple(one.tier for one in tiers),
        tuple(one.stored for one in tiers),
        tuple(one.ended for one in tiers),
        tuple(one.destroyed for one in tiers),
    )


def _verified(scrubbed: Scrubbed, blocks: int) -> int:
    """How many of these blocks were read back: all, none, or what the launch counted (it has one owner if sampled)."""
    level = scrubbed.result.level
    if level == "full":
        return blocks
    return min(blocks, scrubbed.result.verified) if level == "sampled" else 0


def _concatenated(parts: list[NDArray[np.int64]]) -> NDArray[np.int64]:
    return parts[0] if len(parts) == 1 else np.concatenate(parts)
