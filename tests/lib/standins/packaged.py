"""Wheels of this tree, built once."""

import os
import subprocess
import sys
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parents[3]


def run(*command: str, cwd: Path | None = None, env: dict[str, str] | None = None) -> str:
    done = subprocess.run(command, cwd=cwd, env=env, capture_output=True, text=True, check=False)
    assert done.returncode == 0, f"{' '.join(command)}\n{done.stdout}\n{done.stderr}"
    return done.stdout


@pytest.fixture(scope="module")
def wheels(tmp_path_factory: pytest.TempPathFactory) -> tuple[Path, Path]:
    """Wheels of what git tracks or does not ignore, so that no stray build folder hides a missing file."""
    copy = tmp_path_factory.mktemp("source")
    listed = run("git", "ls-files", "-z", "--cached", "--others", "--exclude-standard", cwd=ROOT).split("\0")
    for name in filter(None, listed):
        source, target = ROOT / name, copy / name
        if not os.path.lexists(source):
            continue
        target.parent.mkdir(parents=True, exist_ok=True)
        if source.is_symlink():
            target.symlink_to(source.readlink())
        else:
            target.write_bytes(source.read_bytes())
    built = []
    # What serves is built from its own source distribution, so both hold the files that the build makes.
    for project, forms in ((copy, ()), (copy / "packaging" / "testkit", ("--wheel",))):
        out = tmp_path_factory.mktemp("dist")
        run(sys.executable, "-m", "build", *forms, "--outdir", str(out), str(project))
        built += out.glob("*.whl")
    runtime, testkit = built
    return runtime, testkit
