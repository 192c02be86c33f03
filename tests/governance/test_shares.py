"""In strict, one tenant's evidence fills neither the spill nor the queue for another: it alone waits.

A Governor or a port over a real writer whose database is away. The controls divide nothing: everybody waits then.
"""

from __future__ import annotations

import contextlib
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
from sqlalchemy import Engine
from sqlalchemy.exc import OperationalError

from kvcustody.audit.kinds import Event, WorkerStopped
from kvcustody.audit.kinds.custody_events import BlocksAttached
from kvcustody.audit.write.committer import Committer
from kvcustody.audit.write.event_queue import TenantShares
from kvcustody.audit.write.event_writer import WriterSettings
from kvcustody.clock import VirtualClock
from kvcustody.governance.admission_outcome import Admission, Deferred
from kvcustody.governance.identity.principal import identify
from kvcustody.policies.reading.load_policy import load_policy
from kvcustody.policies.table.compile import compile_policy
from kvcustody.testkit.tiny_model import tiny_model
from standins.builders import governor, policy, table, writer

POLICY = policy(dict.fromkeys(("greedy", "modest"), "{guaranteed: 50%, cap: 50%}"), profile="strict", scope="subject")
SPILL_BYTES = 32 << 10
QUICK = WriterSettings(interval_seconds=0.002, retry_seconds=0.05, spill_bytes=SPILL_BYTES)
MODEL = tiny_model()
ROUNDS = 400  # several times what greedy's quarter of the spill holds


class World:
    """Two tenants with half of a strict pool each, and a ledger whose database may be away."""

    def __init__(self, store: Engine, folder: Path) -> None:
        self.clock = VirtualClock(utc_us=time.time_ns() // 1000)
        self.writer = writer(store, folder / "spill", clock=self.clock, settings=QUICK)
        self.governor = governor(table(POLICY), self.clock, ledger=self.writer)
        self.numbers = {"greedy": 0, "modest": 0}
        for tenant in self.numbers:
            assert self.serve(tenant)

    def serve(self, tenant: str) -> bool:
        """One short request of a new subject, to its end; whether it was admitted."""
        self.numbers[tenant] += 1
        who = identify(issuer="idp", tenant=tenant, verified={"subject": f"s{self.numbers[tenant]}"})
        decision = self.governor.admit(who, MODEL, [1, 2, 3])
        if isinstance(decision, Admission):
            self.governor.abort(decision.request_id)
        else:
            assert isinstance(decision, Deferred) and decision.reason == "ledger", decision
        self.governor.step()
        if isinstance(decision, Admission):
            self.settled()
        return isinstance(decision, Admission)

    def settled(self) -> None:
        """What was told is in the database or the spill, or the spill is full."""
        until = time.monotonic() + 10
        while self.writer.admitting and not self.writer.flush(0.05):
            assert time.monotonic() < until

    def close(self) -> None:
        self.governor.close()
        self.writer.close()


@pytest.fixture(params=[False, True], ids=["divided", "not"])
def undivided(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> bool:
    """The control: nobody has a share."""
    if request.param:
        monkeypatch.setattr(TenantShares, "divide", lambda self, share_of: None)
    return bool(request.param)


@contextlib.contextmanager
def away(monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    def fails(self: Committer, *args: Any, **named: Any) -> int:
        raise OperationalError("the database is away", None, Exception("away"))

    with monkeypatch.context() as patched:
        patched.setattr(Committer, "write", fails)
        patched.setattr(Committer, "reopen", fails)
        yield


def test_a_tenant_that_fills_its_share_of_the_spill_waits_alone(
    store: Engine, tmp_path: Path, undivided: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    world = World(store, tmp_path)
    with away(monkeypatch):
        admitted = 0
        while admitted < ROUNDS and world.serve("greedy"):
            admitted += 1
        assert 0 < admitted < ROUNDS, "it was stopped by what it had spilled"
        assert world.writer.admitting == (not undivided)
        assert world.serve("modest") == (not undivided), "void: undivided, one fills it for all"
        assert world.writer.shares.over == (frozenset() if undivided else {"greedy"})
        if not undivided:
            assert world.writer.status().spilled_bytes < SPILL_BYTES * 0.6
    until = time.monotonic() + 30
    while world.writer.shares.over or not (world.writer.recording and world.writer.admitting):
        assert time.monotonic() < until
        time.sleep(0.01)
    assert world.serve("greedy") and world.serve("modest")
    world.close()


def test_a_fork_asks_for_the_share_of_its_tenant(store: Engine, tmp_path: Path, undivided: bool) -> None:
    world = World(store, tmp_path)
    parents = {}
    for tenant in ("greedy", "modest"):
        who = identify(issuer="idp", tenant=tenant, verified={"subject": "one"})
        made = world.governor.admit(who, MODEL, [1, 2, 3])
        assert isinstance(made, Admission)
        parents[tenant] = made.request_id
    for tenant, parent in parents.items():
        assert isinstance(world.governor.fork(parent, f"child of {tenant}"), Admission), "control: it may"
    world.writer.shares.spilled([("greedy", SPILL_BYTES)])
    again = {tenant: world.governor.fork(parent, f"second of {tenant}") for tenant, parent in parents.items()}
    assert isinstance(again["modest"], Admission)
    if undivided:
        assert isinstance(again["greedy"], Admission)
    else:
        assert again["greedy"] == Deferred("second of greedy", "ledger")
    world.close()


def queued(count: int, tenant: str) -> list[Event]:
    return [BlocksAttached(1, number, tenant, ()) for number in range(count)]


def test_a_tenant_that_fills_its_share_of_the_queue_waits_alone() -> None:
    """Half of the queue is divided; below an eighth nothing is counted, and what leaves is counted out."""
    shares = TenantShares(events=1000, spill_bytes=1000)
    shares.divide(lambda tenant: 0.5)
    queue: list[tuple[int, Event]] = []

    def add(count: int, tenant: str) -> frozenset[str]:
        events = queued(count, tenant)
        queue.extend(enumerate(events))
        shares.queued(queue, events)
        return shares.over

    assert add(125, "greedy") == frozenset(), "too little to be counted"
    assert add(125, "greedy") == frozenset()
    assert add(1, "greedy") == {"greedy"} and add(200, "modest") == {"greedy"}
    assert add(51, "modest") == {"greedy", "modest"}
    taken, queue[:] = queue[:100], queue[100:]
    shares.taken(queue, taken)
    assert shares.over == {"modest"}
    taken, queue[:] = queue[:], []
    shares.taken(queue, taken)
    assert shares.over == frozenset()
    shares.divide(None)
    assert add(1000, "greedy") == frozenset(), "control: nothing is divided"
    queue.append((1, WorkerStopped(1, "w", "closed", 0, ())))
    shares.divide(lambda tenant: 0.0)
    assert add(0, "greedy") == {"greedy"}, "what is nobody's is in nobody's share"


def test_shares_follow_the_profile_and_the_guarantees(store: Engine, tmp_path: Path) -> None:
    world = World(store, tmp_path)
    shares = world.writer.shares
    shares.spilled([("greedy", SPILL_BYTES // 4), ("stranger", 1)])
    assert shares.over == {"stranger"}, "a half of the half, exactly; who has no guarantee has no share"
    shares.spilled([("greedy", 1)])
    assert "greedy" in shares.over
    text = POLICY.replace("strict", "shared")
    world.governor.activate(compile_policy(load_policy(text, name="shared.yaml"), revision=2), actor="ada")
    assert shares.over == frozenset()
    world.close()
