"""The vLLM stage of `benchmarks/gpu.sh`, rehearsed: every case that needs no device runs on the host."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path

ROOT = Path(__file__).parents[4]
sys.path.insert(0, str(ROOT / "benchmarks"))
from gpu.vllm_cases import CASES, REFUSED  # noqa: E402


def test_every_case_that_needs_no_device_holds_on_the_host(tmp_path: Path) -> None:
    out = tmp_path / "out.json"
    done = subprocess.run(
        [
            "bash",
            str(ROOT / "benchmarks" / "gpu.sh"),
            "--rehearse",
            "--only",
            "vllm_engine",
            "--json",
            str(out),
        ],
        env=os.environ | {"PYTHON": sys.executable},
        capture_output=True,
        text=True,
        check=False,
    )
    assert done.returncode == 0, done.stdout[-4000:] + done.stderr[-1000:]
    lines = json.loads(out.read_text())["stages"]["vllm_engine"]["lines"]
    left_out = {line["check"] for line in lines if line["status"] == "SKIP"}
    suites = {"test_isolation, V1", "test_isolation, V2"}  # they are beside this file
    assert left_out == {name for name, case in (CASES | REFUSED).items() if case.device_only} | suites
    ran = {line["check"].split(": ")[0] for line in lines if line.get("control")}
    assert ran == {name for name, case in CASES.items() if not case.device_only}
    assert {line["check"] for line in lines if line["check"].startswith("refused: ")} == {
        f"refused: {name}" for name, case in REFUSED.items() if not case.device_only
    }
