"""E3, C6, C10: a store that returns another object than the one that was put there attaches not one byte of it.

Of 10^5 loads without one that attached, the rate is below 3 x 10^-5 with 95 % confidence.
"""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path
from random import Random

import pytest

from kvcustody.governance.observability.prefill_cost import DeclaredRate
from kvcustody.governance.tiers.copy_event import CopyEvent
from kvcustody.governance.tiers.tier import SealedTier
from standins.governance.offload_world import World, prompt
from standins.redteam.hostile_store import (
    ATTACKS,
    FILE_ATTACKS,
    WELL_FORMED,
    HostileStore,
    file_of,
    put,
    renamed,
    unchecked,
    without_tag,
)

FULL = pytest.param(50_000, marks=pytest.mark.soak)  # of each of two tiers


@pytest.fixture(params=["host", "nvme"])
def hostile(request: pytest.FixtureRequest, tmp_path: Path) -> Iterator[HostileStore]:
    made = HostileStore(tmp_path, request.param)
    yield made
    made.close()


@pytest.mark.parametrize("count", [150, FULL])
def test_nothing_of_another_object_is_attached(hostile: HostileStore, count: int) -> None:
    assert hostile.stock() and hostile.load() == 4, "void: a whole object does not come back"
    assert sum(hostile.attack(count, ATTACKS, seed=1).values()) == 0
    assert hostile.tried == count + 1 and hostile.attached == 1


def test_whoever_takes_what_a_store_returns_attaches_each_of_them(
    hostile: HostileStore, monkeypatch: pytest.MonkeyPatch
) -> None:
    unchecked(monkeypatch)
    attached = hostile.attack(len(ATTACKS) * 2, ATTACKS, seed=1)
    assert attached == dict.fromkeys(ATTACKS, 2)


def test_without_the_tag_every_well_formed_one_is_attached(
    hostile: HostileStore, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Names and lengths are compared still: of what passes them, nothing but the tag tells."""
    without_tag(monkeypatch)
    attached = hostile.attack(len(ATTACKS) * 2, ATTACKS, seed=1)
    assert {name for name, times in attached.items() if times} == WELL_FORMED.keys()


@pytest.mark.parametrize("rounds", [3, pytest.param(300, marks=pytest.mark.soak)])
def test_nor_of_a_file_that_was_exchanged_in_the_folder(tmp_path: Path, rounds: int) -> None:
    """Under the store's hands: its books say that all is as it was."""
    hostile, folder = HostileStore(tmp_path, "nvme"), tmp_path / "tier"
    for _ in range(rounds):
        for attack in FILE_ATTACKS.values():
            has = hostile.stock()
            assert hostile.load() == 4, "void: a whole object does not come back"
            other = next(name for name in hostile.place.tier.objects() if name != has.name)
            attack(file_of(folder, has.name), file_of(folder, other), has)
            assert hostile.load() == 0
            hostile.place.tier.destroy(list(hostile.place.tier.objects()))
    assert hostile.attached == rounds * len(FILE_ATTACKS)
    hostile.close()


@pytest.mark.parametrize("rounds", [1, pytest.param(30, marks=pytest.mark.soak)])
def test_nor_after_a_restart_over_an_exchanged_folder(tmp_path: Path, rounds: int) -> None:
    """The next process has no index but what it reads: what it adopts is its own, and the rest has ended."""
    hostile, folder = HostileStore(tmp_path, "nvme"), tmp_path / "tier"
    for _ in range(rounds):
        for name, attack in FILE_ATTACKS.items():
            has = hostile.stock()
            other = next(one for one in hostile.place.tier.objects() if one != has.name)
            hostile.place.store.close()  # type: ignore[attr-defined]
            if name != "older":
                attack(file_of(folder, has.name), file_of(folder, other), has)
            else:  # of the same name and the same content: what it may do is in test_prolonged_lives
                file_of(folder, has.name).write_bytes(renamed(has.swapped, has.name))
            hostile.place.open()
            assert hostile.place.bring(hostile.acme, "p", 4) == 0, name
            hostile.place.tier.destroy(list(hostile.place.tier.objects()))
    hostile.close()


# -- through a whole Governor ------------------------------------------------------------------------------------------


def exchange(tier: SealedTier, drawn: Random) -> int:
    """Every object of a tier is another one afterwards; how many there were."""
    store, held = tier._index.store, dict[bytes, bytes]()
    for one in store.page(b"", 1000):
        data = store.peek(one.name, one.size)
        assert data is not None
        held[one.name] = data
    names = list(held)
    for at, name in enumerate(names):
        other = held[names[at - 1]] if len(names) > 1 else bytes(len(held[name]))
        shapes = (other, renamed(other, name), held[name][:-1], held[name] + b"\0", b"", drawn.randbytes(64))
        put(store, name, drawn.choice(shapes))
    return len(names)


def watched(tier: SealedTier) -> list[CopyEvent]:
    """From now on: what ended because it did not open, or was not there."""
    take, ended = tier.take_events, list[CopyEvent]()

    def taken() -> list[CopyEvent]:
        events = take()
        ended.extend(one for one in events if one.step == "ended" and one.cause in ("broken", "lost"))
        return events

    tier.take_events = taken  # type: ignore[method-assign]
    return ended


@pytest.mark.parametrize("rounds", [10, pytest.param(5_000, marks=pytest.mark.soak)])
@pytest.mark.parametrize("tiers", ["host", "nvme", "host nvme"])
def test_a_request_is_never_given_one(tmp_path: Path, tiers: str, rounds: int) -> None:
    """`serve` compares every block under a hit with what its prompt's tokens say."""
    world, drawn = World(tmp_path, tiers), Random(3)
    broken = [watched(tier) for tier in world.tiers]
    assert world.worker.governor.offload is not None
    world.worker.governor.offload.transfers.cost = DeclaredRate(1)  # stored whether or not anything of it comes back
    for number in range(rounds):
        mine = prompt(number, 8)
        world.serve("acme", mine)
        world.crowd(number)
        assert sum(exchange(tier, drawn) for tier in world.tiers)
        assert world.serve("acme", mine) == 0
        for tier in world.tiers:
            tier.destroy(list(tier.objects()))
        world.clock.advance(1_000)
    assert sum(map(len, broken)) >= rounds, "void: almost nothing of it was read"
    world.worker.close()


@pytest.mark.parametrize("tiers", ["host", "nvme"])
def test_a_governor_that_takes_what_a_store_returns_is_given_one(
    tmp_path: Path, tiers: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    world, mine = World(tmp_path, tiers), prompt(1, 8)
    unchecked(monkeypatch)
    world.serve("acme", mine)
    world.crowd()
    assert sum(exchange(tier, Random(3)) for tier in world.tiers)
    with pytest.raises(AssertionError, match="is not what was written"):
        world.serve("acme", mine)
    world.worker.governor.release(next(iter(world.worker.governor.running)))
    world.worker.close()
