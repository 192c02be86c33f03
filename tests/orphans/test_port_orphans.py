"""Orphans of an engine that allocates by itself: planted in its books, ours and the ledger; found and recovered."""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Iterator
from pathlib import Path

import numpy as np
import pytest
from sqlalchemy import Engine

from kvcustody.allocator.pool.block_state import ACTIVE, CACHED
from kvcustody.audit.evidence.query.custody import findings
from kvcustody.audit.kinds import CustodyEnded, Event, ReceiptRecorded, ResidencyReleased
from kvcustody.governance.orphans.finding import CLASSES, FAILED_VERIFICATION
from kvcustody.governance.orphans.ledger_join import WriterJoin
from standins.erasure.file_tier import FileTier
from standins.orphans.planting import plant_dead_process
from standins.robust.port_world import PortWorld

Planted = Counter[str]


class Field:
    """A busy engine at a moment when nothing is on its way."""

    def __init__(self, store: Engine, folder: Path) -> None:
        self.dropping: tuple[type, ...] = ()
        self.world = PortWorld(store, folder, seed=4, chosen=self._chosen)
        self.folder = folder
        self.tier = FileTier(folder / "tier")
        self.world.port.erasures.tiers.append(self.tier)
        self.join = WriterJoin(self.world.writer)
        self.rest()

    def _chosen(self, event: Event) -> bool:
        return isinstance(event, self.dropping)

    def rest(self) -> None:
        world = self.world
        while not ((world.pool.state == CACHED).any() and self.running()):
            world.act()
        self.drain()

    def drain(self) -> None:
        while self.world.device:
            self.world.retire()
        self.world.step()
        while self.world.device:
            self.world.retire()
        self.world.port.step()

    def running(self, tenant: str = "") -> list[int]:
        """Requests at work, one tenant's or all."""
        every = self.world.requests.items()
        return [number for number, one in every if not one.waiting and (not tenant or one.tenant == tenant)]

    def state(self, state: int) -> int:
        return int(np.flatnonzero(self.world.pool.state == state)[0])

    def own(self) -> int:
        """A block that one running request alone has."""
        pool = self.world.pool
        return int(np.flatnonzero((pool.state == ACTIVE) & (pool.refs == 1))[0])

    # -- the books of both sides ----------------------------------------------------------------------------

    def lost_finish(self) -> Planted:
        number = self.running()[0]
        told, self.world.port.release = self.world.port.release, lambda *_, **__: False  # type: ignore[method-assign]
        self.world.end(number)
        self.world.port.release = told  # type: ignore[method-assign]
        return Counter({"lost finish": 1})

    def leaked_reference(self) -> Planted:
        self.world.pool.refs[self.own()] += 1
        return Counter({"reference without sequence": 1})

    def missing_reference(self) -> Planted:
        self.world.pool.refs[self.own()] -= 1
        return Counter({"sequence without reference": 1})

    def engine_leak(self) -> Planted:
        self.world.refs[self.world.free.popleft()] += 1
        return Counter({"reference without sequence": 1})

    def engine_skew(self) -> Planted:
        self.world.allocated += 3
        return Counter({"reference without sequence": 1})

    def leaked_hold(self) -> Planted:
        self.world.pool.holds[self.state(CACHED)] += 1
        return Counter({"hold without residency": 1})

    def missing_hold(self) -> Planted:
        self.world.pool.holds[self.state(CACHED)] -= 1
        return Counter({"residency without block": 1})

    def forgotten_key(self) -> Planted:
        block = self.state(CACHED)
        del self.world.index[self.world.key_of.pop(block)]
        del self.world.unused[block]
        self.world.free.append(block)
        return Counter({"unreachable chain": 1})

    def stray_key(self) -> Planted:
        block = self.world.free[0]
        self.world.key_of[block] = b"nobody's"
        return Counter({"unreachable chain": 1})

    def stuck_fence(self) -> Planted:
        self.world.port.fence()
        self.world.clock.advance(31_000_000)
        return Counter({"stuck fence": 1})

    # -- the ledger and the tier ----------------------------------------------------------------------------

    def _dropped(self, *kinds: type) -> int:
        """The events of these kinds about one ended request are lost; returns of how many."""
        self.world.port.scan_and_recover(self.join)
        before, self.dropping = len(self.world.ledger.dropped), kinds
        self.world.end(self.running()[0], "aborted")
        self.drain()
        self.dropping = ()
        return len(self.world.ledger.dropped) - before

    def dropped_release(self) -> Planted:
        lost = self._dropped(ResidencyReleased)
        return Counter({"residency without block": lost})

    def dropped_end(self) -> Planted:
        self._dropped(CustodyEnded)
        return Counter({"receipt without release": -1})

    def dropped_end_and_receipt(self) -> Planted:
        self._dropped(CustodyEnded, ReceiptRecorded)
        return Counter({"ledger gap": -1})

    def dead_process(self) -> Planted:
        plant_dead_process(self.world.store, self.folder, self.world.clock, "gone")
        return Counter({"dead incarnation": 1})

    def stray_object(self) -> Planted:
        self.tier.store(bytes(32), "alpha", self.world.clock.now_us())
        del self.tier.entries[bytes(32)]
        return Counter({"tier object without index": 1})

    def stray_entry(self) -> Planted:
        self.tier.store(bytes(32), "alpha", self.world.clock.now_us())
        self.tier.destroy([bytes(32)])
        return Counter({"index without tier object": 1})


