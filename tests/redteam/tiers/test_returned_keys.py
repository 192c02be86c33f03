"""E5: the tier's folder and the file of shred keys are put back together, as they were before an erasure.

What was destroyed is remembered where that copy does not reach: in the receipts beside the file, and in the ledger. The
controls put those back too, or leave the look out: then everything opens again, as docs/concepts/keys.md says.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from pathlib import Path

import pytest
from sqlalchemy import Engine
from structlog.testing import capture_logs

from kvcustody.audit.kinds import ErasureCompleted, ErasureRequested, WorkerStarted
from kvcustody.governance.erasure.erasure_inbox import ErasureInbox
from kvcustody.governance.erasure.selector import Selector
from kvcustody.governance.erasure.tier_protocol import CompletedErasure
from kvcustody.governance.keys import shred_keys
from kvcustody.governance.keys.apply_key_orders import OrderedKeys, apply_key_orders
from kvcustody.governance.tiers.copies.index import shred_name
from standins import builders
from standins.redteam.key_ends import ENDS
from standins.redteam.put_back import OBJECTS, Deployment, check_at_start


@pytest.fixture
def deployment(tmp_path: Path) -> Iterator[Deployment]:
    made = Deployment(tmp_path / "worker")
    yield made
    made.stop()
    made.place.staging.close()


@pytest.mark.parametrize("end", ["subject", "bucket"])
@pytest.mark.parametrize("remembers", [True, False], ids=["receipts", "control: no look at receipts"])
def test_keys_that_their_receipts_name_are_destroyed_again(
    deployment: Deployment, end: str, remembers: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    copy = deployment.copy()
    ENDS[end](deployment.place, deployment.label)
    assert deployment.opened() == 0
    if not remembers:
        monkeypatch.setattr(shred_keys.ShredReceipts, "read", lambda _: [])
    with capture_logs() as logs:
        deployment.put_back(copy, receipts=False)
    assert deployment.place.tier.returned_keys == (1 if remembers else 0)
    assert [entry["code"] for entry in logs if "code" in entry] == (["KVC320"] if remembers else [])
    assert deployment.opened() == (0 if remembers else OBJECTS)


@pytest.mark.parametrize("remembers", [True, False], ids=["ledger", "control: the ledger is put back too"])
def test_keys_that_the_ledger_knows_as_erased_are_destroyed_again(
    deployment: Deployment, remembers: bool, tmp_path: Path, migrated: Path
) -> None:
    """Receipts and keys are of one copy. With the ledger of that time, too, nothing is left that could tell."""
    place, boot = deployment.place, deployment.place.world.clock
    copy = deployment.copy(receipts=True)
    with builders.ledger(migrated, tmp_path / "ledger.db", timeout_seconds=5) as engine:
        if remembers:
            _erased(engine, tmp_path / "spill", boot.utc_us())
        selector = Selector(tenant="acme", subject="ada")
        place.tier.erase("e-1", selector, boot.now_us())
        assert deployment.opened() == 0
        deployment.put_back(copy, receipts=True)
        assert deployment.place.tier.returned_keys == 0
        check_at_start(deployment, ErasureInbox(engine, "worker-1", 0), ["returned key"] * remembers)
    assert deployment.opened() == (0 if remembers else OBJECTS)


def _erased(engine: Engine, spill: Path, now_us: int) -> None:
    """The leaves of an erasure of `ada`, complete on `worker-1`."""
    writer = builders.writer(engine, spill, worker="worker-1", clear_names=True)
    later = max(now_us - writer.offset_us, 0) + 1_000_000
    writer.submit(
        [
            WorkerStarted(1, "worker-1", 8, 1, 4096, "cpu", "test"),
            ErasureRequested(later, "e-1", "acme", "subject", "ada", None, later + 99, "dpo", ""),
            ErasureCompleted(later + 1, "e-1", "acme", "complete", 1, 2, 0, ""),
        ]
    )
    assert writer.flush()
    writer.close()


def test_a_key_that_was_made_after_the_erasure_stays(deployment: Deployment, tmp_path: Path, migrated: Path) -> None:
    tier, shred = deployment.place.tier, deployment.place.world.shred
    before_us = deployment.place.world.clock.utc_us()
    assert shred.find_subject(shred_name("acme", "ada")) is not None
    complete = CompletedErasure("e-1", Selector(tenant="acme", subject="ada"), before_us)
    assert tier.erase_returned(complete) == 0
    assert deployment.opened() == OBJECTS


@pytest.mark.parametrize("ordered", [True, False], ids=["order on record", "control: no order"])
def test_epochs_that_an_order_on_record_ended_end_again(deployment: Deployment, ordered: bool) -> None:
    """The key store is put back: the ledger's order on keys is followed at each start."""
    world, label = deployment.place.world, deployment.label
    copy = deployment.copy()
    orders = [OrderedKeys("acme", "destroy", world.clock.utc_us() + 1)]
    tenant: Callable[[object], str] = lambda owner: "acme"  # noqa: E731
    apply_key_orders(world.keyring, orders, tenant)
    deployment.put_back(copy, receipts=False)
    if ordered:
        apply_key_orders(world.keyring, orders, tenant)
        deployment.place.tier.narrow()
    assert label.spec is not None and world.keys.has_epoch(label.spec) is not ordered
