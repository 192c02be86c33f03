"""Orders on keys: followed once however often they come, under a clock that is behind, and for the one tenant alone."""

from __future__ import annotations

import threading
import time
from pathlib import Path
from typing import NamedTuple, Self

import pytest

from kvcustody.allocator.pool.memory_protocol import UnbackedMemory
from kvcustody.audit.evidence.query.key_orders import CLOCKS_DIFFER_US, KeyOrderStanding, order_standings
from kvcustody.audit.kinds import KeysOrdered
from kvcustody.audit.store.database.engine import open_store
from kvcustody.audit.write.record_operator_act import record_operator_act
from kvcustody.clock import SystemClock, VirtualClock
from kvcustody.governance.identity.domain_spec import KeyOwner, group_owner, tenant_owner
from kvcustody.governance.keys.apply_key_orders import OrderedKeys, apply_key_orders, newest
from kvcustody.governance.keys.key_backups import KeyBackups
from kvcustody.governance.keys.keyring import KeyFact, Keyring
from kvcustody.governance.keys.locked_buffer import KEY_BYTES, KeyBuffer
from kvcustody.governance.keys.root_key_wrapping import RootKeyWrapping
from kvcustody.governance.keys.wrapped_key_store import FileKeyStore
from kvcustody.governance.settings import Settings
from kvcustody.governance.worker.worker import MemoryPlan, Worker, open_worker
from kvcustody.policies import library
from kvcustody.tenants import Issuers
from standins import builders
from standins.integrations.key_services_world import BAO, BAO_ABSENT, OpenBao
from standins.waiting import until

ACME, ELSEWHERE, LABS, GROUP = (
    tenant_owner("idp", "acme"),
    tenant_owner("other", "acme"),
    tenant_owner("idp", "labs"),
    group_owner("acme"),
)
NOW_US = 1_790_000_000_000_000


def followed(ring: Keyring, orders: list[OrderedKeys]) -> dict[KeyOwner, list[KeyFact]]:
    """Orders followed where `idp` is the home issuer."""
    return apply_key_orders(ring, orders, lambda owner: Issuers("idp").name(owner.issuer, owner.name))


def rings(folder: Path, count: int) -> list[Keyring]:
    """Keyrings of several processes over one store; every owner has its first epoch."""
    root = KeyBuffer.random(KEY_BYTES)
    made = [
        Keyring(FileKeyStore(folder / "keys.json"), RootKeyWrapping(root), VirtualClock(utc_us=NOW_US))
        for _ in range(count)
    ]
    made[0].ensure([ACME, ELSEWHERE, LABS, GROUP])
    return made


def test_an_order_is_followed_once_by_all_who_share_the_keys(tmp_path: Path) -> None:
    first, two = rings(tmp_path, 2)
    order = [OrderedKeys("acme", "rotate", NOW_US + 1)]
    done = followed(first, order)
    assert {owner: [fact.kind for fact in facts] for owner, facts in done.items()} == {
        ACME: ["rotated"],
    }
    for ring in (two, first, two):
        assert followed(ring, order) == {}, "followed already, by another process or by this one"
        assert ring.epochs(ACME) == (1, 2)
        assert ring.epochs(LABS) == ring.epochs(GROUP) == (1,), "control: others' keys stay"
        assert ring.epochs(ELSEWHERE) == (1,), "of another issuer's tenant with that id too"
    done = followed(first, [OrderedKeys("acme^other", "rotate", NOW_US + 1)])
    assert list(done) == [ELSEWHERE], "control"


def test_a_clock_that_is_behind_follows_no_order_twice(tmp_path: Path) -> None:
    """The order is of a moment that has not come here; what it made counts as made then."""
    [ring] = rings(tmp_path, 1)
    order = [OrderedKeys("acme", "destroy", NOW_US + 3_600_000_000)]
    done = followed(ring, order)
    assert [fact.kind for fact in done[ACME]] == ["rotated", "destroyed"]
    assert ring.epochs(ACME) == (2,) and followed(ring, order) == {}
    assert followed(ring, [OrderedKeys("acme", "rotate", NOW_US + 3_600_000_001)])[ACME][0].epoch == 3


