"""Orphan scans of one process: what the allocator, the live sequences and the queues disagree about.

Classes are those of the design that can arise inside one process; ledger and tier classes join from the audit
room.
"""

from __future__ import annotations

from typing import NamedTuple

import numpy as np

from kvcustody.allocator.block import BlockState
from kvcustody.allocator.manager import BlockManager
from kvcustody.allocator.node import Node
from kvcustody.allocator.sequence import Sequence


class Finding(NamedTuple):
    """One disagreement: its class as the design names it, its owner, and the blocks it is about."""

    orphan: str
    tenant: str
    cause: str
    blocks: tuple[int, ...]


def scan(managers: list[BlockManager], live: set[Sequence]) -> list[Finding]:
    """Every finding in these pools; changes nothing."""
    findings: list[Finding] = []
    for manager in managers:
        _sequences(manager, live, findings)
        _references(manager, findings)
        _holds(manager, findings)
        _fences(manager, findings)
    return findings


def _sequences(manager: BlockManager, live: set[Sequence], findings: list[Finding]) -> None:
    for sequence in manager.decode.sequences:
        if sequence is not None and sequence not in live:
            blocks = tuple(sequence.blocks.tolist())
            findings.append(
                Finding("lost finish", sequence.account.name, "a sequence without a live request", blocks)
            )
    for sequence in live:
        if sequence.slot < 0:
            blocks = tuple(sequence.blocks.tolist())
            findings.append(
                Finding(
                    "sequence without reference",
                    sequence.account.name,
                    "a live request without a slot",
                    blocks,
                )
            )


def _references(manager: BlockManager, findings: list[Finding]) -> None:
    """References counted from block tables against those that nodes carry, and index entries against the tree."""
    nodes = {id(node): node for node in manager.tree.nodes()}
    counted = dict.fromkeys(nodes, 0)
    for sequence in manager.decode.sequences:
        node = sequence.leaf if sequence is not None else None
        while node is not None:
            counted[id(node)] = counted.get(id(node), 0) + 1
            node = node.parent
    for key, node in nodes.items():
        if node.refs > counted[key]:
            cause = f"{node.refs} references, {counted[key]} sequences"
            findings.append(
                Finding("reference without sequence", node.domain.owner.name, cause, _blocks(node))
            )
    for node in manager.tree.index.nodes():
        if id(node) not in nodes:
            tenant = node.domain.owner.name
            findings += [Finding("unreachable chain", tenant, "indexed but not in the tree", _blocks(node))]


def _holds(manager: BlockManager, findings: list[Finding]) -> None:
    counted: dict[int, int] = {}
    for account in manager.accounts.values():
        for residency in account.residencies.values():
            node = residency.leaf
            if node is None or node.length == 0:
                findings.append(
                    Finding("residency without block", account.name, "its last block has ended", ())
                )
            while node is not None:
                if node.domain.owner is account or node.domain.is_segment:
                    counted[id(node)] = counted.get(id(node), 0) + 1
                node = node.parent
    for node in manager.tree.nodes():
        explained = counted.get(id(node), 0)
        if node.holds > explained:
            cause = f"{node.holds} holds, {explained} residencies"
            findings.append(Finding("hold without residency", node.domain.owner.name, cause, _blocks(node)))


def _fences(manager: BlockManager, findings: list[Finding]) -> None:
    for partition in manager.pool.partitions:
        for custody in partition.stuck:
            tenant = custody.account.name if custody.account is not None else ""
            cause = f"fence {custody.fence} outlived its bound"
            findings.append(Finding("stuck fence", tenant, cause, tuple(custody.blocks.tolist())))
    quarantined = int(np.count_nonzero(manager.pool.state == BlockState.QUARANTINED))
    stuck = sum(len(custody.blocks) for partition in manager.pool.partitions for custody in partition.stuck)
    if quarantined > stuck:
        findings.append(
            Finding(
                "failed verification", "", f"{quarantined - stuck} blocks did not verify after a scrub", ()
            )
        )


def _blocks(node: Node) -> tuple[int, ...]:
    return tuple(node.blocks.tolist())
