"""Two wheels, built from a clean copy: what serves, installed without extras and imported, and what tests engines."""

import ast
import os
import subprocess
import sys
import tomllib
import venv
import zipfile
from pathlib import Path

import pytest

from kvcustody.console.api.generate_commands import generated
from kvcustody.console.shell.generate import shell_files
from standins.packaged import ROOT, run, wheels  # noqa: F401 - a fixture

pytestmark = pytest.mark.system

ROOMS = (
    "kernels",
    "allocator",
    "policies",
    "audit",
    "migrations",
    "governance",
    "lab",
    "integrations",
    "console",
)


@pytest.fixture
def wheel(wheels: tuple[Path, Path]) -> Path:  # noqa: F811
    """What serves."""
    return wheels[0]


def test_wheel_holds_every_room_once_under_one_namespace(wheel: Path) -> None:
    names = zipfile.ZipFile(wheel).namelist()
    top = {name.split("/")[0] for name in names}
    assert {name.rpartition(".")[2] for name in top} == {"kvcustody", "dist-info", "data"} and len(top) == 3
    shared = {name.partition(".data/data/share/")[2] for name in names if ".data/data/share/" in name}
    assert shared == {
        "man/man1/kvcustody.1",
        "bash-completion/completions/kvcustody",
        "zsh/site-functions/_kvcustody",
        "fish/vendor_completions.d/kvcustody.fish",
    }
    for room in ROOMS:
        assert any(name.startswith(f"kvcustody/{room}/") and name.endswith(".py") for name in names), room
    for needed in (
        "kvcustody/py.typed",
        "kvcustody/policies/library/regulated-saas.yaml",
        "kvcustody/migrations/env.py",
    ):
        assert needed in names, needed
    assert not [name for name in names if "tests/" in name or "benchmarks/" in name or name.endswith(".db")]


def test_what_is_made_of_the_commands_is_in_the_wheel(wheel: Path) -> None:
    """The commands of the API, the manual page and the completions are not committed: the build makes them."""
    held = zipfile.ZipFile(wheel)
    assert held.read("kvcustody/console/api/commands.json") == generated()
    [share] = {name.partition("/share/")[0] for name in held.namelist() if ".data/data/share/" in name}
    files = shell_files()
    for shell, place in (
        ("bash", "bash-completion/completions/kvcustody"),
        ("zsh", "zsh/site-functions/_kvcustody"),
    ):
        name = {"bash": "bash/kvcustody", "zsh": "zsh/_kvcustody"}[shell]
        assert held.read(f"{share}/share/{place}").decode() == files[name]
    page = held.read(f"{share}/share/man/man1/kvcustody.1").decode()
    sections = {line for line in files["kvcustody.1"].splitlines() if line.startswith(".SS")}
    of_testkit = tuple(f".SS kvcustody {name}" for name in ("conformance", r"known\-bugs"))
    assert {line for line in page.splitlines() if line.startswith(".SS")} == {
        line for line in sections if not line.startswith(of_testkit)
    }
    tracked = run("git", "ls-files", "console/api/commands.json", "packaging/share", cwd=ROOT)
    assert tracked == ""


def imported(source: bytes) -> set[str]:
    """Every module that a file imports, wherever it does."""
    modules: set[str] = set()
    for node in ast.walk(ast.parse(source)):
        if isinstance(node, ast.Import):
            modules |= {alias.name for alias in node.names}
        elif isinstance(node, ast.ImportFrom) and node.module:
            modules |= {node.module, *(f"{node.module}.{alias.name}" for alias in node.names)}
    return modules


def of_the_testkit(names: set[str]) -> list[str]:
    return sorted(name for name in names if f"{name}.".startswith("kvcustody.testkit."))


def test_what_tests_engines_is_in_a_wheel_of_its_own(wheels: tuple[Path, Path]) -> None:  # noqa: F811
    runtime, testkit = (zipfile.ZipFile(wheel) for wheel in wheels)
    ours = {name for name in runtime.namelist() if name.endswith(".py")}
    theirs = {name for name in testkit.namelist() if name.endswith(".py")}
    assert not [name for name in ours if name.startswith("kvcustody/testkit/")]
    assert not [name for name in ours if "mutant" in name or "toy_" in name or "modelless" in name]
    assert theirs and all(name.startswith("kvcustody/testkit/") for name in theirs)
    assert {str(path.relative_to(ROOT)) for path in (ROOT / "testkit").rglob("*.py")} == {
        name.removeprefix("kvcustody/") for name in theirs
    }
    assert {name: bad for name in ours if (bad := of_the_testkit(imported(runtime.read(name))))} == {}
    assert of_the_testkit(imported(b"def f():\n    from kvcustody.testkit import demo\n")), "the control"


def test_both_are_of_one_version_and_ask_for_each_other() -> None:
    main = tomllib.loads((ROOT / "pyproject.toml").read_text())
    kit = tomllib.loads((ROOT / "packaging" / "testkit" / "pyproject.toml").read_text())
    from kvcustody._version import __version__

    assert main["project"]["optional-dependencies"]["testkit"] == [f"kvcustody-testkit=={__version__}"]
    assert kit["project"]["dependencies"] == [f"kvcustody=={__version__}"]
    assert kit["tool"]["setuptools"]["dynamic"] == main["tool"]["setuptools"]["dynamic"]


def test_wheel_installs_clean_without_extras_and_imports(
    wheels: tuple[Path, Path],  # noqa: F811
    tmp_path: Path,
) -> None:
    wheel, testkit = wheels
    place = tmp_path / "venv"
    venv.create(place)
    python = str(place / "bin" / "python")
    env = {key: value for key, value in os.environ.items() if not key.startswith("PYTHON")}
    pip = (sys.executable, "-m", "pip", "--disable-pip-version-check", "--python", python)
    constraints = str(ROOT / "constraints.txt")
    run(*pip, "install", "--quiet", "--no-compile", "-c", constraints, str(wheel), env=env)
    program = (
        "import importlib, kvcustody, kvcustody.governance.governor.governor, kvcustody.audit.write.event_writer, sys;"
        "from kvcustody.console.main import COMMANDS;"
        "[importlib.import_module(command.target.split(':')[0]) for command in COMMANDS.values()];"
        "assert 'torch' not in sys.modules; print(kvcustody.__version__)"
    )
    assert run(python, "-c", program, cwd=tmp_path, env=env).strip()
    helped = run(str(place / "bin" / "kvcustody"), "--help", cwd=tmp_path, env=env)
    assert "kvcustody policy init" in helped and "kvcustody[engine]" in helped and " serve " not in helped
    listed = run(*pip, "list", "--format=freeze", env=env).lower()
    assert "torch==" not in listed and "triton==" not in listed
    demo = [str(place / "bin" / "kvcustody"), "demo", "attack", "--help"]
    absent = subprocess.run(demo[:-1], cwd=tmp_path, env=env, capture_output=True, text=True, check=False)
    assert absent.returncode != 0 and "pip install 'kvcustody[testkit]'" in absent.stderr
    run(*pip, "install", "--quiet", "--no-compile", "--no-deps", str(testkit), env=env)
    assert "Let one tenant attack" in run(*demo, cwd=tmp_path, env=env)
    asked = [str(place / "bin" / "kvcustody"), "conformance", "--help"]
    assert "--engine" in run(*asked, cwd=tmp_path, env=env)
