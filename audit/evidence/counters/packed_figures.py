"""Figures of one log and hour as one text: what a row of deltas or sums holds (`schema.counters`, rule 3)."""

from __future__ import annotations

from collections.abc import Iterable, Mapping

import orjson

from kvcustody.audit.project import DENIED, EVENTS, LEAVES, FigureName, HourFigure
from kvcustody.errors import LedgerError


def pack_hour(figures: Mapping[HourFigure, int]) -> str:
    """Figures of one hour, in order; those of value 0 are left out."""
    return orjson.dumps(sorted((*figure, value) for figure, value in figures.items() if value)).decode()


def unpack(hour_us: int, figures: str) -> dict[FigureName, int]:
    """Figures by name; raises `LedgerError` for what `pack_hour` does not make."""
    return {FigureName(hour_us, *figure): value for figure, value in unpack_hour(hour_us, figures).items()}


def unpack_hour(hour_us: int, figures: str) -> dict[HourFigure, int]:
    """Return the same without the hour, which an error names."""
    try:
        return {
            (kind, measure, outcome, detail, classification): int(value)
            for kind, measure, outcome, detail, classification, value in orjson.loads(figures)
        }
    except (TypeError, ValueError) as problem:
        raise LedgerError(f"figures of the hour `{hour_us}` cannot be read; run `kvcustody audit fsck`") from problem


def shared_by_logs(figures: Mapping[HourFigure, int]) -> Iterable[tuple[HourFigure, int]]:
    """Of these, what counts over all logs too, under a name that says nothing of whose it is."""
    for (kind, measure, outcome, _, _), value in figures.items():
        if measure in (LEAVES, EVENTS, DENIED):
            yield (kind, measure, outcome, "", ""), value
