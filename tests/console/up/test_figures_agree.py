"""One ledger, every door: what the pages, the API, the commands and reports show is what the leaves add up to.

`figure_doors` asks each door and compares each of its figures with leaf bytes, while requests run and after.
"""

from __future__ import annotations

import re
from collections import Counter
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest

from standins.audit.figure_doors import DOORS, Shown
from standins.audit.leaf_figures import read_leaves
from standins.console.compared_run import ComparedRun, contents

pytest.importorskip("torch", reason="the worker's blocks are tensors")


def planted(shown: Shown) -> Iterator[tuple[str, Shown]]:
    """The door's text with one of its figures made another, for each figure that is not 0."""
    for name, value in shown.figures.items():
        if value and isinstance(value, int):
            yield " ".join(name), shown._replace(text=_replaced(shown.text, value))
        elif isinstance(value, str):
            other = re.sub(
                rf'{re.escape(value)}(?!"\s*:)', f"9{value}", shown.text
            )  # a value, no name of a field
            yield " ".join(name), shown._replace(text=other)


def _replaced(text: str, value: int) -> str:
    """Every place that has this number, with or without commas, has the next one."""
    forms = "|".join(re.escape(form) for form in {f"{value}", f"{value:,}"})
    return re.sub(rf"(?<![\d.,\w-])({forms})(?![\d\w])", str(value + 1), text)


@pytest.mark.parametrize(
    "minutes",
    [
        pytest.param(0, marks=pytest.mark.system("every door over a run that is killed twice"), id="short"),
        pytest.param(30, marks=pytest.mark.soak, id="half an hour"),
    ],
)
def test_every_door_shows_what_the_leaves_say(
    tmp_path: Path, minutes: float, record_property: Callable[[str, object], None]
) -> None:
    run = ComparedRun(tmp_path)
    run.run(minutes)
    found = contents(read_leaves(run.database_url))
    figures = sum(len(shown.figures) for shown in run.shown["after"])
    record_property("figure", f"{found}, {figures} figures at the end, compared {dict(run.compared)}")
    assert run.problems == []
    assert found.shared_blocks and found.denied_requests and found.processes >= 2, "void"
    assert {"complete", "late", "missed", "open"} <= set(found.erasures), "void"
    assert found.preempted_requests or not minutes, "void"
    controls: Counter[str] = Counter()
    for shown in (*run.shown["while requests run"], *run.shown["after"]):
        for name, wrong in planted(shown):
            assert wrong.differences(), f"{shown.door.name}: a wrong {name} is not found"
            controls[shown.door.name] += 1
    silent = {"quotas"}  # what is held at a moment: at times nothing, and a nought has no control
    assert controls.keys() | silent == {door.name for door in DOORS}, "a door without a control"
