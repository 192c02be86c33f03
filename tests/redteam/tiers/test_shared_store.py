"""A store that workers share: who has a domain's keys finds what another stored, and one alone has custody of it."""

from __future__ import annotations

import hashlib
from collections.abc import Callable, Iterator
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from kvcustody.errors import StoreError
from kvcustody.governance.decisions.access_plan import DomainLabel
from kvcustody.governance.erasure.selector import Selector
from kvcustody.governance.observability.prefill_cost import DeclaredRate
from kvcustody.governance.tiers.run_transfers import CopyReader, RunTransfers
from kvcustody.governance.tiers.stores.guarded_store import GuardedStore
from kvcustody.governance.tiers.stores.remote_store import OVERDUE_US, RemoteStore
from kvcustody.governance.tiers.tier import SealedTier
from kvcustody.governance.tiers.transfer_rates import PROBE_US
from standins.governance.store_servers import MOST, StoreServer
from standins.governance.tier_place import ABSOLUTE_US, STEP, Place, keys_of

Made = Callable[..., Place]


class Worker(Place):
    """It looks for what other processes added to the keyring, as a worker does between steps."""

    def bring(self, label: DomainLabel, prompt: str, blocks: int, depth: int = 0) -> int:
        self.world.keyring.refresh()
        return super().bring(label, prompt, blocks, depth)

    def keep(self, label: DomainLabel, *of: Any, **how: Any) -> int:
        self.world.keyring.refresh()
        return super().keep(label, *of, **how)


@pytest.fixture(params=MOST)
def worker(request: pytest.FixtureRequest, tmp_path: Path, server: Callable[[str], StoreServer]) -> Iterator[Made]:
    """`worker(name)`: one more on the same keys and store; `folder`: on keys of its own."""
    there, places = server(request.param), list[Place]()

    def of(name: str, folder: Path = tmp_path) -> Place:
        place = Worker(folder, "remote", server=there, worker=name, prefix=tmp_path.name)
        places.append(place)
        return place

    yield of
    for place in places:
        place.tier.close()
        place.staging.close()
        place.world.close()


def stored(place: Place) -> list[int]:
    return [one.number for one in place.events() if one.step == "stored"]


def test_what_one_stored_another_brings_back_and_nobody_else(worker: Made, tmp_path: Path) -> None:
    """Hits of one's own domain; none of another tenant, subject, model, layout, or deployment."""
    a, b = worker("a"), worker("b")
    acme, ada = a.label("acme"), a.label("acme", "ada")
    assert a.keep(acme, "p", 8) == 8 and a.keep(ada, "q", 8) == 8
    assert b.bring(acme, "p", 8) == 8 == b.bring(ada, "q", 8), "own"
    assert b.bring(acme, "p", 8) == 8 == b.bring(acme, "p", 20), "again, and a prompt that goes on"
    assert acme.spec is not None
    model = replace(acme, spec=replace(acme.spec, model=hashlib.sha256(b"another").digest()))
    for other, prompt in (
        (b.label("beta"), "p"),
        (ada, "p"),
        (b.label("acme", "bob"), "q"),
        (acme, "q"),
        (model, "p"),
    ):
        assert b.bring(other, prompt, 8) == 0
    other_layout = worker("c")
    other_layout.layout = hashlib.sha256(b"another layout").digest()
    other_layout.open()
    assert other_layout.bring(acme, "p", 8) == 0
    (tmp_path / "elsewhere").mkdir()
    assert worker("b", tmp_path / "elsewhere").bring(acme, "p", 8) == 0, "keys of another deployment"


def test_one_alone_has_custody(worker: Made) -> None:
    """The first writer's is the copy: the second finds it, says nothing of it, and ends it for nobody."""
    a, b = worker("a"), worker("b")
    acme = a.label("acme")
    assert a.keep(acme, "p", 8) == 8
    assert b.keep(acme, "p", 8) == 0 and b.tier.has_run(acme, keys_of("p", 8), 0) is False
    assert b.bring(acme, "p", 8) == 8 and b.tier.has_run(acme, keys_of("p", 8), 0)
    assert stored(a) == [1, 2] and stored(b) == [] and b.tier.counts[:4] == (0, 0, 0, 0)
    assert len(b.tier) == 0 == len(b.tier.objects()) == len(b.tier.copies()) and b.tier.index() == {}
    assert b.orphans() == [] == a.orphans(), "what is another's is no orphan"
    b.allowed = {}
    b.tier.narrow()
    assert b.bring(acme, "p", 8) == 0, "its own policy does not let it here any more"
    assert b.tier.erase("e", Selector("beta"), 0).objects == 0
    assert a.bring(acme, "p", 8) == 8 and len(a.tier.objects()) == 2, "and the owner's is where it was"


