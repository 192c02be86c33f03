"""Block ids for what a trace publishes: numbers for its own ids, for token ids, or for text; and sessions from chains.

1. Equal content after an equal prefix has one number, anything else another; numbers stay below `token_ids.MAX_ID`.
2. Text is cut into blocks of `BYTES_PER_TOKEN` UTF-8 bytes a token: no tokenizer is needed, and equal text is equal.
"""

from __future__ import annotations

from collections.abc import Hashable, Iterable, Sequence
from typing import Final

import numpy as np

from kvcustody.lab.replay.traces.model import BlockIds

BYTES_PER_TOKEN: Final = 4
SMALL_IDS: Final = 1 << 33
"""A trace's own ids below this are kept; others, and what has no id, are numbered from here on."""


class BlockNumbers:
    """Numbers what names a block, in the order of its first appearance."""

    def __init__(self, first: int = 0) -> None:
        self._first = first
        self._numbers: dict[Hashable, int] = {}

    def number(self, name: Hashable) -> int:
        """Return the number of one name."""
        return self._numbers.setdefault(name, self._first + len(self._numbers))

    def of_ids(self, ids: Iterable[int | str]) -> BlockIds:
        """Return a trace's own ids, of which only the large ones and the texts are numbered anew."""
        kept = (item if type(item) is int and item < SMALL_IDS else self.number(item) for item in ids)
        return np.fromiter(kept, dtype=np.int64)

    def of_tokens(self, tokens: Sequence[int], block_tokens: int) -> BlockIds:
        """Return the chain of a prompt's whole blocks."""
        return self._chain([tuple(tokens[at : at + block_tokens]) for at in _starts(len(tokens), block_tokens)])

    def of_text(self, text: bytes, block_tokens: int) -> BlockIds:
        """Return the chain of a text's whole blocks (rule 2)."""
        size = block_tokens * BYTES_PER_TOKEN
        return self._chain([text[at : at + size] for at in _starts(len(text), size)])

    def _chain(self, parts: Sequence[Hashable]) -> BlockIds:
        chain = np.empty(len(parts), dtype=np.int64)
        before = -1
        for index, part in enumerate(parts):
            before = chain[index] = self.number((before, part))
        return chain


def _starts(length: int, size: int) -> range:
    return range(0, length - size + 1, size)


def text_tokens(text: bytes) -> int:
    """Return the tokens that a text counts as."""
    return -(-len(text) // BYTES_PER_TOKEN)


# Infers conversations from chains of block ids, for traces that publish none.
#
# Block ids are prefix-chained, so a shared id at depth d means d + 1 shared blocks. A request continues the session
# whose last request ended (in whole blocks) inside it. It belongs to the lineage that first wrote its deepest shared
# block. The first block does not count: a prefix in every request (a system prompt) is not a conversation.

_HEAD_BLOCKS = 1


class SessionGuesser:
    """Places each request, in trace order, into (session, lineage, turn); the names are row indices of first
    turns. Requests of different senders never share a session.
    """

    def __init__(self) -> None:
        self._of_sender: dict[Hashable, _SenderSessions] = {}

    def place(self, row: int, blocks: BlockIds, sender: Hashable = None) -> tuple[int, int, int]:
        """Return the session, lineage and turn of the request in `row`, and remember its chain for later requests."""
        return self._of_sender.setdefault(sender, _SenderSessions()).place(row, blocks)


class _SenderSessions:
    """The chains of one sender."""

    def __init__(self) -> None:
        self._turns: dict[int, int] = {}
        self._ends: dict[int, int] = {}
        self._lineage_of_block: dict[int, int] = {}

    def place(self, row: int, blocks: BlockIds) -> tuple[int, int, int]:
        """Return the session, lineage and turn of the request in `row`, and remember its chain for later requests."""
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
