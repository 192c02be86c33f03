"""Charts over time or by name: what a page's table says; over time in buckets that fit the period.

    buckets = Buckets.of(since_us, until_us, least_us=HOUR_US)
    chart = TimeChart("Denied requests", "count", "bars", buckets, (ChartSeries("acme", values),), "nothing recorded")
    chart = NameChart("Blocks by worker", "count", "Worker", names, (ChartSeries("cached", values, 1),), across=True)

1. The table is the chart's data: `static/charts.js` draws what it reads there, so both always agree.
2. A value of None is no data, which is not zero: the table says `–`, and the chart is hatched.
3. A bucket begins at a whole multiple of its width since 1970, UTC.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Collection, Iterable, Mapping, Sequence
from typing import NamedTuple

from kvcustody.times import DAY_US, HOUR_US, MINUTE_US, SECOND_US, readable

_BUCKETS_MAX = 62
_SERIES_MAX = 7
_WIDTHS_US = (
    *(seconds * SECOND_US for seconds in (1, 5, 15, 30)),
    *(minutes * MINUTE_US for minutes in (1, 2, 5, 10, 15, 30)),
    *(hours * HOUR_US for hours in (1, 2, 3, 6, 12)),
    *(days * DAY_US for days in (1, 2, 7, 14, 30, 91)),
)


class Buckets(NamedTuple):
    """Equal parts of a period; the first and the last may reach beyond it."""

    starts_us: range
    width_us: int

    @classmethod
    def of(cls, since_us: int, until_us: int, *, least_us: int = SECOND_US) -> Buckets:
        """Return the narrowest buckets, of at least this width, of which the period has not too many."""
        wide_enough = (
            width for width in _WIDTHS_US if width >= least_us and (until_us - since_us) // width < _BUCKETS_MAX
        )
        width_us = next(wide_enough, _WIDTHS_US[-1])
        return cls(range(since_us // width_us * width_us, max(until_us, since_us + 1), width_us), width_us)

    def start_of(self, at_us: int) -> int:
        """Return the start of the bucket of a moment."""
        return at_us // self.width_us * self.width_us

    @property
    def label(self) -> str:
        """The width in words."""
        for unit_us, name in ((DAY_US, "day"), (HOUR_US, "hour"), (MINUTE_US, "minute"), (SECOND_US, "second")):
            if self.width_us % unit_us == 0:
                number = self.width_us // unit_us
                return f"{name}" if number == 1 else f"{number} {name}s"
        raise AssertionError(self.width_us)

    @property
    def form(self) -> str:
        """How a start is written."""
        return (
            "%Y-%m-%d" if self.width_us >= DAY_US else "%Y-%m-%d %H:%M" + ("" if self.width_us >= MINUTE_US else ":%S")
        )


class ChartSeries(NamedTuple):
    """One line or stack of bars: a value for each bucket, None where there is no data. `colour` is 1 to 8."""

    name: str
    values: Sequence[int | float | None]
    colour: int


class TimeChart(NamedTuple):
    """A chart and its table. `unit`: count, percent, duration (µs). `shape`: bars (stacked), or lines."""

    title: str
    unit: str
    shape: str
    buckets: Buckets
    series: tuple[ChartSeries, ...]
    nothing: str

    @property
    def is_empty(self) -> bool:
        """Whether there is no data in the whole period."""
        return all(value is None for series in self.series for value in series.values)

    @property
    def has_gaps(self) -> bool:
        """Whether there is no data in some bucket."""
        return any(value is None for series in self.series for value in series.values)

    @property
    def rows(self) -> list[tuple[int, str, list[int | float | None]]]:
        """The table: start of each bucket, the start as text, and the value of each series."""
        columns = [series.values for series in self.series]
        return [
            (start_us, readable(start_us, self.buckets.form), [column[place] for column in columns])
            for place, start_us in enumerate(self.buckets.starts_us)
        ]


class NameChart(NamedTuple):
    """A chart of bars, one for each name, and its table. `unit`: as of a `TimeChart`.

    `heading` says what the names are. `across`: bars lie below each other, so that long names have room. `grouped`:
    the series stand beside each other, and not on each other.
    """

    title: str
    unit: str
    heading: str
    names: Sequence[str]
    series: tuple[ChartSeries, ...]
    across: bool = False
    grouped: bool = False

    @property
    def is_empty(self) -> bool:
        """Whether every bar has no length."""
        return not any(value for series in self.series for value in series.values)

    @property
    def rows(self) -> list[tuple[str, list[int | float | None]]]:
        """The table: each name, and the value of each series."""
        return [(name, [series.values[place] for series in self.series]) for place, name in enumerate(self.names)]


def summed(
    buckets: Buckets,
    sums: Iterable[tuple[str, int, int]],
    known_us: Collection[int],
    *,
    colours: Mapping[str, int] | None = None,
) -> tuple[ChartSeries, ...]:
    """Return series from (name, moment, value): the largest ones by name, and the others together.

    `known_us` are moments of which there is data; a bucket without any has None.
    """
    by_name: dict[str, Counter[int]] = {}
    for name, at_us, value in sums:
        by_name.setdefault(name, Counter())[buckets.start_of(at_us)] += value
    known = {buckets.start_of(at_us) for at_us in known_us}
    names = sorted(by_name, key=lambda name: (-by_name[name].total(), name))
    if colours is not None:
        names = list(colours)
    elif len(names) > _SERIES_MAX + 1:
        others = Counter[int]()
        for name in names[_SERIES_MAX:]:
            others.update(by_name[name])
        left_out = f"{len(names) - _SERIES_MAX} others"
        names = [*names[:_SERIES_MAX], left_out]
        by_name[left_out] = others
    return tuple(
        ChartSeries(
            name,
            [by_name.get(name, Counter())[start] if start in known else None for start in buckets.starts_us],
            place if colours is None else colours[name],
        )
        for place, name in enumerate(names, 1)
    )
