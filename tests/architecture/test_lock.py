"""What `make setup` installs is pinned by hash: the lock names exactly what is here, and no line is without hashes."""

from __future__ import annotations

import importlib.util
import re
import tomllib
from importlib.metadata import metadata
from pathlib import Path
from types import ModuleType

import pytest
from packaging.specifiers import SpecifierSet

ROOT = Path(__file__).parents[2]


@pytest.fixture
def lock() -> ModuleType:
    spec = importlib.util.spec_from_file_location("lock", ROOT / "packaging" / "lock.py")
    assert spec is not None and spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


def test_the_lock_names_what_is_installed(lock: ModuleType) -> None:
    here = lock.installed()
    assert len(here) > 50 and lock.locked() == here


def test_another_version_is_found(lock: ModuleType, monkeypatch: pytest.MonkeyPatch) -> None:
    """The control."""
    other = {**lock.locked(), "numpy": "0.0.1"}
    monkeypatch.setattr(lock, "locked", lambda: other)
    monkeypatch.setattr("sys.argv", ["lock.py", "--check"])
    assert lock.main() == 1


def test_every_package_has_hashes_and_every_constraint_is_what_is_locked(lock: ModuleType) -> None:
    text = lock.LOCK.read_text(encoding="utf-8")
    entries = re.findall(
        r"^(\S+)==\S+(?: ; [^\\\n]+)? \\\n(?:    --hash=sha256:[0-9a-f]{64}(?: \\)?\n)+", text, re.MULTILINE
    )
    assert sorted(entries) == sorted(lock.locked())
    lines = (ROOT / "constraints.txt").read_text(encoding="utf-8").splitlines()
    pins = dict(line.split("==") for line in lines if line and not line.startswith("#"))
    for name, version in pins.items():
        assert lock.locked().get(lock.canonical(name), version) == version, name


def test_every_locked_package_installs_on_the_oldest_python_that_is_supported(lock: ModuleType) -> None:
    """`make setup` may choose any build of 3.11, and a distribution's may be an early one."""
    project = tomllib.loads((ROOT / "pyproject.toml").read_text(encoding="utf-8"))["project"]
    oldest = project["requires-python"].removeprefix(">=") + ".0"
    needs = {name: metadata(name).get("Requires-Python") or "" for name in lock.installed()}
    assert [name for name, asked in needs.items() if oldest not in SpecifierSet(asked)] == []


def test_setup_checks_hashes() -> None:
    makefile = (ROOT / "Makefile").read_text(encoding="utf-8")
    assert "--no-deps --require-hashes -r requirements.lock" in makefile
