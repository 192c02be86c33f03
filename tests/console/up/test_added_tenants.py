"""The traffic of a running `up` takes up tenants that its policy names, and drops those that it names no more."""

from __future__ import annotations

import re
import subprocess
import time
from collections import Counter
from pathlib import Path

import httpx
import pytest

pytest.importorskip("torch", reason="the worker's blocks are tensors")

from kvcustody.governance.settings import Settings
from kvcustody.lab.replay.workload.generator import WorkloadSpec, generate
from kvcustody.lab.traffic.simulated_worker import Faults, SimulatedWorker
from kvcustody.lab.traffic.traffic_tenants import TrafficTenants
from kvcustody.policies import library
from kvcustody.policies.document.model import Policy
from kvcustody.policies.reading.load_policy import load_policy
from standins import builders
from standins.console.start_up import Started, start

ACME = "  acme:           {group"
BANK = "  northwind-bank: {quota: {guaranteed: 10%, cap: 25%}, scope: session, labels: {region: eu}}\n"
BANK_LEVEL = "  - {tenant: northwind-bank, as: confidential}\n"
NEWCO = "  newco: {quota: {guaranteed: 5%, cap: 20%}}\n"
SPEC = WorkloadSpec(tenants=4, conversations=300)
SOURCE = library.source("regulated-saas")
PAGE = Path(__file__).resolve().parents[3] / "docs" / "tutorials" / "first-ten-minutes.md"


def policy(*, newco: bool = False, bank: bool = True) -> Policy:
    text = SOURCE.replace(ACME, NEWCO + ACME) if newco else SOURCE
    text = text if bank else text.replace(BANK, "").replace(BANK_LEVEL, "")
    return load_policy(text, name="policy.yaml")


def senders(tenants: TrafficTenants) -> Counter[str]:
    """How many requests of the workload each tenant sends."""
    return Counter(tenants.name(label) for label in generate(SPEC).labels)


def test_traffic_is_of_the_tenants_that_the_policy_names_now() -> None:
    tenants = TrafficTenants(policy(), SPEC)
    before = {"acme", "acme-labs", "globex", "northwind-bank"}
    assert senders(tenants).keys() == before == set(tenants.names)
    ranks = {name: rank for rank, name in enumerate(tenants.population.names)}

    tenants.follow(policy(newco=True))
    counts = senders(tenants)
    assert counts.keys() == before | {"newco"} and 0.1 < counts["newco"] / counts.total() < 0.3, counts
    sessions = {(label.session, tenants.name(label)) for label in generate(SPEC).labels}
    assert len(sessions) == len({session for session, _ in sessions}), "a session is one tenant's"

    tenants.follow(policy(newco=True, bank=False))
    assert senders(tenants).keys() == (before | {"newco"}) - {"northwind-bank"}
    tenants.follow(policy(bank=False))
    assert senders(tenants).keys() == (before | {"tenant-004"}) - {"northwind-bank"}, "others up to the number"
    tenants.follow(policy())
    assert senders(tenants).keys() == before
    assert {name: tenants.population.names.index(name) for name in ranks} == ranks, "each keeps its rank"


def test_the_worker_serves_a_tenant_that_came_after_its_start(tmp_path: Path) -> None:
    (tmp_path / "policy.yaml").write_text(SOURCE.replace(ACME, NEWCO + ACME), encoding="utf-8")
    settings = Settings(**builders.worker_files(tmp_path))
    spec = WorkloadSpec(tenants=1, conversations=400, span_seconds=40.0)
    tenants = TrafficTenants(policy(), spec)
    assert "newco" not in tenants.names
    worker = SimulatedWorker(settings, spec, tenants, faults=Faults(stall_every=0, hang_every=0))
    worker.start()
    try:
        until = time.monotonic() + 120.0
        while worker._governor is None or "newco" not in worker._governor.stats().charged:
            assert worker.error is None and time.monotonic() < until, worker.error
            time.sleep(0.05)
    finally:
        worker.stop()
    assert worker.error is None


def blocks(running: Started) -> list[str]:
    """The commands of the tutorial's section, by block: what a reader types, with its placeholders filled in."""
    section = PAGE.read_text(encoding="utf-8").split("## Add a tenant to the policy")[1].split("\n## ")[0]
    found = re.findall(r"```sh\n(.*?)```", section, re.DOTALL)
    return [block.replace("FOLDER", running.said["folder"]) for block in found]


def typed(folder: Path, text: str) -> str:
    """What these commands print."""
    script = f"set -e\n{text}"
    done = subprocess.run(["bash", "-c", script], cwd=folder, capture_output=True, text=True, timeout=120, check=False)
    assert done.returncode == 0, done.stderr
    return done.stdout


@pytest.mark.system("a tenant added to the policy of a running `up` has no traffic")
def test_a_tenant_added_by_the_tutorials_commands_has_rows(tmp_path: Path) -> None:
    running = start(tmp_path, "--tenants", "2")
    try:
        first, second = blocks(running)
        digest = re.findall("sha256:[0-9a-f]{64}", typed(tmp_path, first))[-1]
        server = first.splitlines()[0]
        assert "active: revision 3" in typed(tmp_path, f"{server}\n{second.replace('DIGEST', digest)}")
        with httpx.Client(timeout=30, follow_redirects=True) as client:
            assert client.get(running.said["link"]).status_code == 200
            url = running.said["url"] + "custody?tenant=newco"
            until = time.monotonic() + 150
            while not re.search(r"<td[^>]*>\s*(<a[^>]*>)?newco", client.get(url).text):
                assert time.monotonic() < until, "no row of newco"
                time.sleep(1.0)
    finally:
        running.end()