def test_after_a_restart_each_has_its_own_and_finds_the_others(worker: Made) -> None:
    a, b = worker("a"), worker("b")
    acme = a.label("acme")
    assert a.keep(acme, "p", 8) == 8 and b.keep(acme, "q", 4) == 4
    for place, own in ((a, 2), (b, 1)):
        place.tier.close()
        place.open()
        assert (place.tier.found_at_start, place.tier.ended_at_start) == (own, 0)
        assert place.bring(acme, "p", 8) == 8 and place.bring(acme, "q", 4) == 4
    assert len(a.tier) == 2 and len(b.tier) == 1


def test_what_its_owner_ends_nobody_finds(worker: Made) -> None:
    """By a subject's key: at once, in every worker. By eviction: with the bytes."""
    a, b = worker("a"), worker("b")
    ada, acme = a.label("acme", "ada"), a.label("acme")
    assert a.keep(ada, "p", 4) == 4 == b.bring(ada, "p", 4)
    assert a.keep(acme, "q", 4) == 4 == b.bring(acme, "q", 4)
    a.tier.end_tenant("acme")
    assert b.bring(acme, "q", 4) == 0 == b.bring(ada, "p", 4) and b.ends() == [], "it is no end of a copy of b's"
    b.world.clock.advance(6_000_000)
    a.world.clock.advance(6_000_000)
    assert a.keep(ada, "p", 4) == 4 == b.bring(ada, "p", 4), "void: not found again"
    assert a.tier.erase("e", Selector("acme", "ada"), 0).done
    assert b.bring(ada, "p", 4) == 0
    b.tier.expire()
    assert b.tier.lookup(ada, keys_of("p", 4), 0) == []


def test_an_erasure_holds_for_what_others_have_not_ended_yet(worker: Made) -> None:
    """Of a selector that ends no key; what is computed after it is found as ever."""
    a, b = worker("a"), worker("b")
    acme = a.label("acme")
    assert a.keep(acme, "p", 4) == 4 == b.bring(acme, "p", 4)
    for place in (a, b):
        place.world.clock.advance(10)
    assert b.tier.erase("e", Selector("acme", classification="internal"), 0).done
    assert b.bring(acme, "p", 4) == 0
    for place in (a, b):
        place.world.clock.advance(6_000_000)
    assert b.bring(acme, "p", 4) == 0 and a.bring(acme, "p", 4) == 4, "void: the owner has ended it too"
    assert a.keep(acme, "r", 4) == 4 == b.bring(acme, "r", 4)


def test_a_rotated_epoch_ends_it_for_all(worker: Made) -> None:
    a, b = worker("a"), worker("b")
    acme = a.label("acme")
    assert a.keep(acme, "p", 4) == 4 == b.bring(acme, "p", 4)
    assert acme.spec is not None
    rotated = a.world.keyring.rotate(acme.spec.owner)
    b.world.keyring.refresh()
    again = replace(acme, spec=replace(acme.spec, key_epoch=rotated.epoch))
    assert a.bring(again, "p", 4) == 0 == b.bring(again, "p", 4)
    a.world.keyring.destroy(acme.spec.owner, 1)
    b.world.keyring.refresh()
    assert b.bring(acme, "p", 4) == 0
    assert a.tier.narrow() == 1 and len(a.tier.objects()) == 0


def test_what_came_of_a_late_put_is_its_owners_to_end(worker: Made, monkeypatch: pytest.MonkeyPatch) -> None:
    """Its answer was lost and it was given up: a listing finds it, its owner's scan ends it, another's does not."""
    a, b = worker("a"), worker("b")
    acme = a.label("acme")
    with monkeypatch.context() as lost:
        assert isinstance(a.store, RemoteStore)
        put = a.store._client.put

        def late(*of: object) -> bool:
            put(*of)  # type: ignore[arg-type]
            raise StoreError("no answer")

        def away(*_: object) -> None:
            raise StoreError("away")

        lost.setattr(a.store._client, "put", late)
        lost.setattr(a.store, "peek", away)
        assert a.keep(acme, "p", 4) == 0 and len(a.tier) == 0
    assert b.orphans(repair=True) == [] and a.orphans() == ["tier object without index"]
    assert a.orphans(repair=True) and a.orphans() == [] and len(a.store.page(b"", 9)) == 0
    assert a.keep(acme, "p", 4) == 4 == b.bring(acme, "p", 4)


def test_a_lost_answer_to_a_put_that_is_made_again_is_a_copy(worker: Made, monkeypatch: pytest.MonkeyPatch) -> None:
    a = worker("a")
    assert isinstance(a.store, RemoteStore)
    put, asked = a.store._client.put, list[bool]()

    def once_lost(*of: object) -> bool:
        answer = put(*of)  # type: ignore[arg-type]
        asked.append(answer)
        if len(asked) == 1:
            raise StoreError("no answer")
        return answer

    monkeypatch.setattr(a.store._client, "put", once_lost)
    assert a.keep(a.label("acme"), "p", 4) == 4 == a.bring(a.label("acme"), "p", 4)
    assert asked == [True, False], "void: it was not made again"