PLANTS: dict[str, Callable[[Field], Planted]] = {
    name: plant
    for name, plant in vars(Field).items()
    if not name.startswith("_") and name not in ("rest", "drain", "running", "state", "own")
}


@pytest.fixture
def field(store: Engine, tmp_path: Path) -> Iterator[Field]:
    made = Field(store, tmp_path)
    yield made
    made.world.writer.close(5.0)


@pytest.mark.parametrize("name", PLANTS)
def test_what_is_planted_is_found_and_recovered(field: Field, name: str) -> None:
    assert field.world.port.scan_and_recover(field.join).findings == ()
    planted = PLANTS[name](field)
    scan_findings = field.world.port.scan_and_recover(field.join).findings
    kinds = Counter(finding.orphan for finding in scan_findings)
    if -1 in planted.values():
        assert set(kinds) == set(planted), scan_findings
    else:
        assert kinds == +planted, scan_findings
    assert all(one.action and one.outcome in ("recovered", "contained", "on record") for one in scan_findings)
    for fence in range(1, field.world.pool.fences.last + 1):
        field.world.port.retire(fence)
    field.drain()
    assert field.world.port.scan_and_recover(field.join).findings == ()
    assert field.world.port.check() == []
    field.world.writer.flush()
    with field.world.store.connect() as connection:
        recorded = Counter(one.orphan for one in findings(connection))
    assert recorded == kinds


def test_a_request_whose_blocks_the_engine_took_back_ends(field: Field) -> None:
    world, number = field.world, field.running()[0]
    block = field.own()
    world.refs[block] -= 1
    found = world.port.scan_and_recover(field.join).findings
    assert [one.orphan for one in found] == ["sequence without reference"] and found[0].blocks == (block,)
    assert number not in world.requests or len(world.port.running) == len(world.requests)
    world.refs[block] += 1  # it gave the reference back a second time
    field.drain()
    assert world.port.scan_and_recover(field.join).findings == () and world.port.check() == []


def test_a_busy_engine_has_no_findings(field: Field) -> None:
    for _ in range(20):
        for _ in range(10):
            field.world.act()
        assert field.world.port.scan() == []
    field.drain()
    assert field.world.port.scan_and_recover(field.join).findings == ()


@pytest.mark.parametrize("name", ["leaked_hold", "lost_finish", "stray_key"])
def test_positive_control_what_is_planted_stays_without_recovery(field: Field, name: str) -> None:
    PLANTS[name](field)
    first = [one.orphan for one in field.world.port.scan()]
    assert first and [one.orphan for one in field.world.port.scan()] == first


def test_blocks_that_did_not_become_zero_are_listed_beside_the_fifteen(field: Field) -> None:
    world = field.world
    while not field.running("gamma"):  # whose blocks are all read back
        world.act()
    field.drain()
    number = field.running("gamma")[0]
    block = int(world.requests[number].table[-1])  # not whole, so it ends with its request
    world.memory.stuck.add((1, block))
    world.end(number)
    field.drain()
    for _ in range(2):  # nothing repairs them
        (found,) = world.port.scan_and_recover(field.join).findings
        assert found.orphan == FAILED_VERIFICATION and found.orphan not in CLASSES
        assert found.blocks == (block,) and found.outcome == "contained"
