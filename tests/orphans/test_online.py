"""The scan in slices: finds what is planted within a few rounds, and nothing in a process that is well."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import closing
from pathlib import Path

import pytest
from sqlalchemy import Engine

from kvcustody.audit.evidence.query.custody import findings
from kvcustody.governance.observability.metrics import worker_status
from kvcustody.governance.orphans.online_pool_scan import OnlineScan
from kvcustody.governance.orphans.slices import Budget
from standins.erasure.histories import Histories
from standins.orphans.planting import Garden

FINDABLE = {
    "lost finish": "lost finish",
    "reference without sequence": "reference without sequence",
    "blocks of nobody": "reference without sequence",
    "hold without residency": "hold without residency",
    "residency without block": "residency without block",
}


@pytest.fixture
def garden(store: Engine, tmp_path: Path) -> Iterator[Garden]:
    with closing(Garden(store, tmp_path, 3)) as garden:
        yield garden


def online(garden: Garden | Histories, work: int) -> OnlineScan:
    running = garden.governor.running
    manager = garden.governor.managers[0]
    return OnlineScan(manager, lambda sequence: running.get(sequence.id) is sequence, Budget(work))


@pytest.mark.parametrize("name", FINDABLE)
def test_what_is_planted_is_found_while_the_process_serves(garden: Garden, name: str) -> None:
    garden.quiet()
    scan = online(garden, 100)
    planted = garden.plants[name]()
    before = scan.progress.rounds
    while scan.progress.rounds < before + 4:
        scan.step()
    assert {finding.orphan for finding in scan.take()} == {FINDABLE[name]}
    recovered = garden.governor.scan_and_recover(garden.join)
    assert len(recovered.findings) == planted.total()
    for _ in range(2):
        before = scan.progress.rounds
        while scan.progress.rounds < before + 3:
            scan.step()
        scan.take()
    assert scan.take() == []


def clean(operations: int, scope: str) -> OnlineScan:
    """Operations with a slice after each; a full scan now and then."""
    world = Histories(5, scope=scope)
    scan = online(world, 40)
    for at in range(operations):
        world.act() if at % 40 else world.erase()
        scan.step()
        assert scan.take() == []
        if at % 500 == 0:
            assert world.governor.scan() == []
    return scan


@pytest.mark.parametrize("scope", ["subject", "tenant"])
def test_no_finding_while_requests_come_and_go(scope: str) -> None:
    scan = clean(1500, scope)
    assert scan.progress.rounds > 20 and scan.progress.sequences > 20 and scan.progress.nodes > 500


@pytest.mark.soak
def test_no_finding_in_a_million_operations() -> None:
    for scope in ("subject", "tenant"):
        clean(500_000, scope)


def test_a_governor_records_what_its_slices_find(garden: Garden, store: Engine) -> None:
    garden.quiet()
    garden.governor.scan_online()
    garden.leaked_hold()
    for _ in range(600):
        garden.governor.step()
    garden.world.writer.flush()
    with store.connect() as connection:
        found = findings(connection)
    assert {(one.orphan, one.action) for one in found} == {("hold without residency", "")}
    assert worker_status(garden.governor.stats(), 16)["drift"] == 1, "until it is repaired"
    recovered = garden.governor.scan_and_recover(garden.join)
    assert worker_status(garden.governor.stats(), 16)["drift"] == 0
    assert recovered.drift_blocks > 0 and garden.governor.scan_and_recover(garden.join).drift_blocks == 0
