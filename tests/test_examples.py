"""Every example runs as its page says, in a folder of its own, and shows what it promises."""

from __future__ import annotations

import os
import re
import shutil
import subprocess
import sys
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parents[1]
EXAMPLES = ROOT / "examples"
ENVIRONMENT = {name: value for name, value in os.environ.items() if not name.startswith("KVCUSTODY_")} | {
    "PATH": f"{Path(sys.executable).parent}{os.pathsep}{os.environ['PATH']}"
}


def run(*command: str, folder: Path) -> subprocess.CompletedProcess[str]:
    return subprocess.run(command, check=False, cwd=folder, env=ENVIRONMENT, capture_output=True, text=True)


def test_the_page_names_folders_that_are_there() -> None:
    named = re.findall(r"\]\(([a-z-]+/[a-z.]+)\)", (EXAMPLES / "README.md").read_text(encoding="utf-8"))
    assert len(named) >= 2 and all((EXAMPLES / name).is_file() for name in named)


@pytest.mark.system("an example no longer runs")
def test_a_governor_of_ones_own(tmp_path: Path) -> None:
    pytest.importorskip("torch")
    done = run(sys.executable, str(EXAMPLES / "embedded-governor" / "run.py"), str(tmp_path), folder=tmp_path)
    assert done.returncode == 0, done.stderr
    found = re.findall(r"(\w+) of (\w+): (\d+) tokens", done.stdout)
    assert [int(tokens) for *_, tokens in found] == [0, 96, 0]
    ledger = f"sqlite:///{tmp_path / 'ledger.db'}"
    checked = run("kvcustody", "audit", "fsck", "--ledger", ledger, folder=tmp_path)
    assert checked.returncode == 0, checked.stdout + checked.stderr


@pytest.mark.system("an example no longer runs")
def test_a_policy_in_a_pipeline(tmp_path: Path) -> None:
    place = shutil.copytree(EXAMPLES / "policy-in-ci", tmp_path / "ci")
    done = run("sh", "check.sh", folder=place)
    assert done.returncode == 0 and "no new access" in done.stdout, done.stdout + done.stderr
    policy = place / "policy.yaml"
    policy.write_text(policy.read_text().replace("idle: 15m", "idle: 45m"))
    assert run("sh", "check.sh", folder=place).returncode == 1, "the control: longer than what is in effect"
