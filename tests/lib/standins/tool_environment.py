"""Environments of tools that pin what we do not, made on first use (`packaging/tool_env.sh`)."""

from __future__ import annotations

import subprocess
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parents[3]


def programs_of(folder: str, package: str, version: str) -> Path:
    """The folder of a tool's programs; the test fails where it cannot be installed."""
    command = [str(ROOT / "packaging" / "tool_env.sh"), folder, package, version]
    made = subprocess.run(command, capture_output=True, text=True, check=False)
    if made.returncode:
        pytest.fail(f"{package} is not here: {made.stderr.strip()}")
    return ROOT / made.stdout.strip() / "bin"
