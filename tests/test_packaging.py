"""The wheel: built from a clean copy, installed without extras, imported; and what it must and must not contain."""

import os
import subprocess
import sys
import venv
import zipfile
from pathlib import Path

import pytest

pytestmark = pytest.mark.system

ROOT = Path(__file__).resolve().parent.parent
ROOMS = ("kernels", "allocator", "policies", "audit", "migrations", "governance", "integrations", "console")


def run(*command: str, cwd: Path | None = None, env: dict[str, str] | None = None) -> str:
    done = subprocess.run(command, cwd=cwd, env=env, capture_output=True, text=True, check=False)
    assert done.returncode == 0, f"{' '.join(command)}\n{done.stdout}\n{done.stderr}"
    return done.stdout


@pytest.fixture(scope="module")
def wheel(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A wheel of what git tracks or does not ignore, so that no stray build folder hides a missing file."""
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
    out = tmp_path_factory.mktemp("dist")
    run(sys.executable, "-m", "build", "--wheel", "--outdir", str(out), str(copy))
    (built,) = out.glob("*.whl")
    return built


def test_wheel_holds_every_room_once_under_one_namespace(wheel: Path) -> None:
    names = zipfile.ZipFile(wheel).namelist()
    top = {name.split("/")[0] for name in names}
    assert top == {"kvcustody", next(name for name in top if name.endswith(".dist-info"))}
    for room in ROOMS:
        assert any(name.startswith(f"kvcustody/{room}/") and name.endswith(".py") for name in names), room
    for needed in (
        "kvcustody/py.typed",
        "kvcustody/policies/library/regulated-saas.yaml",
        "kvcustody/migrations/env.py",
    ):
        assert needed in names, needed
    assert not [name for name in names if "tests/" in name or "benchmarks/" in name or name.endswith(".db")]


def test_wheel_installs_clean_without_extras_and_imports(wheel: Path, tmp_path: Path) -> None:
    place = tmp_path / "venv"
    venv.create(place)
    python = str(place / "bin" / "python")
    env = {key: value for key, value in os.environ.items() if not key.startswith("PYTHON")}
    pip = (sys.executable, "-m", "pip", "--disable-pip-version-check", "--python", python)
    constraints = str(ROOT / "constraints.txt")
    run(*pip, "install", "--quiet", "--no-compile", "-c", constraints, str(wheel), env=env)
    program = (
        "import importlib, kvcustody, kvcustody.governance.governor.governor, kvcustody.audit.writer.event_writer, sys;"
        "from kvcustody.console.main import COMMANDS;"
        "[importlib.import_module(command.target.split(':')[0]) for command in COMMANDS.values()];"
        "assert 'torch' not in sys.modules; print(kvcustody.__version__)"
    )
    assert run(python, "-c", program, cwd=tmp_path, env=env).strip()
    assert "replay" in run(str(place / "bin" / "kvcustody"), "--help", cwd=tmp_path, env=env)
    listed = run(*pip, "list", "--format=freeze", env=env).lower()
    assert "torch==" not in listed and "triton==" not in listed
