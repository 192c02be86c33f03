"""Figures of one log and hour as one text: what a row of deltas or sums holds (`schema.counters`, rule 3)."""

from __future__ import annotations

from collections.abc import Iterable
from typing import Final

import orjson

from kvcustody.audit.counters.count_events import DENIED, FigureName
from kvcustody.errors import LedgerError

ORPHANS: Final = "orphan-found"


def is_scraped(kind: str, measure: str) -> bool:
    """Whether every scrape reads such a figure, over all tenants."""
    return measure == DENIED or kind == ORPHANS


def pack(figures: Iterable[tuple[FigureName, int]]) -> str:
    """Figures of one hour, in order; those of value 0 are left out."""
    return orjson.dumps(sorted((*figure[1:], value) for figure, value in figures if value)).decode()


def unpack(hour_us: int, figures: str) -> dict[FigureName, int]:
    """Figures by name; raises `LedgerError` for what `pack` does not make."""
    try:
        return {FigureName(hour_us, *of): int(value) for *of, value in orjson.loads(figures)}
    except (TypeError, ValueError) as problem:
        raise LedgerError(
            f"figures of the hour `{hour_us}` cannot be read; run `kvcustody audit fsck`"
        ) from problem
