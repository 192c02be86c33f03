"""Copies of a governed engine in one tier: who gets them back, what the answers are, and when they end.

Every test runs over host memory and over files.
"""

from __future__ import annotations

import time
from random import Random
from typing import Any

import pytest

from standins.engines.vllm.local_engine import BLOCK, LocalEngine
from standins.engines.vllm.tier_engines import OBJECT, PREFIX, displace, fault, prompt, tier, tier_name
from standins.waiting import until

TENANTS = ("alpha", "beta", "gamma")


def test_own_prompts_come_back_from_the_tier_and_foreign_ones_never(tiered: LocalEngine, plain: LocalEngine):
    before = tier(tiered)
    mine = prompt(1)
    expected = plain.ask(mine, tenant="alpha", max_tokens=24).tokens
    first = tiered.ask(mine, tenant="alpha", max_tokens=24)
    assert (first.cached_tokens, first.tokens) == (0, expected)
    displace(tiered)
    again = tiered.ask(mine, tenant="alpha", max_tokens=24)
    assert (again.cached_tokens, again.tokens) == (PREFIX * BLOCK, expected)
    assert tier(tiered)["restored_blocks"] - before["restored_blocks"] == PREFIX
    displace(tiered)
    for whose in ({"tenant": "beta"}, {"tenant": "alpha", "subject": "other"}):
        foreign = tiered.ask(mine, max_tokens=24, **whose)
        assert (foreign.cached_tokens, foreign.tokens) == (0, expected)
    assert tier(tiered)["restored_blocks"] - before["restored_blocks"] == PREFIX
    assert tiered.governance("check") == []
    assert tiered.governance("scan") == []


def test_a_part_comes_from_the_device_and_the_rest_from_the_tier(tiered: LocalEngine, plain: LocalEngine):
    mine = prompt(2)
    longer = [*mine[:-1], *prompt(3, 2)]
    tiered.ask(mine, tenant="delta")
    displace(tiered)
    tiered.ask(mine[: 4 * BLOCK + 1], tenant="delta")  # its beginning is on the device again
    before = tier(tiered)["restored_blocks"]
    answer = tiered.ask(longer, tenant="delta", max_tokens=12)
    assert answer.cached_tokens == PREFIX * BLOCK
    assert tier(tiered)["restored_blocks"] - before == PREFIX - 4
    assert answer.tokens == plain.ask(longer, tenant="delta", max_tokens=12).tokens


def test_logits_are_the_same_bits_after_a_restore(tiered: LocalEngine):
    mine = prompt(4)
    tiered.ask(mine, tenant="epsilon")
    on_device = likelihoods(tiered, mine, "epsilon")
    displace(tiered)
    before = tier(tiered)["restored_blocks"]
    restored = likelihoods(tiered, mine, "epsilon")
    assert tier(tiered)["restored_blocks"] - before == PREFIX
    assert restored == on_device
    displace(tiered)
    other = likelihoods(tiered, [*mine[:-1], 18], "epsilon")
    assert other != on_device, "control: logits tell prompts apart"


def likelihoods(engine: LocalEngine, tokens: list[int], tenant: str) -> list[dict[int, float]]:
    """The likeliest tokens at each place of an answer, with their log-likelihood."""
    request_id = engine.submit(tokens, tenant=tenant, max_tokens=6, logprobs=8)
    by_place: list[dict[int, float]] = []
    while engine.engine.has_unfinished_requests():
        for output in engine.engine.step():
            if output.finished and output.request_id == request_id:
                places: Any = output.outputs[0].logprobs
                by_place = [{token: one.logprob for token, one in place.items()} for place in places]
    assert len(by_place) == 6
    return by_place


