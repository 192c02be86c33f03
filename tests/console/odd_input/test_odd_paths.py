"""Every command that takes a path: the named file and no other, private where it is written, nothing where it is read.

The commands and their paths come from the command table, so a new command is tried as well.
"""

from __future__ import annotations

import contextlib
import inspect
import os
import shutil
import signal
import sqlite3
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from types import FrameType
from typing import Any, get_args

import pytest
from typer.testing import CliRunner

from kvcustody.console.command_table import every_command, rows
from kvcustody.console.main import app

ODD = "a#b?c%41 ü \u200f\u05d0\u05d1 d"  # a fragment, a query, an escape, spaces, an umlaut, right to left
HERE = "here"
PUBLIC = {"policy key": (f"file-{ODD}.pub",), "policy schema": (f"out-{ODD}",)}  # nobody's secret, by command
LASTING = {row.name for row in rows() if row.lasting} | {"up", "demo"}
SECONDS_MAX = 60
SMALL = {"replay": ["--limit", "1"]}  # what a command would do at length where its paths are right
COMMANDS = dict(every_command())


def takes_path(annotation: Any) -> bool:
    return annotation is Path or any(map(takes_path, get_args(annotation)))


def parameters_of(command: Any) -> dict[str, inspect.Parameter]:
    return dict(inspect.signature(inspect.unwrap(command.callback), eval_str=True).parameters)


def paths_of(command: Any) -> list[Any]:
    """The command's arguments and options that are paths, the ledger's URL among them."""
    known = parameters_of(command)
    return [
        each
        for each in command.params
        if each.name == "ledger" or (each.name in known and takes_path(known[each.name].annotation))
    ]


TRIED = {name: command for name, command in COMMANDS.items() if paths_of(command) and name not in LASTING}


@contextmanager
def in_time() -> Iterator[None]:
    def late(number: int, frame: FrameType | None) -> None:
        raise TimeoutError

    before = signal.signal(signal.SIGALRM, late)
    signal.alarm(SECONDS_MAX)
    try:
        yield
    finally:
        signal.alarm(0)
        signal.signal(signal.SIGALRM, before)


def words_of(name: str, command: Any, odd: Path, *, ledger: str) -> list[str]:
    """A call of a command with every path odd, and a word for whatever else it asks for."""
    paths, words, arguments = paths_of(command), name.split(), []
    for each in command.params:
        flag = next((flag for flag in getattr(each, "opts", ()) if flag.startswith("--")), "")
        if each in paths:
            value = ledger if each.name == "ledger" else str(odd / f"{each.name}-{ODD}")
        elif each.required:
            value = "1"
        else:
            continue
        if each.param_type_name == "argument":
            arguments.append(value)
        else:
            words += [flag, value]
    return [*words, *SMALL.get(name, []), *arguments]


def entries(folder: Path) -> dict[Path, int]:
    """Everything below a folder, with its mode."""
    return {path: path.stat().st_mode & 0o777 for path in folder.rglob("*")}


def problems(
    before: dict[Path, int], after: dict[Path, int], named: set[Path], public: tuple[str, ...] = ()
) -> list[str]:
    """Files that have another name than one that was given (or lie in it, or beside it), or are open to others.

    What lies in the folder that a command runs in has its name from a setting.
    """
    faults = []
    for path in after.keys() - before.keys():
        by_setting = HERE in path.parent.parts or path.name == "worker-replay.lock"  # it lies beside the ledger
        if not by_setting and not any(path == one or one in path.parents or one.stem in path.name for one in named):
            faults.append(f"{path.name!r} was not named")
        if after[path] & 0o077 and not (after[path] == 0o644 and path.name.startswith(public)):
            faults.append(f"{path.name!r} has mode {after[path]:o}")
    return faults


@pytest.fixture
def place(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """A folder with an odd name, and another that commands run in."""
    (tmp_path / HERE).mkdir()
    (tmp_path / ODD).mkdir()
    monkeypatch.chdir(tmp_path / HERE)
    return tmp_path


@pytest.mark.parametrize("name", sorted(TRIED))
def test_a_path_that_is_not_there_makes_no_file_of_another_name(name: str, place: Path) -> None:
    odd = place / ODD
    ledger = odd / f"ledger-{ODD}.db"
    words = words_of(name, TRIED[name], odd, ledger=str(ledger))
    named = {odd / f"{each.name}-{ODD}" for each in paths_of(TRIED[name])} | {ledger}
    before = entries(place)
    with in_time():
        CliRunner().invoke(app, words, input="")
    assert problems(before, entries(place), named, PUBLIC.get(name, ())) == [], words


READS = sorted(
    name
    for name, command in TRIED.items()
    if [each.name for each in paths_of(command) if each.name == "ledger"]
    and not any(each.required for each in command.params)
)


CONTENTS = {
    "deep": b"[" * 100_000,
    "a byte order mark": b"\xef\xbb\xbf{}",
    "no text": b"\xff\xfe\x00",
    "null": b"null",
    "a long number": b"9" * 5_000,
}


@pytest.mark.parametrize("name", sorted(TRIED))
def test_a_file_that_is_none_of_its_kind_is_refused_in_one_line(name: str, place: Path) -> None:
    """Or it is not read; nothing ends in a traceback."""
    for content in CONTENTS.values():
        for each in paths_of(TRIED[name]):
            file = place / ODD / f"{each.name}-{ODD}"
            if each.name != "ledger" and not file.is_dir():
                file.write_bytes(content)
                file.chmod(0o600)
        with in_time():
            found = CliRunner().invoke(app, words_of(name, TRIED[name], place / ODD, ledger=f"sqlite:///{HERE}.db"))
        assert found.exception is None or isinstance(found.exception, SystemExit), found.exception
        assert found.exit_code in (0, 1, 2), found.output


@pytest.mark.parametrize("name", READS)
def test_a_ledger_with_an_odd_name_is_the_one_that_is_opened(name: str, place: Path, migrated: Path) -> None:
    ledger = place / ODD / f"ledger-{ODD}.db"
    shutil.copy(migrated, ledger)
    ledger.chmod(0o600)
    limited = any("--limit" in each.opts for each in TRIED[name].params)  # one request or row names the files too
    before = entries(place)
    with in_time():
        words = [*name.split(), "--ledger", str(ledger), *(["--limit", "1"] if limited else [])]
        done = CliRunner().invoke(app, words, input="")
    assert "does not exist" not in done.output and "cannot be opened" not in done.output, done.output
    assert problems(before, entries(place), {ledger}) == []


def test_a_path_that_is_pasted_into_a_uri_is_noticed(place: Path) -> None:
    """The control: SQLite opens a file of another name, open to others."""
    ledger = place / ODD / f"ledger-{ODD}.db"
    before = entries(place)
    old = os.umask(0o022)
    try:
        with contextlib.closing(sqlite3.connect(f"file:{place}/ledger-{ODD}.db?mode=rwc", uri=True)) as opened:
            opened.execute("CREATE TABLE t (x)")
    finally:
        os.umask(old)
    found = problems(before, entries(place), {ledger})
    assert any("was not named" in one for one in found) and any("has mode" in one for one in found)
