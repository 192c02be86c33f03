"""Tables in a terminal: whatever its width, no word, time or identifier is cut."""

from __future__ import annotations

import io
import os
import pty
import re
from contextlib import redirect_stderr
from contextvars import copy_context

import pytest
from rich.console import Console
from rich.text import Text

from kvcustody.console.api.api_commands import shown_fields
from kvcustody.console.command import make_table, tell_history
from kvcustody.times import readable

IDS = ("6832829fe76242d4b92a1373d3f3203a", "96176ff36acb4141815796fc4d735d44")
COLUMNS = ("case", "tenant", "due (UTC)", "what to do", "blocks", "found again")


def printed(width: int) -> list[str]:
    table = make_table("2 cases", *COLUMNS, left=4)
    for number, name in enumerate(IDS):
        what = "kvcustody case show, and then answer the person"
        table.add_row(name, "acme", "2026-12-01 04:29:21", what, f"{9_000 + number:,}", Text("64.0 MiB"))
    console = Console(width=width, file=io.StringIO())
    console.print(table)
    assert isinstance(console.file, io.StringIO)
    return console.file.getvalue().splitlines()


def test_a_table_that_fits_has_one_line_a_row() -> None:
    lines = [line.rstrip() for line in printed(160)]
    assert len(lines) == 4 and lines[0] == "2 cases" and lines[2].startswith(IDS[0]) and lines[2].endswith("64.0 MiB")


@pytest.mark.parametrize("width", [120, 100, 80, 60])
def test_a_narrow_terminal_shows_every_word_whole(width: int) -> None:
    lines = printed(width)
    text = "\n".join(lines)
    assert max(map(len, lines)) <= width and "…" not in text
    for whole in (*IDS, "2026-12-01 04:29:21", "64.0 MiB", "9,001", "kvcustody", "person"):
        assert whole in text, whole


def test_columns_without_room_stand_below_with_the_rows_name() -> None:
    """Each part begins with the first column; the title stands once."""
    text = "\n".join(printed(80))
    assert text.count("2 cases") == 1
    assert text.count(IDS[0]) == text.count(IDS[1]) == len(re.findall("^case ", text, re.MULTILINE)) > 1


def test_a_word_wider_than_the_terminal_goes_on_in_the_next_line() -> None:
    text = "".join(line.strip() for line in printed(20))
    assert all(part in text for part in ("case", "tenant", "blocks")) and "…" not in text
    assert re.sub(r"\s", "", text).count("6832829fe") == text.count("6832829fe") > 0


def test_moments_of_an_answer_are_shown_once_and_to_the_second() -> None:
    moment = 1_796_099_131_123_456
    shown = shown_fields({"issued_us": moment, "issued": "2026-12-01T04:25:31.123456Z", "age_us": 90_000_000})
    assert shown == {"issued (UTC)": readable(moment), "age": "1.5 min"}
    assert shown_fields({"until_us": None, "names": ["a", "b"]}) == {"until (UTC)": "", "names": "a, b"}


def test_the_note_about_demo_data_is_short_in_a_terminal_and_whole_elsewhere(capfd: pytest.CaptureFixture[str]) -> None:
    whole = "Demo data: this ledger holds simulated traffic: gpu-0 389746a45ddd (simulated, 2026-12-01T04:07:23Z to -)."
    copy_context().run(tell_history, whole)  # once a command
    assert capfd.readouterr().err == f"note: {whole}\n"
    ours, theirs = pty.openpty()
    with os.fdopen(theirs, "w") as terminal, redirect_stderr(terminal):
        copy_context().run(tell_history, whole)  # once a command
        terminal.flush()
        assert os.read(ours, 1000).decode().strip() == "note: Demo data: this ledger holds simulated traffic"
    os.close(ours)
