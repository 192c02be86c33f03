"""When room runs out: a quota holds its tenant back alone; preemption, cancellation and failure stay where they are."""

from __future__ import annotations

import time
from collections.abc import Iterable

import pytest

from kvcustody.allocator.prefix.sequence import RunningSequence
from kvcustody.errors import HandleError
from kvcustody.governance.governor.governor import Governor
from kvcustody.governance.observability.metrics import worker_status
from kvcustody.integrations.transformers.batching.custody import BatchCustody
from kvcustody.tenants import OWN
from standins.engines.transformers.continuous_world import (
    ANYBODY,
    PAGE,
    TENANTS,
    Driver,
    Governed,
    batching,
    generation,
    governed,
    person,
    plain,
    policy,
    prompt,
)

HALVES = """\
  a: {quota: {guaranteed: 50%, cap: 50%}}
  b: {quota: {guaranteed: 50%, cap: 50%}}"""
TIGHT = {"num_blocks": 16, "max_batch_tokens": 128, "scheduler_type": "prefill_first"}
LONG = generation(max_new_tokens=26)


def steps_until(engine: Driver, name: str) -> int:
    for steps in range(1, 300):
        engine.step()
        if name in engine.results:
            return steps
    raise AssertionError("never finished")


def test_a_tenant_over_its_quota_neither_stalls_nor_preempts_another() -> None:
    with governed(config=batching(**TIGHT), text=policy(HALVES), generate=LONG) as engine:
        alone = steps_until(engine, engine.submit(person("b"), prompt(30)))
    with governed(config=batching(**TIGHT), text=policy(HALVES), generate=LONG) as engine:
        hungry = [engine.submit(person("a"), prompt(30, seed)) for seed in range(1, 6)]
        victim = engine.submit(person("b"), prompt(30))
        assert steps_until(engine, victim) == alone
        assert all(len(engine.results[name].generated_tokens) == 26 for name in engine.results)
        account = engine.governor.managers[0].accounts["a"]
        assert account.used_blocks <= account.cap_blocks == 8
        engine.run()
        assert all(len(engine.output(name)) == 26 for name in hungry)  # each in its turn
        assert engine.governor.tenant_counters["a"].deferred["over-quota"] > 0
        assert not engine.governor.tenant_counters["b"].deferred
        engine.sound()


def test_the_plain_engine_lets_one_client_stall_another() -> None:
    with plain(config=batching(**TIGHT), generate=LONG) as engine:
        alone = steps_until(engine, engine.add(prompt(30)))
    with plain(config=batching(**TIGHT), generate=LONG) as engine:
        for seed in range(1, 6):
            engine.add(prompt(30, seed))
        assert steps_until(engine, engine.add(prompt(30))) > alone + 10


def test_a_tenant_out_of_room_preempts_its_own_newest_and_its_outputs_do_not_change() -> None:
    prompts = [prompt(20, seed) for seed in range(3)]
    with governed(generate=LONG) as engine:
        names = [engine.submit(person("a"), tokens) for tokens in prompts]
        engine.run()
        expected = [engine.output(name) for name in names]
    with governed(config=batching(num_blocks=24), text=policy(HALVES), generate=LONG) as engine:
        names = [engine.submit(person("a"), tokens) for tokens in prompts]
        other = engine.submit(person("b"), prompts[0])
        preempted: list[str] = []
        release = engine.custody.release

        def watched(request_id: str, cause: str) -> None:
            if cause == "preempted":
                preempted.append(request_id)
            release(request_id, cause)

        engine.custody.release = watched  # type: ignore[method-assign]
        while engine.step() or engine.processor.has_pending_requests():
            engine.sound()
        assert preempted and set(preempted) <= set(names[1:])  # newest first, and nobody else's
        assert [list(engine.results[name].generated_tokens) for name in names] == expected
        assert engine.output(other) == expected[0]


def test_tenants_that_starve_together_resolve_it() -> None:
    free = """\
  a: {quota: {guaranteed: 0%, cap: 100%, borrow: true}}
  b: {quota: {guaranteed: 0%, cap: 100%, borrow: true}}"""
    config = batching(num_blocks=10, scheduler_type="prefill_first")
    with governed(config=config, text=policy(free), generate=LONG) as engine:
        names = [engine.submit(person(tenant), prompt(36, 4)) for tenant in "ab"]
        engine.run()
        assert len(engine.output(names[0])) == len(engine.output(names[1])) == 26


def test_a_request_that_can_never_fit_is_refused_alone() -> None:
    with governed(config=batching(num_blocks=16), text=policy(HALVES), generate=LONG) as engine:
        big, small = engine.submit(person("a"), prompt(60)), engine.submit(person("a"), prompt(10))
        engine.run()
        assert "need `11` blocks, the tenant may have `8`" in engine.results[big].error
        assert engine.governor.stats().tenants["a"].refused == {"too-large": 1}
        assert len(engine.output(small)) == 26
        filled = engine.submit(person("a"), prompt(60), max_new_tokens=5)
        engine.run()
        assert len(engine.output(filled)) == 5


