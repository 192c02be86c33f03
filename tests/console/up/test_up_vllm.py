"""`kvcustody up --engine vllm`: a real vLLM serves tenants under custody, answers an erasure, and ends in order.

The engine is in a Python of its own, which `KVCUSTODY_ENGINE_PYTHON` names; `tests/engines/run.sh` makes it.
"""

from __future__ import annotations

import os
import subprocess
import sys
import time
from pathlib import Path

import httpx
import pytest
from sqlalchemy import create_engine, func, select

from kvcustody.audit.evidence.coverage.summary import coverage
from kvcustody.audit.store.schema.leaf_tables import erasure_results
from kvcustody.audit.store.schema.ledger import events
from standins.console.start_up import PROGRAM, start

pytestmark = pytest.mark.system
ENGINE_PYTHON = os.environ.get("KVCUSTODY_ENGINE_PYTHON", "")


def test_a_python_without_vllm_is_refused_and_nothing_is_left(tmp_path: Path) -> None:
    done = subprocess.run(
        [PROGRAM, "up", "--engine", "vllm", "--engine-python", sys.executable, "--folder", "there"],
        cwd=tmp_path,
        capture_output=True,
        text=True,
        check=False,
    )
    assert done.returncode == 2 and "lacks vllm; install vLLM and `kvcustody[vllm]` there" in done.stderr
    assert not (tmp_path / "there").exists()
    other = subprocess.run(
        [PROGRAM, "up", "--engine-python", sys.executable], capture_output=True, text=True, check=False
    )
    assert other.returncode == 2 and "--engine-python is of --engine vllm" in other.stderr


@pytest.mark.skipif(not ENGINE_PYTHON, reason="KVCUSTODY_ENGINE_PYTHON names no Python with vLLM")
def test_a_real_vllm_serves_and_its_custody_is_on_record(tmp_path: Path) -> None:
    started = start(
        tmp_path,
        "--engine",
        "vllm",
        "--engine-python",
        ENGINE_PYTHON,
        "--folder",
        "there",
        "--seconds",
        "240",
    )
    try:
        key = Path(tmp_path / started.said["keys"]["you"]).read_text()
        with httpx.Client(base_url=started.said["url"].removesuffix("/console/"), timeout=60) as client:
            workers, until = [], time.monotonic() + 120
            while time.monotonic() < until:
                answer = client.get("/v1/workers", headers={"Authorization": f"Bearer {key}"})
                workers = [one["worker"] for one in answer.json()["items"]]
                if (
                    workers
                    and _count(started.said["ledger"], "residency-opened") >= 20
                    and _erased(started.said["ledger"])
                ):
                    break
                time.sleep(1)
    finally:
        code = started.end()
    assert workers == ["vllm"]
    assert code == 0
    ledger = started.said["ledger"]
    assert _count(ledger, "residency-opened") >= 20 and _erased(ledger)
    engine = create_engine(ledger)
    with engine.connect() as connection:
        total = coverage(connection).total
    engine.dispose()
    assert total.due == total.covered > 100, "everything that it held was destroyed, with evidence"


def _count(ledger: str, kind: str) -> int:
    engine = create_engine(ledger)
    with engine.connect() as connection:
        found = connection.scalar(select(func.count()).select_from(events).where(events.c.kind == kind))
    engine.dispose()
    return int(found or 0)


def _erased(ledger: str) -> bool:
    engine = create_engine(ledger)
    with engine.connect() as connection:
        found = connection.scalars(select(erasure_results.c.outcome)).all()
    engine.dispose()
    return "complete" in found
