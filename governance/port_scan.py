"""Orphan scans of an engine that allocates by itself: its books against ours, and ours against themselves."""

from __future__ import annotations

from typing import TYPE_CHECKING

import numpy as np
from numpy.typing import NDArray

from kvcustody.allocator.block import ACTIVE, CACHED, QUARANTINED, BlockState
from kvcustody.allocator.foreign_residency import ForeignResidency
from kvcustody.governance.plan import DomainLabel
from kvcustody.governance.scan import Finding

if TYPE_CHECKING:
    from kvcustody.governance.engine_port import EnginePort, EngineView


def scan(port: EnginePort, view: EngineView) -> list[Finding]:
    """Every disagreement between the engine's books and ours; changes nothing."""
    pool = port.pool
    usable = np.ones(pool.blocks, dtype=np.bool_)
    usable[pool.reserved] = False
    findings: list[Finding] = []

    def found(orphan: str, cause: str, mask: NDArray[np.bool_]) -> None:
        blocks = np.flatnonzero(mask & usable)
        if len(blocks):
            findings.append(Finding(orphan, _owner(port, int(blocks[0])), cause, tuple(blocks.tolist())))

    found(
        "reference without sequence",
        "the engine references blocks that no request was handed or attached",
        view.refs > pool.refs,
    )
    found(
        "sequence without reference",
        "requests have blocks that the engine does not reference",
        view.refs < pool.refs,
    )
    in_custody = (pool.state == ACTIVE) | (pool.state == CACHED)
    found(
        "unreachable chain",
        "CACHED blocks that the engine's index does not have",
        (pool.state == CACHED) & ~view.indexed,
    )
    found(
        "index without tier object",
        "the engine's index has blocks that nobody has in custody",
        view.indexed & ~in_custody,
    )
    found("hold without residency", "blocks are CACHED and nobody holds them", _unheld(port))
    found("failed verification", "blocks did not verify after a scrub", pool.state == QUARANTINED)
    for request_id, residency in port.running.items():
        if residency.is_opened and request_id not in view.requests:
            blocks = tuple(residency.blocks().tolist())
            findings.append(
                Finding("lost finish", residency.tenant, "a residency whose request is gone", blocks)
            )
    if len(pool.fences) and pool.fences.stuck_before(pool.fence_bound_us, port.clock.now_us()):
        findings.append(Finding("stuck fence", "", "a device step has not retired within its bound", ()))
    if pool.next_generation - 1 != view.allocated:
        cause = f"the engine handed out {view.allocated} blocks, {pool.next_generation - 1} came into custody"
        findings.append(Finding("reference without sequence", "", cause, ()))
    return findings


def _unheld(port: EnginePort) -> NDArray[np.bool_]:
    pool = port.pool
    unheld: NDArray[np.bool_] = (pool.state == CACHED) & (pool.holds <= 0)
    return unheld


def _owner(port: EnginePort, block: int) -> str:
    domain = port.pool.domains.get(int(port.pool.tag[block]))
    label = domain.label if domain is not None else None
    return label.tenant if isinstance(label, DomainLabel) else ""


def check(port: EnginePort) -> list[str]:
    """Recompute references, holds and charges from the residencies; every difference is a problem."""
    pool = port.pool
    problems: list[str] = []
    refs = np.zeros(pool.blocks, dtype=np.int64)
    for residency in port.running.values():
        np.add.at(refs, residency.blocks(), 1)
    if (refs != pool.refs).any():
        at = np.flatnonzero(refs != pool.refs)
        problems.append(
            f"references of blocks {at[:8].tolist()}: counted {refs[at[:8]].tolist()}, "
            f"kept {pool.refs[at[:8]].tolist()}"
        )
    holds = np.zeros(pool.blocks, dtype=np.int64)
    for account in pool.accounts.values():
        for hold in account.residencies.values():
            assert isinstance(hold, ForeignResidency)
            valid = hold.held[pool.generation[hold.held] == hold.held_generations]
            np.add.at(holds, valid, 1)
    live = (pool.state == ACTIVE) | (pool.state == CACHED)
    if (holds[live] != pool.holds[live]).any():
        problems.append("holds kept per block differ from those of the residencies")
    if ((pool.state == ACTIVE) != (pool.refs > 0)).any():
        problems.append("a block is ACTIVE without a reference, or referenced and not ACTIVE (L1)")
    if ((pool.state == CACHED) & ~pool.indexed).any():
        problems.append("a CACHED block is not indexed")
    if (pool.indexed & ~live).any():
        problems.append("an indexed block is in nobody's custody")
    for account in pool.accounts.values():
        tags = [tag for tag, domain in pool.domains.items() if domain.owner is account]
        used = int(np.count_nonzero(live & np.isin(pool.tag, tags)))
        if used != account.used_blocks:
            problems.append(f"tenant `{account.name}` is charged {account.used_blocks} blocks and has {used}")
    total = sum(pool.counts().values())
    if total != pool.partition.size:
        problems.append(f"{total} blocks in all states, {pool.partition.size} in the pool (L1)")
    if int(np.count_nonzero(pool.state == BlockState.CACHED)) and not len(pool.partition.wheel):
        problems.append("blocks are CACHED and no hold will lapse")
    return problems
