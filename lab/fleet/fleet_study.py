"""The cost of isolation, doors, workers and erasures in a fleet: `fleet_model` over one workload, as a table and a
page.

1. Each row varies one thing:
   - the number of tenants that share the fleet (no isolation, then 1, 8 and 128);
   - the number of doors (1, 2, 4);
   - the number of erasures a day, by subject (0, 100, 1,000);
   - the number of workers.
2. A larger fleet gets the same load per worker: the workload is run as many times at once.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any, Final, NamedTuple

from markupsafe import Markup

from kvcustody.errors import ConfigError
from kvcustody.files import READABLE, write_file
from kvcustody.lab.fleet.fleet_model import ComputeCost, FleetOutcome, FleetShape, scaled, simulate
from kvcustody.lab.fleet.open_router import MODEL, OpenRouter, router_opener
from kvcustody.lab.replay.charts import Series, StackedBar, environment, stacked_bars
from kvcustody.lab.replay.traces.model import TraceRequest
from kvcustody.lab.replay.workload.labels import Labeller, zipf_weights
from kvcustody.plurals import several

TENANTS: Final = (0, 1, 8, 128)
DOORS: Final = (1, 2, 4)
ERASURES: Final = (0, 100, 1000)
PARTS: Final = ("isolation", "doors", "erasures", "workers")


class FleetWorkload(NamedTuple):
    """Requests in time order, and the block size in tokens."""

    name: str
    requests: list[TraceRequest]
    block_tokens: int


class StudyRow(NamedTuple):
    """One setup and its outcome. `part`: the part of the study that varies here."""

    part: str
    shape: FleetShape
    outcome: FleetOutcome

    @property
    def name(self) -> str:
        """The row's name in tables and charts."""
        shape = self.shape
        return {
            "isolation": several(shape.tenants, "tenant") if shape.tenants else "nobody apart",
            "doors": several(shape.doors, "door"),
            "erasures": f"{shape.erasures_per_day} a day",
            "workers": several(shape.workers, "worker"),
        }[self.part]

    def as_json(self) -> dict[str, Any]:
        """Return the row as JSON values."""
        figures = self.outcome._asdict() | {
            "found_share": round(self.outcome.found_share, 4),
            "to_oracle": round(self.outcome.to_oracle, 4),
            "imbalance": round(self.outcome.imbalance, 3),
            "ttft_p50_ms": round(self.outcome.ttft_p50_ms, 1),
            "ttft_p99_ms": round(self.outcome.ttft_p99_ms, 1),
        }
        return {"part": self.part, "name": self.name, **self.shape._asdict(), **figures}


