"""Blocks in custody that no node and no sequence has: whose they are, and their end."""

from __future__ import annotations

import numpy as np

from kvcustody.allocator.manager.block_manager import BlockManager
from kvcustody.allocator.manager.repair import end_lost
from kvcustody.allocator.pool.accounting import Account, Domain
from kvcustody.allocator.pool.block_state import ACTIVE, CACHED, Blocks
from kvcustody.governance.decisions.access_plan import DomainLabel
from kvcustody.governance.orphans.finding import FindingBuilder, Trouble
from kvcustody.governance.orphans.pool_census import Census


def lost_blocks(census: Census, found: FindingBuilder) -> list[Trouble]:
    """One finding for each account that is charged for more than nodes and sequences explain."""
    manager, now_us = census.manager, found.now_us
    pool = manager.pool
    lost = np.flatnonzero(((pool.state == ACTIVE) | (pool.state == CACHED)) & ~_explained(census))

    def of(account: Account, blocks: Blocks) -> Trouble:
        def end() -> tuple[str, str]:
            left = blocks[(pool.state[blocks] == ACTIVE) | (pool.state[blocks] == CACHED)]
            end_lost(manager, left, _nobodys(manager, account), now_us)
            return "ended", "recovered"

        cause = "blocks in custody that no request and no chain has"
        return found("reference without sequence", account.name, cause, blocks, end)

    return [of(account, blocks) for account, blocks in _by_account(census, lost)] if len(lost) else []


def _explained(census: Census) -> np.ndarray[tuple[int], np.dtype[np.bool_]]:
    """By block: a node or a sequence has it."""
    has = np.zeros(census.manager.pool.blocks, dtype=np.bool_)
    parts: list[Blocks] = [*census.tree.blocks, *census.tree.windows]
    for sequence in census.sequences:
        parts += [sequence.blocks, *sequence.windows]
        parts += [blocks for blocks, _ in sequence.duplicates]
    if parts:
        has[np.concatenate(parts)] = True
    return has


def _by_account(census: Census, lost: Blocks) -> list[tuple[Account, Blocks]]:
    accounts = census.manager.accounts
    explained = dict.fromkeys(accounts, 0)
    for node in census.nodes:
        explained[node.domain.owner.name] += node.block_count
    for sequence in census.sequences:
        for first, last, domain in sequence.shares(sequence.published, sequence.block_count):
            explained[domain.owner.name] += last - first
        for blocks, domain in sequence.duplicates:
            explained[domain.owner.name] += len(blocks)
        for window in sequence.windows:
            explained[sequence.domain.owner.name] += len(window)
    left, made = lost, []
    for name, account in accounts.items():
        surplus = account.active_blocks + account.cached_blocks - explained[name]
        if surplus > 0 and len(left):
            made.append((account, left[:surplus]))
            left = left[surplus:]
    if len(left):
        made.append((next(iter(accounts.values())), left))
    return made


def _nobodys(manager: BlockManager, account: Account) -> Domain:
    """A domain for custody whose own is not known any more: never cached, read back in full."""
    label = DomainLabel(account.name, "unknown", 0, "request", None, None, None)
    return manager.domain(
        account, label=label, idle_us=0, absolute_us=0, scrub_within_us=1_000_000, verify_share=1.0
    )