@pytest.mark.parametrize("requests", [pytest.param(90, id="90"), pytest.param(500, id="500", marks=pytest.mark.soak)])
def test_every_answer_is_that_of_the_plain_engine(tiered: LocalEngine, plain: LocalEngine, requests: int):
    """Shared beginnings, several tenants, chunks, batches, and more work than the pool holds."""
    random = Random(requests)
    heads = [prompt(50 + number, random.choice((3, 6, 9))) for number in range(10)]
    before, wrong, expected = tier(tiered), [], dict[tuple[int, ...], list[int]]()
    for first in range(0, requests, 6):
        asked = {}
        for _ in range(min(6, requests - first)):
            tokens = [
                *random.choice(heads)[:-1],
                *prompt(random.randrange(400, 410), random.choice((0, 1, 2))),
            ]
            asked[tiered.submit(tokens, tenant=random.choice(TENANTS), max_tokens=12)] = tokens
        for request_id, answer in tiered.finish().items():
            tokens = tuple(asked[request_id])
            if tokens not in expected:
                expected[tokens] = plain.ask(list(tokens), max_tokens=12).tokens
            if answer.tokens != expected[tokens]:
                wrong.append((request_id, answer))
    after = tier(tiered)
    print(before, after)
    assert wrong == []
    assert after["restored_blocks"] - before["restored_blocks"] > requests // 2
    assert after["failed_loads"] == before["failed_loads"]
    assert tiered.governance("check") == []
    assert tiered.governance("scan") == []


def test_erasing_a_subject_ends_its_copies_at_once_and_nobody_elses(tiered: LocalEngine):
    mine = prompt(5)
    for subject in ("one", "two"):
        tiered.ask(mine, tenant="zeta", subject=subject)
    displace(tiered)
    before = tier(tiered)["steps"]
    erased = tiered.governance("erase", "zeta", "one", None)
    for subject, hits in (("one", 0), ("two", PREFIX * BLOCK)):
        assert tiered.ask(mine, tenant="zeta", subject=subject).cached_tokens == hits, (subject, erased)
    after = tier(tiered)["steps"]
    ended = after["ended erased"] - before.get("ended erased", 0)
    assert ended == PREFIX // OBJECT
    assert after["destroyed key-destroyed"] - before.get("destroyed key-destroyed", 0) == ended
    gone = {"host": "destroyed zeroed", "nvme": "destroyed unlinked"}[tier_name(tiered)]
    assert after[gone] - before.get(gone, 0) >= ended


def test_erasing_a_subject_while_its_load_is_in_flight(tiered: LocalEngine):
    mine = prompt(6)
    tiered.ask(mine, tenant="eta", subject="one")
    displace(tiered)
    fault(tiered, "slow", 0.3)
    try:
        request_id = tiered.submit(mine, tenant="eta", subject="one", max_tokens=40)
        time.sleep(0.1)
        tiered.governance("erase", "eta", "one", None)
        answer = tiered.finish()[request_id]
    finally:
        fault(tiered, "none")
    assert answer.reason == "abort"
    assert tiered.governance("scan") == [], "its blocks are its own until the load is over"
    assert tiered.ask(mine, tenant="eta", subject="one").cached_tokens == 0
    assert until(lambda: not any(tiered.probe("pool")["refs"][1:]))
    assert until(lambda: tiered.free_residue() == 0)
    assert tiered.governance("check") == []
    assert tiered.governance("scan") == []


def test_an_abort_while_its_load_is_in_flight(tiered: LocalEngine, plain: LocalEngine):
    mine = prompt(7)
    tiered.ask(mine, tenant="theta")
    displace(tiered)
    fault(tiered, "slow", 0.2)
    try:
        request_id = tiered.submit(mine, tenant="theta", max_tokens=40)
        time.sleep(0.1)
        tiered.abort(request_id)
        tiered.finish()
    finally:
        fault(tiered, "none")
    assert until(lambda: not any(tiered.probe("pool")["refs"][1:]))
    assert until(lambda: tiered.free_residue() == 0)
    answer = tiered.ask(mine, tenant="theta", max_tokens=12)
    assert answer.cached_tokens == PREFIX * BLOCK
    assert answer.tokens == plain.ask(mine, max_tokens=12).tokens
    assert tiered.governance("check") == []


@pytest.mark.parametrize("how", ["loads fail", "lies"])
def test_a_store_that_fails_or_lies_is_a_miss(tiered: LocalEngine, plain: LocalEngine, how: str):
    seed = 8 + len(how)
    mine = prompt(seed)
    expected = plain.ask(mine, max_tokens=24).tokens
    tiered.ask(mine, tenant="iota", max_tokens=24)
    displace(tiered)
    before = tier(tiered)
    changed = fault(tiered, how)
    try:
        answer = tiered.ask(mine, tenant="iota", max_tokens=24)
    finally:
        fault(tiered, "none")
    after = tier(tiered)
    assert (answer.cached_tokens, answer.tokens, answer.reason) == (0, expected, "length")
    assert after["failed_loads"] - before["failed_loads"] == 1
    assert after["restored_blocks"] == before["restored_blocks"]
    if how == "lies":
        assert changed[0] > 0
        assert after["steps"]["ended broken"] - before["steps"].get("ended broken", 0) == 1
    assert tiered.governance("check") == []
    assert tiered.governance("scan") == [], "what a load did not bring is no orphan"
    if how == "loads fail":
        time.sleep(10)
        displace(tiered)
        assert tiered.ask(mine, tenant="iota").cached_tokens == PREFIX * BLOCK, "and comes back later"


