"""vLLM through LMCache's server where stores are slow, full, broken or lie, and where what was stored has to end."""

from __future__ import annotations

import os
import threading
import time
from collections.abc import Iterator, Sequence
from pathlib import Path
from random import Random
from typing import Any, NamedTuple

import pytest

from standins import LIBRARY
from standins.engines.lmcache.lmcache_server import GOVERNED, OURS, READ_SECONDS, LMCacheServer
from standins.engines.lmcache.lmcache_site import Site, run, transfer, vouched
from standins.engines.lmcache.store_faults import StoreFaults
from standins.engines.vllm.deployment import CONNECTOR
from standins.engines.vllm.local_engine import BLOCK, LocalEngine
from standins.engines.vllm.tier_engines import BLOCKS, PREFIX, displace, prompt
from standins.waiting import until

WHOLE = PREFIX * BLOCK  # tokens
CHUNKS = PREFIX // 2
TENANTS = ("red", "green", "blue")
TIERS = ("host", "nvme")
TIE = 2.0**-5  # log-likelihoods less apart than this are one step of bfloat16: batches of another size decide


class World(NamedTuple):
    """One engine and one server."""

    engine: LocalEngine
    server: LMCacheServer
    site: Site
    faults: StoreFaults
    made: list[Path]  # by the last `store`

    def keep_in(self, tier: str) -> None:
        """What is stored from now on goes to this tier: the one above it is full."""
        self.faults.set("host", "" if tier == "host" else "full")
        self.faults.set("nvme", "")

    def store(self, tokens: list[int], **whose: str) -> list[int]:
        """Ask for it, wait until the server has it, and have other work take the pool; the answer."""
        self._settle()
        before, files = self._stored(), set(self.files())
        answer = self.engine.ask(tokens, max_tokens=8, **whose)
        assert answer.cached_tokens == 0
        assert until(lambda: self._stored() >= before + len(tokens) // BLOCK // 2), self.server.status()
        self._settle()
        self.made[:] = set(self.files()) - files
        displace(self.engine)
        return answer.tokens

    def loads(self) -> dict[str, int]:
        """Loads that each tier's store began."""
        return {tier: self.faults.loads(tier)[0] for tier in TIERS}

    def files(self) -> list[Path]:
        """Sealed objects on the disk."""
        return [path for path in (self.site.folder / "tier").rglob("*") if len(path.name) == 64]

    def _settle(self) -> None:
        """What was asked for before is stored by now."""
        seen = -1
        while seen != (seen := self._stored()):
            time.sleep(0.3)

    def _stored(self) -> int:
        return sum(map(self.faults.stores, TIERS))


@pytest.fixture(scope="module")
def world(model: Path, site: list[str], tmp_path_factory: pytest.TempPathFactory) -> Iterator[World]:
    folder = tmp_path_factory.mktemp("hurt")
    deployment = Site(folder, more={"KVCUSTODY_VLLM_CONNECTORS_ALLOWED": vouched(folder)})
    faults = StoreFaults(folder / "faults")
    named = {
        **deployment.of_server(),
        "KVCUSTODY_HOST_TIER_BYTES": str(64 << 20),
        "PYTHONPATH": os.pathsep.join([str(LIBRARY), os.environ.get("PYTHONPATH", "")]),
    }
    server = LMCacheServer(folder / "lmcache", named, OURS, *GOVERNED, *faults.arguments())
    engine = None
    try:
        engine = LocalEngine(
            model,
            site,
            deployment=deployment,
            kv_transfer_config=transfer(CONNECTOR, server.connector()),
            num_gpu_blocks_override=BLOCKS,
        )
        yield World(engine, server, deployment, faults, [])
    finally:
        if engine is not None:
            engine.close()
        server.close()


@pytest.fixture(autouse=True)
def nothing_is_left(world: World) -> Iterator[None]:
    """What went through the server's first tier, in clear, is not there any more when nobody asks.

    What was brought for a request that went away is locked for `READ_SECONDS`.
    """
    yield
    assert until(lambda: world.faults.first_tier() == 0, seconds=READ_SECONDS + 3.0), world.server.status()


@pytest.mark.parametrize("tier", TIERS)
def test_own_prompts_come_back_from_each_tier_and_foreign_ones_never(
    world: World, plain: LocalEngine, tier: str
) -> None:
    mine = prompt(100 + TIERS.index(tier))
    expected = plain.ask(mine, max_tokens=8).tokens
    world.keep_in(tier)
    assert world.store(mine, tenant="acme") == expected
    before = world.loads()
    again = world.engine.ask(mine, tenant="acme", max_tokens=8)
    assert (again.cached_tokens, again.tokens) == (WHOLE, expected)
    assert {name: count - before[name] for name, count in world.loads().items()} == {
        name: CHUNKS * (name == tier) for name in TIERS
    }
    displace(world.engine)
    for whose in ({"tenant": "beta"}, {"tenant": "acme", "subject": "other"}):
        foreign = world.engine.ask(mine, max_tokens=8, **whose)
        assert (foreign.cached_tokens, foreign.tokens) == (0, expected)
        displace(world.engine)
    assert world.engine.ask(mine, tenant="beta", max_tokens=8).cached_tokens == WHOLE, world.server.status()
    assert world.engine.governance("check") == []


@pytest.mark.parametrize("tier", TIERS)
@pytest.mark.parametrize("fault", ["slow", "fails", "lies"])
def test_a_tier_that_is_hurt_gives_right_answers(world: World, plain: LocalEngine, tier: str, fault: str) -> None:
    mine = prompt(110 + TIERS.index(tier) * 10 + ("slow", "fails", "lies").index(fault))
    world.keep_in(tier)
    expected = plain.ask(mine, max_tokens=8).tokens
    assert world.store(mine, tenant="acme") == expected
    world.faults.set(tier, fault, 0.3)
    before = world.loads()
    try:
        answer = world.engine.ask(mine, tenant="acme", max_tokens=8)
    finally:
        world.keep_in(tier)
    print(tier, fault, answer, before, world.loads())
    assert answer.tokens == expected
    assert world.loads()[tier] > before[tier], "it was asked"
    assert answer.cached_tokens == (WHOLE if fault == "slow" else 0)
    assert world.engine.governance("check") == []


@pytest.mark.parametrize("fault", ["full", "slow"])
def test_what_cannot_be_stored_is_computed_again(world: World, plain: LocalEngine, fault: str) -> None:
    mine = prompt(140 + len(fault) + (fault == "full"))
    expected = plain.ask(mine, max_tokens=8).tokens
    for tier in TIERS:
        world.faults.set(tier, fault, 0.2)
    try:
        assert world.engine.ask(mine, tenant="acme", max_tokens=8).tokens == expected
        displace(world.engine)
        answer = world.engine.ask(mine, tenant="acme", max_tokens=8)
    finally:
        world.keep_in("host")
    assert answer.tokens == expected and answer.cached_tokens % (2 * BLOCK) == 0
    assert fault == "slow" or answer.cached_tokens == 0
    displace(world.engine)
    world.store(prompt(150 + len(fault) + (fault == "full")), tenant="acme")
    again = world.engine.ask(mine, tenant="acme", max_tokens=8)
    assert again.tokens == expected and world.engine.governance("check") == []


def test_files_that_change_places_are_misses(world: World, plain: LocalEngine) -> None:
    """A moved object. What LMCache makes of one with a serde of its own: `test_sealed_server.py`."""
    world.keep_in("nvme")
    world.store(prompt(160), tenant="acme")  # what was above goes down first
    mine, other = prompt(161), prompt(162)
    world.store(mine, tenant="acme")
    ours = list(world.made)
    world.store(other, tenant="acme")
    assert len(ours) == len(world.made) == CHUNKS
    for path, another in zip(ours, world.made, strict=True):
        path.write_bytes(another.read_bytes())
    answer = world.engine.ask(mine, tenant="acme", max_tokens=8)
    assert (answer.cached_tokens, answer.tokens) == (0, plain.ask(mine, max_tokens=8).tokens)
    displace(world.engine)
    assert world.engine.ask(other, tenant="acme", max_tokens=8).cached_tokens == WHOLE, "control"


def test_an_owner_is_erased_while_its_load_is_in_flight(world: World, plain: LocalEngine) -> None:
    world.keep_in("nvme")
    mine, ledger = prompt(171), ("--ledger", world.site.ledger_url)
    for subject in ("one", "two"):
        world.store(mine, tenant="acme", subject=subject)
    engine, faults = world.engine, world.faults
    begun, _ = faults.loads("nvme")
    asked: list[str] = []

    def order() -> None:
        """As soon as the first of the six loads is under way."""
        assert until(lambda: faults.loads("nvme")[0] > begun)
        made = run("erasure", "request", "--tenant", "acme", "--subject", "one", *ledger)
        asked.append(made["erasure"])
        in_flight.append(faults.loads("nvme")[1] < begun + CHUNKS)

    in_flight: list[bool] = []
    faults.set("nvme", "slow", 1.0)
    officer = threading.Thread(target=order)
    officer.start()
    try:
        answer = engine.ask(mine, tenant="acme", subject="one", max_tokens=8)
        officer.join()
    finally:
        world.keep_in("nvme")
    assert in_flight == [True]
    assert answer.reason == "abort" or answer.tokens == plain.ask(mine, max_tokens=8).tokens
    state = run("erasure", "status", asked[0], *ledger, "--wait-seconds", "30")
    assert state["outcome"] == "complete", state
    displace(engine)
    assert engine.ask(mine, tenant="acme", subject="one").cached_tokens == 0
    displace(engine)
    assert engine.ask(mine, tenant="acme", subject="two").cached_tokens == WHOLE, "control"
    assert engine.governance("check") == []


def test_a_deadline_passes_in_the_tier_while_nobody_asks(world: World) -> None:
    world.keep_in("nvme")
    world.store(prompt(180), tenant="acme")  # what was above goes down first
    mine = prompt(181)
    world.store(mine, tenant="acme")
    long = set(world.made)
    world.store(mine, tenant="brief")
    short = set(world.made)
    assert len(long) == len(short) == CHUNKS
    assert until(lambda: not short & set(world.files())), "two seconds"
    assert long <= set(world.files()), "control"
    assert world.engine.ask(mine, tenant="brief").cached_tokens == 0
    displace(world.engine)
    assert world.engine.ask(mine, tenant="acme").cached_tokens == WHOLE, "control"


def test_what_the_store_has_and_no_index_is_found_by_a_scan_and_ended(world: World) -> None:
    world.keep_in("nvme")
    world.store(prompt(191), tenant="acme")
    known = world.files()
    planted = known[0].with_name(known[0].name[:2] + 62 * "0")
    planted.write_bytes(known[0].read_bytes())
    assert world.faults.scan() == ["tier object without index"]
    assert not planted.exists() and set(known) == set(world.files())
    assert world.faults.scan() == []


@pytest.mark.parametrize("tier", TIERS)
def test_likelihoods_are_the_same_bits_after_a_restore(world: World, tier: str) -> None:
    world.keep_in(tier)
    mine = prompt(201 + TIERS.index(tier))
    world.engine.ask(mine, tenant="acme")
    on_device = likelihoods(world.engine, mine)
    assert likelihoods(world.engine, mine) == on_device
    displace(world.engine)
    before = world.loads()[tier]
    restored = likelihoods(world.engine, mine)
    assert world.loads()[tier] - before == CHUNKS
    assert restored == on_device
    displace(world.engine)
    assert likelihoods(world.engine, [*mine[:-1], 18]) != on_device, "control: they tell prompts apart"


def likelihoods(engine: LocalEngine, tokens: list[int]) -> list[dict[int, float]]:
    """The likeliest tokens at each place of an answer whose whole prompt was cached, with their log-likelihood."""
    request_id = engine.submit(tokens, tenant="acme", max_tokens=6, logprobs=8)
    by_place: list[dict[int, float]] = []
    while engine.engine.has_unfinished_requests():
        for output in engine.engine.step():
            if output.finished and output.request_id == request_id:
                assert output.num_cached_tokens == WHOLE
                places: Any = output.outputs[0].logprobs
                by_place = [{token: one.logprob for token, one in place.items()} for place in places]
    assert len(by_place) == 6
    return by_place


@pytest.mark.parametrize("tier", TIERS)
@pytest.mark.parametrize("requests", [pytest.param(60, id="60"), pytest.param(504, id="504", marks=pytest.mark.soak)])
def test_every_answer_is_that_of_the_plain_engine(world: World, plain: LocalEngine, tier: str, requests: int) -> None:
    """Shared beginnings, several tenants, chunks, batches, and more work than the pool holds."""
    world.keep_in(tier)
    random = Random(requests)
    heads = [prompt(250 + 10 * TIERS.index(tier) + number, random.choice((4, 6, 10))) for number in range(10)]
    wrong, ties, expected = [], 0, dict[tuple[int, ...], list[int]]()
    before, seen = world.loads()[tier], 0
    for _ in range(requests // 6):
        asked = {}
        for _ in range(6):
            tokens = [
                *random.choice(heads)[:-1],
                *prompt(random.randrange(400, 410), random.choice((0, 1, 2))),
            ]
            asked[world.engine.submit(tokens, tenant=random.choice(TENANTS), max_tokens=12)] = tokens
        for request_id, answer in world.engine.finish().items():
            seen += 1
            tokens = tuple(asked[request_id])
            if tokens not in expected:
                expected[tokens] = plain.ask(list(tokens), max_tokens=12).tokens
            if answer.tokens != expected[tokens]:
                ties += 1
                if not is_as_likely(plain, tokens, answer.tokens, expected[tokens]):
                    wrong.append((request_id, answer))
    assert wrong == [] and seen == requests and ties <= requests // 100
    print(tier, world.loads()[tier] - before, "chunks loaded in", requests, "requests,", ties, "ties")
    assert world.loads()[tier] - before > requests // 3, "the tier was in it"
    assert world.engine.governance("check") == []


def test_control_an_answer_that_is_less_likely_is_no_tie(plain: LocalEngine) -> None:
    mine = prompt(231)
    said = plain.ask(mine, max_tokens=6).tokens
    (first, likeliest), (other, likely), *_ = candidates(plain, mine)
    assert first == said[0] and likeliest - likely > TIE
    assert not is_as_likely(plain, mine, [other, *said[1:]], said)
    assert is_as_likely(plain, mine, said, said)


def is_as_likely(plain: LocalEngine, tokens: Sequence[int], answer: Sequence[int], expected: Sequence[int]) -> bool:
    """Whether an answer leaves the plain engine's only where that holds both tokens for as likely (`TIE`)."""
    while list(answer) != list(expected):
        pairs = enumerate(zip(answer, expected, strict=True))
        at = next(place for place, (one, other) in pairs if one != other)
        found = candidates(plain, [*tokens, *answer[:at]])
        if found[0][1] - dict(found).get(answer[at], -1e9) > TIE:
            return False
        begun, left = [*answer[: at + 1]], len(answer) - at - 1
        expected = [*begun, *(plain.ask([*tokens, *begun], max_tokens=left).tokens if left else ())]
    return True


def candidates(plain: LocalEngine, tokens: Sequence[int]) -> list[tuple[int, float]]:
    """The tokens that may follow and their log-likelihoods, the likeliest first."""
    request_id = plain.submit(tokens, max_tokens=1, logprobs=4)
    while True:
        for output in plain.engine.step():
            if output.finished and output.request_id == request_id:
                places: Any = output.outputs[0].logprobs
                found = [(token, one.logprob) for token, one in places[0].items()]
                return sorted(found, key=lambda each: each[1], reverse=True)
