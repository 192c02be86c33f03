"""Run the kernel cases on the Triton kernels, under Triton's interpreter, in a process of their own.

The interpreter is chosen when a kernel's module is first imported, so it cannot be switched on here.
"""

from __future__ import annotations

import os
import re
import subprocess
import sys
from pathlib import Path

import pytest

pytestmark = pytest.mark.system

pytest.importorskip("triton")


def test_triton_kernels_agree_with_the_oracle():
    environment = {name: value for name, value in os.environ.items() if not name.startswith("PYTEST_")}
    cases = Path(__file__).with_name("test_kernels.py")
    done = subprocess.run(
        [sys.executable, "-m", "pytest", "-q", "-p", "no:cacheprovider", str(cases)],
        env=environment | {"TRITON_INTERPRET": "1"},
        capture_output=True,
        text=True,
        check=False,
        cwd=cases.parents[2],
    )
    assert done.returncode == 0, done.stdout + done.stderr
    passed = re.search(r"(\d+) passed", done.stdout)
    assert passed and int(passed[1]) >= 16, done.stdout
    assert "skipped" not in done.stdout
