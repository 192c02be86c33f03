"""What becomes of the copies of a worker that was killed: by policy and by heir, on record, and gone where they end."""

from __future__ import annotations

import json
import os
import signal
import sys
import traceback
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
from sqlalchemy import select

from kvcustody.audit.evidence.copies.copy_coverage import CopyCoverageRow, copy_coverage
from kvcustody.audit.kinds import DECLARED
from kvcustody.audit.store.database.engine import open_store
from kvcustody.audit.store.schema.ledger import events
from kvcustody.audit.verify.ledger.fsck_ledger import fsck
from kvcustody.audit.write.committer import closing_committer
from kvcustody.audit.write.crash_recovery import Closing, close_process
from kvcustody.clock import SystemClock
from kvcustody.governance.erasure.selector import Selector
from kvcustody.governance.tiers.heirs import UNKNOWN, TierHolder, WorkerDeath, death_before
from standins.governance.offload_world import POLICY, TOKENS, World, prompt
from standins.governance.store_servers import VALKEY, StoreServer, ValkeyServer

GROUPED = {"placement_group": "east-1"}
STORED = prompt(1, 8)


class Fleet(World):
    """A worker of this name and group, on one folder with its predecessors."""

    def __init__(self, folder: Path, death: str, **said: object) -> None:
        self.death, self.said = death, said
        super().__init__(folder, "" if "remote_tier_url" in said else "nvme")

    def open(self) -> None:
        self.policy = POLICY + (f"on_worker_death: {{default: {self.death}}}\n" if self.death else "")
        if "remote_tier_url" in self.said:
            self.policy = self.policy.replace("tiers: [host, nvme]", "tiers: [remote]")
        self.set |= self.said
        super().open()


def left_behind(folder: Path, death: str, *, is_killed: bool, **options: object) -> None:
    """A worker in a process of its own stores copies, and is killed, or stops in order."""
    child = os.fork()
    if child:
        _, status = os.waitpid(child, 0)
        ended = os.waitstatus_to_exitcode(status)
        assert ended == (-signal.SIGKILL if is_killed else 0)
        return
    try:
        world = Fleet(folder, death, **options)
        world.serve("acme", STORED)
        world.crowd()
        assert len(world.tiers[0]) > 0
        world.worker.writer.flush()
        if is_killed:
            os.kill(os.getpid(), signal.SIGKILL)
        world.worker.close()
        os._exit(0)
    except BaseException:
        traceback.print_exc(file=sys.stderr)
        os._exit(1)


def files(folder: Path) -> list[Path]:
    return [path for path in (folder / "tier").rglob("*") if path.is_file() and path.name != "kvcustody-tier"]


def leaves(folder: Path) -> list[dict[str, Any]]:
    engine = open_store(folder / "ledger.db")
    with engine.connect() as connection:
        kind = events.c.kind == "tier-inherited"
        found = [json.loads(leaf) for leaf in connection.scalars(select(events.c.leaf).where(kind))]
    engine.dispose()
    return found


_slow = pytest.mark.system
HEIRS = [
    # policy, killed, the first worker, the one that comes, whether its copies are taken over
    ("restore", True, {"worker_name": "gpu-1"}, {"worker_name": "gpu-1"}, "restored"),
    pytest.param(
        "restore",
        True,
        {"worker_name": "gpu-1", **GROUPED},
        {"worker_name": "gpu-2", **GROUPED},
        "restored",
        marks=_slow,
    ),
    ("restore", True, {"worker_name": "gpu-1"}, {"worker_name": "gpu-2"}, "ended"),
    ("recompute", True, {"worker_name": "gpu-1"}, {"worker_name": "gpu-1"}, "ended"),
    pytest.param("fail", True, {"worker_name": "gpu-1"}, {"worker_name": "gpu-1"}, "ended", marks=_slow),
    ("", True, {"worker_name": "gpu-1"}, {"worker_name": "gpu-1"}, "restored"),
    ("recompute", False, {"worker_name": "gpu-1"}, {"worker_name": "gpu-2"}, ""),  # the control: nobody died
]