def test_a_request_without_a_limit_that_outgrows_its_tenant_fails_alone() -> None:
    config = batching(num_blocks=16)
    with governed(config=config, text=policy(HALVES), generate=generation(max_new_tokens=None)) as engine:
        endless = engine.submit(person("a"), prompt(20), max_new_tokens=None)
        other = engine.submit(person("b"), prompt(20), max_new_tokens=26)
        engine.run()
        assert "has outgrown the blocks" in engine.results[endless].error
        assert len(engine.output(other)) == 26
        engine.sound()


def test_cancelling_gives_the_blocks_back_and_stops_the_output() -> None:
    with governed(generate=LONG) as engine:
        gone, kept = engine.submit(person("a"), prompt(50)), engine.submit(person("b"), prompt(50))
        waiting = engine.submit(person("a"), prompt(50, 2))
        engine.step()
        engine.step()
        for name in (gone, waiting):
            engine.batching.cancel(name)
        engine.step()
        assert set(engine.tables()) == {kept}
        assert engine.governor.managers[0].accounts["a"].active_blocks == 0
        engine.run()
        assert len(engine.output(kept)) == 26 and gone not in engine.results
        engine.batching.cancel(gone)  # a second time, and after the end: nothing
        engine.step()
        engine.sound()


def test_forks_share_what_is_whole_and_copy_the_rest() -> None:
    generate = generation(num_return_sequences=3, do_sample=True, max_new_tokens=6)
    with governed(generate=generate) as engine:
        name = engine.submit(person(), prompt(29))
        engine.step()
        tables = engine.tables()
        assert set(tables) == {name, f"{name}__child#0", f"{name}__child#1"}
        assert len({tuple(table[:3]) for table in tables.values()}) == 1
        assert len({table[3] for table in tables.values()}) == 3
        contents = {
            bytes(engine.cache.cache_tensor.view(-1, engine.allocator.bytes_per_block)[table[3]].numpy())
            for table in tables.values()
        }
        assert len(contents) == 1
        engine.sound()
        engine.run()
        later = engine.submit(person("b"), prompt(29))
        engine.run()
        assert engine.reused[later] == 0
        engine.sound()


WAY = "grants: [{id: way, owner: b, reader: a, at_most: low, until: 2099-01-01, reason: t}]"
GRANTED = policy().replace("scope: subject", "scope: tenant").replace("rules:\n", f"{WAY}\nrules:\n")


