"""Garbage collection of a serving process: never for loaded code, seldom for short-lived objects.

Batches that wait for their commit hold some ten small lists a leaf. By its defaults the collector would look at all of
them, and at every module, once in a few thousand leaves: a third of what taking a leaf costs.
"""

from __future__ import annotations

import gc
from collections.abc import Iterator
from contextlib import contextmanager

_YOUNG = 50_000  # containers more than at the last look; the default is 700


@contextmanager
def gc_seldom() -> Iterator[None]:
    """Collect seldom inside the block, and restore the collector afterwards. Frozen objects stay frozen."""
    before = gc.get_threshold()
    frozen_before = gc.get_freeze_count() > 0
    if not frozen_before:
        gc.collect()
        gc.freeze()
    gc.set_threshold(max(_YOUNG, before[0]), *before[1:])
    try:
        yield
    finally:
        gc.set_threshold(*before)
        if not frozen_before:
            gc.unfreeze()
