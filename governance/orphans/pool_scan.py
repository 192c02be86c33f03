"""A full scan of one pool: what the allocator, the live sequences and the queues disagree about, and the repairs."""

from __future__ import annotations

from collections.abc import Callable

import numpy as np

from kvcustody.allocator.manager.block_manager import BlockManager
from kvcustody.allocator.manager.repair import cut_path, set_holds, set_refs
from kvcustody.allocator.pool.block_state import QUARANTINED
from kvcustody.allocator.prefix.node import Node, PathResidency
from kvcustody.allocator.prefix.sequence import RunningSequence
from kvcustody.governance.orphans.finding import FAILED_VERIFICATION, NONE, FindingBuilder, Trouble
from kvcustody.governance.orphans.index_scan import index_troubles
from kvcustody.governance.orphans.lost_blocks import lost_blocks
from kvcustody.governance.orphans.pool_census import Census


class PoolScan:
    """One pool, read once. `live`: sequences of requests that have not ended here.

    `end` ends a sequence in every book, with its evidence.
    """

    def __init__(
        self,
        manager: BlockManager,
        live: set[RunningSequence],
        now_us: int,
        end: Callable[[RunningSequence], None],
    ) -> None:
        self.manager = manager
        self.live = live
        self.now_us = now_us
        self.end = end
        self.census = Census(manager)
        self.sequences = self.census.sequences
        self._found = FindingBuilder(manager.number, now_us)

    def troubles(self) -> list[Trouble]:
        """Every finding of this pool with its repair, in an order in which they can be repaired one by one."""
        return [
            *self._missing_references(),
            *self._lost_sequences(),
            *self._leaked_references(),
            *self._blockless(),
            *self._holds(),
            *index_troubles(self.census, self._found),
            *lost_blocks(self.census, self._found),
            *self._fences(),
        ]

    # -- sequences ----------------------------------------------------------------------------------------------------

    def _lost_sequences(self) -> list[Trouble]:
        made = [
            self._sequence("lost finish", sequence, "a sequence without a live request", "released")
            for sequence in self.sequences
            if sequence not in self.live
        ]
        wanted = "sequence without reference"
        made += [
            self._sequence(wanted, sequence, "blocks of its path have ended under it", "aborted")
            for sequence in self.census.broken
        ]
        made += [
            self._sequence(wanted, sequence, "a live request without a slot", "closed")
            for sequence in self.live
            if sequence.slot < 0
        ]
        return made

    def _sequence(self, orphan: str, sequence: RunningSequence, cause: str, action: str) -> Trouble:
        def end() -> tuple[str, str]:
            if sequence in self.census.broken:
                cut_path(self.manager, sequence)
            self.manager.stop_publishing(sequence)
            self.end(sequence)
            return action, "recovered"

        residency, tenant = sequence.residency, sequence.account.name
        since_us = residency.opened_us
        return self._found(
            orphan, tenant, cause, sequence.blocks, end, since_us=since_us, residency=residency.id
        )

    # -- references ---------------------------------------------------------------------------------------------------

    def _missing_references(self) -> list[Trouble]:
        """Taken from the root down, before any sequence ends that should have them."""
        tree, now_us, census = self.manager.tree, self.now_us, self.census

        def missing(node: Node, counted: int) -> Trouble:
            def take() -> tuple[str, str]:
                set_refs(tree, node, counted, now_us)
                return "reference taken", "recovered"

            cause = f"{counted} sequences, {node.refs} references"
            return self._node("sequence without reference", node, cause, take)

        places = np.flatnonzero(census.refs < census.counted).tolist()
        return [missing(census.nodes[at], int(census.counted[at])) for at in places]

    def _leaked_references(self) -> list[Trouble]:
        """Given back from the leaves up."""
        census, made = self.census, []
        for at in np.flatnonzero(census.refs > census.counted)[::-1].tolist():
            node = census.nodes[at]
            cause = f"{node.refs} references, {int(census.counted[at])} sequences"
            repair = _Refs(self.manager, node, self.now_us)
            made.append(self._node("reference without sequence", node, cause, repair))
        return made

    def _node(self, orphan: str, node: Node, cause: str, repair: Callable[[], tuple[str, str]]) -> Trouble:
        tenant = node.domain.owner.name
        return self._found(orphan, tenant, cause, node.blocks, repair, since_us=node.used_us)

    # -- holds --------------------------------------------------------------------------------------------------------

    def _blockless(self) -> list[Trouble]:
        def dropped(residency: PathResidency) -> Trouble:
            def drop() -> tuple[str, str]:
                self.manager.hold_table.remove(residency)
                return "hold dropped", "recovered"

            orphan, cause, tenant = (
                "residency without block",
                "its last block has ended",
                residency.account.name,
            )
            since_us = residency.opened_us
            return self._found(orphan, tenant, cause, NONE, drop, since_us=since_us, residency=residency.id)

        return [dropped(residency) for residency in self.census.blockless]

    def _holds(self) -> list[Trouble]:
        tree, now_us, census = self.manager.tree, self.now_us, self.census

        def differing(node: Node, held: int) -> Trouble:
            def hold() -> tuple[str, str]:
                if node.length:
                    set_holds(tree, node, held, now_us)
                return "holds counted anew", "recovered"

            orphan = "hold without residency" if node.holds > held else "residency without block"
            return self._node(orphan, node, f"{node.holds} holds, {held} residencies", hold)

        places = np.flatnonzero(census.holds != census.held)[::-1].tolist()
        return [differing(census.nodes[at], int(census.held[at])) for at in places]

    # -- fences -------------------------------------------------------------------------------------------------------

    def _fences(self) -> list[Trouble]:
        made: list[Trouble] = []
        for partition in self.manager.pool.partitions:
            for custody in partition.stuck:
                tenant = custody.account.name if custody.account is not None else ""
                cause = f"fence {custody.fence} outlived its bound"
                made.append(
                    self._found(
                        "stuck fence",
                        tenant,
                        cause,
                        custody.blocks,
                        lambda: ("quarantined until it retires", "contained"),
                        since_us=custody.ended_us,
                    )
                )
        unverified = self.manager.pool.state == QUARANTINED
        for trouble in made:
            unverified[list(trouble.finding.blocks)] = False
        if unverified.any():
            cause = "blocks did not verify after a scrub"
            contained = "quarantined until teardown", "contained"
            failed = np.flatnonzero(unverified)
            made.append(self._found(FAILED_VERIFICATION, "", cause, failed, lambda: contained))
        return made


class _Refs:
    """Gives back what no sequence explains, counted at the moment of the repair: others may have gone before."""

    def __init__(self, manager: BlockManager, node: Node, now_us: int) -> None:
        self.manager = manager
        self.node = node
        self.now_us = now_us

    def __call__(self) -> tuple[str, str]:
        node = self.node
        if node.length:
            counted = 0
            for sequence in self.manager.decode.sequences:
                at = sequence.leaf if sequence is not None else None
                while at is not None:
                    counted += at is node
                    at = at.parent
            if counted < node.refs:
                set_refs(self.manager.tree, node, counted, self.now_us)
        return "references given back", "recovered"
