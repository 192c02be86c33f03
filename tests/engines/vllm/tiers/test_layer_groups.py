"""A model of two layer groups, full attention and a sliding window of two blocks, in a running vLLM with a host tier.

vLLM keeps a window's blocks at the end of a prompt alone, unless it is told to keep them once in so many tokens.
"""

from __future__ import annotations

import time
from collections.abc import Callable
from pathlib import Path
from random import Random

import pytest

from standins.engines.vllm.local_engine import BLOCK, LocalEngine, environment
from standins.engines.vllm.tier_engines import (
    BLOCKS,
    OBJECT,
    PREFIX,
    deployment_with,
    displace,
    options,
    prompt,
    tier,
)
from standins.waiting import until

TENANTS = ("alpha", "beta", "gamma")
WINDOW = 2  # blocks of it that a hit needs


@pytest.fixture(scope="module", params=[0, OBJECT * BLOCK], ids=["at-ends", "at-objects"])
def kept(request: pytest.FixtureRequest) -> int:
    """Once in how many tokens a window's blocks are kept; 0: at the ends of prompts."""
    return int(request.param)


@pytest.fixture(scope="module")
def windowed(
    kept: int,
    engines: Callable[..., LocalEngine],
    windowed_model: Path,
    tmp_path_factory: pytest.TempPathFactory,
) -> LocalEngine:
    """Governed, with sealed copies in host memory."""
    return engines(
        windowed_model,
        deployment=deployment_with(tmp_path_factory.mktemp("windowed-tiers")),
        prefix_cache_retention_interval=kept,
        **options(),
    )


@pytest.fixture(scope="session")
def plain_windowed(engines: Callable[..., LocalEngine], windowed_model: Path) -> LocalEngine:
    """vLLM as it is, over the same model."""
    return engines(windowed_model)


def restored(engine: LocalEngine) -> int:
    return tier(engine)["restored_blocks"]


def idle(engine: LocalEngine) -> None:
    """Nothing is held, nothing is left, and all books agree."""
    assert until(lambda: not any(engine.probe("pool")["refs"][1:]))
    assert until(lambda: engine.free_residue() == 0)
    assert engine.governance("check") == []
    assert engine.governance("scan") == []


def test_own_prompts_come_back_and_foreign_ones_never(windowed: LocalEngine, plain_windowed: LocalEngine):
    mine = prompt(1)
    expected = plain_windowed.ask(mine, max_tokens=24).tokens
    first = windowed.ask(mine, tenant="alpha", max_tokens=24)
    assert (first.cached_tokens, first.tokens) == (0, expected)
    displace(windowed)
    before = restored(windowed)
    again = windowed.ask(mine, tenant="alpha", max_tokens=24)
    assert (again.cached_tokens, again.tokens) == (PREFIX * BLOCK, expected)
    assert restored(windowed) - before == PREFIX + WINDOW, "all blocks of one group, the last ones of the other"
    displace(windowed)
    before = restored(windowed)
    for whose in ({"tenant": "beta"}, {"tenant": "alpha", "subject": "other"}):
        foreign = windowed.ask(mine, max_tokens=24, **whose)
        assert (foreign.cached_tokens, foreign.tokens) == (0, expected)
    assert restored(windowed) == before
    idle(windowed)


def test_a_hit_ends_where_objects_of_both_groups_do(windowed: LocalEngine, plain_windowed: LocalEngine, kept: int):
    mine = prompt(2, PREFIX - 2)  # its end is not one of a whole object
    windowed.ask(mine, tenant="delta")
    displace(windowed)
    objects = 2 * OBJECT if kept else 0
    for common, hit in ((PREFIX - 2, PREFIX - 2), (2 * OBJECT + 1, objects), (OBJECT - 1, 0)):
        other = [*mine[: common * BLOCK], *prompt(60 + common, 3)]
        before = restored(windowed)
        answer = windowed.ask(other, tenant="delta", max_tokens=12)
        assert answer.tokens == plain_windowed.ask(other, max_tokens=12).tokens
        assert answer.cached_tokens == hit * BLOCK, common
        assert restored(windowed) - before == (hit + WINDOW if hit else 0)
        displace(windowed)


