"""docs/policy/first-steps.md is a recorded session: every command runs here and prints what the page shows.

`KVCUSTODY_RECORD=1` writes what was printed into the page instead of comparing it. Digests and instants differ from run
to run and count as equal; `CELLS` in a command stands for the widening digest that was printed last.
"""

from __future__ import annotations

import os
import re
import shlex
from collections.abc import Iterator
from pathlib import Path

import pytest
import structlog
from typer.testing import CliRunner

from kvcustody.console.main import app

PAGE = Path(__file__).parents[3] / "docs" / "policy" / "first-steps.md"
FENCE = re.compile(r"^```(?P<info>[^\n`]*)\n(?P<body>.*?)^```$", re.MULTILINE | re.DOTALL)
_DIGEST = re.compile(r"sha256:[0-9a-f]{64}")
_INSTANT = re.compile(r"\d{4}-\d\d-\d\dT\d\d:\d\d:\d\d(\.\d+)?Z")


def normal(text: str) -> str:
    """Without what differs from run to run, and without space that tables pad with."""
    text = _INSTANT.sub("INSTANT", _DIGEST.sub("DIGEST", text))
    text = re.sub(r"\b\d+ bytes", "BYTES", text)
    return "\n".join(" ".join(line.split()) for line in text.splitlines()).strip()


class Session:
    """A terminal in a folder of its own."""

    def __init__(self) -> None:
        self._cells = ""

    def run(self, line: str) -> str:
        words = shlex.split(line)
        assert words[0] == "kvcustody", line
        answer = CliRunner().invoke(app, [self._cells if word == "CELLS" else word for word in words[1:]])
        text = answer.output.rstrip("\n")
        found = re.findall(r"widening digest: (sha256:[0-9a-f]{64})", text)
        self._cells = found[-1] if found else self._cells
        is_no = text.startswith(("error: ", "refused: "))
        assert (answer.exit_code != 0) == is_no, (
            f"{line}: exit {answer.exit_code}\n{text}\n{answer.exception!r}"
        )
        return text


@pytest.fixture
def folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[Path]:
    monkeypatch.chdir(tmp_path)
    for name in list(os.environ):
        if name.startswith("KVCUSTODY_") and name != "KVCUSTODY_RECORD":
            monkeypatch.delenv(name)
    yield tmp_path
    structlog.reset_defaults()


def played(folder: Path) -> str:
    """The page with every block of the session run, and what it printed under each command."""
    session = Session()

    def play(fence: re.Match[str]) -> str:
        info, body = fence["info"].split(), fence["body"]
        if len(info) == 3 and info[1] == "write":
            (folder / info[2]).write_text(body)
        elif len(info) == 3 and info[1] == "append":
            with (folder / info[2]).open("a") as file:
                file.write("\n" + body)
        elif len(info) == 2 and info[0] == "diff":
            file = folder / info[1]
            old, new = (
                "".join(line[2:] + "\n" for line in body.splitlines() if line[0] == sign) for sign in "-+"
            )
            assert old in file.read_text(), "what the page changes is there"
            file.write_text(file.read_text().replace(old, new))
        elif info == ["console"]:
            lines = [line for line in body.splitlines() if line.startswith("$ ")]
            printed = [f"{line}\n{session.run(line[2:])}".rstrip() for line in lines]
            printed = ["\n".join(part.rstrip() for part in text.splitlines()) for text in printed]
            return "```console\n" + "\n".join(printed) + "\n```"
        return fence[0]

    return FENCE.sub(play, PAGE.read_text(encoding="utf-8"))


@pytest.mark.system("the first-steps page no longer runs")
def test_the_session_runs_as_recorded(folder: Path) -> None:
    page = played(folder)
    if os.environ.get("KVCUSTODY_RECORD"):
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
