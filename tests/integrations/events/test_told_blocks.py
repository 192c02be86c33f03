"""Under which names routers are told of blocks: held against an index that knows names, hashes and parents alone."""

from __future__ import annotations

import random
from typing import Any

import pytest

from kvcustody.clock import VirtualClock
from kvcustody.governance.edge.current_namespaces import CurrentNamespaces
from kvcustody.governance.edge.erase_epochs import (
    EpochScope,
    EpochTags,
    EraseEpochs,
    KnownEpochs,
    RaisedEpoch,
)
from kvcustody.governance.edge.named_requester import NamedRequester
from kvcustody.governance.edge.router_namespace import RouterNamespaces
from kvcustody.integrations.events import sglang_wire, vllm_wire
from kvcustody.integrations.events.block_event import (
    STORED,
    BlockEvent,
    EventScope,
    cleared,
    removed,
    split_keys,
    stored,
)
from kvcustody.integrations.events.dynamo_wire import DynamoWire
from kvcustody.integrations.events.mooncake_wire import MooncakeWire
from kvcustody.integrations.events.names.told_blocks import ToldBlocks, hash_under
from kvcustody.times import DAY_US
from standins.integrations.door_world import secret
from standins.integrations.router_names import NamedWire, lasting_names

ISSUER = "idp"
TENANT = NamedRequester(ISSUER, "acme")
ANN, BOB, GLOBEX = (
    NamedRequester(ISSUER, "acme", "ann"),
    NamedRequester(ISSUER, "acme", "bob"),
    NamedRequester(ISSUER, "globex", "eve"),
)
WIDE = EventScope("acme", "tenant", "internal", 1, 1, TENANT, TENANT)
SEGMENT = EventScope("acme", "segment", "internal", 2, 1, None, TENANT)
OF_ANN = EventScope("acme", "subject", "internal", 3, 1, ANN)
OF_BOB = EventScope("acme", "subject", "internal", 4, 1, BOB)
LENT = EventScope("globex", "group", "internal", 5, 1)
NAMES = lasting_names(bytes(range(32)))
TAGS = EpochTags(bytes(32))
BLOCK = 4


def key(*path: int) -> bytes:
    return bytes(path).ljust(32, b"\0")


def store(scope: EventScope, *paths: tuple[int, ...], by: NamedRequester | None = None) -> BlockEvent:
    """Blocks of one chain, each named by its path from the first on; its tokens are the path's last number."""
    tokens = [path[-1] for path in paths for _ in range(BLOCK)]
    parent = key(*paths[0][:-1]) if len(paths[0]) > 1 else b""
    keys = b"".join(key(*path) for path in paths)
    return stored(scope, keys, residency=1, parent=parent, block_tokens=BLOCK, tokens=tokens, requester=by)


def remove(scope: EventScope, *paths: tuple[int, ...]) -> BlockEvent:
    return removed(scope, b"".join(key(*path) for path in paths), cause="erased")


def raised(*scopes: EpochScope) -> KnownEpochs:
    numbers = [RaisedEpoch(number, TAGS.of(scope)) for number, scope in enumerate(scopes, 1)]
    return KnownEpochs(EraseEpochs(numbers, version=len(numbers)), TAGS)


def as_other_worker(event: BlockEvent) -> BlockEvent:
    """The same blocks under the keys of another worker's keyring."""
    keys = b"".join(hash_under(each, "of another worker") for each in split_keys(event.keys))
    return event._replace(keys=keys, parent=event.parent and hash_under(event.parent, "of another worker"))


class Index:
    """What an event-fed index knows: for each name, hashes with their parents and tokens."""

    def __init__(self) -> None:
        self.blocks: dict[bytes, tuple[str, bytes, tuple[int, ...]]] = {}

    def apply(self, events: list[BlockEvent]) -> None:
        for event in events:
            if event.kind == STORED:
                before = event.parent
                for at, one in enumerate(split_keys(event.keys)):
                    tokens = tuple(event.tokens[at * BLOCK : (at + 1) * BLOCK])
                    self.blocks[one] = (event.namespace, before, tokens)
                    before = one
            elif event.keys:
                for one in split_keys(event.keys):
                    del self.blocks[one]  # a removal of what was never told is a defect
            else:
                self.blocks.clear()

    def overlap(self, name: str, path: tuple[int, ...]) -> int:
        """Blocks of a prompt, from its first on, that a request of this name is told."""
        before, matched = b"", 0
        for number in path:
            wanted = (name, before, (number,) * BLOCK)
            held = next((one for one, block in self.blocks.items() if block == wanted), None)
            if held is None:
                break
            before, matched = held, matched + 1
        return matched


