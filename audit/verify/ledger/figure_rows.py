"""Compare figures with the leaves: the sums of every log, and the coverage verdicts by hour.

1. What was folded and what was not are compared together, by hour and in all: it is their sum that is shown.
2. Of a log with a leaf that is none, or with one that its row contradicts, figures are not compared: what they should
   be is said by nobody.
3. Verdicts are judged again over the state that they say they are of.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterator
from itertools import groupby

from sqlalchemy import Connection, select

from kvcustody.audit.evidence.counters.hourly_coverage import judged_rows, judged_state
from kvcustody.audit.evidence.counters.packed_figures import shared_by_logs, unpack, unpack_hour
from kvcustody.audit.project import CARRIED, FigureName, Figures, HourFigure, is_scraped
from kvcustody.audit.store.schema.counters import (
    ALL_HOURS,
    ALL_LOGS,
    counter_deltas,
    counters,
    coverage_hours,
)
from kvcustody.errors import CustodyError, LedgerError
from kvcustody.plurals import several

_SHOWN = 3


def wrong_figures(connection: Connection, log: int, counted: Figures) -> Iterator[str]:
    """Yield the figures of a log that differ from what its leaves give (rule 1)."""
    expected, stored = _both(counted), Counter[FigureName]()
    for table in (counters, counter_deltas):
        column = table.c
        for scraped, hour_us, figures in connection.execute(
            select(column.scraped, column.hour_us, column.figures).where(column.log == log)
        ):
            try:
                found = unpack(hour_us, figures)
            except LedgerError as problem:
                yield f"`{table.name}`: {problem.message}"
                continue
            for figure, value in found.items():
                if figure[1:] == CARRIED:  # of leaves that are gone: `held_rows` adds it up
                    continue
                if is_scraped(figure.kind, figure.measure) != scraped:
                    yield f"`{table.name}` has `{figure.kind}` of the hour `{hour_us}` where it is not read"
                stored[figure] += value
                if table is counter_deltas:
                    stored[figure._replace(hour_us=ALL_HOURS)] += value
    differing = sorted(key for key in expected.keys() | stored.keys() if expected[key] != stored[key])
    for figure in differing[:_SHOWN]:
        when = "in all" if figure.hour_us == ALL_HOURS else f"in the hour `{figure.hour_us}`"
        what = " ".join(word for word in figure[1:] if word)
        yield (
            f"`counters` and `counter_deltas` have `{stored[figure]}` of {what} {when}, and the leaves give "
            f"`{expected[figure]}`"
        )
    if len(differing) > _SHOWN:
        yield f"`counters`: the leaves do not give {several(len(differing) - _SHOWN, 'more figure')}"


def wrong_sums_over_logs(connection: Connection) -> Iterator[str]:
    """Yield hours whose sums over all logs differ from the sum of the logs, which are compared with their leaves."""
    column = counters.c
    ordered = select(counters).where(column.hour_us != ALL_HOURS).order_by(column.scraped, column.hour_us)
    for (_, hour_us), rows in groupby(connection.execute(ordered), lambda row: (row.scraped, row.hour_us)):
        stored, expected = Counter[HourFigure](), Counter[HourFigure]()
        try:
            for row in rows:
                figures = unpack_hour(hour_us, row.figures)
                if row.log == ALL_LOGS:
                    stored.update(figures)
                    continue
                for figure, value in shared_by_logs(figures):
                    expected[figure] += value
        except LedgerError as problem:
            yield f"`counters`: {problem.message}"
            continue
        if any(stored[key] != expected[key] for key in stored.keys() | expected.keys()):
            yield f"`counters` has sums over all logs of the hour `{hour_us}` that are not those of the logs"


def wrong_verdicts(connection: Connection) -> Iterator[str]:
    """Yield hours of coverage that differ from what the judged state gives (rule 3)."""
    stored = {tuple(row)[:3]: tuple(row) for row in connection.execute(select(coverage_hours))}
    state = judged_state(connection)
    if state is None:
        if stored:
            yield "`coverage_hours` has verdicts, and `coverage_pass` does not say of which state"
        return
    try:
        expected = {row[:3]: row for row in judged_rows(connection, state)}
    except (CustodyError, LookupError, TypeError, ValueError) as problem:
        yield f"`coverage_pass` names a state that cannot be judged: {problem}"
        return
    for key in sorted(stored.keys() | expected.keys()):
        if stored.get(key) != expected.get(key):
            yield f"`coverage_hours` has verdicts of the hour `{key[0]}` that the leaves do not give"


def _both(counted: Figures) -> Counter[FigureName]:
    """Figures by hour, and in all."""
    made = Counter[FigureName]()
    for (_, _, hour_us), figures in counted.items():
        for figure, value in figures.items():
            made[FigureName(hour_us, *figure)] += value
            made[FigureName(ALL_HOURS, *figure)] += value
    return made
