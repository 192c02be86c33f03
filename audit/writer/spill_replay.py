"""Spills read back into the ledger.

1. Each leaf is added once, however often a spill is replayed.
2. A segment is deleted only after all of it, and the leaf that reports the replay, are committed.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import NamedTuple

import orjson

from kvcustody.audit.events.batch import read_leaves
from kvcustody.audit.subjects.subject_table import row_of
from kvcustody.audit.writer.committer import Committer
from kvcustody.audit.writer.spill_file import SpillFile, SpillSegment


class SpillReplay(NamedTuple):
    """What a replay found."""

    segments: int
    added: int
    duplicates: int
    torn_bytes: int


def replay(
    spill: SpillFile, committer: Committer, report: Callable[[SpillReplay], None], *, batch: int
) -> None:
    """Commit every segment that no live process holds, then the report, then delete them."""
    segments = spill.segments()
    added = duplicates = torn = 0
    try:
        for segment in segments:
            new, known = _replay_one(segment, committer, batch)
            added, duplicates, torn = added + new, duplicates + known, torn + segment.torn_bytes
        if segments:  # on record before the evidence of the outage goes
            report(SpillReplay(len(segments), added, duplicates, torn))
        for segment in segments:
            segment.retire()
    finally:
        for segment in segments:
            segment.close()


def _replay_one(segment: SpillSegment, committer: Committer, batch: int) -> tuple[int, int]:
    """Leaves added, and leaves that were there."""
    added = total = 0
    chunk: list[bytes] = []
    for record in segment.records():
        chunk.append(record)
        total += record[:1] == b"L"
        if len(chunk) >= batch:
            added += _commit(chunk, committer)
            chunk.clear()
    if chunk:
        added += _commit(chunk, committer)
    return added, total - added


def _commit(records: list[bytes], committer: Committer) -> int:
    names = [row_of(orjson.loads(record[1:])) for record in records if record[:1] == b"P"]
    found = [record[1:] for record in records if record[:1] == b"L"]
    committer.write_names(names, own=True)
    return committer.write(read_leaves(found), skip_known=True)
