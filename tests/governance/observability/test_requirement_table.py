"""The table of requirements names what is there: modules, metrics, tests; and it leaves no worker's metric out."""

from __future__ import annotations

import ast
import re
from pathlib import Path

import pytest

from kvcustody.governance.observability.metrics import BY_NAME, MEASURES
from kvcustody.governance.observability.requirement_table import ROWS, RequirementRow, requirements_table

ROOT = Path(__file__).resolve().parents[3]


def faults(row: RequirementRow) -> list[str]:
    """What a row names that is not there, and verdicts that are none."""
    found = [path for path in row.lives if not (ROOT / path).is_file()]
    found += [name for name in row.metrics if name not in BY_NAME]
    for test in row.tests:
        path, _, function = test.partition("::")
        file = ROOT / "tests" / path
        names = (
            {node.name for node in ast.parse(file.read_text()).body if isinstance(node, ast.FunctionDef)}
            if file.is_file()
            else set()
        )
        found += [] if function.startswith("test_") and function in names else [test]
    verdicts = (row.own_pool, row.transformers, row.vllm)
    found += [one for one in verdicts if one != "yes" and not re.fullmatch(r"absent: \S.+", one)]
    if "yes" in verdicts and not (row.lives and row.tests):
        found.append(f"{row.what}: a `yes` that nothing shows")
    return found


@pytest.mark.parametrize("row", ROWS, ids=lambda row: f"{row.requirement} {row.what}")
def test_what_a_row_names_is_there(row: RequirementRow) -> None:
    assert faults(row) == []


@pytest.mark.parametrize(
    "change",
    [
        {"lives": ("allocator/pool/puddle.py",)},
        {"metrics": ("kv_cache_puddles",)},
        {"tests": ("allocator/test_sizing.py::test_puddles",)},
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


def test_a_row_is_shown_once_with_all_that_it_names() -> None:
    assert len({(row.requirement, row.what) for row in ROWS}) == len(ROWS)
    lines = requirements_table().splitlines()[2:]
    for row, line in zip(ROWS, lines, strict=True):
        assert line.count(" | ") == 7 and line.startswith(f"| {row.requirement} | {row.what} |")
        assert all(f"`{name}`" in line for name in (*row.lives, *row.metrics, *row.tests))
