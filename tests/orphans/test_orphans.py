"""Orphans of the fifteen classes, planted in a working process: all found, classified, recovered; none else."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterator
from contextlib import closing
from pathlib import Path

import pytest
from sqlalchemy import Engine, func, select

from kvcustody.allocator.pool.block_state import QUARANTINED
from kvcustody.audit.store.schema.leaf_tables import orphan_findings, orphan_scans
from kvcustody.governance.orphans.finding import CLASSES, FAILED_VERIFICATION
from standins.orphans.planting import Garden

ROUNDS = 2


def settle(garden: Garden) -> None:
    """After the recovery: nothing is left to find, every invariant and identity holds."""
    for fence in garden.world.fences:
        garden.governor.retire(fence)
    garden.world.fences.clear()
    garden.world.wait(3)
    again = garden.governor.scan_and_recover(garden.join)
    assert again.findings == (), again.findings
    assert garden.governor.check() == []
    assert garden.governor.managers[0].pool.partitions[0].stuck == []


def plant(garden: Garden, name: str) -> Counter[str]:
    """One defect; what the scan finds must be exactly it."""
    garden.quiet()
    planted = garden.plants[name]()
    scan = garden.governor.scan_and_recover(garden.join)
    kinds = Counter(finding.orphan for finding in scan.findings)
    if -1 in planted.values():
        assert set(kinds) == set(planted), (name, scan.findings)
    else:
        assert kinds == +planted, (name, scan.findings)
    for finding in scan.findings:
        assert finding.action and finding.outcome in ("recovered", "contained", "on record")
    settle(garden)
    return kinds


@pytest.fixture
def garden(store: Engine, tmp_path: Path) -> Iterator[Garden]:
    with closing(Garden(store, tmp_path, 5)) as garden:
        yield garden


def test_every_class_is_planted_found_and_recovered(garden: Garden, store: Engine) -> None:
    detected: Counter[str] = Counter()
    for _ in range(ROUNDS):
        for name in garden.plants:
            detected += plant(garden, name)
    assert set(detected) == set(CLASSES)
    garden.world.writer.flush()
    with store.connect() as connection:
        rows = connection.execute(select(orphan_findings.c.orphan, func.count()).group_by(orphan_findings.c.orphan))
        assert {row[0]: row[1] for row in rows} == dict(detected)
        assert connection.scalar(select(func.count()).select_from(orphan_scans)) >= ROUNDS * 2 * 14
    garden.world.close()


def test_a_clean_process_has_no_findings(garden: Garden) -> None:
    for _ in range(40):
        garden.world.run(5)
        found = [finding for finding in garden.governor.scan() if finding.orphan != "stuck fence"]
        assert found == []
    garden.quiet()
    assert garden.governor.scan_and_recover(garden.join).findings == ()
    garden.world.close()


def test_positive_control_what_is_planted_stays_without_recovery(garden: Garden) -> None:
    garden.quiet()
    garden.leaked_hold()
    for _ in range(2):
        assert [finding.orphan for finding in garden.governor.scan()] == ["hold without residency"]
    assert garden.governor.check() != []


def test_blocks_that_did_not_become_zero_are_listed_beside_the_fifteen(garden: Garden) -> None:
    garden.quiet()
    handle, sequence = next(iter(garden.governor.running.items()))
    block = int(sequence.blocks[-1])
    garden.world.memory.stuck.add((0, block))
    garden.world.lengths.pop(handle)
    garden.governor.release(handle)
    garden.world.wait(3)
    for _ in range(2):  # nothing repairs them
        (found,) = garden.governor.scan_and_recover(garden.join).findings
        assert found.orphan == FAILED_VERIFICATION and found.orphan not in CLASSES
        assert found.blocks == (block,) and found.outcome == "contained"
    assert garden.governor.managers[0].pool.state[block] == QUARANTINED


def many(garden: Garden) -> Counter[str]:
    """Defects that do not touch each other, many at once."""
    garden.quiet()
    planted: Counter[str] = Counter()
    for name, number in (
        ("tier object without index", 60),
        ("index without tier object", 60),
        ("copy without custody", 20),
        ("custody without copy", 20),
        ("copy past its ceiling", 20),
        ("residency without block", 40),
        ("dead incarnation", 5),
        ("sequence gap", 5),
        ("blocks of nobody", 1),
    ):
        for _ in range(number):
            planted += garden.plants[name]()
    found = garden.governor.scan_and_recover(garden.join)
    kinds = Counter(finding.orphan for finding in found.findings)
    assert kinds == planted
    assert all(finding.outcome in ("recovered", "on record") for finding in found.findings)
    settle(garden)
    return kinds


@pytest.mark.soak
def test_ten_thousand_orphans(garden: Garden) -> None:
    detected = Counter[str]()
    while detected.total() < 10_000:
        detected += many(garden)
        for name in garden.plants:
            detected += plant(garden, name)
        print(detected.total(), dict(detected), flush=True)
    assert set(detected) == set(CLASSES) and min(detected.values()) >= 50
