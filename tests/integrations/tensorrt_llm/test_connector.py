"""Two tenants with one prompt through a stand-in engine: own hits whole, foreign none, from device and tier.

Each defence has a control: with it off, the same engine leaks or goes on.
"""

from __future__ import annotations

import time
from pathlib import Path
from typing import Any

import orjson
import pytest

from kvcustody.audit.evidence.copies.copy_coverage import copy_coverage
from kvcustody.audit.store.database.engine import open_store
from kvcustody.audit.verify.ledger.fsck_ledger import fsck
from kvcustody.errors import IsolationError
from kvcustody.governance.tiers.tier import SealedTier
from kvcustody.integrations.lmcache.custody_thread import CustodyThread
from kvcustody.integrations.tensorrt_llm import scheduler_half, transfer_thread
from kvcustody.integrations.tensorrt_llm.derived_salt import DerivedSalts
from kvcustody.integrations.tensorrt_llm.scheduler_half import SchedulerHalf
from kvcustody.integrations.tensorrt_llm.transfer_thread import TransferThread
from standins.integrations.stand_in_engine import BLOCK_TOKENS, StandInEngine
from standins.integrations.trtllm_world import PROMPT, WHOLE, TrtllmWorld
from standins.waiting import until

pytestmark = pytest.mark.system

PLAIN = StandInEngine().run(PROMPT).output


def test_own_hits_are_whole_and_foreign_ones_none(world: TrtllmWorld) -> None:
    engine = world.engine
    first = engine.run(PROMPT, world.salt("acme"))
    assert (first.device_tokens, first.connector_tokens) == (0, 0)
    foreign = engine.run(PROMPT, world.salt("beta"))
    assert (foreign.device_tokens, foreign.connector_tokens) == (0, 0)
    other = engine.run(PROMPT, world.salt("acme", "other"))
    assert (other.device_tokens, other.connector_tokens) == (0, 0)
    nobody = engine.run(PROMPT, world.salt("acme", None))
    assert (nobody.device_tokens, nobody.connector_tokens) == (0, 0)
    own = engine.run(PROMPT, world.salt("acme"))
    assert (own.device_tokens, own.connector_tokens) == (WHOLE, 0)
    assert all(one.output == PLAIN for one in (first, foreign, other, nobody, own))


def test_the_plain_engine_serves_the_other_tenant() -> None:
    """The control: without salts the second tenant gets the first one's blocks."""
    engine = StandInEngine()
    engine.run(PROMPT)
    assert engine.run(PROMPT).device_tokens == WHOLE


def test_after_an_eviction_own_blocks_come_from_the_tier(world: TrtllmWorld) -> None:
    engine = world.engine
    engine.run(PROMPT, world.salt("acme"))
    engine.forget_device()
    foreign = engine.run(PROMPT, world.salt("beta"))
    assert (foreign.connector_tokens, foreign.output) == (0, PLAIN)
    own = engine.run(PROMPT, world.salt("acme"))
    assert (own.device_tokens, own.connector_tokens, own.output) == (0, WHOLE, PLAIN)
    longer = engine.run([*PROMPT, *PLAIN, 1, 2, 3], world.salt("acme"))
    assert longer.device_tokens >= WHOLE


def test_whose_a_block_is_decides_what_the_tier_brings(world: TrtllmWorld, monkeypatch: pytest.MonkeyPatch) -> None:
    """The control: where every salt stands for the first tenant, the second one gets its blocks."""
    engine = world.engine
    mine = world.salt("acme")
    engine.run(PROMPT, mine)
    engine.forget_device()
    real = DerivedSalts.standing
    monkeypatch.setattr(DerivedSalts, "standing", lambda self, chunks, salt: real(self, chunks, mine))
    assert engine.run(PROMPT, world.salt("beta")).connector_tokens == WHOLE


