"""`pytest --forks`: forked processes report what one process reports, and one that dies fails its test alone."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path
from xml.etree import ElementTree

import pytest

LIB = Path(__file__).resolve().parents[1] / "lib"

CONFTEST = """
import os, pytest

@pytest.fixture(scope="session")
def shared(tmp_path_factory):
    folder = tmp_path_factory.getbasetemp()
    with (folder.parent.parent / "started").open("a") as file:
        file.write(f"{os.getpid()}\\n")
    yield folder
    with (folder.parent.parent / "ended").open("a") as file:
        file.write(f"{os.getpid()}\\n")
"""

FILE = """
import os, signal, warnings

def test_passes(shared, tmp_path):
    assert tmp_path.is_relative_to(shared)

def test_fails(shared):
    print("printed by a test")
    os.write(2, b"written by a test")
    warnings.warn("warned by a test")
    assert shared == "nothing"

def test_dies(shared):
    if os.environ.get("DIES"):
        os.kill(os.getpid(), signal.SIGKILL)

def test_after(shared):
    pass
"""


def run(folder: Path, *arguments: str, dies: bool = False) -> tuple[dict[str, str], str]:
    """The outcome of each test by its name, and what the terminal shows."""
    suite = folder / "suite"
    suite.mkdir(exist_ok=True)
    (suite / "conftest.py").write_text(CONFTEST)
    for number in range(3):
        (suite / f"test_{number}.py").write_text(FILE)
    done = subprocess.run(
        [sys.executable, "-m", "pytest", "-p", "standins.forks", "-p", "no:cacheprovider", "--rootdir", suite,
         "--basetemp", folder / "base", "--junitxml", folder / "all.xml", *arguments, suite],
        capture_output=True, text=True, check=False, timeout=120,
        env=os.environ | {"PYTHONPATH": str(LIB), "DIES": "1" if dies else ""},
    )  # fmt: skip
    cases = ElementTree.parse(folder / "all.xml").iter("testcase")
    outcomes = {
        f"{case.get('classname', '').rpartition('.')[2]}::{case.get('name')}": (
            "failed" if case.find("failure") is not None else "passed"
        )
        for case in cases
    }
    return outcomes, done.stdout + done.stderr


@pytest.mark.parametrize("forks", ["0", "2"])
def test_outcomes_output_and_warnings_are_those_of_one_process(forks: str, tmp_path: Path) -> None:
    outcomes, text = run(tmp_path, "--forks", forks)
    assert len(outcomes) == 12
    assert {name for name, outcome in outcomes.items() if outcome == "failed"} == {
        f"test_{number}::test_fails" for number in range(3)
    }
    assert "3 failed, 9 passed, 3 warnings" in text
    assert text.count("printed by a test") >= 3 and text.count("written by a test") >= 3
    assert "warned by a test" in text


def test_fixtures_of_the_session_live_once_in_each_process_and_end(tmp_path: Path) -> None:
    run(tmp_path, "--forks", "2")
    started = (tmp_path / "started").read_text().split()
    assert len(started) == len(set(started)) == 2
    assert sorted((tmp_path / "ended").read_text().split()) == sorted(started)


def test_a_process_that_dies_fails_its_test_and_another_runs_the_rest(tmp_path: Path) -> None:
    outcomes, text = run(tmp_path, "--forks", "2", dies=True)
    assert len(outcomes) == 12
    assert {name for name, outcome in outcomes.items() if outcome == "failed"} == {
        f"test_{number}::{name}" for number in range(3) for name in ("test_fails", "test_dies")
    }
    assert "its process ended: killed by SIGKILL" in text


def test_the_first_failure_ends_the_run_where_that_is_asked_for(tmp_path: Path) -> None:
    outcomes, text = run(tmp_path, "--forks", "1", "-x")
    assert "stopping after 1 failures" in text
    assert list(outcomes) == ["test_0::test_passes", "test_0::test_fails"]
    assert (tmp_path / "ended").read_text() == (tmp_path / "started").read_text()
