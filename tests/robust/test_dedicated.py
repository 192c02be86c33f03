"""Dedicated pools in one process: each tenant's custody is on record as its own, though its pools do the same."""

from __future__ import annotations

import sys
from pathlib import Path

import pytest
from custody_world import BLOCK, MODEL, QUICK, SPEC, open_keyring
from sqlalchemy import Engine, select

sys.path.insert(0, str(Path(__file__).parents[1] / "audit"))

from coverage_agreement import disagreements

from kvcustody.allocator.pool.options import PoolOptions
from kvcustody.allocator.pool.tensor_memory import TensorMemory
from kvcustody.audit.coverage.summary import coverage
from kvcustody.audit.events import WorkerStarted
from kvcustody.audit.query.custody import gaps
from kvcustody.audit.schema.ledger import residencies
from kvcustody.audit.writer.event_writer import EventWriter
from kvcustody.clock import MICROSECONDS, VirtualClock
from kvcustody.governance.admission_outcome import Admission
from kvcustody.governance.governor.governor import Governor
from kvcustody.governance.governor.pools import Pools
from kvcustody.governance.identity.principal import identify
from kvcustody.governance.orphans.ledger_join import WriterJoin
from kvcustody.policies.reading.load_policy import load_policy
from kvcustody.policies.table.compile import compile_policy

POLICY = """\
schema: kvcustody/policy@1
name: apart
profile: dedicated
scope: tenant
classifications: [low]
classify: [{tenant: "*", as: low}]
tenants:
  alpha: {quota: {guaranteed: 40%, cap: 40%, borrow: false}}
  beta:  {quota: {guaranteed: 40%, cap: 40%, borrow: false}}
rules: [{id: own, effect: permit, action: reuse, when: {reader: owner}}]
retention: {low: {idle: 10s, absolute: 60s, active_max: 1h}}
scrub: {default: {within: 5s, verify: all}}
offload: {low: never}
audit: {on_outage: {decisions: deny, lifecycle: spill, own_hits: aggregate}}
eviction: {policy: lru}
"""


class Apart:
    """A process with a pool for each of two tenants, which do the same at the same time."""

    def __init__(self, store: Engine, folder: Path) -> None:
        self.clock = VirtualClock()
        self.writer = EventWriter(
            store,
            worker="apart",
            clock=self.clock,
            spill_directory=folder / "spill",
            settings=QUICK,
            clear_names=True,
        )
        self.writer.submit([WorkerStarted(self.clock.now_us(), "apart", 64, 1, 512, "cpu", "test", 1)])
        self.governor = Governor(
            Pools(
                lambda blocks: TensorMemory.allocate(blocks, SPEC, clock=self.clock),
                80,
                PoolOptions(block_tokens=BLOCK, reserve_low=2, reserve_high=4, scrub_batch=8),
            ),
            compile_policy(load_policy(POLICY, name="apart.yaml"), revision=1),
            open_keyring(folder, self.clock),
            self.writer,
            clock=self.clock,
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
