"""docs/tutorials/first-report.md runs as it stands, and prints what it shows but for figures of the machine."""

from __future__ import annotations

import os
from pathlib import Path

import pytest

from standins.docs.recorded_page import RECORDS, Session, normal, played, terminal

PAGE = Path(__file__).parents[2] / "docs" / "tutorials" / "first-report.md"
VARIES = (r"note: [^\n]*", r"\b[0-9a-f]{64}\b", r"\d[\d,.]*", r" {2,}")


@pytest.mark.system("the first report cannot be made as its page says")
def test_the_page_runs_as_recorded(tmp_path: Path) -> None:
    text = PAGE.read_text(encoding="utf-8")
    with terminal(tmp_path):
        session = Session(tmp_path, {"KEY": r"(kvcustody\.example/ledger/\S+)"})
        session.run("kvcustody replay --limit 60")
        shown = played(text, session)
        report = tmp_path / "report" / "report.json"
        report.write_text(report.read_text(encoding="utf-8").replace('"due":', '"duo":', 1), encoding="utf-8")
        with pytest.raises(AssertionError, match=r"exit 1\nproblem: .*\nnot sound"):  # the control
            session.run("kvcustody report verify report --key KEY --ledger kvcustody.db")
    if os.environ.get(RECORDS):
        PAGE.write_text(shown, encoding="utf-8")
        return
    assert normal(shown, *VARIES) == normal(text, *VARIES)
