"""One ledger, every door: what the pages, the API, the commands and reports show is what the leaves add up to.

`figure_doors` asks each door and compares each of its figures with leaf bytes, while requests run and after.
"""

from __future__ import annotations

import re
from collections import Counter
from collections.abc import Callable
from pathlib import Path

import pytest

from standins.audit.figure_doors import DOORS, Shown
from standins.audit.leaf_figures import read_leaves
from standins.console.compared_run import ComparedRun, contents

pytest.importorskip("torch", reason="the worker's blocks are tensors")


def planted(shown: Shown) -> tuple[set[str], Shown]:
    """The names of a door's figures that are not 0, and its text with each of these made another, in one pass."""
    figures = {name: value for name, value in shown.figures.items() if isinstance(value, str | int) and value}
    words = sorted({value for value in figures.values() if isinstance(value, str)}, key=len, reverse=True)
    numbers = {value for value in figures.values() if isinstance(value, int)}
    word = "|".join(re.escape(value) for value in words) or "(?!)"  # a value, no name of a field

    def other(match: re.Match[str]) -> str:
        if match["word"]:
            return f"9{match['word']}"
        number = int(match["number"].replace(",", ""))
        return str(number + 1) if number in numbers else match["number"]

    number = r"\d{1,3}(?:,\d{3})+(?!\d)|\d+"  # with or without commas
    pattern = rf'(?P<word>{word})(?!"\s*:)|(?<![\d.,\w-])(?P<number>{number})(?![\d\w])'
    return {" ".join(name) for name in figures}, shown._replace(text=re.sub(pattern, other, shown.text))


def named(shown: Shown) -> set[str]:
    """The figures that are found to be wrong."""
    begins = f"{shown.door.name}: "
    return {line.removeprefix(begins).partition(" is ")[0] for line in shown.differences()}


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
    recorded = contents(read_leaves(run.database_url))
    figures = sum(len(shown.figures) for shown in run.shown["after"])
    record_property("figure", f"{recorded}, {figures} figures at the end, compared {dict(run.compared)}")
    assert run.problems == []
    assert recorded.shared_blocks and recorded.denied_requests and recorded.processes >= 2, "void"
    assert {"complete", "late", "missed", "open"} <= set(recorded.erasures), "void"
    assert recorded.preempted_requests or not minutes, "void"
    controls: Counter[str] = Counter()
    for shown in (*run.shown["while requests run"], *run.shown["after"]):
        names, wrong = planted(shown)
        missed = names - named(wrong)
        assert not missed, f"{shown.door.name}: wrong figures are not found: {sorted(missed)}"
        if names:
            controls[shown.door.name] += len(names)
    silent = {"quotas"}  # what is held at a moment: at times nothing, and a nought has no control
    assert controls.keys() | silent == {door.name for door in DOORS}, "a door without a control"