def study(
    workload: FleetWorkload,
    workers: Sequence[int],
    *,
    per_copy: int = 8,
    cost: ComputeCost | None = None,
    seed: int = 1,
    blocks_max: int = 20_000,
    open_router: OpenRouter | None = None,
    parts: Sequence[str] = PARTS,
    progress: Callable[[StudyRow], None] = lambda _: None,
) -> list[StudyRow]:
    """Run every setup. All parts except `workers` use the first value of `workers`; `per_copy` workers serve one copy
    of the load.

    `open_router`: gives each row a fresh router; without it the model.
    """
    first = FleetShape(workers[0], 8, blocks_max=blocks_max)
    wanted = [("isolation", first._replace(tenants=tenants)) for tenants in TENANTS]
    by_subject = first._replace(by_subject=True)
    busy = by_subject._replace(erasures_per_day=ERASURES[-1])
    wanted += [("doors", busy._replace(doors=doors)) for doors in DOORS]
    wanted += [("erasures", by_subject._replace(erasures_per_day=rate)) for rate in ERASURES]
    wanted += [("workers", first._replace(workers=each)) for each in workers]
    rows: list[StudyRow] = []
    known: dict[FleetShape, FleetOutcome] = {}
    open_router = router_opener(MODEL, (), Path()) if open_router is None else open_router
    for part, shape in wanted:
        if part not in parts:
            continue
        if shape not in known:
            requests = scaled(workload.requests, max(1, shape.workers // per_copy))
            tenants = max(1, shape.tenants)
            labels = Labeller(zipf_weights(tenants), tenants=tenants, seed=seed)
            with open_router(shape) as router:
                known[shape] = simulate(
                    requests,
                    [labels.label(request).tenant for request in requests],
                    shape,
                    block_tokens=workload.block_tokens,
                    cost=cost,
                    router=router,
                    seed=seed,
                )
        rows.append(StudyRow(part, shape, known[shape]))
        progress(rows[-1])
    return rows


def problems_of(rows: Sequence[StudyRow]) -> list[str]:
    """Return the bounds that do not hold: one tenant finds at least 0.97 of what it finds without isolation, every
    setup 0.95 of the oracle, and doors differ by at most 0.01.
    """
    problems = []
    of = {row.shape.tenants: row.outcome for row in rows if row.part == "isolation"}
    if of[1].found_tokens < 0.97 * of[0].found_tokens:
        problems.append(
            f"one tenant finds {of[1].found_tokens / of[0].found_tokens:.3f} of what it finds without doors"
        )
    problems += [
        f"{tenants} tenants find {of[tenants].to_oracle:.3f} of the oracle's"
        for tenants in (8, 128)
        if of[tenants].to_oracle < 0.95
    ]
    doors = [row.outcome.found_share for row in rows if row.part == "doors"]
    if max(doors) - min(doors) > 0.01:
        problems.append(f"doors differ by {max(doors) - min(doors):.3f}")
    return problems


_HEADINGS: Final = {
    "isolation": "What isolation costs",
    "doors": "More doors, with 1,000 erasures a day",
    "erasures": "Erasures of subjects a day, names by subject",
    "workers": "More workers, as much load each",
}


def write_page(path: Path, workload: FleetWorkload, rows: Sequence[StudyRow]) -> None:
    """Write tables and charts to one file.

    Raises:
        ConfigError: the file cannot be written.
    """
    parts = [
        (
            heading,
            [row for row in rows if row.part == part],
            _charts(heading, [row for row in rows if row.part == part]),
        )
        for part, heading in _HEADINGS.items()
    ]
    text = environment.get_template("fleet_study.html").render(workload=workload, parts=parts, cost=ComputeCost())
    try:
        write_file(path, text.encode(), mode=READABLE)
    except OSError as error:
        raise ConfigError(f"{path}: {error.strerror}", path=path) from None


def _charts(heading: str, rows: Sequence[StudyRow]) -> list[Markup]:
    tokens = [
        StackedBar(
            row.name,
            (
                row.outcome.found_tokens,
                max(0, row.outcome.oracle_tokens - row.outcome.found_tokens),
                row.outcome.prompt_tokens - max(row.outcome.oracle_tokens, row.outcome.found_tokens),
            ),
            f"{row.outcome.found_share:.1%}",
        )
        for row in rows
    ]
    times = [
        StackedBar(
            row.name,
            (row.outcome.ttft_p50_ms, max(0.0, row.outcome.ttft_p99_ms - row.outcome.ttft_p50_ms)),
            f"{row.outcome.ttft_p99_ms / 1000:.1f} s",
        )
        for row in rows
    ]
    balance = [StackedBar(row.name, (row.outcome.imbalance,), f"{row.outcome.imbalance:.2f}") for row in rows]
    kinds = (Series("found", "s1"), Series("at another worker", "s2"), Series("computed nowhere yet", "s3"))
    return [
        stacked_bars(f"{heading}: prompt tokens", tokens, kinds),
        stacked_bars(f"{heading}: time to the first token, ms", times, (Series("p50", "s1"), Series("p99", "s4"))),
        stacked_bars(f"{heading}: requests of the busiest worker over the mean", balance, (Series("ratio", "s5"),)),
    ]
