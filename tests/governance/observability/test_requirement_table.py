"""The table of docs/reference/requirements.md names what is there, and it leaves no worker's metric out.

A row is a requirement, or one measure of it. A verdict is `yes`, or `absent: ` and why.
"""

from __future__ import annotations

import ast
import re
from pathlib import Path
from typing import NamedTuple

import pytest

from kvcustody.governance.observability.metrics import BY_NAME, MEASURES

ROOT = Path(__file__).resolve().parents[3]
PAGE = ROOT / "docs" / "reference" / "requirements.md"


class RequirementRow(NamedTuple):
    """One row; tests are below `tests/`, metrics without `kvcustody_`."""

    requirement: str
    what: str
    lives: tuple[str, ...]
    metrics: tuple[str, ...]
    tests: tuple[str, ...]
    own_pool: str
    transformers: str
    vllm: str


def rows_of(page: str) -> tuple[RequirementRow, ...]:
    """The rows of the page's table, without its two lines of heading."""
    lines = [line for line in page.splitlines() if line.startswith("| ")][1:]
    cells = [line.removeprefix("| ").removesuffix(" |").split(" | ") for line in lines]
    return tuple(
        RequirementRow(requirement, what, *(tuple(re.findall("`([^`]+)`", cell)) for cell in names), *verdicts)
        for requirement, what, *names, one, two, three in cells
        for verdicts in [(one, two, three)]
    )


ROWS = rows_of(PAGE.read_text(encoding="utf-8"))


def faults(row: RequirementRow) -> list[str]:
    """What a row names that is not there, and verdicts that are none."""
    wrong = [path for path in row.lives if not (ROOT / path).is_file()]
    wrong += [name for name in row.metrics if name not in BY_NAME]
    for test in row.tests:
        path, _, function = test.partition("::")
        file = ROOT / "tests" / path
        names = (
            {node.name for node in ast.parse(file.read_text()).body if isinstance(node, ast.FunctionDef)}
            if file.is_file()
            else set()
        )
        wrong += [] if function.startswith("test_") and function in names else [test]
    verdicts = (row.own_pool, row.transformers, row.vllm)
    wrong += [one for one in verdicts if one != "yes" and not re.fullmatch(r"absent: \S.+", one)]
    if "yes" in verdicts and not (row.lives and row.tests):
        wrong.append(f"{row.what}: a `yes` that nothing shows")
    return wrong


@pytest.mark.parametrize("row", ROWS, ids=lambda row: f"{row.requirement} {row.what}")
def test_what_a_row_names_is_there(row: RequirementRow) -> None:
    assert faults(row) == []


@pytest.mark.parametrize(
    "change",
    [
        {"lives": ("allocator/pool/puddle.py",)},
        {"metrics": ("kv_cache_puddles",)},
        {"tests": ("lab/test_sizing.py::test_puddles",)},
        {"tests": ("allocator/test_puddles.py::test_bytes_per_token",)},
        {"vllm": "partly"},
        {"vllm": "absent: "},
        {"tests": ()},
    ],
)
def test_control_what_is_not_there_is_found(change: dict[str, tuple[str, ...]]) -> None:
    assert faults(ROWS[0]._replace(**change))  # type: ignore[arg-type]


def test_every_metric_of_a_worker_is_in_a_row() -> None:
    shown = {name for row in ROWS for name in row.metrics}
    assert [one.name for one in MEASURES if "worker" in one.labels and one.name not in shown] == []


def test_a_row_is_shown_once() -> None:
    assert len({(row.requirement, row.what) for row in ROWS}) == len(ROWS)
    assert len(ROWS) > 40
