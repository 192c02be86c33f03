"""Orders that cannot be read end no worker's erasure thread and keep none from starting: each is a finding."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import orjson
import pytest
from sqlalchemy import Engine, select

from kvcustody.audit.evidence.processes.enforcement import worker_enforcement
from kvcustody.audit.kinds import EnforcementOrdered, ErasureRequested, Event, KeysOrdered
from kvcustody.audit.store.schema.ledger import events
from kvcustody.clock import VirtualClock
from kvcustody.errors import ConfigError
from kvcustody.governance.erasure import erasure_inbox
from kvcustody.governance.erasure.selector import Selector
from kvcustody.governance.monitoring.enforcement import Enforcement
from standins import builders
from standins.erasure.asking import ask, inbox
from standins.robust.custody_world import CustodyWorld

ORDER = EnforcementOrdered(1, "monitor", (), 0, "ab" * 16, 1 << 40, "olga", "test")
ODD: dict[str, Event] = {
    "mode": ORDER._replace(mode="boom"),
    "share": ORDER._replace(mode="canary", share_millionths=-1),
    "seed": ORDER._replace(mode="canary", share_millionths=5, seed="no seed"),
    "nobody's": ORDER._replace(actor=""),
    "keys": KeysOrdered(1, "alpha", "boom", "olga", "test"),
    "selector": ErasureRequested(1, "e-0", "alpha", "tenant", None, None, 1 << 40, "olga", "boom"),
    "deep": ErasureRequested(1, "e-0", "alpha", "tenant", None, None, 1 << 40, "olga", "[" * 4_000),
}


def put(store: Engine, folder: Path, clock: VirtualClock, event: Event) -> None:
    """An order on record, as whoever can write there would write it."""
    writer = builders.writer(store, folder / "desk", worker="desk", clock=clock)
    writer.submit_durable(event._replace(at_us=clock.now_us()))
    writer.close()


@pytest.mark.parametrize("odd", ODD)
def test_a_worker_starts_and_goes_on_and_erases(store: Engine, tmp_path: Path, odd: str) -> None:
    clock = VirtualClock()
    world = CustodyWorld(store, tmp_path, worker="one", clock=clock).run(10)
    world.writer.flush()
    put(store, tmp_path, clock, ODD[odd])
    box = inbox(world, "one")
    box.recover_pending(world.governor)
    world.settle()
    ask(store, tmp_path, clock, Selector("alpha"), "e-1")
    assert box.look(world.governor) == 1, "the look ends in order, and finds the erasure"
    world.settle()
    world.writer.flush()
    assert not world.governor.enforcement.monitors, "an order that cannot be read opens nothing"
    if isinstance(ODD[odd], EnforcementOrdered):
        with store.connect() as connection:
            [now] = [one for one in worker_enforcement(connection) if one.worker == "one"]
            leaves = connection.scalars(select(events.c.leaf).where(events.c.kind == "enforcement-changed")).all()
        assert now.mode == "enforce" and now.refused.startswith("the order cannot be read"), "it is on record"
        assert orjson.loads(leaves[-1])["order"] == now.order
    put(store, tmp_path, clock, ORDER)
    box.look(world.governor)
    world.settle()
    assert world.governor.ordered.mode == "monitor", "control: a later order that can be read is followed"
    world.close()
    world.writer.close()


def test_without_the_reading_of_odd_orders_the_thread_fails(
    store: Engine, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Control: an order taken as it stands is an exception at every look."""

    def as_it_stands(order: Any) -> Enforcement:
        return Enforcement(order.mode, seed=order.seed, until_utc_us=order.until_us, actor=order.actor)

    monkeypatch.setattr(erasure_inbox, "followed", as_it_stands)
    clock = VirtualClock()
    world = CustodyWorld(store, tmp_path, worker="one", clock=clock).run(3)
    put(store, tmp_path, clock, ODD["mode"])
    with pytest.raises(ConfigError, match="boom"):
        inbox(world, "one").look(world.governor)
    world.close()
    world.writer.close()
