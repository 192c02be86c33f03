"""A revision that was activated is released; in effect it is once a worker has it on record that it runs it."""

from __future__ import annotations

import shutil
from pathlib import Path

import httpx
import pytest

from standins.console.web_world import running

pytestmark = pytest.mark.system

RELEASED, RUNS = "Released; no worker is on record as running it", "In effect on 1 worker"


def test_a_released_revision_is_in_effect_once_a_worker_runs_it(
    tmp_path: Path, migrated: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    shutil.copy(migrated, tmp_path / "ledger.db")
    taken: list[tuple[int, str]] = []
    with running(tmp_path) as world, httpx.Client(base_url=world.url) as client:
        assert client.post("/console/login", data={"key": world.keys["auditor"]}).status_code == 303
        with monkeypatch.context() as late:
            late.setattr(world.worker, "activate", lambda *revision: taken.append(revision))
            world.release()
        revision, overview = (client.get(path).text for path in ("/console/policy/1", "/console/"))
        assert RELEASED in revision and RUNS not in revision
        assert "no leaf says what workers run" in overview
        world.worker.activate(*taken[0])
        revision, overview = (client.get(path).text for path in ("/console/policy/1", "/console/"))
        assert RUNS in revision and RELEASED not in revision
        assert "in effect since" in overview and "no leaf says" not in overview
