"""What an installation offers: a listing of what runs in it, extras that say what they give, a manual, completions."""

from __future__ import annotations

import re
import shutil
import subprocess
import sys
import tomllib
from pathlib import Path

import pytest

from kvcustody.console.main import NEEDS
from kvcustody.console.shell.generate import shell_files

ROOT = Path(__file__).resolve().parents[2]
EXTRAS = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]["optional-dependencies"]
_WITHOUT = """
import sys
from importlib.machinery import PathFinder
class Absent:
    @staticmethod
    def find_spec(name, path=None, target=None):
        if name.partition(".")[0] in {absent}:
            raise ModuleNotFoundError(name, name=name)
sys.meta_path.insert(0, Absent)
import importlib.util
find = importlib.util.find_spec
def found(name, package=None):
    try:
        return find(name, package)
    except ModuleNotFoundError:
        return None
importlib.util.find_spec = found
sys.argv = ["kvcustody", *{words}]
from kvcustody.console.main import app
app()
"""
BASE = (
    "torch",
    "fastapi",
    "uvicorn",
    "prometheus_client",
    "zmq",
    "weasyprint",
    "pyarrow",
    "jwt",
    "psycopg",
)


def without(*words: str, absent: tuple[str, ...] = BASE) -> subprocess.CompletedProcess[str]:
    """A command in an installation that lacks some distributions."""
    source = _WITHOUT.replace("{absent}", repr(set(absent) or {""})).replace("{words}", repr(list(words)))
    return subprocess.run([sys.executable, "-c", source], check=False, capture_output=True, text=True)


def listed(text: str) -> set[str]:
    return set(re.findall(r"^│ ([a-z]+) ", text, flags=re.MULTILINE))


def test_a_base_install_lists_what_runs_in_it_and_says_what_brings_the_rest() -> None:
    told = without("--help")
    assert told.returncode == 0 and not listed(told.stdout) & NEEDS.keys(), told.stdout + told.stderr
    assert {"policy", "audit", "report"} <= listed(told.stdout)
    for name, needs in NEEDS.items():
        assert name in told.stdout and f"kvcustody[{needs.extra}]" in told.stdout.replace("\n", " ")
    assert "kvcustody policy init" in told.stdout and "Start with kvcustody up" not in told.stdout


def test_a_whole_install_lists_everything() -> None:
    told = without("--help", absent=())
    assert NEEDS.keys() <= listed(told.stdout) and "Not installed" not in told.stdout


@pytest.mark.system("a missing extra is not named")
@pytest.mark.parametrize("name", ["up", "serve", "replay"])
def test_what_is_asked_for_all_the_same_says_its_extra_and_leaves_nothing(name: str, tmp_path: Path) -> None:
    places = {"up": ["--folder", str(tmp_path / "demo")], "serve": ["--ledger", f"sqlite:///{tmp_path}/x.db"]}
    told = without(name, *places.get(name, ["--ledger", str(tmp_path / "x.db"), "--html", str(tmp_path / "x.html")]))
    assert told.returncode == 2, told.stdout + told.stderr
    assert f"pip install 'kvcustody[{NEEDS[name].extra}]'" in told.stderr
    assert list(tmp_path.iterdir()) == []


@pytest.mark.system("a base install cannot do its first job")
def test_the_first_job_of_a_base_install_works(tmp_path: Path) -> None:
    policy = str(tmp_path / "policy.yaml")
    assert without("policy", "init", policy, "--from", "single-org", "--name", "x").returncode == 0
    assert without("policy", "prove", policy).returncode == 0


def test_every_extra_says_what_it_gives() -> None:
    page = (ROOT / "docs" / "how-to" / "operate" / "install.md").read_text(encoding="utf-8")
    rows = dict(re.findall(r"^\| `([a-z0-9-]+)` \| (.+) \|$", page, flags=re.MULTILINE))
    assert rows.keys() == EXTRAS.keys() - {"test", "dev"}
    whole = re.fullmatch(r"kvcustody\[(.+)\]", EXTRAS["all"][0])
    assert whole is not None and set(re.findall(r"`([a-z]+)`", rows["all"])) == set(whole[1].split(","))
    assert {needs.extra for needs in NEEDS.values()} <= EXTRAS.keys()


@pytest.mark.skipif(shutil.which("man") is None, reason="man is not installed")
def test_man_reads_the_page(tmp_path: Path) -> None:
    page = tmp_path / "kvcustody.1"
    page.write_text(shell_files()[page.name], encoding="utf-8")
    done = subprocess.run(["man", "--warnings", "-l", str(page)], check=False, capture_output=True, text=True)
    if "not included" in done.stdout + done.stderr or "minimized" in done.stdout + done.stderr:
        pytest.skip("this machine's man shows nothing")
    assert done.returncode == 0 and "KVCUSTODY(1)" in done.stdout and "warning" not in done.stderr
