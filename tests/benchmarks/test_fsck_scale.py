"""The measure of `fsck` runs at a small size: whole and after a purge, with the disk that temporary files take."""

from __future__ import annotations

import importlib.util
import json
import subprocess
import sys
import tempfile
from pathlib import Path

import pytest

SCRIPT = Path(__file__).parents[2] / "benchmarks" / "evidence" / "fsck_scale.py"


@pytest.mark.system("ledgers that are filled, purged and checked by processes of their own")
def test_a_whole_ledger_and_a_purged_one_are_checked(tmp_path: Path) -> None:
    out = tmp_path / "found.json"
    sizes = ["--leaves", "300", "--rounds", "1", "--databases", "sqlite", "--json", str(out)]
    subprocess.run([sys.executable, str(SCRIPT), *sizes], check=True, capture_output=True)
    found = json.loads(out.read_text())
    whole, purged = found["this_tree_sqlite_0"], found["this_tree_sqlite_40"]
    assert whole["leaves_left"] == whole["leaves"] >= 300
    assert 0.5 < purged["leaves_left"] / purged["leaves"] < 0.8
    for case in (whole, purged):
        assert case["seconds"] > 0 and case["memory_mib"] > 10 and case["temporary_mib"] == 0


def test_a_temporary_file_without_a_name_is_counted() -> None:
    spec = importlib.util.spec_from_file_location("benchmarks_fsck_scale", SCRIPT)
    assert spec is not None and spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    before = module._deleted_bytes()
    with tempfile.TemporaryFile() as file:
        file.write(bytes(1 << 20))
        file.flush()
        assert module._deleted_bytes() >= before + (1 << 20)