def name(place: NamedRequester, known: KnownEpochs | None = None) -> str:
    return NAMES.of(*place, known=known)


class World:
    def __init__(self, **more: Any) -> None:
        self.told, self.index = ToldBlocks(NAMES, **more), Index()

    def hashes(self, *events: BlockEvent) -> set[bytes]:
        """What the events' named stores call their blocks."""
        return {key for event in self.tell(*events) if event.namespace for key in split_keys(event.keys)}

    def tell(self, *events: BlockEvent) -> list[BlockEvent]:
        made = self.told.tell(events)
        self.index.apply(made)
        return made

    def take(self, known: KnownEpochs) -> list[BlockEvent]:
        made = self.told.take_epochs(known)
        self.index.apply(made)
        return made

    def overlaps(self, path: tuple[int, ...], known: KnownEpochs | None = None) -> dict[str, int]:
        places = {"tenant": TENANT, "ann": ANN, "bob": BOB, "eve": GLOBEX}
        return {who: self.index.overlap(name(place, known), path) for who, place in places.items()}


@pytest.fixture
def world() -> World:
    return World()


def test_a_subjects_blocks_are_told_under_its_name_alone(world: World) -> None:
    world.tell(store(OF_ANN, (1,), (1, 2)))
    assert world.overlaps((1, 2)) == {"tenant": 0, "ann": 2, "bob": 0, "eve": 0}


def test_what_is_lent_is_told_under_no_name(world: World) -> None:
    made = world.tell(store(LENT, (1,), by=ANN))
    assert [event.namespace for event in made] == [""]


@pytest.mark.parametrize("scope", [WIDE, SEGMENT])
def test_an_index_sees_a_chain_whole_that_begins_in_a_wider_segment(world: World, scope: EventScope) -> None:
    world.tell(store(scope, (1,), (1, 2), by=ANN), store(OF_ANN, (1, 2, 3)))
    assert world.overlaps((1, 2, 3))["ann"] == 3
    assert world.overlaps((1, 2, 3))["bob"] == 0, "nothing of his stands on it yet"
    world.tell(store(OF_BOB, (1, 2, 4)))
    found = world.overlaps((1, 2, 4))
    assert (found["bob"], found["ann"], found["eve"]) == (3, 2, 0)
    assert found["tenant"] == (2 if scope is WIDE else 0)


def test_without_the_rule_a_segment_ends_the_chain(monkeypatch: pytest.MonkeyPatch) -> None:
    """The control: nothing is told again under a further name."""
    monkeypatch.setattr(ToldBlocks, "_whole_chain", lambda self, place, event: [])
    monkeypatch.setattr(ToldBlocks, "_tell_further", lambda self, place, event: [])
    world = World()
    world.tell(store(WIDE, (1,), by=ANN), store(OF_ANN, (1, 2)))
    assert world.overlaps((1, 2))["ann"] == 0


def test_a_foreign_tenants_request_gets_no_further_name(world: World) -> None:
    world.tell(store(WIDE, (1,), by=GLOBEX))
    foreign = EventScope("globex", "subject", "internal", 9, 1, GLOBEX)
    world.tell(store(foreign, (1, 2)))
    assert world.overlaps((1, 2)) == {"tenant": 1, "ann": 0, "bob": 0, "eve": 0}


def test_a_removal_ends_a_block_under_every_name(world: World) -> None:
    world.tell(store(WIDE, (1,), by=ANN), store(OF_BOB, (1, 2)), store(OF_ANN, (1, 3)))
    made = world.tell(remove(WIDE, (1,)))
    assert {event.namespace for event in made} == {name(TENANT), name(ANN), name(BOB)}
    assert set(world.overlaps((1,)).values()) == {0}
    world.tell(remove(OF_ANN, (1, 3)), remove(OF_BOB, (1, 2)))
    assert not world.index.blocks and len(world.told) == 0
    assert world.tell(remove(OF_ANN, (1, 3))) == [], "once"


