"""Leaves in a terminal: one line each, whose time is whole however narrow it is."""

from __future__ import annotations

import json
import re
from pathlib import Path

import pytest
from typer.testing import CliRunner

from kvcustody.console.main import app

TIME = r"\d{4}-\d\d-\d\d \d\d:\d\d:\d\d"


@pytest.mark.parametrize(("width", "has_index"), [(80, False), (140, True)])
def test_a_leaf_is_a_line_with_its_whole_time(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, width: int, *, has_index: bool
) -> None:
    monkeypatch.chdir(tmp_path)
    rows = [{"timestamp": at, "input_length": 1024, "output_length": 2, "hash_ids": [1, 2]} for at in (0, 900)]
    Path("t.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))
    assert CliRunner().invoke(app, ["replay", "t.jsonl", "--pool-blocks", "64", "--brief"]).exit_code == 0
    terminal = {"COLUMNS": str(width), "FORCE_COLOR": "1", "NO_COLOR": "1"}
    shown = CliRunner().invoke(app, ["audit", "tail", "-n", "6"], env=terminal)
    lines = [re.sub(r"\x1b\[[0-9;]*m", "", line).rstrip() for line in shown.stdout.splitlines()]
    title, header, *leaves = lines
    assert len(leaves) == 6 and title.startswith("6 leaves") and max(map(len, lines)) <= width
    assert all(re.match(rf"{TIME}  \S", line) for line in leaves), leaves
    assert ("idx" in header.split()) is has_index
    assert not has_index or all(re.match(rf"{TIME}  \S+ +\d+ ", line) for line in leaves), "what `audit prove` takes"