@pytest.mark.parametrize("how", ["stores fail", "full"])
def test_a_store_that_takes_nothing_keeps_nothing(tiered: LocalEngine, plain: LocalEngine, how: str):
    mine = prompt(30 + len(how))
    before = tier(tiered)
    fault(tiered, how)
    try:
        tiered.ask(mine, tenant="kappa")
        displace(tiered)
        answer = tiered.ask(mine, tenant="kappa", max_tokens=12)
    finally:
        fault(tiered, "none")
    assert (answer.cached_tokens, answer.tokens) == (0, plain.ask(mine, max_tokens=12).tokens)
    after = tier(tiered)
    assert after["restored_blocks"] == before["restored_blocks"]
    assert after["copies"] <= before["copies"], "nothing is told to be there"
    assert tiered.governance("check") == [] and tiered.governance("scan") == []
    time.sleep(1.5)  # a store that failed three times is not asked for a second
    displace(tiered, rounds=1)
    assert until(lambda: tier(tiered)["copies"] > after["copies"]), "control: what it takes again is kept"


def test_copies_are_sealed_and_staging_is_zeroed(tiered: LocalEngine):
    mine = prompt(31)
    tiered.ask(mine, tenant="lambda")
    indexed = tiered.probe("pool")["indexed"]
    contents = [tiered.rpc("block_content", block)[0] for block, is_there in enumerate(indexed) if is_there]
    contents = [content for content in contents if len(set(content)) > 8]
    assert len(contents) >= PREFIX, "positive control: blocks have content"
    assert until(lambda: tier(tiered)["copies"] > 0)
    displace(tiered)
    for content in contents:
        (found,) = tiered.rpc("tier_has", tier_name(tiered), content)
        assert found["used"] > 0
        assert (found["store"], found["staging"]) == (0, 0)


def test_a_copy_ends_when_its_blocks_would_have_without_a_request(tiered: LocalEngine):
    mine = prompt(32)
    tiered.ask(mine, tenant="brief")
    displace(tiered, rounds=2)
    held = tier(tiered)
    assert held["copies"] > 0
    before = held["steps"].get("ended ceiling", 0)
    time.sleep(4.5)  # idle: no request, no step of ours
    assert tier(tiered)["steps"].get("ended ceiling", 0) - before >= PREFIX // OBJECT
    assert tiered.ask(mine, tenant="brief").cached_tokens == 0


def test_what_the_policy_keeps_on_the_device_never_leaves_it(tiered: LocalEngine):
    before = tier(tiered)["steps"].get("stored", 0)
    for _ in range(2):
        assert tiered.ask(prompt(33), tenant="secret").cached_tokens == 0
    assert tier(tiered)["steps"].get("stored", 0) == before


def test_what_is_computed_behind_a_restore_ends_with_it(tiered: LocalEngine):
    """Blocks that follow a restored prefix were written later, and are in the index no longer than it may be."""
    mine = prompt(40, 8)
    began = time.monotonic()
    tiered.ask(mine, tenant="short", max_tokens=1)  # ten seconds in all, six after its last use
    assert until(lambda: tier(tiered)["copies"] > 0)
    displace(tiered)
    while time.monotonic() < began + 5.3:
        time.sleep(0.05)
    longer = [*mine[:-1], *prompt(41, 4)]
    assert tiered.ask(longer, tenant="short", max_tokens=1).cached_tokens == 8 * BLOCK
    held = sum(tiered.probe("pool")["indexed"])
    assert time.monotonic() < began + 10
    # From the tenth second on nothing of it is there, though its last use was less than six ago.
    assert until(lambda: held - sum(tiered.probe("pool")["indexed"]) >= 12, began + 11 - time.monotonic())
    assert time.monotonic() > began + 9.5