@pytest.mark.parametrize(
    ("scope", "left"),
    [
        (EpochScope(ISSUER, "acme", "ann"), {"tenant": 1, "ann": 0, "bob": 1, "eve": 0}),
        (EpochScope(ISSUER, "acme", is_shared=True), {"tenant": 0, "ann": 1, "bob": 1, "eve": 0}),
        (EpochScope(ISSUER, "acme"), {"tenant": 0, "ann": 0, "bob": 0, "eve": 0}),
        (EpochScope(), {"tenant": 0, "ann": 0, "bob": 0, "eve": 0}),
        (EpochScope(ISSUER, "globex"), {"tenant": 1, "ann": 1, "bob": 1, "eve": 0}),
    ],
)
def test_a_raised_epoch_removes_what_its_scope_was_told_at_once(
    world: World, scope: EpochScope, left: dict[str, int]
) -> None:
    world.tell(store(WIDE, (1,), by=ANN), store(OF_BOB, (1, 2)), store(OF_ANN, (1, 3)))
    assert world.overlaps((1,)) == {"tenant": 1, "ann": 1, "bob": 1, "eve": 0}
    known = raised(scope)
    made = world.take(known)
    assert all(event.cause == "renamed" and event.keys for event in made)
    assert world.overlaps((1,)) == left, "by the names of before"
    assert world.take(known) == []
    after = world.overlaps((1,), known)
    assert all(after[who] in (0, left[who]) for who in after), "nothing is under a new name by itself"


def test_after_a_batch_of_the_shared_name_chains_are_told_anew(world: World) -> None:
    """The tenant's blocks are still there; who stands on them under a name of now finds them by it."""
    world.tell(store(WIDE, (1,)), store(OF_ANN, (1, 2)))
    known = raised(EpochScope(ISSUER, "acme", "ann"))
    world.take(known)
    assert world.overlaps((1, 2))["ann"] == world.overlaps((1, 2), known)["ann"] == 0
    world.tell(store(OF_ANN._replace(domain=8), (1, 5)))
    assert world.overlaps((1, 5), known)["ann"] == 2 and world.overlaps((1, 5))["ann"] == 0


def test_a_clear_ends_everything_that_was_told(world: World) -> None:
    world.tell(store(WIDE, (1,), by=ANN), store(OF_ANN, (1, 2)))
    world.tell(cleared(1, "resync"))
    assert not world.index.blocks and len(world.told) == 0
    assert world.tell(remove(OF_ANN, (1, 2))) == []
    world.tell(store(OF_ANN, (1, 2, 3)))
    assert world.overlaps((1, 2, 3))["ann"] == 0, "what came before the clear is unknown: no chain from its first block"


def test_further_names_are_bounded_and_the_oldest_are_let_go() -> None:
    world = World(further_max=10)
    world.tell(store(WIDE, (1,), (1, 2)))
    subjects = [NamedRequester(ISSUER, "acme", f"s{number}") for number in range(20)]
    for number, place in enumerate(subjects):
        scope = EventScope("acme", "subject", "internal", 10 + number, 1, place)
        world.tell(store(scope, (1, 2, 3 + number)))
        assert len(world.told) <= 2 + 10 + number + 1
    found = [world.index.overlap(name(place), (1, 2, 3 + number)) for number, place in enumerate(subjects)]
    assert found == [0] * 15 + [3] * 5


def test_wide_blocks_that_are_not_kept_are_not_told_again() -> None:
    world = World(wide_blocks_max=1)
    world.tell(store(WIDE, (1,), (1, 2)), store(OF_ANN, (1, 2, 3)))
    assert world.overlaps((1, 2, 3)) == {"tenant": 2, "ann": 0, "bob": 0, "eve": 0}


def test_names_end_with_their_days() -> None:
    clock = VirtualClock()
    names = CurrentNamespaces(RouterNamespaces(secret()), clock, days=1)
    told, index = ToldBlocks(names), Index()
    index.apply(told.tell([store(OF_ANN, (1,))]))
    before = names.of(*ANN)
    clock.advance(DAY_US)
    index.apply(told.tell([store(OF_ANN, (2,))]))
    assert index.overlap(before, (1,)) == 0 and index.overlap(names.of(*ANN), (2,)) == 1


CHAIN = (store(WIDE, (1,), (1, 2), by=ANN), store(OF_ANN, (1, 2, 3), (1, 2, 3, 4)))


def test_every_worker_of_a_fleet_tells_one_hash_for_equal_tokens() -> None:
    first, second = World(fleet_hashes=True), World(fleet_hashes=True)
    told = first.hashes(*CHAIN)
    assert len(told) == 6, "two of the tenant, and four of the subject"
    assert second.hashes(*map(as_other_worker, CHAIN)) == told
    assert (
        first.overlaps((1, 2, 3, 4)) == second.overlaps((1, 2, 3, 4)) == {**{"tenant": 2, "ann": 4, "bob": 0, "eve": 0}}
    )
    own = World().hashes(*CHAIN)
    assert own != World().hashes(*map(as_other_worker, CHAIN)), "the control: hashes of each worker's keys"