@pytest.mark.parametrize(("death", "is_killed", "first", "second", "outcome"), HEIRS)
def test_copies_of_a_dead_worker_go_to_an_heir_or_end(
    tmp_path: Path, death: str, is_killed: bool, first: Any, second: Any, outcome: str
) -> None:
    left_behind(tmp_path, death, is_killed=is_killed, **first)
    before = files(tmp_path)
    assert before, "a killed worker leaves files"
    world = Fleet(tmp_path, death, **second)
    with world.worker as worker:
        is_kept = outcome != "ended"
        assert (world.tiers[0].found_at_start > 0) is is_kept
        assert ({path for path in before if path.exists()} == set(before)) is is_kept
        assert is_kept or not files(tmp_path), "ended, and their bytes with them"
        assert (world.serve("acme", STORED) >= 4 * TOKENS) is is_kept
        worker.governor.step()
        worker.writer.flush()
    recorded = leaves(tmp_path)
    assert {leaf["outcome"] for leaf in recorded} == ({outcome} if outcome else set())
    if outcome:
        assert sum(len(leaf["copies"]) for leaf in recorded) == len(before)
        assert {(leaf["left_by_worker"], leaf["log"]) for leaf in recorded} <= {
            (first["worker_name"], f"tenant/{tenant}") for tenant in ("acme", "beta")
        }
    as_of_us = world.clock.utc_us() + 3 * 3_600_000_000
    if outcome == "ended":
        if first["worker_name"] != second["worker_name"]:
            [row] = coverage(tmp_path, as_of_us)
            assert (row.open, row.covered) == (len(before), 0), "a worker that nobody saw die may be at work"
            put_on_record(tmp_path, recorded[0]["left_by_process"])
        rows = coverage(tmp_path, as_of_us)
        assert [(row.due, row.covered, row.unlinked) for row in rows] == [(len(before),) * 3]
    engine = open_store(tmp_path / "ledger.db")
    with engine.connect() as connection:
        assert fsck(connection).problems == []
    engine.dispose()


def coverage(folder: Path, as_of_us: int) -> tuple[CopyCoverageRow, ...]:
    engine = open_store(folder / "ledger.db", read_only=True)
    with engine.connect() as connection:
        rows = copy_coverage(connection, as_of_us=as_of_us).by_tier()
    engine.dispose()
    return rows


def put_on_record(folder: Path, incarnation: str) -> None:
    """That a process died."""
    engine, clock = open_store(folder / "ledger.db"), SystemClock()
    with closing_committer(engine, clock) as committer:
        why = Closing(DECLARED, 90, 0, "ops", "dpo", "host destroyed")
        assert close_process(committer, engine, clock, incarnation, why, "ops:closing")
    engine.dispose()


@pytest.mark.parametrize("heir_of", ["gpu-1", pytest.param("gpu-7", marks=_slow)])
def test_in_a_shared_store_the_heir_that_settings_name_takes_them_over(
    tmp_path: Path, server: Callable[[str], StoreServer], heir_of: str
) -> None:
    """The ledger has it from whom, and that what became of all of them is proved; a stranger takes nothing over."""
    there = server(VALKEY)
    assert isinstance(there, ValkeyServer)
    said = {
        "remote_tier_url": f"valkey://127.0.0.1:{there.port}/0/{tmp_path.name}",
        "remote_tier_bytes": 1 << 20,
    }
    left_behind(tmp_path, "restore", is_killed=True, worker_name="gpu-1", **said)
    world = Fleet(tmp_path, "restore", worker_name="gpu-2", remote_tier_heir_of=heir_of, **said)
    is_heir = heir_of == "gpu-1"
    with world.worker as worker:
        taken_over = world.tiers[0].found_at_start
        assert (taken_over > 0) is is_heir
        assert world.serve("acme", STORED) >= 4 * TOKENS, "also a stranger finds what another stored"
        for tenant in ("acme", "beta") if is_heir else ():
            assert worker.governor.erase(Selector(tenant)).erasure
        worker.governor.step()
        assert worker.governor.check() == []
        worker.writer.flush()
    recorded = leaves(tmp_path)
    assert {(leaf["outcome"], leaf["left_by_worker"]) for leaf in recorded} == (
        {("restored", "gpu-1")} if is_heir else set()
    )
    assert sum(len(leaf["copies"]) for leaf in recorded) == taken_over
    if is_heir:
        put_on_record(tmp_path, recorded[0]["left_by_process"])
        rows = coverage(tmp_path, world.clock.utc_us() + 3 * 3_600_000_000)
        assert [(row.due, row.open) for row in rows] == [(row.covered, 0) for row in rows]
        assert sum(row.due for row in rows) >= 2 * taken_over, "of the dead one's process, and of its heir's"
    engine = open_store(tmp_path / "ledger.db")
    with engine.connect() as connection:
        assert fsck(connection).problems == []
    engine.dispose()


def test_who_is_an_heir() -> None:
    holder, same, other = TierHolder("a", "g", "1"), TierHolder("a", "default", "2"), TierHolder("b", "g", "3")
    assert death_before(holder.written(is_stopped=True), other) is None
    assert death_before(holder.written(), same) == WorkerDeath(holder, True)
    assert death_before(holder.written(), other) == WorkerDeath(holder, True)
    assert death_before(same.written(), other) == WorkerDeath(same, False)
    nobody = TierHolder("c", "default", "4")
    assert death_before(same.written(), nobody) == WorkerDeath(same, False), "the group without a name is none"
    odd = [holder._replace(worker=name).written() for name in ("a\0", "a\x1b[2J", "a" * 257)]
    for torn in (b"", b"{", holder.written()[:-3], b"[]", b"{}", *odd):
        assert death_before(torn, holder) == WorkerDeath(UNKNOWN, False)
