"""Reads words from K and V: a block's content for a token is a function of that token and its position.

In the first layer nothing but the token and its position enters a key or a value. So an engine's own vectors for every
word of a vocabulary, taken once, read any block of a prompt's beginning: for whoever has them, K/V is plaintext.

1. The vectors are the engine's own. Nothing is assumed about how it lays a block out: which values belong to a place
   is found by changing the token there.
"""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np
import numpy.typing as npt

from kvcustody.testkit.demo.engine import Engine, Values
from kvcustody.testkit.demo.vocabulary import FIRST_WORD, WORDS

BATCH = 16
TOLERANCE = 0.05  # squared distance, as a share of the word's own squared length
AUTHOR = "author"  # whoever makes the book is a tenant too


class Codebook:
    """The first layer's K and V of every word at every position of a first block.

    vectors: [words, values of a block]. places: [tokens of a block, values of a block], which values a place has.
    """

    def __init__(self, vectors: Values, places: npt.NDArray[np.bool_]) -> None:
        assert places.any(axis=1).all(), "every place of a block has values"
        self._vectors = vectors
        self._places = places

    @classmethod
    def learn(cls, engine: Engine) -> Codebook:
        """Request every word, repeated over a block, and then one word changed at each position (rule 1)."""
        size = engine.block_tokens
        first, other = FIRST_WORD, FIRST_WORD + 1
        vectors = _contents(engine, [[word] * size for word in range(FIRST_WORD, len(WORDS))])
        changed = [[other if at == place else first for at in range(size)] for place in range(size)]
        return cls(vectors, _contents(engine, changed) != vectors[0])

    def read(self, block: Values) -> list[str | None]:
        """Return the word at each position of a block; None where there is none, or something else."""
        return [self._word(block[values], self._vectors[:, values]) for values in self._places]

    def _word(self, found: Values, known: Values) -> str | None:
        if not found.any() or not np.isfinite(found).all():
            return None
        with np.errstate(over="ignore"):  # memory that was never written may hold any number
            far = np.square(known - found).sum(axis=1)
        nearest = int(far.argmin())
        if far[nearest] > TOLERANCE * np.square(known[nearest]).sum():
            return None
        return WORDS[FIRST_WORD + nearest]


def _contents(engine: Engine, prompts: Sequence[Sequence[int]]) -> Values:
    """Return a block's content for each prompt, which fills one."""
    return np.stack(
        [
            served.left
            for first in range(0, len(prompts), BATCH)
            for served in engine.serve(AUTHOR, prompts[first : first + BATCH])
        ]
    )
