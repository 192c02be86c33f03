"""Dedicated pools in one process: each tenant's custody is on record as its own, though its pools do the same."""

from __future__ import annotations

from pathlib import Path

import pytest
from sqlalchemy import Engine, select

from kvcustody.allocator.pool.options import PoolOptions
from kvcustody.allocator.pool.tensor_memory import TensorMemory
from kvcustody.audit.evidence.coverage.summary import coverage
from kvcustody.audit.evidence.processes.sequence_gaps import gaps
from kvcustody.audit.kinds import WorkerStarted
from kvcustody.audit.store.schema.leaf_tables import residencies
from kvcustody.clock import MICROSECONDS, VirtualClock
from kvcustody.governance.admission_outcome import Admission
from kvcustody.governance.identity.principal import identify
from kvcustody.governance.orphans.ledger_join import WriterJoin
from standins.audit.coverage_agreement import disagreements
from standins.builders import governor, policy, table, writer
from standins.robust.custody_world import BLOCK, MODEL, SPEC

POLICY = policy(
    dict.fromkeys(("alpha", "beta"), "{guaranteed: 40%, cap: 40%, borrow: false}"),
    profile="dedicated",
    retention="{idle: 10s, absolute: 60s, active_max: 1h}",
    scrub="{within: 5s, verify: all}",
    more="eviction: {policy: lru}",
)


class Apart:
    """A process with a pool for each of two tenants, which do the same at the same time."""

    def __init__(self, store: Engine, folder: Path) -> None:
        self.clock = VirtualClock()
        self.writer = writer(store, folder / "spill", worker="apart", clock=self.clock)
        self.writer.submit([WorkerStarted(self.clock.now_us(), "apart", 64, 1, 512, "cpu", "test", 1)])
        self.governor = governor(
            table(POLICY),
            self.clock,
            ledger=self.writer,
            blocks=80,
            memory=lambda blocks: TensorMemory.allocate(blocks, SPEC, clock=self.clock),
            options=PoolOptions(block_tokens=BLOCK, reserve_low=2, reserve_high=4, scrub_batch=8),
        )

    def run(self) -> None:
        for turn in range(3):
            for tenant in ("alpha", "beta"):
                who = identify(issuer="idp", tenant=tenant, verified={"subject": tenant})
                got = self.governor.admit(who, MODEL, list(range(5 * BLOCK + turn)))
                assert isinstance(got, Admission), got
                self.governor.commit([got.request_id], [5 * BLOCK + turn])
                self.governor.release(got.request_id)
            self.governor.step()
        for _ in range(20):
            self.clock.advance(MICROSECONDS)
            self.governor.step()
        self.writer.flush()


@pytest.fixture
def apart(store: Engine, tmp_path: Path) -> Apart:
    return Apart(store, tmp_path)


def test_every_custody_is_recorded_once_under_its_own_tenant(apart: Apart, store: Engine) -> None:
    apart.run()
    assert [manager.number for manager in apart.governor.managers] == [0, 1]
    with store.connect() as connection:
        rows = connection.execute(select(residencies.c.residency, residencies.c.tenant)).all()
        found = coverage(connection)
        assert gaps(connection) == ()
        assert disagreements(connection) == []
    assert len({row.residency for row in rows}) == len(rows) == 6
    assert sorted(row.tenant for row in rows) == ["alpha"] * 3 + ["beta"] * 3
    due = {row.tenant: (row.due, row.in_time, row.disputed) for row in found.rows}
    assert due["alpha"] == due["beta"] and due["alpha"][0] == due["alpha"][1] >= 5 and due["alpha"][2] == 0
    assert apart.governor.scan_and_recover(WriterJoin(apart.writer)).findings == ()
    apart.governor.close()
    apart.writer.close()


def test_positive_control_pools_that_count_alike_lose_evidence(apart: Apart, store: Engine) -> None:
    for manager in apart.governor.managers:
        manager._next_residency = 1
    apart.run()
    with store.connect() as connection:
        assert gaps(connection) != () or coverage(connection).total.disputed
    apart.writer.close()
