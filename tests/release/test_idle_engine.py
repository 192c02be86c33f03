"""Every order reaches an engine that sleeps: a worker of its own ledger, its release in a folder, nobody's request.

The control is the same engine that nothing wakes: each order stays where it was put. Through a control plane:
`service/fleet/test_idle_engine.py`.
"""

from __future__ import annotations

import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import orjson
import pytest
from sqlalchemy import Engine, select

from kvcustody.audit.evidence.erasure.requests_and_answers import status
from kvcustody.audit.kinds import Event, KeysOrdered
from kvcustody.audit.store.database.engine import open_store
from kvcustody.audit.store.database.signed_orders import authenticate
from kvcustody.audit.store.schema.ledger import events
from kvcustody.clock import SystemClock
from kvcustody.errors import LedgerError
from kvcustody.governance.erasure.erasure_run import request_event
from kvcustody.governance.erasure.selector import Selector
from kvcustody.governance.identity.domain_spec import tenant_owner
from kvcustody.governance.monitoring.ordering import enforcement_order
from kvcustody.governance.release.order_signing import read_signed_orders
from kvcustody.governance.settings import Settings
from standins import builders
from standins.release.idle_engine import IdleEngine
from standins.release.release_world import MODEL, READS, Release, policy, worker_settings

CLOCK = SystemClock()
HOLDER = tenant_owner("idp", "holder")


class Desk:
    """Somebody else's process on the same ledger: what it asks for is on record before anybody acts on it."""

    def __init__(self, folder: Path) -> None:
        self.folder = folder
        self.store: Engine = open_store(folder / "ledger.db")
        ledger = Settings().ledger_origin
        authenticate(self.store, read_signed_orders(folder / "trust.toml", ledger, folder / "orders.key"))

    def put(self, event: Event) -> None:
        writer = builders.writer(self.store, self.folder / "desk", worker="desk", clock=CLOCK)
        writer.submit_durable(event)
        writer.close()

    def findings(self) -> list[dict[str, Any]]:
        with self.store.connect() as connection:
            query = select(events.c.leaf).where(events.c.kind == "orphan-found")
            return [orjson.loads(leaf) for leaf in connection.scalars(query)]

    def erasure_outcome(self) -> str:
        try:
            with self.store.connect() as connection:
                return status(connection, "e-1", CLOCK.utc_us()).outcome
        except LedgerError:  # nobody has asked yet
            return ""


def erase(desk: Desk, release: Release) -> None:
    now_us = CLOCK.now_us()
    desk.put(request_event(Selector(tenant="holder"), "e-1", "dpo", now_us + 60_000_000, now_us))


def order_keys(action: str) -> Callable[[Desk, Release], None]:
    return lambda desk, release: desk.put(KeysOrdered(CLOCK.now_us(), "holder", action, "carl", "test"))


def monitor(desk: Desk, release: Release) -> None:
    until_us = CLOCK.utc_us() + 3_600_000_000
    now = {"at_us": CLOCK.now_us(), "now_utc_us": CLOCK.utc_us(), "until_us": until_us}
    desk.put(enforcement_order(None, "monitor", **now, actor="olga", reason="test"))


def narrow(desk: Desk, release: Release) -> None:
    release.release(policy())


def revoke(desk: Desk, release: Release) -> None:
    release.desk.revoke(["reads"], release.people.grace, reason="test")


ORDERS: dict[
    str, tuple[Callable[[Desk, Release], None], Callable[[IdleEngine, Desk], bool]]
] = {  # how it is given, and when it is carried out
    "erasure": (erase, lambda engine, desk: desk.erasure_outcome() == "complete"),
    "rotation of keys": (order_keys("rotate"), lambda engine, desk: epochs(engine) == (1, 2)),
    "destruction of keys": (order_keys("destroy"), lambda engine, desk: epochs(engine) == (2,)),
    "activation": (narrow, lambda engine, desk: engine.port.table.revision == 2),
    "monitoring": (monitor, lambda engine, desk: engine.port.enforcement.mode == "monitor"),
    "revocation": (revoke, lambda engine, desk: "reads" in engine.port.revoked),
}


def epochs(engine: IdleEngine) -> tuple[int, ...]:
    found: tuple[int, ...] = engine.port._keyring.epochs(HOLDER)
    return found


@pytest.fixture
def opened_release(release: Release, tmp_path: Path) -> Release:
    release.release(policy(READS), consents=(("reads", release.people.holger),))
    return release


def engine(folder: Path, **more: bool) -> IdleEngine:
    asked = worker_settings(
        folder,
        policy_release=str(folder / "release"),
        policy_lease_seconds=1,
        erasure_poll_ms=10,
        monitoring="allowed",
        order_key_path=folder / "orders.key",
    )
    return IdleEngine(asked, MODEL, **more)


@pytest.mark.parametrize("order", ORDERS)
def test_an_order_reaches_an_engine_that_sleeps(opened_release: Release, tmp_path: Path, order: str) -> None:
    give, is_done = ORDERS[order]
    with engine(tmp_path) as idle:
        desk = Desk(tmp_path)
        assert not is_done(idle, desk)
        give(desk, opened_release)
        deadline = time.monotonic() + 60
        while not is_done(idle, desk):
            assert time.monotonic() < deadline, f"{order}: nothing was done"
            time.sleep(0.01)
        desk.store.dispose()


def test_an_order_that_nobody_signed_is_found_and_not_followed(opened_release: Release, tmp_path: Path) -> None:
    """Its control: the same order, signed, above."""
    with engine(tmp_path) as idle:
        desk = Desk(tmp_path)
        authenticate(desk.store, None)
        monitor(desk, opened_release)
        deadline = time.monotonic() + 60
        while not (found := desk.findings()):
            assert time.monotonic() < deadline, "nothing was found"
            time.sleep(0.01)
        assert [(one["orphan"], one["action"]) for one in found] == [("unsigned order", "not followed")]
        assert "`enforcement-ordered` in `system`" in found[0]["cause"]
        assert idle.port.enforcement.mode != "monitor"
        desk.store.dispose()


def test_without_a_call_to_wake_up_every_order_waits_for_somebodys_request(
    opened_release: Release, tmp_path: Path
) -> None:
    with engine(tmp_path, asleep=True) as idle:
        desk = Desk(tmp_path)
        erase(desk, opened_release)
        order_keys("rotate")(desk, opened_release)
        revoke(desk, opened_release)
        deadline = time.monotonic() + 60
        while len(idle.port._commands) < 3:  # the renewal of the lease waits, too
            assert time.monotonic() < deadline, "the orders were never handed over"
            time.sleep(0.01)
        assert desk.erasure_outcome() != "complete" and epochs(idle) == (1,)
        assert "reads" not in idle.port.revoked
        idle.wake()  # somebody's request
        while desk.erasure_outcome() != "complete" or epochs(idle) != (1, 2):
            assert time.monotonic() < deadline
            time.sleep(0.01)
        desk.store.dispose()
