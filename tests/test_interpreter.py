"""`make setup` takes the fastest build of its Python's version, and never one that can make no environment."""

import os
import subprocess
import sys
from importlib.util import module_from_spec, spec_from_file_location
from pathlib import Path

import pytest

from standins.packaged import ROOT

SCRIPT = ROOT / "packaging/interpreter.py"


@pytest.fixture
def choice(tmp_path: Path):
    """The executable that `fastest` chooses for this Python, which takes 100 ms, beside builds that answer as told."""
    spec = spec_from_file_location("interpreter", SCRIPT)
    assert spec is not None and spec.loader is not None
    interpreter = module_from_spec(spec)
    spec.loader.exec_module(interpreter)

    def choose(this: str = "3.11 0.1", **others: str) -> str:
        for name, answer in {"this": this, **others}.items():
            build = tmp_path / name / "python3"
            build.parent.mkdir()
            build.write_text(f"#!/bin/sh\n{answer if answer.startswith('exit') else f'echo {answer} {name}'}\n")
            build.chmod(0o755)
        folders = [tmp_path / name for name in ("nowhere", "this", *others)]
        return interpreter.fastest(tmp_path / "this/python3", "3.11", folders)

    return choose


def test_the_fastest_build_of_this_version_is_chosen(choice) -> None:
    assert choice(slow="3.11 0.2", fast="3.11 0.05", faster="3.11 0.04") == "faster"


def test_another_version_is_not_chosen(choice) -> None:
    assert choice(newer="3.12 0.01") == "this"


def test_an_alike_build_does_not_replace_this_one(choice) -> None:
    assert choice(alike="3.11 0.095") == "this"


def test_a_build_that_makes_no_environment_is_not_chosen(choice) -> None:
    assert choice(bare="exit 1", odd="Python", fast="3.11 0.05") == "fast"


def test_without_any_answer_this_python_stays(choice, tmp_path: Path) -> None:
    assert choice(this="exit 1", fast="3.11 0.05") == str(tmp_path / "this/python3")


def test_what_is_chosen_here_makes_an_environment(tmp_path: Path) -> None:
    command = [sys.executable, str(SCRIPT)]
    chosen = subprocess.run(command, capture_output=True, text=True, check=True).stdout.strip()
    probe = "import ensurepip, sys, venv; print(*sys.version_info[:2])"
    answer = subprocess.run([chosen, "-c", probe], capture_output=True, text=True, check=True)
    assert answer.stdout.split() == [str(part) for part in sys.version_info[:2]]


def test_a_build_without_ensurepip_answers_nothing(tmp_path: Path) -> None:
    """The probe itself, on a Python that cannot import `ensurepip`."""
    (tmp_path / "ensurepip.py").write_text("raise ImportError")
    command = [
        sys.executable,
        "-c",
        "import interpreter, sys; print(interpreter.measure(interpreter.Path(sys.executable)))",
    ]
    paths = [str(SCRIPT.parent)]
    whole, bare = (
        subprocess.run(
            command,
            env={**os.environ, "PYTHONPATH": os.pathsep.join(more)},
            capture_output=True,
            text=True,
            check=True,
        ).stdout
        for more in (paths, [*paths, str(tmp_path)])
    )
    assert whole.startswith("('3.") and bare == "None\n"