@pytest.mark.parametrize(("how", "is_forked"), [("kept", True), ("revoked", False), ("control", True)])
def test_what_is_revoked_before_a_fork_is_not_copied_into_the_children(
    how: str, is_forked: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    """`control`: revoked, and nobody looks."""
    if how == "control":
        monkeypatch.setattr(Governor, "may_fork", lambda self, request_id: True)
    generate = generation(num_return_sequences=3, do_sample=True, max_new_tokens=6)
    with governed(config=batching(max_batch_tokens=16), text=GRANTED, generate=generate) as engine:
        engine.submit(person("b"), prompt(29))
        engine.submit(person("a"), prompt(9, seed=3))  # a first use is a miss until it is on record
        engine.run()
        engine.governor.settle()
        name = engine.submit(person("a"), [*prompt(29), *prompt(40, seed=4)])
        engine.step()
        assert engine.cache.custody.records[name].hit_tokens > 0, "void: the parent must read what is granted"
        assert set(engine.tables()) == {name}, "void: it has forked already"
        if how != "kept":
            engine.batching.call(lambda governor: governor.revoke(["way"], actor="t"))
        while engine.tables().keys() == {name}:
            engine.step()
        children = [table for other, table in engine.tables().items() if other != name]
        assert (len(children) == 2) is is_forked
        engine.run()


def test_forks_that_do_not_fit_wait_and_are_still_their_parents() -> None:
    generate = generation(num_return_sequences=4, do_sample=True, max_new_tokens=6)
    with governed(config=batching(num_blocks=12), text=policy(HALVES), generate=generate) as engine:
        name = engine.submit(person("a"), prompt(29))
        engine.run()
        assert len(engine.results) == 4 and all(len(engine.output(one)) == 6 for one in engine.results)
        assert name in engine.results and set(engine.governor.tenant_counters) == {"a"}


def test_positive_control_children_that_inherit_nothing_are_strangers(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    def strangers(self: BatchCustody, parent_id: str, child_ids: Iterable[str]) -> None:
        for child_id in child_ids:
            self.take_claim(child_id)

    monkeypatch.setattr(BatchCustody, "inherit", strangers)
    generate = generation(num_return_sequences=2, do_sample=True, max_new_tokens=6)
    with governed(generate=generate, text=policy(TENANTS + ANYBODY)) as engine:
        engine.submit(person("a"), prompt(29))
        engine.run()
        assert set(engine.governor.tenant_counters) == {"a", f"anonymous^{OWN}"}


def test_token_ids_that_are_not_token_ids_fail_their_own_request() -> None:
    with governed() as engine:
        bad, empty, good = (engine.submit(person(), tokens) for tokens in ([5, -1], [], prompt(9)))
        engine.run()
        assert "token ids must be" in engine.results[bad].error
        assert "prompt is empty" in engine.results[empty].error
        assert len(engine.output(good)) == 8


def test_a_loop_that_has_ended_takes_no_requests_and_closing_ends_what_runs() -> None:
    with governed(generate=generation(max_new_tokens=400)) as engine:
        engine.batching.start()
        name = engine.batching.submit(person(), prompt(30))
        with pytest.raises(HandleError, match="is running"):
            engine.batching.generate_batch(person(), [prompt(9)])
        while not engine.governor.running:
            time.sleep(0.01)
        engine.batching.stop(hard=True)
        result = engine.manager.get_result(timeout=1)
        while result is not None and not result.is_finished():
            result = engine.manager.get_result(timeout=1)
        with pytest.raises(HandleError, match="takes no requests"):
            engine.batching.submit(person(), prompt(30))
        assert not engine.governor.running and name


def cancelled_in_flight(engine: Governed) -> tuple[list[int], str]:
    """A request is cancelled while a step over it has not retired: its blocks, and another that runs on."""
    engine.custody.is_async = True  # its fences, on a device without streams
    gone, kept = engine.submit(person("a"), prompt(29)), engine.submit(person("b"), prompt(29))
    engine.step()
    engine.step()
    held = engine.tables()[gone]
    engine.custody.tick = lambda: list(engine.governor.step())  # type: ignore[method-assign, arg-type]
    engine.batching.cancel(gone)
    engine.processor._update_tp_group_state()
    engine.scheduler.clear_cancelled_requests()
    return held, kept


def test_positive_control_without_fences_a_step_in_flight_writes_into_what_was_scrubbed(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(BatchCustody, "fence", lambda self, request_ids: None)
    with governed(generate=LONG, tick_seconds=None) as engine:
        held, _ = cancelled_in_flight(engine)
        (manager,) = engine.governor.managers
        engine.clock.advance(1_100_000)
        engine.governor.step()
        assert not manager.pool.partitions[0].fenced and engine.nonzero(held[-1:]) == 0


def test_steps_in_flight_keep_their_blocks_until_they_have_retired() -> None:
    with governed(generate=LONG, tick_seconds=None) as engine:
        held, kept = cancelled_in_flight(engine)
        (manager,) = engine.governor.managers
        engine.clock.advance(1_100_000)
        engine.governor.step()
        assert manager.pool.partitions[0].fenced  # released, but a step may still write there
        assert engine.nonzero(held[-1:]) > 0
        engine.step()
        engine.step()
        engine.clock.advance(1_100_000)
        engine.governor.step()
        assert not manager.pool.partitions[0].fenced and engine.nonzero(held[-1:]) == 0
        engine.run()
        assert len(engine.output(kept)) == 26


UNREPEATED = [prompt(50, seed) for seed in range(5)]
ONE_TENANT = "  a: {quota: {guaranteed: 50%, cap: 100%, borrow: true}}"
CROWDED = {"num_blocks": 24, "max_batch_tokens": 128}


def hit_ratio(monkeypatch: pytest.MonkeyPatch) -> float:
    """What a worker says of its hits, as a share of its prompts' tokens, after a run in which some were preempted."""
    preempted: list[str] = []
    how = generation(max_new_tokens=26)
    with governed(config=batching(**CROWDED), text=policy(ONE_TENANT), generate=how) as engine:
        release = engine.custody.release

        def watched(request_id: str, cause: str) -> None:
            if cause == "preempted":
                preempted.append(request_id)
            release(request_id, cause)

        monkeypatch.setattr(engine.custody, "release", watched)
        names = [engine.submit(person("a"), tokens) for tokens in UNREPEATED]
        engine.run()
        assert preempted and [len(engine.output(name)) for name in names] == [26] * len(UNREPEATED)
        engine.sound()
        status = worker_status(engine.governor.stats(), PAGE)
    assert status["prompt_tokens"] == sum(map(len, UNREPEATED)), "each prompt is counted once"
    return status["hit_tokens"] / status["prompt_tokens"]


def test_a_prompt_that_nobody_repeats_is_no_hit_when_its_request_begins_again(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    assert hit_ratio(monkeypatch) == 0


def test_the_control_without_the_mark_own_work_is_a_hit(monkeypatch: pytest.MonkeyPatch) -> None:
    """The same run where no admission keeps how much is its request's own earlier work: over a quarter is a hit."""
    monkeypatch.setattr(RunningSequence, "earlier_blocks", property(lambda _: 0, lambda _, value: None))
    assert hit_ratio(monkeypatch) > 0.25
