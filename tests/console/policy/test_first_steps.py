"""docs/tutorials/first-policy.md is a recorded session: every command runs here and prints what the page shows.

`CELLS` in a command stands for the widening digest that was printed last.
"""

from __future__ import annotations

import os
import re
from pathlib import Path

import pytest

from standins.docs.recorded_page import RECORDS, Session, normal, played, terminal

PAGE = Path(__file__).parents[3] / "docs" / "tutorials" / "first-policy.md"
BINDS = {"CELLS": r"widening digest: (sha256:[0-9a-f]{64})"}


@pytest.mark.system("the first-steps page no longer runs")
def test_the_session_runs_as_recorded(tmp_path: Path) -> None:
    with terminal(tmp_path):
        page = played(PAGE.read_text(encoding="utf-8"), Session(tmp_path, BINDS))
    if os.environ.get(RECORDS):
        PAGE.write_text(page, encoding="utf-8")
    assert normal(page) == normal(PAGE.read_text(encoding="utf-8"))
    commands = re.findall(r"^\$ kvcustody policy (\S+)", page, re.MULTILINE)
    assert {
        "init",
        "validate",
        "lint",
        "test",
        "prove",
        "propose",
        "review",
        "approve",
        "consent",
        "activate",
    } <= {*commands}
