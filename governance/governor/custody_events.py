"""From what the allocator did to events for the ledger.

V1  Every block handed out appears once as written (at admission, or at release for what came after), once as ended,
    and once per shard in a receipt.
V2  Building an event costs a tuple; runs are gathered on the writer's thread.
V3  A launch that covers several owners is one receipt per owner, so that each tenant's log is complete by itself.
"""

from __future__ import annotations

from collections.abc import Iterator

import numpy as np
from numpy.typing import NDArray

from kvcustody.allocator.manager.block_manager import BlockManager
from kvcustody.allocator.pool.accounting import EndedRun
from kvcustody.allocator.pool.block_state import NEVER_US
from kvcustody.allocator.pool.records import AttachedBlocks, ReleasedBlocks, Scrubbed
from kvcustody.allocator.prefix.sequence import RunningSequence
from kvcustody.audit.events import (
    BlocksAttached,
    BlocksReleased,
    CustodyEnded,
    Event,
    ReceiptRecorded,
    ResidencyOpened,
    ResidencyReleased,
    Runs,
)
from kvcustody.audit.events.block_runs import Run
from kvcustody.governance.decisions.access_plan import AnyPlan, DomainLabel, label_of, plan_of
from kvcustody.governance.lazy_runs import FlatRuns

NO_TIME_US = 0


def opened(
    plan: AnyPlan,
    sequence: RunningSequence,
    manager: BlockManager,
    pool: int,
    reasons: tuple[str, ...],
    revision: int,
    now_us: int,
) -> ResidencyOpened:
    """The residency as it began: who, under which decision, which blocks it attached and which it was handed."""
    principal = plan.principal
    residency = sequence.residency
    attached = _attached(sequence)
    domains: tuple[int, ...] = (residency.domain.tag,)
    leaf = sequence.leaf
    if leaf is not None and leaf.domain is not residency.domain:
        domains = (residency.domain.tag, leaf.domain.tag)
    return ResidencyOpened(
        now_us,
        residency.id,
        plan.tenant,
        principal.subject,
        principal.session,
        principal.subject_asserted or principal.session_asserted,
        plan.classification,
        domains,
        FlatRuns(attached, manager.pool.generation[attached], pool) if len(attached) else (),
        reasons,
        revision,
        now_us + residency.domain.absolute_us if residency.domain.cacheable else 0,
        _handed_out(sequence, pool),
        plan.model,
        residency.trace,
    )


def _attached(sequence: RunningSequence) -> NDArray[np.int64]:
    """The blocks of the path it found, in every layer group; to be taken before it publishes its own."""
    blocks = sequence.table[: sequence.hit_blocks]
    if not (sequence.windows and sequence.hit_blocks):
        return blocks
    windows: list[NDArray[np.int64]] = []
    node = sequence.leaf
    while node is not None:
        windows += node.windows
        node = node.parent
    return np.concatenate((blocks, *windows))


def _handed_out(sequence: RunningSequence, pool: int) -> Runs:
    """The blocks of the admission itself: one hand-out a layer group, so one run, without a look at any block."""
    first = sequence.hit_blocks
    if first == sequence.block_count:
        return ()
    own = Run(sequence.table[first : sequence.block_count], sequence.first_generation, pool)
    if not sequence.extra_written:
        return (own,)
    return (
        own,
        *(Run(blocks, int(numbers[0]), pool) for blocks, numbers in sequence.extra_written if len(blocks)),
    )


def written(sequence: RunningSequence, manager: BlockManager, pool: int) -> Runs:
    """Every block the sequence was handed after its admission: growth, copies, windows.

    To be taken before its release, while the generations stand.
    """
    if sequence.block_count == sequence.admitted_blocks:
        return ()
    blocks, generations = unlisted(sequence, manager)
    return FlatRuns(blocks, generations, pool)