def test_what_nobody_ended_anybody_ends_once_it_is_overdue(worker: Made) -> None:
    """Its owner never came back: the bytes open for nobody, and whoever lists them ends them."""
    a, b = worker("a"), worker("b")
    assert a.keep(a.label("acme"), "p", 4) == 4
    b.world.clock.advance(ABSOLUTE_US + OVERDUE_US - 1)
    assert len(b.tier.objects()) == 0
    b.world.clock.advance(2)
    assert b.orphans(repair=True) == ["tier object without index"]
    assert a.store.page(b"", 9) == []


def test_several_are_on_their_way_at_a_time(worker: Made) -> None:
    """Through the guard, with as many lanes as the store has: what went in comes back, whole."""
    a = worker("a")
    guarded = GuardedStore(a.store, seconds=10, clock=a.world.clock)
    a.tier = SealedTier(guarded, a.world.keys, a.world.shred, a.staging, a.world.clock, a.tier._index.terms)
    acme, blocks = a.label("acme"), 15 * STEP + 1
    assert a.keep(acme, "p", blocks) == blocks == a.bring(acme, "p", blocks)
    assert len(a.tier) == 16 and a.tier.erase("e", Selector("acme"), 0).done
    assert guarded.used_bytes == 0 and not a.store._loading and not a.store._prepared  # type: ignore[attr-defined]


def test_memory_that_somebody_reads_is_not_received_into(worker: Made) -> None:
    """Of one object that is loaded twice at a time neither; else what was read is used again."""
    a = worker("a")
    store, acme = a.store, a.label("acme")
    assert isinstance(store, RemoteStore) and a.keep(acme, "p", 8) == 8
    first_name, second_name = sorted(name for name in a.tier.index())
    spares = len(store._spares)
    first, second = store.prepare_load(first_name), store.prepare_load(first_name)
    assert first is not None and second is not None
    before = bytes(first)
    store.complete_load(first_name)
    for _ in range(4):
        assert store.prepare_load(second_name) is not None
        store.complete_load(second_name)
    assert bytes(first) == bytes(second) == before
    store.complete_load(first_name)
    assert not store._loading and spares <= len(store._spares) <= spares + 1


def test_a_store_that_does_not_pay_is_not_even_asked(worker: Made, monkeypatch: pytest.MonkeyPatch) -> None:
    """Until it is faster again; what is known of it already is found all the same."""
    a, b = worker("a"), worker("b")
    acme = a.label("acme")
    assert a.keep(acme, "p", 4) == 4 == a.keep(acme, "q", 4) and b.label("acme").tenant == "acme"
    asked, peek = list[bytes](), b.store.peek
    monkeypatch.setattr(b.store, "peek", lambda name, size: asked.append(name) or peek(name, size))
    transfers = RunTransfers([b.tier], DeclaredRate(1), b.world.clock, 16)
    [way] = transfers.ways
    assert transfers.best(acme, keys_of("p", 4), 0, 4)[0] is way and len(asked) == 1
    way.link.watch.left_alone(b.world.clock.now_us())
    assert transfers.best(acme, keys_of("q", 4), 0, 4) == (None, []) and len(asked) == 1
    assert transfers.best(acme, keys_of("p", 4), 0, 4)[0] is way
    way.link.watch.used()
    assert transfers.best(acme, keys_of("q", 4), 0, 4)[0] is way and len(asked) == 2


def test_a_slower_store_is_tried_again_and_a_look_up_is_part_of_what_a_restore_takes(worker: Made) -> None:
    """Also by a worker that has nothing there of which a read could tell."""
    a, b = worker("a"), worker("b")
    acme, clock = a.label("acme"), b.world.clock
    assert a.keep(acme, "p", 4) == 4 and b.label("acme").tenant == "acme"
    transfers = RunTransfers([b.tier], DeclaredRate(1e-3), clock, 16)
    [way] = transfers.ways
    way.link.restores.learn(4 * b.tier.block_bytes, 1 << 40)
    assert transfers.best(acme, keys_of("p", 4), 0, 4) == (None, []) and b.tier.sought == 0
    clock.advance(PROBE_US)
    transfers.step(clock.now_us())
    assert transfers.best(acme, keys_of("q", 4), 0, 4) == (None, []) and b.tier.sought == 1, "nobody stored it"
    clock.advance(2 * PROBE_US)
    transfers.step(clock.now_us())
    way.link.looked(7_000_000)
    _, best_units = transfers.best(acme, keys_of("p", 4), 0, 4)
    expected_us, took_us = way.looked
    assert expected_us > 0 < took_us < way.link.look_us
    reader = CopyReader(acme, 1)
    choice = transfers.choose_restore(way, reader, 0, best_units)
    assert (choice.moves, choice.reason) == (True, "tried") and choice.transfer_us > expected_us
    came = transfers.restore(way, reader, keys_of("p", 4), 0, best_units, choice, lambda *_: None)
    [decision] = transfers.take_decisions()
    assert sum(one.blocks for one in came) == 4 and decision.actual_us >= took_us
    assert not way.is_tried and decision.transfer_us == choice.transfer_us
    transfers.best(acme, keys_of("p", 4), 0, 4)
    assert way.looked == (0, 0), "what it knows already asks nobody"
