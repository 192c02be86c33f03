"""Pages of a stand-in engine in tiers: own hits come back and no others, nothing is prolonged, stores may fail."""

from __future__ import annotations

import random
import threading
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from kvcustody.allocator.prefix.key_chain import keys_of
from kvcustody.audit.kinds import CopiesDestroyed, CopiesEnded, CopiesStored, TransferDecided
from kvcustody.errors import IsolationError, StoreError
from kvcustody.governance.erasure.selector import Selector
from kvcustody.governance.identity.domain_spec import tenant_owner
from kvcustody.governance.restriction.restricted_subjects import (
    NOBODY_RESTRICTED,
    RestrictedSubject,
    RestrictedSubjects,
)
from kvcustody.governance.tiers import tier as tier_module
from kvcustody.governance.tiers.tier import SealedTier
from kvcustody.integrations.sglang import slot_tiers
from kvcustody.integrations.sglang.slot_custody import SlotCustody
from kvcustody.integrations.sglang.slot_tiers import UNIT_TOKENS, SlotTiers, unit_pages
from kvcustody.policies.reading.load_policy import load_policy
from kvcustody.policies.table.compile import compile_policy
from kvcustody.testkit.conformance.policy import ABSOLUTE_US, IDLE_US, policy
from standins.integrations.tiered_engine import OBJECT_UNITS, TIER_POLICY, TieredEngine, prompt

MINE = prompt(1, 161)  # ten units and a token


@pytest.fixture(params=["host", "nvme", "host nvme"])
def own(request: pytest.FixtureRequest, tmp_path: Path) -> Iterator[TieredEngine]:
    made = TieredEngine(tmp_path, request.param)
    yield made
    made.close()


def settled(engine: TieredEngine) -> None:
    """Everything was told, every book agrees."""
    engine.custody.step()
    assert engine.problems() == []


@pytest.mark.parametrize("size", [1, 4, 16, 32])
def test_a_unit_holds_sixteen_tokens_or_a_page(size: int) -> None:
    assert unit_pages(size) * size == max(UNIT_TOKENS, size)


