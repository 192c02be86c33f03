"""Faults of a fleet's parts on real servers, small form: what was acknowledged stays, what was erased is not found."""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

from standins.integrations.jetstream.nats_server import ABSENT, BINARY

SCRIPT = Path(__file__).resolve().parents[2] / "benchmarks" / "fleet" / "faults.py"
pytestmark = [
    pytest.mark.system("a part of the fleet that was away takes evidence with it, or leaves what was erased"),
    pytest.mark.skipif(BINARY is None, reason=ABSENT),
]


def faults(folder: Path, *words: str) -> list[dict[str, Any]]:
    """The rows; the script ends with another status than 0 where something was lost or reused too late."""
    file = folder / "faults.json"
    command = [
        sys.executable,
        str(SCRIPT),
        "--router",
        "none",
        "--seconds",
        "10",
        "--json",
        str(file),
        *words,
    ]
    subprocess.run(command, check=True, timeout=900)
    made: list[dict[str, Any]] = json.loads(file.read_text())["faults"]
    return made


def test_each_part_that_was_killed_or_cut_off(tmp_path: Path) -> None:
    rows = faults(tmp_path, "--fault", "killed", "--fault", "cut off", "--lease", "4")
    assert {row["part"] for row in rows} == {
        "nats", "postgresql", "router", "door", "worker", "door and worker",
    }  # fmt: skip
    assert all(row["asked_after_erasure"] and row["recovered_after_seconds"] < 60 for row in rows)


def test_under_a_long_lease_what_was_erased_is_found(tmp_path: Path) -> None:
    """The control: door and worker do not hear of the erasure, and their lease is not over."""
    [row] = faults(tmp_path, "--part", "door and worker", "--fault", "cut off", "--lease", "86400")
    assert row["last_reuse_after_erasure_seconds"] > 1.2 * 4