def test_part_of_a_prompt_comes_from_the_device_and_the_rest_from_the_tier(world: TrtllmWorld) -> None:
    engine = world.engine
    salt = world.salt("acme")
    engine.run(PROMPT, salt)
    for end in range(5 * BLOCK_TOKENS, WHOLE + 1, BLOCK_TOKENS):
        engine.free.append(engine.index.pop(engine._key(PROMPT[:end], salt)))
    engine.pool[engine.free] = 7.0
    again = engine.run(PROMPT, salt)
    assert (again.device_tokens, again.connector_tokens) == (4 * BLOCK_TOKENS, WHOLE - 4 * BLOCK_TOKENS)
    assert again.output == PLAIN


def test_a_prompt_in_pieces_is_kept_whole(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    world = TrtllmWorld(tmp_path, monkeypatch, chunk_tokens=11)
    try:
        assert world.engine.run(PROMPT, world.salt("acme"), output=8).output[:4] == PLAIN
        assert world.copies() == (len(PROMPT) + 7) // BLOCK_TOKENS, "decoded blocks are kept too"
        world.engine.forget_device()
        again = world.engine.run(PROMPT, world.salt("acme"))
        assert (again.connector_tokens, again.output) == (WHOLE, PLAIN)
    finally:
        world.close()


def test_after_a_restart_own_blocks_come_from_the_tier(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    world = TrtllmWorld(tmp_path, monkeypatch)
    before = world.salt("acme")
    world.engine.run(PROMPT, before)
    world.close()
    again = TrtllmWorld(tmp_path, monkeypatch)
    try:
        assert again.engine.run(PROMPT, again.salt("beta")).connector_tokens == 0
        own = again.engine.run(PROMPT, again.salt("acme"))
        assert (own.connector_tokens, own.output) == (WHOLE, PLAIN)
        with pytest.raises(IsolationError, match="without a `cache_salt` of ours"):
            again.engine.run(PROMPT, before)
    finally:
        again.close()


def test_what_rests_is_sealed(world: TrtllmWorld) -> None:
    world.engine.run(PROMPT, world.salt("acme"))
    files = world.files()
    assert len(files) == WHOLE // BLOCK_TOKENS == world.copies()
    rows = world.engine.pool.view(len(world.engine.pool), -1)
    pieces = [
        row.numpy().tobytes()[at : at + 64]
        for block, row in enumerate(rows)
        if block not in world.engine.free
        for at in (0, 256)
    ]
    assert len(pieces) == 2 * WHOLE // BLOCK_TOKENS
    assert not any(piece in path.read_bytes() for piece in pieces for path in files)
    assert "acme" not in " ".join(path.name for path in files)


def test_what_is_due_before_a_promise_ends_is_not_promised(world: TrtllmWorld, monkeypatch: pytest.MonkeyPatch) -> None:
    """A claim is loaded when the engine likes: what is due meanwhile would be attached past its time."""
    engine = world.engine
    engine.run(PROMPT, world.salt("brief"))
    engine.forget_device()
    assert engine.run(PROMPT, world.salt("brief")).connector_tokens == 0, "due in two seconds"
    monkeypatch.setattr(transfer_thread, "PROMISE_US", 0)

    def promised() -> int:
        engine.run(PROMPT, world.salt("brief"))
        engine.forget_device()
        return engine.run(PROMPT, world.salt("brief")).connector_tokens

    assert WHOLE in (promised() for _ in range(10)), "control: with no time for a promise it is promised"


def test_a_copy_ends_at_its_deadline_while_nobody_asks(world: TrtllmWorld, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(transfer_thread, "PROMISE_US", 0)
    engine = world.engine
    engine.run(PROMPT, world.salt("acme"))

    def found() -> int:
        engine.run(PROMPT, world.salt("brief"))
        engine.forget_device()
        return engine.run(PROMPT, world.salt("brief")).connector_tokens

    tries = (found() for _ in range(10))
    assert WHOLE in tries, "control: kept and found in its time, on a machine that may be slow"
    engine.forget_device()
    assert until(lambda: world.copies() == WHOLE // BLOCK_TOKENS, 5.0)
    assert len(world.files()) == WHOLE // BLOCK_TOKENS
    late = engine.run(PROMPT, world.salt("brief"))
    assert (late.connector_tokens, late.output) == (0, PLAIN)
    assert engine.run(PROMPT, world.salt("acme")).connector_tokens == WHOLE


def test_the_device_reuses_nothing_past_its_time(world: TrtllmWorld) -> None:
    engine = world.engine
    found = (engine.run(PROMPT, world.salt("brief")).device_tokens for _ in range(10))
    assert WHOLE in found, "control: two in a row, on a machine that may be slow"
    time.sleep(2.1)
    late = engine.run(PROMPT, world.salt("brief"))
    assert (late.device_tokens, late.output) == (0, PLAIN)


def test_what_policy_lets_nobody_reuse_is_neither_kept_nor_reused(world: TrtllmWorld) -> None:
    for _ in range(2):
        answer = world.engine.run(PROMPT, world.salt("secret"))
        assert (answer.device_tokens, answer.connector_tokens) == (0, 0)
    assert world.files() == []


def test_an_erasure_waits_for_the_load_in_flight_and_then_nothing_is_found(world: TrtllmWorld) -> None:
    engine = world.engine
    engine.run(PROMPT, world.salt("acme"))
    engine.run(PROMPT, world.salt("acme", "other"))
    engine.forget_device()
    futures: list[Any] = []

    def order() -> None:
        futures.append(world.erase("acme", "s"))
        time.sleep(0.3)
        assert not futures[0].done(), "the load goes first"

    salt = world.salt("acme")
    engine.between = order
    served = engine.run(PROMPT, salt, output=BLOCK_TOKENS + 1)
    engine.between = None
    assert (served.connector_tokens, served.output[:4]) == (WHOLE, PLAIN), "nothing wrong was attached"
    assert futures[0].result(10).remaining_blocks == 0
    assert until(lambda: world.copies() == WHOLE // BLOCK_TOKENS), "the other subject's alone"
    assert until(lambda: len(world.files()) == WHOLE // BLOCK_TOKENS)
    fresh = world.salt("acme")
    assert fresh != salt
    after = engine.run(PROMPT, fresh)
    assert (after.device_tokens, after.connector_tokens, after.output) == (0, 0, PLAIN)
    assert engine.run(PROMPT, world.salt("acme", "other")).device_tokens == 0
    engine.forget_device()
    assert engine.run(PROMPT, world.salt("acme", "other")).connector_tokens == WHOLE


def test_without_that_wait_the_erasure_is_done_while_content_is_on_its_way(
    world: TrtllmWorld, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The control: the worker steps while a claim is open, and says that all is gone before it is."""
    monkeypatch.setattr(TransferThread, "step_worker", CustodyThread.step_worker)
    engine = world.engine
    engine.run(PROMPT, world.salt("acme"))
    engine.forget_device()
    done: list[bool] = []

    def order() -> None:
        future = world.erase("acme", "s")
        future.result(10)
        done.append(True)

    engine.between = order
    assert engine.run(PROMPT, world.salt("acme")).connector_tokens == WHOLE and done == [True]


def test_what_an_erased_subject_computes_afterwards_is_not_kept(world: TrtllmWorld) -> None:
    engine = world.engine

    def order() -> None:
        world.erase("acme", "s").result(10)

    salt = world.salt("acme")
    engine.between = order  # nothing is claimed, so it takes effect at once
    engine.run(PROMPT, salt)
    engine.between = None
    assert world.copies() == 0 and world.files() == []
    assert world.custody.thread.counts["refused: erased"] > 0
    engine.run(PROMPT, world.salt("acme"))
    assert world.copies() == WHOLE // BLOCK_TOKENS, "control: who comes after it is kept"


@pytest.mark.parametrize("bound", ["_CLAIM_SECONDS", "_QUIET_SECONDS"])
def test_a_claim_that_is_gone_stops_the_engine_and_changes_nothing(
    world: TrtllmWorld, monkeypatch: pytest.MonkeyPatch, bound: str
) -> None:
    engine = world.engine
    engine.run(PROMPT, world.salt("acme"))
    engine.forget_device()
    monkeypatch.setattr(transfer_thread, bound, 0.1)
    engine.between = lambda: time.sleep(0.5)
    before = engine.pool.clone()
    with pytest.raises(IsolationError, match="are gone"):
        engine.run(PROMPT, world.salt("acme"))
    assert bool((engine.pool == before).all())
    assert world.custody.thread._claims == {}


@pytest.fixture
def claimed(monkeypatch: pytest.MonkeyPatch) -> list[bytearray]:
    """The memory of every claim from now on."""
    buffers: list[bytearray] = []
    real = transfer_thread._OpenClaim

    def opened(content: list[bytearray]) -> Any:
        buffers.extend(content)
        assert any(any(part) for part in content), "control: it had content"
        return real(content)

    monkeypatch.setattr(transfer_thread, "_OpenClaim", opened)
    return buffers


def test_claims_are_zeroed_when_they_were_used(world: TrtllmWorld, claimed: list[bytearray]) -> None:
    engine = world.engine
    engine.run(PROMPT, world.salt("acme"))
    engine.forget_device()
    engine.run(PROMPT, world.salt("acme"))
    assert claimed and not any(any(part) for part in claimed)


def test_claims_that_nobody_took_are_zeroed_when_it_ends(world: TrtllmWorld, claimed: list[bytearray]) -> None:
    engine = world.engine
    engine.run(PROMPT, world.salt("acme"))
    engine.forget_device()
    engine.between = world.custody.close
    with pytest.raises(IsolationError, match="are gone"):
        engine.run(PROMPT, world.salt("acme"))
    assert claimed and not any(any(part) for part in claimed)


def test_who_has_many_salts_does_not_stop_the_engine(world: TrtllmWorld, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(scheduler_half, "_SALTS_MAX", 2)
    mine = world.salt("acme")
    world.engine.run(PROMPT, mine)
    for subject in ("one", "two", "three"):
        world.engine.run(PROMPT, world.salt("beta", subject))
    assert world.engine.run(PROMPT, mine).device_tokens == WHOLE
    assert sum(world.custody.scheduler.counts.values()) and mine in world.custody.scheduler._had


@pytest.mark.parametrize("salt", [None, "", "acme", "ab" * 32, "0" * 161])
def test_a_request_without_a_salt_of_ours_stops_the_engine(world: TrtllmWorld, salt: str | None) -> None:
    with pytest.raises(IsolationError, match="without a `cache_salt` of ours"):
        world.engine.run(PROMPT, salt)
    assert world.files() == []


def test_the_engine_s_own_requests_pass_and_are_not_kept(world: TrtllmWorld) -> None:
    assert world.engine.run(PROMPT, None, dummy=True).output == PLAIN
    assert world.files() == []


def test_an_engine_that_does_not_keep_salts_apart_is_stopped(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    world = TrtllmWorld(tmp_path, monkeypatch, salted=False)
    try:
        world.engine.run(PROMPT, world.salt("acme"))
        with pytest.raises(IsolationError, match="does not keep salts apart"):
            world.engine.run(PROMPT, world.salt("beta"))
        monkeypatch.setattr(SchedulerHalf, "_check_reuse", lambda *_: None)
        world.engine.run(PROMPT, world.salt("acme"))
        leaked = world.engine.run(PROMPT, world.salt("beta", "third")).device_tokens
        assert leaked == WHOLE, "the control: unlooked at, it leaks"
    finally:
        world.close()


def test_part_of_a_block_is_not_reused(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    world = TrtllmWorld(tmp_path, monkeypatch, partial=3)
    try:
        world.engine.run(PROMPT, world.salt("acme"))
        with pytest.raises(IsolationError, match="no whole blocks"):
            world.engine.run(PROMPT, world.salt("acme"))
    finally:
        world.close()


def test_an_engine_that_counts_what_was_promised_as_computed_is_stopped(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Else blocks that nobody computed would be kept under the keys of what they should have been."""
    world = TrtllmWorld(tmp_path, monkeypatch, counts_promised=True, chunk_tokens=11)
    try:
        world.engine.run(PROMPT, world.salt("acme"), output=8)
        world.engine.forget_device()
        with pytest.raises(IsolationError, match="tokens have KV"):
            world.engine.run([*PROMPT, *PLAIN], world.salt("acme"))
    finally:
        world.close()


def test_content_that_no_token_says_is_neither_kept_nor_found(
    world: TrtllmWorld, monkeypatch: pytest.MonkeyPatch
) -> None:
    engine = world.engine
    engine.run(PROMPT, world.salt("acme"))
    engine.forget_device()
    monkeypatch.setattr("standins.integrations.stand_in_engine.LlmRequest.multimodal_hashes", [[1]], raising=False)
    assert engine.run(PROMPT, world.salt("acme")).connector_tokens == 0
    monkeypatch.undo()


def covered(world: TrtllmWorld) -> list[tuple[str, int, int]]:
    """By tier: copies that were due by now, and those of which the ledger has evidence."""
    database = open_store(world.deployment.ledger_url, read_only=True)
    try:
        with database.connect() as connection:
            found = copy_coverage(connection, as_of_us=time.time_ns() // 1000)
            assert fsck(connection).problems == []
        return [(row.tier, row.due, row.covered) for row in found.by_tier()]
    finally:
        database.dispose()


def test_copies_and_their_ends_are_in_the_ledger(world: TrtllmWorld) -> None:
    world.engine.run(PROMPT, world.salt("acme"))
    world.erase("acme", "s").result(10)
    assert until(lambda: not world.files())
    assert world.on_thread(lambda chunks: chunks.governor.scan()) == []
    blocks = WHOLE // BLOCK_TOKENS
    assert world.on_thread(lambda chunks: chunks.tiers[0].counts[:2]) == (blocks, blocks)
    world.close()
    assert covered(world) == [("nvme", blocks, blocks)]


def test_a_tier_whose_ends_are_not_told_is_seen_in_the_ledger(
    world: TrtllmWorld, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The control of the last one."""
    world.engine.run(PROMPT, world.salt("acme"))
    assert world.on_thread(lambda chunks: chunks.governor.scan()) == []
    monkeypatch.setattr(SealedTier, "take_events", lambda self: [])
    world.erase("acme", "s").result(10)
    assert until(lambda: not world.files())
    world.close()
    assert covered(world) != [("nvme", WHOLE // BLOCK_TOKENS, WHOLE // BLOCK_TOKENS)]


def test_two_tiers_bring_and_lose_what_they_have_together(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    world = TrtllmWorld(tmp_path, monkeypatch, host_bytes=6 << 10)  # less than the prompt has
    try:
        engine, blocks = world.engine, WHOLE // BLOCK_TOKENS
        engine.run(PROMPT, world.salt("acme"))
        held = world.on_thread(lambda chunks: [len(tier) for tier in chunks.tiers])
        assert len(held) == 2 and all(held) and sum(held) == blocks
        engine.forget_device()
        assert engine.run(PROMPT, world.salt("beta")).connector_tokens == 0
        own = engine.run(PROMPT, world.salt("acme"))
        assert (own.connector_tokens, own.output) == (WHOLE, PLAIN)
        world.erase("acme", "s").result(10)
        engine.forget_device()
        after = engine.run(PROMPT, world.salt("acme"))
        assert (after.connector_tokens, after.output) == (0, PLAIN)
    finally:
        world.close()


def test_the_start_names_what_is_kept_too_short_to_come_back(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    """Control: what lives longer is not named, nor what is never kept."""
    world = TrtllmWorld(tmp_path, monkeypatch)
    world.custody.thread.run(lambda chunks: None).result(30)
    world.close()
    lines = [line for line in capsys.readouterr().err.splitlines() if "comes back from no tier" in line]
    assert [orjson.loads(line)["classifications"] for line in lines] == [["brief"]]