@pytest.mark.parametrize("size", [1, 4])
@pytest.mark.parametrize("tiers", ["host", "nvme"])
def test_what_was_evicted_comes_back_to_its_own_and_to_nobody_else(tmp_path: Path, size: int, tiers: str) -> None:
    own = TieredEngine(tmp_path, tiers, page_tokens=size, pages=260 // size)
    assert own.run("alpha", "ann", MINE) == 0
    assert own.run("alpha", "ann", MINE) == 160 // size, "from the device"
    own.crowd()
    assert own.run("gamma", "eve", MINE[:60]) == 0, "another tenant, the same beginning"
    assert own.run("alpha", "bob", MINE) == 0, "another subject"
    own.crowd(1)
    assert own.run("alpha", "ann", MINE, "mine") == 0, "narrowed by its client"
    assert own.run(None, "", MINE[:100]) == 0
    own.crowd(2)
    assert own.run("alpha", "ann", MINE) == 160 // size, "from a tier"
    settled(own)
    own.crowd(3)
    assert own.run("alpha", "ann", MINE, "mine") == 160 // size
    settled(own)
    own.close()


def test_a_load_is_over_when_the_scheduler_goes_on(own: TieredEngine, monkeypatch: pytest.MonkeyPatch) -> None:
    """It runs in the scheduler's thread, where erasures are taken: none is ever in flight when one comes."""
    loads, threads, writes = [0], list[int](), own.write
    bring, erase = SlotTiers.bring, SealedTier.erase

    def write(pages: Any, data: memoryview) -> None:
        threads.append(threading.get_ident())
        assert loads[0] == 1, "written behind the call that brings it"
        writes(pages, data)

    def brings(self: SlotTiers, *given: Any) -> Any:
        loads[0] += 1
        try:
            return bring(self, *given)
        finally:
            loads[0] -= 1

    def erases(self: SealedTier, *given: Any) -> Any:
        assert loads[0] == 0 and threading.get_ident() == threading.main_thread().ident
        return erase(self, *given)

    monkeypatch.setattr(own, "write", write)
    monkeypatch.setattr(SlotTiers, "bring", brings)
    monkeypatch.setattr(SealedTier, "erase", erases)
    own.run("alpha", "ann", MINE)
    own.crowd()
    assert own.run("alpha", "ann", MINE) == 160
    own.port.erase(Selector(tenant="alpha", subject="ann"))
    own.custody.step()
    assert set(threads) == {threading.main_thread().ident}


def test_without_tiers_it_is_computed_again(own: TieredEngine) -> None:
    """The control: the same requests, and nobody offers anything."""
    own.custody.tiers.offer = lambda node, keep: None
    own.run("alpha", "ann", MINE)
    own.crowd()
    assert own.run("alpha", "ann", MINE) == 0


def test_a_prompt_that_leaves_the_chain_gets_what_lies_before(own: TieredEngine) -> None:
    step = OBJECT_UNITS * UNIT_TOKENS
    own.run("alpha", "ann", MINE)
    own.crowd()
    other = MINE[: 2 * step + 20] + prompt(9, 60)
    assert own.run("alpha", "ann", other) == 2 * step
    assert own.run("alpha", "ann", MINE) >= 2 * step
    settled(own)


def test_a_hit_that_ends_within_a_unit_goes_on_behind_it(own: TieredEngine) -> None:
    own.run("alpha", "ann", MINE)
    own.crowd()
    assert own.run("alpha", "ann", MINE[:10]) == 0  # ten tokens of the first unit are on the device
    assert own.run("alpha", "ann", MINE) == 160
    settled(own)


def test_a_second_eviction_moves_nothing(own: TieredEngine) -> None:
    own.run("alpha", "ann", MINE)
    own.crowd()
    own.run("alpha", "ann", MINE)
    first = own.tiers[0]
    held = sum(len(tier) for tier in own.tiers)
    mine = [name for name, entry in first.index().items() if entry.tenant == "alpha"]
    own.crowd(1)
    again = [name for name, entry in first.index().items() if entry.tenant == "alpha"]
    assert mine == again and held


def test_a_restart_finds_what_files_kept(tmp_path: Path) -> None:
    first = TieredEngine(tmp_path, "host nvme")
    first.run("alpha", "ann", MINE)
    first.crowd()
    first.close()
    hosts = TieredEngine(tmp_path, "host", before=first)
    assert hosts.run("alpha", "ann", MINE) == 0, "memory of the machine is gone"
    hosts.close()
    files = TieredEngine(tmp_path, "nvme")
    files.run("alpha", "ann", prompt(2, 161))
    files.crowd()
    files.close()
    again = TieredEngine(tmp_path, "nvme", before=files)
    assert again.run("alpha", "eve", prompt(2, 161)) == 0
    assert again.run("alpha", "ann", prompt(2, 161)) == 160
    settled(again)
    again.close()


def test_no_round_trip_prolongs_anything(own: TieredEngine) -> None:
    own.run("alpha", "ann", MINE)
    ceiling_us = int(own.port.pool.ceiling_us.max())
    for turn in range(3):
        own.clock.advance(IDLE_US - 1_000_000)
        own.crowd(turn)
        found = own.run("alpha", "ann", MINE)
        if own.clock.now_us() >= ceiling_us:
            assert found == 0
            break
        assert found == 160, "used in time"
        mine = own.port.pool.ceiling_us[own.tree.indexed()]
        assert int(mine.min()) <= ceiling_us
    own.clock.advance(ABSOLUTE_US)
    own.custody.step()
    assert own.run("alpha", "ann", MINE) == 0
    settled(own)


def test_a_deadline_passes_in_the_tier(own: TieredEngine) -> None:
    own.run("alpha", "ann", MINE)
    own.crowd()
    assert any(copy.tenant == "alpha" for tier in own.tiers for copy in tier.copies())
    own.clock.advance(IDLE_US + 1)
    assert own.run("alpha", "ann", MINE) == 0, "before anybody swept"
    own.clock.advance(IDLE_US)
    own.custody.step()
    assert not any(len(tier) for tier in own.tiers)
    settled(own)


def test_an_erasure_reaches_every_copy(own: TieredEngine) -> None:
    own.run("alpha", "ann", MINE)
    own.run("alpha", "bob", prompt(3, 161))
    own.crowd()
    before = {copy.name for tier in own.tiers for copy in tier.copies()}
    own.port.erase(Selector(tenant="alpha", subject="ann"))
    own.custody.step()
    assert own.run("alpha", "ann", MINE) == 0
    own.crowd(1)
    assert own.run("alpha", "bob", prompt(3, 161)) == 160
    settled(own)
    ended = [one for one in own.ledger.events if isinstance(one, CopiesEnded) and one.cause == "erased"]
    destroyed = [one for one in own.ledger.events if isinstance(one, CopiesDestroyed)]
    assert sum(len(one.numbers) for one in ended) >= 3
    assert {one.cause for one in destroyed} >= {"key-destroyed"}
    assert before


def test_destroyed_keys_end_copies_with_the_next_step(own: TieredEngine) -> None:
    own.run("alpha", "ann", MINE)
    own.crowd()
    (epoch,) = own.port.keyring.epochs(tenant_owner("idp", "alpha"))
    own.port.keyring.destroy(tenant_owner("idp", "alpha"), epoch)
    own.port.reload_keys()
    assert not any(copy.tenant == "alpha" for tier in own.tiers for copy in tier.copies())
    assert own.run("alpha", "ann", MINE) == 0
    settled(own)


def test_a_policy_that_allows_no_tier_any_more_ends_what_is_there(own: TieredEngine) -> None:
    own.run("alpha", "ann", MINE)
    own.crowd()
    text = TIER_POLICY.replace("low: {tiers: [host, nvme], encrypt: required}", "low: never")
    assert text != TIER_POLICY
    table = compile_policy(load_policy(text, name="narrower.yaml"), revision=own.port.table.revision + 1)
    own.port.activate(table, actor="tests")
    assert not any(len(tier) for tier in own.tiers)
    assert own.run("alpha", "ann", MINE) == 0
    own.crowd(1)
    assert not any(len(tier) for tier in own.tiers)


class Between:
    """What a tier asks of its store goes through here, so that `load` may answer anything."""

    def __init__(self, tier: SealedTier) -> None:
        self._store = tier._index.store
        self.load = self._store.prepare_load
        self.instead: dict[bytes, bytes] = {}
        tier._index.store = self

    def prepare_load(self, name: bytes) -> memoryview | None:
        return self.load(self.instead.get(name, name))

    def complete_load(self, name: bytes) -> None:
        self._store.complete_load(self.instead.get(name, name))

    def __getattr__(self, name: str) -> Any:
        return getattr(self._store, name)


def _failing(*_given: object, **_named: object) -> object:
    raise StoreError("the store does not answer")


def test_a_store_that_fails_gives_misses_and_nothing_waits(own: TieredEngine) -> None:
    own.run("alpha", "ann", MINE)
    own.crowd()
    for tier in own.tiers:
        Between(tier).load = _failing
    assert own.run("alpha", "ann", MINE) == 0
    assert own.run("alpha", "ann", MINE) == 160, "from the device by now"
    settled(own)
    failed = [one for one in own.ledger.events if isinstance(one, TransferDecided) and one.outcome == "failed"]
    assert failed and failed[-1].action == "restore"


def test_what_came_before_a_store_failed_is_used(tmp_path: Path) -> None:
    own = TieredEngine(tmp_path, "host")
    own.run("alpha", "ann", MINE)
    own.crowd()
    (tier,) = own.tiers
    between = Between(tier)
    loads, load = [0], between.load

    def second_fails(name: bytes) -> object:
        loads[0] += 1
        return _failing() if loads[0] == 2 else load(name)

    between.load = second_fails
    assert own.run("alpha", "ann", MINE) == OBJECT_UNITS * UNIT_TOKENS
    settled(own)
    own.close()


def test_a_store_that_lies_gives_misses_and_ends_the_copy(tmp_path: Path) -> None:
    own = TieredEngine(tmp_path, "host")
    own.run("alpha", "ann", MINE)
    own.run("alpha", "ann", prompt(4, 161))
    own.crowd()
    (tier,) = own.tiers
    names = [copy.name for copy in tier.copies() if copy.tenant == "alpha" and copy.blocks == OBJECT_UNITS]
    Between(tier).instead = {name: names[at - 1] for at, name in enumerate(names)}
    assert len(names) >= 4
    assert own.run("alpha", "ann", MINE) == 0
    assert own.run("alpha", "ann", prompt(4, 161)) == 0
    settled(own)
    assert any(isinstance(one, CopiesEnded) and one.cause == "broken" for one in own.ledger.events)
    own.close()


def test_bytes_that_are_not_opened_would_be_noticed(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """The positive control of every comparison here: whoever checks nothing attaches what a store returns."""
    own = TieredEngine(tmp_path, "host")
    monkeypatch.setattr("kvcustody.governance.tiers.tier.seal_into", _copy_in)
    monkeypatch.setattr("kvcustody.governance.tiers.tier.open_into", _copy_out)
    own.run("alpha", "ann", MINE)
    own.run("alpha", "ann", prompt(4, 161))
    own.crowd()
    (tier,) = own.tiers
    names = [copy.name for copy in tier.copies() if copy.tenant == "alpha" and copy.blocks == OBJECT_UNITS]
    Between(tier).instead = {name: names[at - 1] for at, name in enumerate(names)}
    with pytest.raises(AssertionError, match="what came"):
        own.run("alpha", "ann", MINE)


def _copy_in(key, name, facts, plain, into, **_named: object) -> None:
    into[:] = bytes(len(into))
    into[: len(plain)] = plain


def _copy_out(key, name, facts, sealed, plain) -> None:
    plain[:] = sealed[: len(plain)]


def test_keys_without_their_domain_would_be_noticed(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """The positive control of every 0 above: one domain's names and keys for everybody, and another's bytes come."""
    own = TieredEngine(tmp_path, "host")
    own.run("alpha", "ann", MINE)
    own.crowd()
    label = next(owner.label for owner in own.tiers[0]._index.owners if owner.tenant == "alpha")
    assert own.run("beta", "eve", MINE) == 0
    own.crowd(1)
    monkeypatch.setattr("kvcustody.integrations.sglang.slot_tiers.label_of", lambda domain: label)
    monkeypatch.setattr(SlotTiers, "_keys", _keys_of_anybody)
    with pytest.raises(AssertionError, match="what came"):
        own.run("beta", "eve", MINE)


@pytest.mark.parametrize("granted", [True, False])
def test_what_goes_on_from_a_grant_never_leaves(tmp_path: Path, granted: bool) -> None:
    """Control: without the grant the same prompt is the reader's from its beginning, and leaves."""
    text = policy(scope="tenant", grant=granted).replace(
        "offload: {low: never", "offload: {low: {tiers: [host, nvme], encrypt: required}"
    )
    own = TieredEngine(tmp_path, "host", text=text)
    owners = MINE[:97]
    own.run("alpha", "ann", owners)
    asked = [*owners, *prompt(2, 40)]
    for _ in range(2):  # a first use is put on record, and computed
        rid = own.ask("beta", "eve", asked)
        if granted and own.number > 2:
            own.waiting[rid].who = ("alpha", "ann", "")  # what it may read there is the owner's
        assert own.start(rid)
        own.running[rid].who = ("beta", "eve", "")
        own.chunk(rid, len(asked))
        own.finish(rid)
        if own.number == 2:
            own.port.erase(Selector(tenant="beta"))  # only what it adds to what it was granted is to be there
            own.custody.step()
    assert own.hits == (len(owners) if granted else 0)
    for node in list(own.tree._nodes.values()):
        own.custody.tiers.offer(node, 0)
    assert {copy.tenant for copy in own.tiers[0].copies()} == ({"alpha"} if granted else {"alpha", "beta"})
    settled(own)
    own.close()


def test_a_restriction_leaves_copies_as_they_are(own: TieredEngine) -> None:
    own.run("alpha", "ann", MINE)
    own.crowd()
    own.port.restrict(RestrictedSubjects([RestrictedSubject("case-1", "alpha", "ann")]))
    assert own.run("alpha", "ann", MINE) == 0
    assert any(copy.tenant == "alpha" for tier in own.tiers for copy in tier.copies()), "stored still"
    own.crowd(1)
    own.port.restrict(NOBODY_RESTRICTED)
    assert own.run("alpha", "ann", MINE) == 160, "lifted"
    settled(own)


def test_scans_compare_stores_with_what_can_be_found(own: TieredEngine) -> None:
    own.run("alpha", "ann", MINE)
    own.crowd()
    tier = next(tier for tier in own.tiers if len(tier))
    lost, *_ = [copy.name for copy in tier.copies() if copy.tenant == "alpha"]
    tier._index.store.delete([lost])
    into = tier._index.store.prepare_store(bytes(32), 100)
    assert into is not None
    into.release()
    tier._index.store.complete_store(bytes(32))
    found = {one.orphan for one in own.port.scan()}
    assert found == {"index without tier object", "tier object without index"}
    own.port.scan_and_recover()
    assert own.port.scan() == []
    own.crowd(1)
    own.run("alpha", "ann", MINE)
    settled(own)


def _keys_of_anybody(self: SlotTiers, label, place, data: bytes, first: int, last: int) -> bytes:
    state = self._port.keyring.domains.state(label.spec).copy()
    size = self._unit * self._page_tokens * 4
    state.update(data[: first * size])
    return keys_of(state, data, first, last, size)


def test_a_tier_fills_only_pages_that_are_zero(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    own = TieredEngine(tmp_path, "host")
    own.run("alpha", "ann", MINE)
    own.crowd()
    monkeypatch.setattr(SlotCustody, "zero", lambda self: None)
    with pytest.raises(IsolationError, match="not zero"):
        own.run("alpha", "ann", MINE)


def test_a_tier_that_is_slower_is_left_alone_and_told_once(tmp_path: Path) -> None:
    own = TieredEngine(tmp_path, "host", tokens_a_second=1e12)
    own.transfers.ways[0].link.restores.learn(1000, 500)
    own.transfers.ways[0].link.stores.learn(1000, 0)
    for _ in range(40):
        own.run("alpha", "ann", MINE)
        own.crowd()
    own.custody.step()
    events = own.ledger.events
    assert not any(isinstance(one, CopiesStored) and one.tenant == "gamma" for one in events)
    decided = [one for one in events if isinstance(one, TransferDecided)]
    assert any(one.reason == "does not pay" for one in decided)
    assert own.run("alpha", "ann", MINE) in (0, 160)
    restores = [one for one in decided if one.action == "restore"]
    assert all(one.outcome == "" for one in restores if one.reason == "slower")
    settled(own)
    own.close()


def test_what_a_tier_took_is_no_prefill(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    own = TieredEngine(tmp_path, "host")
    own.run("alpha", "ann", MINE)
    own.crowd()
    own.port.measures.figures()  # what was told by now is counted
    between = Between(own.tiers[0])
    load = between.load

    def slowly(name: bytes) -> memoryview | None:
        own.clock.advance(1_000_000)
        return load(name)

    between.load = slowly
    rid = own.ask("alpha", "ann", MINE)
    assert own.start(rid)
    own.clock.advance(2000)
    told, measures = [], own.port.measures
    monkeypatch.setattr(type(measures), "first_token", lambda self, *what, **more: told.append(what))
    own.custody.first_token(own.running[rid].request)
    ((computed, before, asked_us, began_us),) = told
    assert (computed, before, began_us) == (1, 160, 2000) and asked_us > 2_000_000
    own.chunk(rid, 99)
    own.finish(rid)
    settled(own)
    own.close()


@pytest.mark.parametrize(("latency", "reason"), [("", "not measured yet"), ("interactive", "untried")])
def test_a_request_in_a_hurry_tries_no_tier(own: TieredEngine, latency: str, reason: str) -> None:
    own.run("alpha", "ann", MINE)
    own.crowd()
    before = own.hits
    rid = own.ask("alpha", "ann", MINE, latency=latency)
    assert own.start(rid)
    assert own.hits - before == (0 if latency else 160)
    own.chunk(rid, len(MINE))
    own.finish(rid)
    settled(own)
    (decided,) = [one for one in own.ledger.events if isinstance(one, TransferDecided) and one.action == "restore"]
    assert (decided.reason, decided.latency_class) == (reason, latency)


def test_every_movement_is_on_record_and_every_count_agrees(own: TieredEngine) -> None:
    for turn in range(4):
        own.run("alpha", "ann", MINE)
        own.crowd(turn)
    settled(own)
    events = own.ledger.events
    decided = [one for one in events if isinstance(one, TransferDecided)]
    assert {one.action for one in decided} == {"store", "restore"}
    stored = [number for one in events if isinstance(one, CopiesStored) for number in one.numbers]
    ended = [number for one in events if isinstance(one, CopiesEnded) for number in one.numbers]
    counts = own.port.counts().tiers
    assert sum(one.stored for one in counts) == len(stored)
    assert sum(one.ended for one in counts) == len(ended)
    uses = {use.tier: use.restored_blocks for use in own.transfers.uses()}
    brought = sum(one.blocks for one in decided if one.action == "restore" and one.outcome == "done")
    assert sum(uses.values()) == brought >= 30


def test_a_quota_sends_what_it_displaces_to_the_tier(tmp_path: Path) -> None:
    own = TieredEngine(tmp_path, "host", pages=400)
    for number in range(4):  # `gamma` may have a quarter of the pool
        own.run("gamma", "guy", prompt(70 + number, 65))
    assert any(copy.tenant == "gamma" for copy in own.tiers[0].copies())
    assert own.run("gamma", "guy", prompt(70, 65)) == 64
    settled(own)
    own.close()


@pytest.mark.parametrize("seed", range(8))
def test_drawn_work_brings_back_only_its_own_and_keeps_every_book(tmp_path: Path, seed: int) -> None:
    draw = random.Random(seed)
    own = TieredEngine(tmp_path, draw.choice(("host", "nvme", "host nvme")), page_tokens=draw.choice((1, 4)))
    texts = [prompt(number, draw.randrange(30, 100)) for number in range(6)]
    between, failing = [Between(tier) for tier in own.tiers], False
    for _ in range(120):
        own.clock.advance(1000)
        act = draw.random()
        if act < 0.6:
            text = draw.choice(texts)
            tokens = text[: draw.randrange(10, len(text))] + prompt(draw.randrange(40, 60), draw.randrange(1, 30))
            rid = own.ask(draw.choice(("alpha", "beta", None)), draw.choice(("x", "y")), tokens)
            if own.start(rid):
                own.chunk(rid, draw.randrange(1, 250))
                own.finish(rid, draw.choice(("finished", "finished", "aborted", "preempted")))
                if rid in own.waiting:
                    own.custody.release(own.waiting.pop(rid).request, "aborted")
        elif act < 0.8:
            own.custody.make_room(draw.randrange(1, 120))
        elif act < 0.88:
            own.clock.advance(draw.randrange(IDLE_US // 2))
            own.custody.step()
        elif act < 0.92:
            own.port.erase(Selector(tenant="alpha", subject=draw.choice(("x", "y"))))
        elif act < 0.96:
            failing = not failing
            for one in between:
                one.load = _failing if failing else one._store.prepare_load
        assert own.problems() == []
    own.custody.step()
    assert sum(use.restored_blocks for use in own.transfers.uses()) > 0
    own.close()


@pytest.mark.parametrize("looks_again", [True, False])
def test_what_a_load_outlasts_is_not_attached(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, looks_again: bool
) -> None:
    """The control is the parameter: without a look at the time behind the load, what is due comes back."""
    if not looks_again:
        for module in (tier_module, slot_tiers):
            monkeypatch.setattr(module, "in_time", lambda restored, now_us: list(restored))
    short = prompt(1, UNIT_TOKENS * OBJECT_UNITS + 1)
    own = TieredEngine(tmp_path, "host")
    own.run("alpha", "ann", short)
    own.crowd()
    (tier,) = own.tiers
    real = tier._load_object

    def slow(*given: Any) -> bool:
        came = real(*given)
        own.clock.advance(2_000_000)
        return came

    monkeypatch.setattr(tier, "_load_object", slow)
    own.clock.advance(IDLE_US - 1_000_000)
    assert own.run("alpha", "ann", short) == (0 if looks_again else UNIT_TOKENS * OBJECT_UNITS)
    settled(own)
    own.close()


@pytest.mark.parametrize("parts", [True, False])
def test_who_waits_while_weights_change_is_brought_nothing_of_the_old_ones(tmp_path: Path, parts: bool) -> None:
    """The control is the parameter: it was admitted for the old ones, and a tier has them still."""
    own = TieredEngine(tmp_path, "host")
    own.run("alpha", "ann", MINE)
    own.crowd()
    rid = own.ask("alpha", "ann", MINE)
    own.custody.clear()
    if parts:
        own.custody.part_waiting()
        own.waiting[rid].who = ("alpha", "ann", "parted")
    assert own.start(rid)
    assert own.running[rid].protected == (0 if parts else 160)
    own.chunk(rid, len(MINE))
    own.finish(rid)
    own.close()
