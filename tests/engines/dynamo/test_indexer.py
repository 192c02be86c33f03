"""Dynamo's standalone indexer over ZMQ: own look-ups found, foreign none; what leaks there alone; the relay."""

from __future__ import annotations

import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from kvcustody.governance.edge.erase_epochs import (
    EpochScope,
    EpochTags,
    EraseEpochs,
    KnownEpochs,
    RaisedEpoch,
)
from kvcustody.governance.edge.router_namespace import RouterNamespaces
from kvcustody.integrations.dynamo.relay import ScopedRelay
from kvcustody.integrations.events.block_event import cleared, stored
from kvcustody.integrations.events.publisher import EventPublisher
from standins.engines.dynamo.router_world import (
    ACME,
    ALICE,
    BLOCK,
    BLOCKS,
    GLOBEX,
    ISSUER,
    Indexer,
    RawPublisher,
    hashes,
    indexer,
    keys,
    namespaces,
    prompt,
    some_removed,
    some_stored,
)

LOCAL = "tcp://127.0.0.1:0"
WHOLE = BLOCK * BLOCKS
NAMES = namespaces()
NS_ALICE = NAMES.of(*ALICE.owner)  # type: ignore[misc]
NS_ACME, NS_GLOBEX = NAMES.of(*ACME.owner), NAMES.of(*GLOBEX.owner)  # type: ignore[misc]
MARK = 99  # a prompt that is stored last: when it is found, everything before it has been applied


class World:
    def __init__(self, publisher: EventPublisher, index: Indexer) -> None:
        self.publisher, self.index = publisher, index
        assert index.settles(self.marked), "no event arrives"

    def marked(self) -> bool:
        self.publisher.publish([some_removed(MARK, ACME), some_stored(MARK, ACME)])
        return self.index.tokens_found(prompt(MARK), NS_ACME) == WHOLE

    def publish(self, *events: Any) -> None:
        self.publisher.publish([some_removed(MARK, ACME)])
        assert self.index.settles(lambda: not self.index.tokens_found(prompt(MARK), NS_ACME))
        self.publisher.publish([*events, some_stored(MARK, ACME)])
        assert self.index.settles(lambda: self.index.tokens_found(prompt(MARK), NS_ACME) == WHOLE)

    def found(self, number: int) -> tuple[int, int, int]:
        """What acme's, globex's and a nameless request are told."""
        tokens = prompt(number)
        whose = (NS_ACME, NS_GLOBEX, None)
        acme, globex, nobody = (self.index.tokens_found(tokens, each) for each in whose)
        return acme, globex, nobody


@pytest.fixture
def world(tmp_path: Path) -> Iterator[World]:
    more: Any = {"form": "dynamo", "namespaces": NAMES, "tokens_published": True}
    with EventPublisher(LOCAL, **more) as publisher, indexer(publisher.endpoint, tmp_path / "log") as index:
        yield World(publisher, index)


def test_own_prompts_are_found_and_foreign_ones_not(world: World) -> None:
    world.publish(some_stored(1, ACME))
    assert world.found(1) == (WHOLE, 0, 0)
    world.publish(some_stored(1, GLOBEX))
    assert world.found(1) == (WHOLE, WHOLE, 0)
    world.publish(some_removed(1, ACME, kept=1))
    assert world.found(1) == (BLOCK, WHOLE, 0), "a removal ends its tenant's blocks alone"


def test_the_dump_holds_no_tokens_and_no_names(world: World) -> None:
    world.publish(some_stored(2, ACME))
    dump = str(world.index.call("/dump"))
    assert "acme" not in dump and NS_ACME not in dump and str(prompt(2)[:3]) not in dump


def test_a_clear_ends_all(world: World) -> None:
    world.publish(some_stored(3, ACME), some_stored(3, GLOBEX))
    assert world.found(3) == (WHOLE, WHOLE, 0)
    world.publish(cleared(5, "reset"))
    assert world.found(3) == (0, 0, 0)


def test_blocks_of_one_subject_are_told_under_its_name_alone(world: World) -> None:
    world.publish(some_stored(4, ALICE))
    assert world.found(4) == (0, 0, 0)
    assert world.index.tokens_found(prompt(4), NS_ALICE) == WHOLE


def test_a_subject_finds_a_chain_that_begins_in_the_tenants_blocks(world: World) -> None:
    """Two blocks are everybody's, and the rest hers: under her name the index sees all four."""
    tokens, mine = prompt(5), keys(5)
    shared = stored(ACME, mine[:64], residency=7, block_tokens=BLOCK, tokens=tokens[: 2 * BLOCK])
    rest = stored(ALICE, mine[64:], residency=7, parent=mine[32:64], block_tokens=BLOCK, tokens=tokens[2 * BLOCK :])
    world.publish(shared)
    assert world.index.tokens_found(tokens, NS_ALICE) == 0, "nothing of hers stands on it yet"
    world.publish(rest)
    assert world.index.tokens_found(tokens, NS_ALICE) == WHOLE
    assert world.index.tokens_found(tokens, NS_ACME) == 2 * BLOCK


def test_a_raised_epoch_ends_a_subjects_name_in_the_index(world: World) -> None:
    world.publish(some_stored(6, ALICE), some_stored(6, ACME))
    assert world.index.tokens_found(prompt(6), NS_ALICE) == WHOLE
    tags = EpochTags(bytes(32))
    raised = [RaisedEpoch(1, tags.of(EpochScope(ISSUER, "acme", "alice")))]
    known = KnownEpochs(EraseEpochs(raised, version=1), tags)
    world.publisher.take_epochs(known)
    assert world.index.settles(lambda: world.index.tokens_found(prompt(6), NS_ALICE) == 0)
    assert world.found(6) == (WHOLE, 0, 0), "the tenant's stay"
    world.publish(some_stored(6, ALICE))
    assert world.index.tokens_found(prompt(6), NS_ALICE) == 0
    assert world.index.tokens_found(prompt(6), NAMES.of(*ALICE.owner, known=known)) == WHOLE  # type: ignore[misc]