def test_a_part_comes_from_the_device_and_the_rest_from_the_tier(windowed: LocalEngine, plain_windowed: LocalEngine):
    mine = prompt(3)
    longer = [*mine[:-1], *prompt(4, 2)]
    windowed.ask(mine, tenant="epsilon")
    displace(windowed)
    windowed.ask(mine[: OBJECT * BLOCK + 1], tenant="epsilon")
    before = restored(windowed)
    answer = windowed.ask(longer, tenant="epsilon", max_tokens=12)
    assert answer.cached_tokens == PREFIX * BLOCK
    assert restored(windowed) - before == PREFIX - OBJECT + WINDOW
    assert answer.tokens == plain_windowed.ask(longer, max_tokens=12).tokens
    idle(windowed)


@pytest.mark.parametrize("first", ["longer", "shorter"])
def test_a_window_may_begin_within_an_object(windowed: LocalEngine, plain_windowed: LocalEngine, first: str):
    """A prompt ends one block behind an object, so its window begins in that one; and another ends with that object."""
    mine = prompt(90 + len(first), OBJECT + 1)
    shorter = [*mine[: OBJECT * BLOCK], 17]
    asked = (mine, shorter) if first == "longer" else (shorter, mine)
    expected = [plain_windowed.ask(one, max_tokens=12).tokens for one in asked]
    for one in asked:
        windowed.ask(one, tenant="lambda", max_tokens=12)
        displace(windowed)
    for one, tokens in zip(asked, expected, strict=True):
        answer = windowed.ask(one, tenant="lambda", max_tokens=12)
        assert (answer.cached_tokens, answer.tokens) == (len(one) // BLOCK * BLOCK, tokens)
        displace(windowed)
    idle(windowed)


@pytest.mark.parametrize("fault", ["loads fail", "lies"])
def test_a_load_that_fails_is_computed(windowed: LocalEngine, plain_windowed: LocalEngine, fault: str):
    mine = prompt(10 + len(fault))
    expected = plain_windowed.ask(mine, max_tokens=24).tokens
    windowed.ask(mine, tenant="iota", max_tokens=24)
    displace(windowed)
    before = tier(windowed)
    windowed.rpc("tier_fault", "host", fault)
    try:
        answer = windowed.ask(mine, tenant="iota", max_tokens=24)
    finally:
        windowed.rpc("tier_fault", "host", "none")
    after = tier(windowed)
    assert (answer.cached_tokens, answer.tokens, answer.reason) == (0, expected, "length")
    assert after["failed_loads"] - before["failed_loads"] == 1
    assert after["restored_blocks"] == before["restored_blocks"]
    idle(windowed)


def test_one_group_is_of_no_use_without_the_other(windowed: LocalEngine, plain_windowed: LocalEngine):
    """The last object of full attention does not open; what came before it is not used, and is there later."""
    mine = prompt(25)
    expected = plain_windowed.ask(mine, max_tokens=24).tokens
    windowed.ask(mine, tenant="kappa", max_tokens=24)
    assert until(lambda: windowed.governance("stats")["tiers"]["host"]["copies"] > 0)
    time.sleep(0.5)
    assert windowed.rpc("tier_fault", "host", "newest lies") == [1]
    displace(windowed)
    before = tier(windowed)
    answer = windowed.ask(mine, tenant="kappa", max_tokens=24)
    assert (answer.cached_tokens, answer.tokens, answer.reason) == (0, expected, "length")
    after = tier(windowed)
    assert after["steps"]["ended broken"] - before["steps"].get("ended broken", 0) == 1
    assert after["restored_blocks"] == before["restored_blocks"]
    idle(windowed)
    displace(windowed)
    answer = windowed.ask(mine, tenant="kappa", max_tokens=24)
    assert (answer.cached_tokens, answer.tokens) == (PREFIX * BLOCK, expected), "it was computed, and stored again"


def test_an_erasure_and_an_abort_while_loads_are_in_flight(windowed: LocalEngine):
    mine = prompt(20)
    for subject in ("one", "two"):
        windowed.ask(mine, tenant="zeta", subject=subject)
    displace(windowed)
    windowed.rpc("tier_fault", "host", "slow", 0.2)
    try:
        erased = windowed.submit(mine, tenant="zeta", subject="one", max_tokens=40)
        aborted = windowed.submit(mine, tenant="zeta", subject="two", max_tokens=40)
        time.sleep(0.1)
        windowed.governance("erase", "zeta", "one", None)
        windowed.abort(aborted)
        assert windowed.finish()[erased].reason == "abort"
    finally:
        windowed.rpc("tier_fault", "host", "none")
    assert windowed.ask(mine, tenant="zeta", subject="one").cached_tokens == 0
    assert windowed.ask(mine, tenant="zeta", subject="two").cached_tokens == PREFIX * BLOCK
    idle(windowed)


@pytest.mark.parametrize("requests", [pytest.param(60, id="60"), pytest.param(500, id="500", marks=pytest.mark.soak)])
def test_every_answer_is_that_of_the_plain_engine(windowed: LocalEngine, plain_windowed: LocalEngine, requests: int):
    """Shared beginnings, several tenants, chunks, batches, and more work than the pool holds."""
    random = Random(requests)
    heads = [prompt(50 + number, random.choice((4, 8, 10))) for number in range(8)]
    before, wrong, expected = tier(windowed), [], dict[tuple[int, ...], list[int]]()
    for first in range(0, requests, 6):
        asked = {}
        for _ in range(min(6, requests - first)):
            tail = prompt(random.randrange(400, 410), random.choice((0, 1, 2)))
            tokens = [*random.choice(heads)[:-1], *tail]
            asked[windowed.submit(tokens, tenant=random.choice(TENANTS), max_tokens=12)] = tokens
        for request_id, answer in windowed.finish().items():
            tokens = tuple(asked[request_id])
            if tokens not in expected:
                expected[tokens] = plain_windowed.ask(list(tokens), max_tokens=12).tokens
            if answer.tokens != expected[tokens]:
                wrong.append((request_id, answer))
    after = tier(windowed)
    assert wrong == []
    assert after["restored_blocks"] - before["restored_blocks"] > requests // 2
    assert after["failed_loads"] == before["failed_loads"]
    idle(windowed)


@pytest.mark.soak
@pytest.mark.parametrize("retained", [0, OBJECT * BLOCK], ids=["at-ends", "at-objects"])
def test_each_of_two_workers_seals_its_part_of_each_group(
    start: Callable[..., LocalEngine], windowed_model: Path, tmp_path: Path, retained: int
):
    """Two tensor-parallel workers; a load that one of them cannot do is computed, and a scan looks at both stores."""
    mine = [prompt(70 + seed, blocks) for seed, blocks in enumerate((PREFIX, PREFIX - 2, OBJECT + 1))]
    shared = [*mine[0][: 2 * OBJECT * BLOCK], *prompt(80, 2)]
    with environment({"VLLM_CPU_OMP_THREADS_BIND": "0|1"}):
        plain = start(windowed_model, tensor_parallel_size=2, num_gpu_blocks_override=BLOCKS)
        expected = {tuple(one): plain.ask(one, max_tokens=16).tokens for one in (*mine, shared)}
        plain.close()
        engine = start(
            windowed_model,
            tensor_parallel_size=2,
            deployment=deployment_with(tmp_path / "site"),
            prefix_cache_retention_interval=retained,
            **options(),
        )

    def ask(tokens: list[int], **whose: str) -> tuple[int, int]:
        """Blocks that were cached, and those that a tier brought; the answer is the plain engine's."""
        before = restored(engine)
        answer = engine.ask(tokens, max_tokens=16, **whose)
        assert answer.tokens == expected[tuple(tokens)]
        return answer.cached_tokens // BLOCK, restored(engine) - before

    for one in mine:
        assert ask(one, tenant="alpha") == (0, 0)
    displace(engine)
    used = [found["used"] for found in engine.rpc("tier_has", "host", b"nothing")]
    assert len(used) == 2 and used[0] == used[1] > 0
    for one in mine:
        whole = len(one) // BLOCK
        assert ask(one, tenant="alpha") == (whole, whole + WINDOW)
        displace(engine)
        for whose in ({"tenant": "beta"}, {"tenant": "alpha", "subject": "other"}):
            assert ask(one, **whose) == (0, 0)
        displace(engine)
    hit = 2 * OBJECT if retained else 0
    assert ask(shared, tenant="alpha") == (hit, hit + WINDOW if hit else 0)

    displace(engine)
    for rank in (0, 1):
        failed = tier(engine)["failed_loads"]
        engine.rpc("tier_fault", "host", "loads fail", 0.0, rank)
        assert ask(mine[0], tenant="alpha") == (0, 0)
        engine.rpc("tier_fault", "host", "none")
        assert tier(engine)["failed_loads"] == failed + 1
        displace(engine)
        assert until(lambda: ask(mine[0], tenant="alpha") == (PREFIX, PREFIX + WINDOW) or displace(engine))
        displace(engine)
    assert engine.rpc("plant_orphans", "host", 1)[0] == 0
    assert engine.governance("scan", True) == []
    assert until(lambda: not engine.rpc("store_has", "host")[1])
    displace(engine, rounds=1)
    assert tier(engine)["steps"]["ended orphan"] == 1
    idle(engine)
    engine.close()
