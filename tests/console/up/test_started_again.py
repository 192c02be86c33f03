"""A folder that is started again goes on, and a running `up` takes new people and tenants."""

from __future__ import annotations

import json
import os
import shlex
import shutil
import subprocess
from collections.abc import Iterator
from pathlib import Path

import httpx
import pytest

from kvcustody.audit.evidence.cases.read_cases import read_cases
from kvcustody.lab.replay.workload.generator import WorkloadSpec
from kvcustody.lab.traffic.office import Office
from standins.console.start_up import PROGRAM, start
from standins.console.web_world import World, running


@pytest.fixture
def world(tmp_path: Path, migrated: Path) -> Iterator[World]:
    shutil.copy(migrated, tmp_path / "ledger.db")
    with running(tmp_path) as opened:
        yield opened


def test_a_second_start_opens_no_second_cases_and_schedule(world: World) -> None:
    """The control is the first start, which makes both."""
    spec = WorkloadSpec(tenants=2, conversations=20)
    for _ in range(2):
        office = Office(world.service, spec, lambda label: ["acme", "labs"][label.tenant], "worker")
        office.open_cases()
        office.make_report()
        with world.service.reading() as connection:
            found = read_cases(connection)
        assert len(found) == 2
        assert len({case.due.until_us < world.service.clock.utc_us() for case in found}) == 2, "one is past its day"
        assert len(world.service.schedules.listed(tenant=None)) == 1


@pytest.mark.system("nobody can be added to a running `up`")
def test_a_person_and_a_tenant_are_added_while_it_runs(tmp_path: Path) -> None:
    running_up = start(tmp_path)
    url = running_up.said["url"].removesuffix("/console/")
    try:
        for who, command in running_up.said["adds"].items():
            words = shlex.split(command.replace("NAME", f"new-{who}").replace("TENANT", "newco"))
            environment = os.environ | running_up.said["environment"]
            done = subprocess.run(
                [PROGRAM, *words[1:], "--json"], env=environment, capture_output=True, text=True, check=True
            )
            key = json.loads(done.stdout)["key"]
            with httpx.Client(base_url=url, timeout=30, follow_redirects=True) as client:
                page = client.post("/console/login", data={"key": key}).text
                assert f"new-{who}" in page and ("of newco" in page) == (who == "tenant")
    finally:
        running_up.end()
