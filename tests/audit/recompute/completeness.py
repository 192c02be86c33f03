"""Completeness: what leaves name that no other leaf accounts for. Nothing of this can be seen in one custody alone.

1. A residency that was released was opened. L2 A pool's generations come from one counter, so that each below the
   highest was handed out; growth of residencies that are still open is not listed yet and counts here. L3 What a
   receipt names has ended.
"""

from __future__ import annotations

from typing import NamedTuple

import numpy as np

from recompute.columns import Directory, distinct
from recompute.history import History, RecomputedLife


class Unaccounted(NamedTuple):
    """Residencies without an opening; generations that nothing lists as handed out; wiped custody without an end."""

    residencies: int = 0
    generations: int = 0
    receipts: int = 0

    @property
    def is_empty(self) -> bool:
        """Whether everything is accounted for."""
        return not any(self)


def unaccounted(history: History) -> Unaccounted:
    """Over all incarnations."""
    found = [_of(life) for life in history.lives.values()]
    return Unaccounted(*(sum(column) for column in zip(*found, strict=True))) if found else Unaccounted()


def _of(life: RecomputedLife) -> Unaccounted:
    named = life.named
    uses, gone = life.uses["residency"], life.gone["residency"]
    lists = [life.released["residency"], uses[distinct(named.uses.row)], gone[distinct(named.gone.row)]]
    about = distinct(np.concatenate(lists))
    strange = Directory(life.people["residency"]).find(about) < 0
    handed_out, wiped = (np.zeros(len(named.pool), np.bool_) for _ in range(2))
    handed_out[named.uses.place[life.uses["written"][named.uses.row] == 1]] = True
    wiped[named.proofs.place] = True
    wiped[named.ends.place] = False
    # The counter of a pool starts at `life.generation`; between two that are named those are missing that none names.
    is_first = np.diff(named.pool, prepend=-1) > 0
    before = np.where(is_first, life.generation, np.roll(named.generation, 1))
    gaps = np.maximum(0, named.generation - np.maximum(before, life.generation) - 1)
    return Unaccounted(int(strange.sum()), int(gaps.sum() + (~handed_out).sum()), int(wiped.sum()))