def test_without_namespaces_of_their_own_tenants_find_each_others(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The control of the first test: the same publisher with one namespace for everybody."""
    monkeypatch.setattr(RouterNamespaces, "of", lambda self, issuer, tenant, *_: NS_ACME)
    more: Any = {"form": "dynamo", "namespaces": NAMES, "tokens_published": True}
    with EventPublisher(LOCAL, **more) as publisher, indexer(publisher.endpoint, tmp_path / "log") as index:
        world = World(publisher, index)
        world.publish(some_stored(1, GLOBEX))
        assert world.found(1)[0] == WHOLE


# -- what Dynamo does with events that are not ours ------------------------------------------------------------------


def as_array(number: int, salt: str) -> list[Any]:
    extra = [[salt], *[None] * (BLOCKS - 1)]
    return ["BlockStored", hashes(), None, prompt(number), BLOCK, None, "GPU", None, extra]


def as_map(number: int, **more: Any) -> dict[str, Any]:
    return {
        "type": "BlockStored",
        "block_hashes": hashes(),
        "parent_block_hash": None,
        "token_ids": prompt(number),
        "block_size": BLOCK,
        "lora_id": None,
        "medium": "GPU",
        **more,
    }


def with_aliases(number: int) -> dict[str, Any]:
    """Mooncake's standard form with the aliases that its master adds, and a tenant."""
    envelope = {"event_type": "stored", "event_id": 0, "tenant_id": NS_ACME, "backend_id": "pool"}
    return as_map(number, additional_salt=NS_ACME, **envelope)


LEAKING = {
    "array with the salt in extra_keys": lambda: as_array(1, NS_ACME),
    "map with the salt in extra_keys": lambda: as_map(1, extra_keys=[[NS_ACME], *[None] * (BLOCKS - 1)]),
    "map without a salt": lambda: as_map(1),
    "map with an empty salt": lambda: as_map(1, cache_salt=""),
    "standard form with aliases": lambda: with_aliases(1),
}
MARKED = {"type": "AllBlocksCleared"}


def settle(engine: RawPublisher, index: Indexer, *events: Any, step: Any = lambda: None) -> None:
    """Send until the mark behind the events is found."""

    def marked() -> bool:
        engine.send(*events, as_map(MARK, cache_salt=NS_ACME))
        step()
        return index.tokens_found(prompt(MARK), NS_ACME) == WHOLE

    assert index.settles(marked)


@pytest.fixture
def engine() -> Iterator[RawPublisher]:
    made = RawPublisher()
    yield made
    made.close()


@pytest.mark.parametrize("shape", LEAKING)
def test_dynamo_alone_indexes_it_for_every_tenant(shape: str, engine: RawPublisher, tmp_path: Path) -> None:
    """The control of the next test: a request without a namespace of its own finds what one tenant stored."""
    with indexer(engine.endpoint, tmp_path / "log") as index:
        settle(engine, index, LEAKING[shape]())
        assert index.tokens_found(prompt(1)) == WHOLE
        assert index.tokens_found(prompt(1), NS_ACME) == 0


@pytest.mark.parametrize("shape", LEAKING)
def test_the_relay_refuses_it(shape: str, engine: RawPublisher, tmp_path: Path) -> None:
    relay = ScopedRelay(engine.endpoint, LOCAL)
    with relay, indexer(relay.endpoint, tmp_path / "log") as index:
        event = LEAKING[shape]()
        settle(engine, index, event, as_map(2, cache_salt=NS_ACME), step=lambda: relay.step(50))
        for whose in (None, NS_ACME, NS_GLOBEX):
            assert index.tokens_found(prompt(1), whose) == 0
        assert index.tokens_found(prompt(2), NS_ACME) == WHOLE, "what is scoped passes"
        assert index.tokens_found(prompt(2), NS_GLOBEX) == 0
        assert relay.stats().refused >= 1
        engine.send(["BlockRemoved", as_map(2)["block_hashes"]], MARKED)
        assert index.settles(lambda: relay.step(50) or index.tokens_found(prompt(2), NS_ACME) == 0)


@pytest.mark.parametrize(("form", "readable_tokens"), [("vllm", 0), ("mooncake", 0), ("sglang", WHOLE)])
def test_other_forms_are_not_for_dynamo(form: Any, readable_tokens: int, tmp_path: Path) -> None:
    """Ours in another engine's form, tokens published: Dynamo reads SGLang's, under the name that it has."""
    more: Any = {"form": form, "namespaces": NAMES, "tokens_published": True}
    with EventPublisher(LOCAL, **more) as publisher, indexer(publisher.endpoint, tmp_path / "log") as index:

        def told_now() -> bool:
            publisher.publish([some_stored(1, ACME)])
            return index.tokens_found(prompt(1), NS_ACME if readable_tokens else None) == WHOLE

        if readable_tokens:
            assert index.settles(told_now)
            assert [index.tokens_found(prompt(1), each) for each in (None, NS_GLOBEX)] == [0, 0]
        else:
            for _ in range(20):  # as long as SGLang's form needs, many times over
                assert not told_now()
                time.sleep(0.05)
            assert [index.tokens_found(prompt(1), each) for each in (None, NS_ACME)] == [0, 0]
