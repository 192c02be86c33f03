"""Orders on keys: followed once however often they come, under a clock that is behind, and for the one tenant alone."""

from __future__ import annotations

import time
from pathlib import Path

import pytest

from kvcustody.allocator.pool.memory_protocol import UnbackedMemory
from kvcustody.audit.kinds import KeysOrdered
from kvcustody.audit.store.database.engine import open_store
from kvcustody.audit.write.record_operator_act import record_operator_act
from kvcustody.clock import SystemClock, VirtualClock
from kvcustody.governance.identity.domain_spec import KeyOwner, group_owner, tenant_owner
from kvcustody.governance.keys.apply_key_orders import OrderedKeys, apply_key_orders, newest
from kvcustody.governance.keys.keyring import KeyFact, Keyring
from kvcustody.governance.keys.locked_buffer import KEY_BYTES, KeyBuffer
from kvcustody.governance.keys.root_key_wrapping import RootKeyWrapping
from kvcustody.governance.keys.wrapped_key_store import FileKeyStore
from kvcustody.governance.settings import Settings
from kvcustody.governance.worker.worker import MemoryPlan, Worker, open_worker
from kvcustody.policies import library
from kvcustody.tenants import Issuers

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
    one, two = rings(tmp_path, 2)
    order = [OrderedKeys("acme", "rotate", NOW_US + 1)]
    done = followed(one, order)
    assert {owner: [fact.kind for fact in facts] for owner, facts in done.items()} == {
        ACME: ["rotated"],
    }
    for ring in (two, one, two):
        assert followed(ring, order) == {}, "followed already, by another process or by this one"
        assert ring.epochs(ACME) == (1, 2)
        assert ring.epochs(LABS) == ring.epochs(GROUP) == (1,), "control: others' keys stay"
        assert ring.epochs(ELSEWHERE) == (1,), "of another issuer's tenant with that id too"
    done = followed(one, [OrderedKeys("acme^other", "rotate", NOW_US + 1)])
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
        policy_path=policy,
        database_url=f"sqlite:///{tmp_path / 'ledger.db'}",
        spill_path=tmp_path / "spill",
        root_key_path=tmp_path / "root.key",
        keyring_path=tmp_path / "keys.json",
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
