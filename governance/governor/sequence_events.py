"""Events of sequences in our own pools: the blocks that they attached, joined and wrote."""

from __future__ import annotations

import numpy as np
from numpy.typing import NDArray

from kvcustody.allocator.manager.block_manager import BlockManager
from kvcustody.allocator.pool.accounting import Domain
from kvcustody.allocator.pool.records import AttachedBlocks
from kvcustody.allocator.prefix.sequence import RunningSequence
from kvcustody.audit.kinds import BlocksAttached, Event, ResidencyOpened, Runs
from kvcustody.audit.kinds.block_runs import FlatRuns, Run
from kvcustody.governance.custody_events import blocks_assigned, residency_opened
from kvcustody.governance.decisions.access_plan import AnyPlan


def opening_events(
    plan: AnyPlan,
    sequence: RunningSequence,
    manager: BlockManager,
    reasons: tuple[str, ...],
    revision: int,
    now_us: int,
) -> tuple[Event, ...]:
    """Return the events of a sequence's start, with its blocks that belong to another tenant."""
    opened = sequence_opened(plan, sequence, manager, reasons, revision, now_us)
    return (opened, *sequence_assigned(sequence, manager, now_us))


def sequence_opened(
    plan: AnyPlan,
    sequence: RunningSequence,
    manager: BlockManager,
    reasons: tuple[str, ...],
    revision: int,
    now_us: int,
) -> ResidencyOpened:
    """Return the event of a sequence's start: attached and allocated blocks."""
    residency, pool = sequence.residency, manager.number
    attached = _attached(sequence)
    domains: tuple[int, ...] = (residency.domain.tag,)
    leaf = sequence.leaf
    if sequence.monitored is not None:
        others = {domain.tag for domain in path_domains(sequence)} - {residency.domain.tag}
        domains = (residency.domain.tag, *sorted(others))
    elif leaf is not None and leaf.domain is not residency.domain:
        domains = (residency.domain.tag, leaf.domain.tag)
    return residency_opened(
        plan.facts,
        residency,
        now_us,
        domains,
        FlatRuns(attached, manager.pool.generation[attached], pool) if len(attached) else (),
        _handed_out(sequence, pool),
        reasons,
        revision,
        # All that it found, windows too, or so many blocks of its path.
        len(attached) if sequence.earlier_blocks == sequence.hit_blocks else sequence.earlier_blocks,
    )


def sequence_assigned(sequence: RunningSequence, manager: BlockManager, now_us: int) -> list[Event]:
    """Return the blocks allocated for another tenant's segment; call it before the sequence publishes."""
    account, generation = sequence.account, manager.pool.generation
    if all(span.domain.owner is account for span in sequence.spans):
        return []
    tables = [(sequence.hit_blocks, sequence.blocks[sequence.hit_blocks :])]
    tables += zip(sequence.window_first, sequence.windows, strict=True)
    shared = [
        (domain, blocks[start - first : end - first].copy())
        for first, blocks in tables
        for start, end, domain in sequence.shares(first, first + len(blocks))
        if domain.owner is not account
    ]
    return [
        blocks_assigned(now_us, sequence.residency, domain, FlatRuns(blocks, generation[blocks], manager.number))
        for domain, blocks in shared
    ]


def path_domains(sequence: RunningSequence) -> list[Domain]:
    """Return the domain of each matched block, in token order; call it before the sequence publishes."""
    found: list[Domain] = []
    node = sequence.leaf
    while node is not None:
        found[:0] = [node.domain] * node.length
        node = node.parent
    return found[: sequence.hit_blocks]


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


def written(sequence: RunningSequence, manager: BlockManager) -> Runs:
    """Return every block that the sequence was given after its admission: growth, copies, windows.

    To be taken before its release, while the generations stand.
    """
    if sequence.block_count == sequence.admitted_blocks:
        return ()
    blocks, generations = unlisted(sequence, manager)
    return FlatRuns(blocks, generations, manager.number)


def unlisted(sequence: RunningSequence, manager: BlockManager) -> tuple[NDArray[np.int64], NDArray[np.int64]]:
    """Return blocks and generations given to the sequence since its admission; generations only rise."""
    blocks = sequence.table[sequence.hit_blocks : sequence.block_count]
    generations = manager.pool.generation[blocks]
    if sequence.extra_written:
        blocks = np.concatenate([blocks, *(more for more, _ in sequence.extra_written)])
        generations = np.concatenate([generations, *(numbers for _, numbers in sequence.extra_written)])
    new = generations >= sequence.recorded_until
    if sequence.passed:
        new &= ~np.isin(generations, np.concatenate(sequence.passed))
    return blocks[new], generations[new]


def sequence_joined(join: AttachedBlocks, pool: int) -> BlocksAttached:
    """Return the event of a running request that now refers to blocks that another published first."""
    residency = join.residency
    runs = FlatRuns(join.blocks, join.generations, pool)
    return BlocksAttached(join.at_us, residency.id, residency.account.name, runs, residency.trace)