@pytest.mark.parametrize("action", ["rotate", "destroy"])
def test_an_order_from_before_an_epoch_was_made_is_none(tmp_path: Path, action: str) -> None:
    [ring] = rings(tmp_path, 1)
    assert followed(ring, [OrderedKeys("acme", action, NOW_US)]) == {}
    assert followed(ring, [OrderedKeys("acme", action, NOW_US + 1)]) != {}, "control"


def test_the_last_order_asks_for_all_that_earlier_ones_did() -> None:
    orders = [OrderedKeys("a", "rotate", 2), OrderedKeys("a", "rotate", 5), OrderedKeys("a", "destroy", 3)]
    assert newest(orders) == (orders[2], orders[1])


def test_a_worker_that_keeps_its_ledger_itself_follows_what_stands_in_it(tmp_path: Path) -> None:
    """An order from before its start is followed before the first request, one from then on by the next look."""
    policy = tmp_path / "policy.yaml"
    policy.write_text(library.source("single-org"), encoding="utf-8")
    settings = Settings(
        **builders.worker_files(tmp_path),
        erasure_poll_ms=10,
    )
    clock, org = SystemClock(), tenant_owner("idp", "org")

    def order(action: str) -> None:
        engine = open_store(tmp_path / "ledger.db")
        record_operator_act(engine, lambda at_us: KeysOrdered(at_us, "org", action, "carl", "test"))
        engine.dispose()

    def opened() -> Worker:
        plan = MemoryPlan(lambda blocks: UnbackedMemory(blocks, 1, clock=clock), 64, 1, 1024)
        return open_worker(settings, plan)

    with opened() as worker:
        worker.governor._keyring.ensure([org])
    order("rotate")
    with opened() as worker:
        ring = worker.governor._keyring
        assert ring.epochs(org) == (1, 2)
        order("destroy")
        deadline = time.monotonic() + 60
        while ring.epochs(org) != (3,) and time.monotonic() < deadline:
            worker.governor.step()
            time.sleep(0.01)
        assert ring.epochs(org) == (3,)


class Fleet(NamedTuple):
    """Two workers of one key store and one ledger, each with the tenant's epoch in use."""

    folder: Path
    settings: Settings

    @classmethod
    def create(cls, folder: Path, source: str = "generated") -> Self:
        policy = folder / "policy.yaml"
        policy.write_text(library.source("single-org"), encoding="utf-8")
        settings = Settings(
            **builders.worker_files(folder),
            root_key_source=source,
            key_service_path=folder / "service.yaml",
            erasure_poll_ms=10,
        )
        return cls(folder, settings)

    def worker(self, name: str) -> Worker:
        plan = MemoryPlan(lambda blocks: UnbackedMemory(blocks, 1, clock=SystemClock()), 64, 1, 1024)
        own = {"worker_name": name, "spill_path": self.folder / f"spill-{name}"}
        return open_worker(self.settings.model_copy(update=own), plan)

    def order(self, action: str) -> None:
        engine = open_store(self.folder / "ledger.db")
        record_operator_act(engine, lambda at_us: KeysOrdered(at_us, "org", action, "carl", "test"))
        engine.dispose()

    def standing(self) -> KeyOrderStanding:
        engine = open_store(self.folder / "ledger.db", read_only=True)
        with engine.connect() as connection:
            last = order_standings(connection)[-1]
        engine.dispose()
        return last

    def until(self, state: str, *stepping: Worker) -> KeyOrderStanding:
        def step() -> None:
            for worker in stepping:
                worker.governor.step()

        return until(lambda: (last := self.standing()).state == state and last, meanwhile=step)


ORG = tenant_owner("idp", "org")


def test_an_order_to_destroy_is_complete_when_every_process_of_then_has_dropped_its_copies(
    tmp_path: Path,
) -> None:
    fleet = Fleet.create(tmp_path)
    with fleet.worker("one") as worker, fleet.worker("two") as two:
        worker.governor._keyring.ensure([ORG])
        fleet.order("destroy")
        assert fleet.standing().waiting == ("one", "two")
        held = two.governor._keyring
        with KeyBuffer() as key:
            held.refresh()
            held.derive(ORG, 1, b"use", key)
        last = until(lambda: (said := fleet.standing()).waiting == ("two",) and said, meanwhile=worker.governor.step)
        assert last.state == "open" and worker.governor._keyring.epochs(ORG) == (2,)
        assert held._secrets, "control: another process still has what the order ended"
        fleet.until("complete", worker, two)
        assert (ORG, 1) not in held._secrets
        with fleet.worker("three"):
            assert fleet.standing().state == "complete", "who began later never had any of it"


