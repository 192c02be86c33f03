"""Builds kvcustody with setuptools, after making the files that are derived from its commands.

1. `console/api/commands.json`, the manual page and the completions are not committed: a build makes them. A checkout
   makes `commands.json` with `make setup`, and does without the others.
2. To make them, a build imports the commands and the API, so it asks for what the service needs. A source distribution
   holds the files already: a build of one asks for setuptools alone.
"""

from __future__ import annotations

import os
import subprocess
import sys
import tomllib
from pathlib import Path
from typing import Any

from setuptools import build_meta
from setuptools.build_meta import (
    build_editable,
    get_requires_for_build_editable,
    prepare_metadata_for_build_editable,
    prepare_metadata_for_build_wheel,
)

__all__ = [
    "build_editable",
    "build_sdist",
    "build_wheel",
    "get_requires_for_build_editable",
    "get_requires_for_build_sdist",
    "get_requires_for_build_wheel",
    "prepare_metadata_for_build_editable",
    "prepare_metadata_for_build_wheel",
]

ROOT = Path(__file__).resolve().parents[1]
MAKERS = ("kvcustody.console.api.generate_commands", "kvcustody.console.shell.generate")
Settings = dict[str, Any] | None


def get_requires_for_build_sdist(config_settings: Settings = None) -> list[str]:
    """What a source distribution is built with."""
    return [*build_meta.get_requires_for_build_sdist(config_settings), *_requirements()]


def get_requires_for_build_wheel(config_settings: Settings = None) -> list[str]:
    """What a wheel is built with."""
    return [*build_meta.get_requires_for_build_wheel(config_settings), *_requirements()]


def build_sdist(sdist_directory: str, config_settings: Settings = None) -> str:
    """Build a source distribution."""
    _make_files()
    return build_meta.build_sdist(sdist_directory, config_settings)


def build_wheel(wheel_directory: str, config_settings: Settings = None, metadata_directory: str | None = None) -> str:
    """Build a wheel."""
    _make_files()
    return build_meta.build_wheel(wheel_directory, config_settings, metadata_directory)


def _is_made() -> bool:
    """Whether this is a source distribution (rule 2)."""
    return (ROOT / "PKG-INFO").is_file()


def _requirements() -> list[str]:
    if _is_made():
        return []
    project = tomllib.loads((ROOT / "pyproject.toml").read_text(encoding="utf-8"))["project"]
    return [*project["dependencies"], *project["optional-dependencies"]["service"]]


def _make_files() -> None:
    if _is_made():
        return
    paths = [str(ROOT / "src"), *filter(None, [os.environ.get("PYTHONPATH")])]
    environment = os.environ | {"PYTHONPATH": os.pathsep.join(paths)}
    for maker in MAKERS:
        subprocess.run([sys.executable, "-m", maker], cwd=ROOT, env=environment, check=True)  # noqa: S603 - our own modules
