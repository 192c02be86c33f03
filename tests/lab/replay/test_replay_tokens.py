"""Token expansion: injective, stable, below the vocabulary."""

from __future__ import annotations

import numpy as np
import pytest

from kvcustody.lab.replay.traces.token_ids import MAX_ID, VOCABULARY, expand


def test_blocks_are_injective_and_stable() -> None:
    ids = np.array([0, 1, VOCABULARY - 1, VOCABULARY, MAX_ID - 1, 123_456_789, 0], dtype=np.int64)
    blocks = expand(ids, 16).reshape(-1, 16)
    assert blocks.dtype == np.int32
    assert (blocks >= 0).all() and (blocks < VOCABULARY).all()
    assert len({block.tobytes() for block in blocks[:-1]}) == len(ids) - 1
    assert (blocks[0] == blocks[-1]).all()
    assert (expand(ids[3:4], 16) == blocks[3]).all(), "a block does not depend on its place"


def test_the_tail_depends_on_its_key_alone() -> None:
    ids = np.array([5, 6], dtype=np.int64)
    one, other = expand(ids, 64, tail_tokens=9, tail_key=1), expand(ids[:1], 64, tail_tokens=9, tail_key=1)
    assert len(one) == 137
    assert (one[-9:] == other[-9:]).all()
    assert (expand(ids, 64, tail_tokens=9, tail_key=2)[-9:] != one[-9:]).any()


@pytest.mark.parametrize("bad", [-1, MAX_ID])
def test_ids_out_of_range_are_refused(bad: int) -> None:
    with pytest.raises(ValueError, match="block ids must be"):
        expand(np.array([bad], dtype=np.int64), 16)
