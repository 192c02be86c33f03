"""An erasure while a tier's store is away for an hour: the key ends its copies at once, the bytes go later."""

from __future__ import annotations

from pathlib import Path

import pytest

from kvcustody.audit.reports.erasure.certificate import issue, new_opening
from kvcustody.audit.store.database.engine import open_store
from kvcustody.audit.tlog.checkpoint_signer import CheckpointSigner
from kvcustody.audit.tlog.signing_key import SigningKey
from kvcustody.errors import StoreError
from kvcustody.governance.erasure.selector import Selector
from kvcustody.governance.tiers.copy_event import CopyEvent
from kvcustody.governance.tiers.stores.store_protocol import TierStore
from standins.governance.offload_world import POLICY, World, prompt

ADA = Selector("acme", "ada")
KEY = SigningKey.generate("example.com/ledger")
MINUTE_US = 60_000_000


class SubjectWorld(World):
    """A worker whose domains are those of subjects."""

    def open(self) -> None:
        self.policy = POLICY.replace("scope: tenant", "scope: subject")
        super().open()


class Away:
    """What stands in for a store that cannot be reached: whatever is asked of it fails, but for its own arithmetic."""

    def __init__(self, store: TierStore) -> None:
        self.taken, self.used_bytes = store.taken, store.used_bytes

    def __getattr__(self, name: str) -> object:
        def fails(*_: object) -> None:
            raise StoreError("cannot be reached")

        return fails


@pytest.fixture
def world(tmp_path: Path) -> SubjectWorld:
    return SubjectWorld(tmp_path, "nvme")


def steps_of(world: World) -> list[CopyEvent]:
    """From now on: every step of a copy that the tier tells."""
    (tier,) = world.tiers
    take, steps = tier.take_events, list[CopyEvent]()

    def taken() -> list[CopyEvent]:
        events = take()
        steps.extend(events)
        return events

    tier.take_events = taken  # type: ignore[method-assign]
    return steps


def causes(steps: list[CopyEvent], at_us: int) -> set[tuple[str, str]]:
    return {(one.step, one.cause) for one in steps if one.at_us == at_us}


def test_the_key_ends_them_at_once_and_they_are_unlinked_when_it_is_back(world: SubjectWorld, tmp_path: Path) -> None:
    hers, his = prompt(1, 10), prompt(2, 10)
    world.serve("acme", hers, subject="ada")
    world.crowd()
    world.serve("acme", his, subject="bob")
    world.crowd(1)
    (tier,) = world.tiers
    folder, before = tmp_path / "tier", len(tier)
    steps = steps_of(world)
    guard, governor = tier._index.store, world.worker.governor
    held, guard._store = guard._store, Away(guard._store)  # type: ignore[attr-defined]
    erased_us = world.clock.now_us()
    erasure = governor.erase(ADA).erasure
    assert causes(steps, erased_us) >= {("ended", "erased"), ("destroyed", "key-destroyed")}
    ended = {one.number for one in steps if one.step == "ended"}
    count = len(ended)
    assert count == before - len(tier) > 2
    assert {one.number for one in steps if one.cause == "key-destroyed"} == ended
    for _ in range(60):
        world.clock.advance(MINUTE_US // 60)  # bob's must not lapse meanwhile: an idle hold is ten minutes
        governor.step()
    assert len(files_in(folder)) == before, "void: the store was not away"
    assert world.serve("acme", hers, subject="ada") == 0
    first = certificate(world, erasure)
    assert first["nvme"] | {"ended": count, "key_destroyed": count, "unlinked": 0, "waiting": 0} == first["nvme"]
    for _ in range(60):
        world.clock.advance(MINUTE_US)
        governor.step()
    unlinked = [one for one in steps if one.cause == "unlinked" and one.number in ended]
    assert unlinked == []
    guard._store = held  # type: ignore[attr-defined]
    world.clock.advance(MINUTE_US)
    governor.step()
    unlinked = [one for one in steps if one.cause == "unlinked" and one.number in ended]
    assert {one.number for one in unlinked} == ended
    assert {one.at_us - erased_us for one in unlinked} == {62 * MINUTE_US}
    later = certificate(world, erasure)
    assert later["nvme"] | {"ended": count, "key_destroyed": count, "unlinked": count, "waiting": 0} == later["nvme"]
    world.worker.close()


def files_in(folder: Path) -> list[Path]:
    return [path for path in folder.rglob("*") if len(path.name) == 64]


def certificate(world: World, erasure: str) -> dict[str, dict[str, int]]:
    """Its figures of copies, by tier, from the ledger alone."""
    assert world.worker.writer.flush()
    engine = open_store(world.folder / "ledger.db")
    CheckpointSigner(engine, [KEY], memory=world.folder / "signed", clock=world.clock).sign_once()
    with engine.connect() as connection:
        document = issue(connection, erasure, KEY, new_opening(ADA.text()), now_us=world.clock.utc_us())
    engine.dispose()
    found: dict[str, dict[str, int]] = document.facts["figures"]["copies"]
    return found


def test_without_a_key_of_its_own_it_would_wait_for_the_store(
    world: SubjectWorld, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The control: nothing tells that a key is destroyed. Every copy waits, and the erasure is not called done."""
    world.serve("acme", prompt(1, 10), subject="ada")
    world.crowd()
    (tier,) = world.tiers
    steps = steps_of(world)
    monkeypatch.setattr(tier._ends, "_tell_destroyed", lambda *_: None)
    guard = tier._index.store
    held, guard._store = guard._store, Away(guard._store)  # type: ignore[attr-defined]
    governor = world.worker.governor
    erasure = governor.erase(ADA).erasure
    for _ in range(60):
        world.clock.advance(1_000_000)
        governor.step()
    assert not [one for one in steps if one.step == "destroyed"]
    result = governor.erasures.result(erasure)
    assert result is not None and not result.is_complete
    guard._store = held  # type: ignore[attr-defined]
    world.worker.close()
