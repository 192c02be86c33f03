"""The verifiers side by side: the library, the stand-alone file that is made from it, and the independent one."""

from __future__ import annotations

import subprocess
import sys
from collections.abc import Sequence
from pathlib import Path
from types import ModuleType
from typing import Any

from kvcustody.audit.exports.amalgamate import standalone
from kvcustody.audit.verify.verify_export import ExportVerdict, verify_export
from standins.audit.independent import fsck_export

ALONE = ModuleType("verify_kvcustody")
sys.modules[ALONE.__name__] = ALONE  # where dataclasses look for it
exec(compile(standalone(), "verify_kvcustody.py", "exec"), ALONE.__dict__)


def verify_both(folder: Path, keys: str | Sequence[str], **more: Any) -> ExportVerdict:
    """What the library finds; the stand-alone file has to find the same, word for word."""
    keys = [keys] if isinstance(keys, str) else keys
    found = verify_export(folder, keys, **more)
    alone = ALONE.verify_export(folder, keys, **more)
    assert (alone.problems, alone.limits) == (found.problems, found.limits)
    assert (alone.leaves, alone.handovers, alone.whole) == (found.leaves, found.handovers, found.whole)
    return found


def is_sound(folder: Path, key: str) -> bool:
    """The verdict of all three on an export of whole logs."""
    found = verify_both(folder, key)
    assert fsck_export(folder, key) == found.ok, found.problems
    return found.ok


def run_alone(folder: Path, key: str, *more: str) -> subprocess.CompletedProcess[str]:
    """The verifier that came with the export, in an isolated interpreter."""
    program = [sys.executable, "-I", str(folder / "verify_kvcustody.py"), str(folder), "--key", key, *more]
    return subprocess.run(program, capture_output=True, text=True, check=False, timeout=60)
