"""A page with a recorded terminal session: each `console` block runs, and prints what the page shows.

    session = Session(folder, binds={"ERASURE": r"erasure ([0-9a-f]{32})"})
    assert normal(played(page, session)) == normal(page)

`KVCUSTODY_RECORD=1` has a test write what was printed into its page. Digests, instants and sizes differ from run to run
and count as equal. A word in capitals of `binds` stands for what its pattern found last in what was printed.
"""

from __future__ import annotations

import os
import re
import shlex
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from pathlib import Path

import pytest
import structlog
from typer.testing import CliRunner

from kvcustody.console.main import app

FENCE = re.compile(r"^```(?P<info>[^\n`]*)\n(?P<body>.*?)^```$", re.MULTILINE | re.DOTALL)
_DIGEST = re.compile(r"sha256:[0-9a-f]{64}")
_INSTANT = re.compile(r"\d{4}-\d\d-\d\d[T ]\d\d:\d\d:\d\d(\.\d+)?Z?")
RECORDS = "KVCUSTODY_RECORD"


def normal(text: str, *more: str) -> str:
    """Without what differs from run to run, and without space that tables pad with; `more`: further patterns."""
    text = _INSTANT.sub("INSTANT", _DIGEST.sub("DIGEST", text))
    text = re.sub(r"\b\d+ bytes", "BYTES", text)
    for pattern in more:
        text = re.sub(pattern, "VARIES", text)
    return "\n".join(" ".join(line.split()) for line in text.splitlines()).strip()


class Session:
    """A terminal in a folder of its own."""

    def __init__(
        self,
        folder: Path,
        binds: Mapping[str, str],
        given: Mapping[str, str] | None = None,
        *,
        after_each: Callable[[], object] = lambda: None,
    ) -> None:
        """`binds`: patterns by word; `given`: what words stand for from the start. `after_each` command is called."""
        self.folder = folder
        self._after_each = after_each
        self._binds = dict(binds)
        self._values = dict(given or {})

    def run(self, line: str) -> str:
        """What a command prints; its exit status is what its words say."""
        words = shlex.split(line)
        assert words[0] == "kvcustody", line
        answer = CliRunner().invoke(app, [self._values.get(word, word) for word in words[1:]], prog_name="kvcustody")
        text = answer.output.rstrip("\n")
        self._after_each()
        for word, pattern in self._binds.items():
            if found := re.findall(pattern, text):
                self._values[word] = found[-1]
        is_no = text.startswith(("error: ", "refused: ")) or "\ndenied: " in text
        assert (answer.exit_code != 0) == is_no, f"{line}: exit {answer.exit_code}\n{text}\n{answer.exception!r}"
        for word, value in self._values.items():
            if not value.startswith("sha256:"):
                text = text.replace(value, word)
        return text


@contextmanager
def terminal(folder: Path) -> Iterator[None]:
    """Inside, commands run in this folder, and no variable of ours is set."""
    with pytest.MonkeyPatch.context() as patch:
        patch.chdir(folder)
        patch.setenv("COLUMNS", "120")
        for name in list(os.environ):
            if name.startswith("KVCUSTODY_") and name != RECORDS:
                patch.delenv(name)
        yield
    structlog.reset_defaults()


def played(page: str, session: Session) -> str:
    """The page with every block of the session run, and what it printed under each command."""

    def play(fence: re.Match[str]) -> str:
        info, body = fence["info"].split(), fence["body"]
        if len(info) == 3 and info[1] == "write":
            (session.folder / info[2]).write_text(body)
        elif len(info) == 3 and info[1] == "append":
            with (session.folder / info[2]).open("a") as file:
                file.write("\n" + body)
        elif len(info) == 2 and info[0] == "diff":
            file = session.folder / info[1]
            old, new = ("".join(line[2:] + "\n" for line in body.splitlines() if line[0] == sign) for sign in "-+")
            assert old in file.read_text(), "what the page changes is there"
            file.write_text(file.read_text().replace(old, new))
        elif info == ["console"]:
            lines = [line for line in body.splitlines() if line.startswith("$ ")]
            printed = [f"{line}\n{session.run(line[2:])}".rstrip() for line in lines]
            printed = ["\n".join(part.rstrip() for part in text.splitlines()) for text in printed]
            return "```console\n" + "\n".join(printed) + "\n```"
        return fence[0]

    return FENCE.sub(play, page)
