"""Infers conversations from chains of block ids, for traces that publish none.

Block ids are prefix-chained, so a shared id at depth d means d + 1 shared blocks. A request continues the
session whose last request ended (in whole blocks) inside it; it belongs to the lineage that first wrote its
deepest shared block. The first block does not count: a head that everybody sends (a system prompt) is not a
conversation.
"""

from __future__ import annotations

from kvcustody.lab.replay.traces.model import BlockIds

_HEAD_BLOCKS = 1


class SessionGuesser:
    """Places each request, in trace order, into (session, lineage, turn); the names are row indices of first
    turns.
    """

    def __init__(self) -> None:
        self._turns: dict[int, int] = {}
        self._ends: dict[int, int] = {}
        self._lineage_of_block: dict[int, int] = {}

    def place(self, row: int, blocks: BlockIds) -> tuple[int, int, int]:
        """Session, lineage and turn of the request in `row`; remembers its chain for later requests."""
        chain: list[int] = blocks[_HEAD_BLOCKS:].tolist()
        session = lineage = row
        for block in reversed(chain):
            if block in self._lineage_of_block:
                lineage = self._lineage_of_block[block]
                break
        for block in reversed(chain):
            if block in self._ends:
                session = self._ends[block]
                break
        for block in chain:
            self._lineage_of_block.setdefault(block, lineage)
        if len(chain) >= 2:  # the last block may be partial, and then is never met again
            self._ends[chain[-2]] = session
        if chain:
            self._ends[chain[-1]] = session
        turn = self._turns.get(session, 0)
        self._turns[session] = turn + 1
        return session, lineage, turn
