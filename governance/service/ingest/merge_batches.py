"""Several batches as one, for one transaction: rows in their order, columns of a kind behind each other."""

from __future__ import annotations

from collections.abc import Sequence
from itertools import chain
from typing import Any

from kvcustody.audit.events.batch import LeafBatch, LeafGroup
from kvcustody.audit.events.block_run_text import Extents


def merge_batches(batches: Sequence[LeafBatch]) -> LeafBatch:
    """The batches in order; needs at least one."""
    if len(batches) == 1:
        return batches[0]
    rows = [
        list(chain.from_iterable(column)) for column in zip(*[batch[:9] for batch in batches], strict=True)
    ]
    pieces: dict[str, list[LeafGroup]] = {}
    start = 0
    for batch in batches:
        for group in batch.groups:
            moved = group._replace(places=[start + place for place in group.places])
            pieces.setdefault(group.kind, []).append(moved)
        start += len(batch.data)
    founders = {uuid: founder for batch in reversed(batches) for uuid, founder in batch.founders.items()}
    hashes = list(chain.from_iterable(batch.hashes for batch in batches))
    return LeafBatch._make([*rows, [_joined(groups) for groups in pieces.values()], founders, hashes])


def _joined(groups: list[LeafGroup]) -> LeafGroup:
    """Groups of one kind as one; a column that one of them has not is empty there."""
    if len(groups) == 1:
        return groups[0]
    keys = dict.fromkeys(key for group in groups for key in group.columns)
    columns: dict[str, Sequence[Any]] = {}
    for key in keys:
        parts = [group.columns.get(key) or [None] * len(group.places) for group in groups]
        columns[key] = list(chain.from_iterable(parts))
    extents = {
        name: Extents(
            *(
                list(chain.from_iterable(parts))
                for parts in zip(*[g.extents[name] for g in groups], strict=True)
            )
        )
        for name in groups[0].extents
    }
    places = list(chain.from_iterable(group.places for group in groups))
    return LeafGroup(groups[0].kind, places, columns, extents)