def test_a_fleet_hash_is_of_one_name_one_secret_and_one_place_in_a_chain() -> None:
    of_globex = EventScope("globex", "subject", "internal", 9, 1, GLOBEX)
    hashes = [
        World(fleet_hashes=True).hashes(event)
        for event in (
            store(OF_ANN, (1,), (1, 1)),
            store(OF_BOB, (1,), (1, 1)),
            store(of_globex, (1,), (1, 1)),
            store(OF_ANN, (1,), (1, 1))._replace(lora_name="sql"),
        )
    ]
    other = ToldBlocks(lasting_names(bytes(32)), fleet_hashes=True)
    [foreign] = other.tell([store(OF_ANN, (1,), (1, 1))])
    every = [*hashes, set(split_keys(foreign.keys))]
    assert len(set[bytes]().union(*every)) == 10


def test_an_erasures_epoch_changes_fleet_hashes() -> None:
    world = World(fleet_hashes=True)
    before = world.hashes(store(OF_ANN, (1,)))
    known = raised(EpochScope(ISSUER, "acme", "ann"))
    assert {key for event in world.take(known) for key in split_keys(event.keys)} == before
    assert not before & world.hashes(store(OF_ANN._replace(domain=8), (1,)))


def test_a_fleet_hash_of_two_domains_ends_with_the_last() -> None:
    world = World(fleet_hashes=True)
    other = OF_ANN._replace(domain=8, classification="confidential")
    again = as_other_worker(store(other, (1,)))
    world.tell(store(OF_ANN, (1,)), again)
    assert world.tell(remove(OF_ANN, (1,))) == [] and world.overlaps((1,))["ann"] == 1
    assert len(world.tell(removed(other, again.keys, cause="ended"))) == 1
    assert not world.index.blocks


@pytest.mark.parametrize("fleet_hashes", [False, True])
@pytest.mark.parametrize("seed", range(20))
def test_what_an_index_holds_is_what_the_book_says(seed: int, fleet_hashes: bool) -> None:
    """Any order of stores, removals, raises and clears: every removal ends something, and all end at the end."""
    chance, world = random.Random(seed), World(further_max=7, wide_blocks_max=9, fleet_hashes=fleet_hashes)
    scopes = [WIDE, SEGMENT, OF_ANN, OF_BOB]
    held: dict[tuple[int, ...], EventScope] = {}
    for number in range(200):
        act = chance.random()
        if act < 0.6:
            before = chance.choice([(), *held])[:3]
            path = (*before, chance.randrange(1, 6))
            if path not in held:
                held[path] = chance.choice(scopes)
                world.tell(store(held[path], path, by=chance.choice([None, ANN, BOB])))
        elif act < 0.9 and held:
            path = chance.choice(list(held))
            world.tell(remove(held.pop(path), path))
        elif act < 0.97:
            places = [ANN, BOB]
            world.take(raised(*(EpochScope(*chance.choice(places)[:3]) for _ in range(number + 1))))
        else:
            world.tell(cleared(1, "x"))
            held.clear()
        named = {one for one, (name_, _, _) in world.index.blocks.items() if name_}
        assert len(named) == len(world.told)
    for path, scope in held.items():
        for one in [event for event in world.told.tell([remove(scope, path)]) if event.namespace]:
            world.index.apply([one])
    assert len(world.told) == 0 and not any(name_ for name_, _, _ in world.index.blocks.values())


@pytest.mark.parametrize(
    ("wire", "named"),
    [
        (vllm_wire, lambda event: event["extra_keys"][0][0]),
        (sglang_wire, lambda event: event["cache_salt"]),
        (DynamoWire(tokens_published=True), lambda event: event["cache_salt"]),
        (MooncakeWire("w"), lambda event: event["tenant_id"]),
    ],
)
def test_each_form_has_the_namespace_where_its_index_reads_it(wire: Any, named: Any) -> None:
    made = NamedWire(wire, NAMES).events(store(WIDE, (1,), by=ANN), store(OF_ANN, (2,)))
    stores = [event for event in made if "stored" in (event.get("event_type", ""), event.get("type", "")[5:].lower())]
    assert [named(event) for event in stores] == [name(TENANT), name(ANN), name(ANN)]
    assert "ann" not in str(made), "no name of a person leaves"


def test_a_hash_under_a_further_name_is_another() -> None:
    assert len({key(1), hash_under(key(1), name(ANN)), hash_under(key(1), name(BOB))}) == 3
