"""Figures of one log and hour packed into one text, the content of a row of deltas or sums (`schema.counters`, rule
3).
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping

import orjson

from kvcustody.audit.project import DENIED, EVENTS, LEAVES, FigureName, HourFigure
from kvcustody.errors import LedgerError


def pack_hour(figures: Mapping[HourFigure, int]) -> str:
    """Return the figures of one hour as text, in order, without zero values."""
    return orjson.dumps(sorted((*figure, value) for figure, value in figures.items() if value)).decode()


def unpack(hour_us: int, figures: str) -> dict[FigureName, int]:
    """Return figures by name; raises `LedgerError` for text that `pack_hour` did not make."""
    return {FigureName(hour_us, *figure): value for figure, value in unpack_hour(hour_us, figures).items()}


def unpack_hour(hour_us: int, figures: str) -> dict[HourFigure, int]:
    """Return figures without the hour, which only error messages name."""
    try:
        return {
            (kind, measure, outcome, detail, classification): int(value)
            for kind, measure, outcome, detail, classification, value in orjson.loads(figures)
        }
    except (TypeError, ValueError) as problem:
        raise LedgerError(f"figures of the hour `{hour_us}` cannot be read; run `kvcustody audit fsck`") from problem


def shared_by_logs(figures: Mapping[HourFigure, int]) -> Iterable[tuple[HourFigure, int]]:
    """Yield the figures that also count over all logs, under names without a tenant."""
    for (kind, measure, outcome, _, _), value in figures.items():
        if measure in (LEAVES, EVENTS, DENIED):
            yield (kind, measure, outcome, "", ""), value
