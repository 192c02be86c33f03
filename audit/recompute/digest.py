"""The digest of a population (`audit.report.population`, N2) from a recount's verdicts, without any table."""

from __future__ import annotations

import hashlib
import struct
from collections.abc import Iterable

from kvcustody.audit.recompute.figures import Judged

VERDICTS = ("in_time", "late", "failed", "missing", "unproven", "overdue")
_ROW = struct.Struct(">7q")


def recompute_digest(judged: Iterable[Judged]) -> str:
    """SHA-256, hexadecimal: of each incarnation its id, then seven numbers a custody in the order of N1."""
    lives: dict[str, tuple[list[bytes], list[bytes]]] = {}
    pack = _ROW.pack
    for item in judged:
        ended, overdue = lives.setdefault(item.incarnation, ([], []))
        rows = overdue if item.verdict == "overdue" else ended
        pool, due, verdict = item.pool, item.due, VERDICTS.index(item.verdict)
        covered, shards = int(item.covered), item.shards
        for generation, block in enumerate(item.blocks, item.generation):
            rows.append(pack(pool, generation, block, due, verdict, covered, shards))
    made = hashlib.sha256()
    for uuid in sorted(lives):
        made.update(uuid.encode() + b"\n")
        for rows in lives[uuid]:
            made.update(b"".join(sorted(rows)))  # big-endian: as bytes they sort by pool and generation
    return made.hexdigest()