def test_a_process_that_ended_is_waited_for_no_more(tmp_path: Path) -> None:
    fleet = Fleet.create(tmp_path)
    with fleet.worker("one") as one:
        one.governor._keyring.ensure([ORG])
        with fleet.worker("two"):
            fleet.order("destroy")
            assert fleet.standing().waiting == ("one", "two")
        fleet.until("complete", one)


@pytest.mark.skipif(BAO is None, reason=BAO_ABSENT)
def test_an_order_is_open_until_the_key_service_has_destroyed_the_epochs_key(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    server = OpenBao(tmp_path)
    try:
        server.document(tmp_path / "service.yaml", timeout_ms=300)
        fleet = Fleet.create(tmp_path, "key-service")
        with fleet.worker("one") as worker:
            worker.governor._keyring.ensure([ORG])
            keys = server.keys()
            asked = threading.Event()
            monkeypatch.setattr(worker.governor, "end_keys_in_service", asked.set)  # the service is not asked yet
            fleet.order("destroy")
            last = until(lambda: (said := fleet.standing()).in_service and said, meanwhile=worker.governor.step)
            assert asked.wait(60) and (last.state, last.in_service) == ("open", 1)
            monkeypatch.undo()
            assert fleet.until("complete", worker).in_service == 0
            assert len(set(keys) - set(server.keys())) == 1
    finally:
        server.close()


def test_a_service_that_destroys_later_leaves_the_order_pending_until_its_date(tmp_path: Path) -> None:
    fleet = Fleet.create(tmp_path)
    until_us = SystemClock().utc_us() + 7 * 86_400_000_000
    with fleet.worker("one") as one:
        governor = one.governor
        governor._keyring.ensure([ORG])
        fleet.order("destroy")
        fleet.until("complete", one)
        facts = [
            KeyFact("destroyed", ORG, 1, 0, "owed"),
            KeyFact("destroyed", ORG, 1, 0, "pending", until_us),
        ]
        governor._record_key_facts({ORG: facts})
        last = fleet.standing()
        assert (last.state, last.pending_until_us) == ("pending", until_us)
        governor._record_key_facts({ORG: [KeyFact("destroyed", ORG, 1, 0, "gone")]})
        assert fleet.standing().state == "complete"


def test_a_known_backup_of_the_key_store_leaves_the_order_pending_until_its_date(tmp_path: Path) -> None:
    """Or until nothing from before opens any more; one from after the order counts for nothing."""
    fleet, now_us = Fleet.create(tmp_path), SystemClock().utc_us()
    until_us, backups = now_us + 30 * 86_400_000_000, KeyBackups(fleet.settings.keyring_path)
    with fleet.worker("one") as worker:
        worker.governor._keyring.ensure([ORG])
        backups.add(now_us, until_us)
        backups.add(now_us + 2 * CLOCKS_DIFFER_US, 2 * until_us)
        fleet.order("destroy")
        last = fleet.until("pending", worker)
        assert (last.pending_until_us, last.waiting, last.in_service) == (until_us, (), 0)
        backups.moved(now_us, b"root")
        backups.end(b"root")
        assert fleet.until("complete", worker).pending_until_us is None


@pytest.mark.parametrize("when", ["before the process began", "while it runs"])
def test_a_time_that_somebody_wrote_into_the_key_store_keeps_no_epoch(tmp_path: Path, when: str) -> None:
    """No wrap says when its epoch was made, and whoever has the file says that it is a later one."""
    [ring] = rings(tmp_path, 1)
    order, store = [OrderedKeys("acme", "destroy", NOW_US + 1)], FileKeyStore(tmp_path / "keys.json")

    def written(later_us: int) -> None:
        document = store.load()
        document.epochs[ACME, 1] = document.epochs[ACME, 1]._replace(created_utc_us=NOW_US + later_us)
        store.save(document)

    if when == "while it runs":
        written(1_000)
    else:
        written(2 * 3_600_000_000)
        ring = Keyring(store, ring._port, VirtualClock(utc_us=NOW_US))
    followed(ring, order)
    assert ring.epochs(ACME) == (2,)
    assert followed(ring, order) == {}, "control: an epoch that was made since stays"