def unlisted(sequence: RunningSequence, manager: BlockManager) -> tuple[NDArray[np.int64], NDArray[np.int64]]:
    """Blocks and generations the sequence was handed since its admission: generations only rise (L3)."""
    blocks = sequence.table[sequence.hit_blocks : sequence.block_count]
    generations = manager.pool.generation[blocks]
    if sequence.extra_written:
        blocks = np.concatenate([blocks, *(more for more, _ in sequence.extra_written)])
        generations = np.concatenate([generations, *(numbers for _, numbers in sequence.extra_written)])
    new = generations >= sequence.recorded_until
    if sequence.passed:
        new &= ~np.isin(generations, np.concatenate(sequence.passed))
    return blocks[new], generations[new]


def attached(join: AttachedBlocks, pool: int) -> BlocksAttached:
    """A running request came to refer to what another had published before it could."""
    residency = join.residency
    plan = plan_of(residency)
    runs = FlatRuns(join.blocks, join.generations, pool)
    return BlocksAttached(join.at_us, residency.id, plan.tenant, runs, residency.trace)


def released_blocks(gone: ReleasedBlocks, pool: int) -> Iterator[Event]:
    """A running request stopped using blocks: a tail that it copied, a window that it passed."""
    residency = gone.residency
    plan = plan_of(residency)
    head = (gone.at_us, residency.id, plan.tenant, "passed")
    own = gone.generations >= gone.recorded_until
    for chosen, is_own in ((own, True), (~own, False)):
        if chosen.any():
            runs = FlatRuns(gone.blocks[chosen], gone.generations[chosen], pool)
            yield BlocksReleased(*head, runs, is_own, NO_TIME_US, trace=residency.trace)


def released(
    sequence: RunningSequence, runs: Runs, tenant: str, cause: str, now_us: int
) -> ResidencyReleased:
    """The residency as it left: what it wrote, and until when it holds."""
    residency = sequence.residency
    hold_us = residency.deadline_us if residency.is_held else NO_TIME_US
    return ResidencyReleased(now_us, residency.id, tenant, cause, runs, hold_us, "", residency.trace)


def ended(custody: EndedRun, pool: int, now_us: int) -> CustodyEnded:
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


def receipts(
    scrubbed: Scrubbed, launch: int, pool: int, bytes_per_block: int, now_us: int
) -> Iterator[Event]:
    """One receipt per owner of the launch, and one more for what failed to verify."""
    result = scrubbed.result
    failed = result.failed
    by_owner: dict[str | None, list[EndedRun]] = {}
    for custody in scrubbed.custodies:
        label = custody.domain.label if custody.domain is not None else None
        by_owner.setdefault(label.tenant if isinstance(label, DomainLabel) else None, []).append(custody)
    for tenant, custodies in by_owner.items():
        blocks = _joined([custody.blocks for custody in custodies])
        generations = _joined([custody.generations for custody in custodies])
        bad = np.isin(blocks, failed) if len(failed) else None
        for outcome, chosen in (("ok", None if bad is None else ~bad), ("failed", bad)):
            if outcome == "failed" and (bad is None or not bad.any()):
                continue
            part = blocks if chosen is None else blocks[chosen]
            if not len(part):
                continue
            numbers = generations if chosen is None else generations[chosen]
            yield ReceiptRecorded(
                now_us,
                launch,
                scrubbed.shard,
                tenant,
                result.method,
                result.device,
                bytes_per_block * len(part) if result.bytes else 0,
                result.started_us,
                result.ended_us,
                result.level,
                scrubbed.share,
                _verified(scrubbed, len(part)),
                outcome,
                FlatRuns(part, numbers, pool),
            )


def _verified(scrubbed: Scrubbed, blocks: int) -> int:
    """How many of these blocks were read back: all, none, or what the launch counted (it has one owner if sampled)."""
    level = scrubbed.result.level
    if level == "full":
        return blocks
    return min(blocks, scrubbed.result.verified) if level == "sampled" else 0


def _joined(parts: list[NDArray[np.int64]]) -> NDArray[np.int64]:
    return parts[0] if len(parts) == 1 else np.concatenate(parts)
