"""A request id is its owner's: nobody else is answered, refused or cancelled under it, or runs under what it left."""

from __future__ import annotations

import asyncio
from collections.abc import Callable
from typing import Any

import pytest

from kvcustody.errors import IdentityError
from kvcustody.governance.identity.principal import Principal
from kvcustody.integrations.transformers.batching.request_claims import CHILD_MARK, RequestClaims
from standins.engines.transformers.continuous_world import (
    TENANTS,
    Governed,
    generation,
    governed,
    person,
    policy,
    prompt,
)

ANA, BOB = person("a"), person("b", "bob")
LONG = generation(max_new_tokens=26)
HIT = 32  # tokens of 33


def begun(engine: Governed, *, steps: int = 10) -> list[int]:
    """What a's request `same` has said when b comes with its id."""
    engine.submit(ANA, prompt(20), request_id="same")
    for _ in range(steps):
        engine.step()
    said: list[int] = list(engine.scheduler.active_requests["same"].generated_tokens)
    return said


def test_a_second_request_under_an_id_is_refused_before_it_is_queued() -> None:
    with governed(generate=LONG) as engine:
        said = begun(engine)
        with pytest.raises(IdentityError, match="is in use"):
            engine.submit(BOB, prompt(20, seed=9), request_id="same")
        assert said and engine.manager.input_queue.empty() and not engine.batching.claims._waiting
        engine.run()
        assert engine.results["same"].error is None and engine.output("same")[: len(said)] == said
        engine.submit(BOB, prompt(33, seed=5), request_id="same")  # b may try again
        engine.run()
        again = engine.add(prompt(33, seed=5), request_id="same")
        engine.run()
        assert not engine.reused.get(again), "nobody's request runs under a claim that was left"


def test_positive_control_ids_that_are_nobodys(monkeypatch: pytest.MonkeyPatch) -> None:
    """Without the check b's refusal is delivered to a, with what a's request has said so far."""
    monkeypatch.setattr(RequestClaims, "_check_free", lambda *given, **named: None)
    with governed(generate=LONG) as engine:
        said = begun(engine)
        engine.submit(BOB, prompt(20, seed=9), request_id="same")
        engine.step()
        assert engine.results["same"].error
        assert list(engine.results["same"].generated_tokens)[: len(said)] == said


def _identified(engine: Governed) -> None:
    engine.batching.identify("same", BOB)


def _unclaimed(engine: Governed) -> None:
    engine.add(prompt(20), request_id="same")


def _handled(engine: Governed) -> None:
    with engine.batching.acting(BOB):
        engine.manager.register_result_handler("same", lambda result: None)


@pytest.mark.parametrize("come", [_identified, _unclaimed, _handled])
def test_no_way_takes_an_id_that_is_in_use(come: Callable[[Governed], None]) -> None:
    with governed(generate=LONG, text=policy(TENANTS)) as engine:
        begun(engine, steps=2)
        with pytest.raises(IdentityError, match="is in use"):
            come(engine)
        engine.run()
        assert len(engine.output("same")) == 26


def test_an_id_is_in_use_until_its_answer_was_taken() -> None:
    """Else whoever comes next under the id reads what the engine keeps for the one before."""
    with governed() as engine:
        engine.submit(ANA, prompt(20), request_id="same")
        while engine.processor.has_pending_requests() or not engine.manager.input_queue.empty():
            if engine.processor.prepare_next_batch():
                engine.processor._generation_step(engine.manager.model)
                engine.processor.update_batch()
        with pytest.raises(IdentityError, match="is in use"):
            engine.submit(BOB, prompt(20), request_id="same")
        with engine.batching.acting(BOB):
            assert engine.manager.get_result("same", timeout=0) is None
        with engine.batching.acting(ANA):
            answer = engine.manager.get_result("same", timeout=0)
        assert len(answer.generated_tokens) == 8
        engine.submit(BOB, prompt(20), request_id="same")
        engine.run()
        assert engine.results["same"].error is None


def test_only_its_owner_cancels_a_request_and_its_id_is_free_then() -> None:
    with governed(generate=LONG) as engine:
        begun(engine, steps=2)
        with engine.batching.acting(BOB):
            engine.manager.cancel_request("same")
        engine.step()
        assert "same" in engine.scheduler.active_requests
        with engine.batching.acting(ANA):
            engine.manager.cancel_request("same")
        with pytest.raises(IdentityError, match="is in use"):
            engine.submit(BOB, prompt(20), request_id="same")
        engine.run()
        engine.submit(BOB, prompt(20), request_id="same")
        engine.run()
        assert len(engine.output("same")) == 26, "a cancellation that came late ends nobody else's request"


def test_a_childs_id_keeps_its_parents_in_use() -> None:
    generate = generation(num_return_sequences=2, do_sample=True, max_new_tokens=12)
    with governed(generate=generate) as engine:
        engine.submit(ANA, prompt(20), request_id="same")
        while f"same{CHILD_MARK}0" not in engine.scheduler.active_requests:
            engine.step()
        engine.batching.cancel("same")
        engine.step()
        assert "same" not in engine.scheduler.active_requests
        with pytest.raises(IdentityError, match="is in use"):
            engine.submit(BOB, prompt(20), request_id="same")
        engine.run()
        engine.submit(BOB, prompt(20), request_id="same")


def test_a_queue_that_is_full_leaves_no_claim(monkeypatch: pytest.MonkeyPatch) -> None:
    def full(*given: Any, **named: Any) -> None:
        raise RuntimeError("full")

    with governed() as engine:
        monkeypatch.setattr(engine.manager.input_queue, "put", full)
        with pytest.raises(RuntimeError, match="full"):
            engine.submit(ANA, prompt(20), request_id="same")
        monkeypatch.undo()
        engine.submit(BOB, prompt(20), request_id="same")
        engine.run()
        assert engine.results["same"].error is None


def test_results_go_to_their_owners_handler() -> None:
    delivered: dict[str, list[Any]] = {"a": [], "b": []}

    async def ask(engine: Governed, who: Principal, name: str) -> None:
        with engine.batching.acting(who):
            engine.manager.register_result_handler("same", delivered[name].append)
            engine.manager.add_request(prompt(20), request_id="same")

    async def both(engine: Governed) -> None:
        await ask(engine, ANA, "a")
        with pytest.raises(IdentityError, match="is in use"):
            await ask(engine, BOB, "b")
        engine.run()
        await asyncio.sleep(0)
        await asyncio.sleep(0)
        await ask(engine, BOB, "b")
        engine.run()
        await asyncio.sleep(0)

    with governed() as engine:
        asyncio.run(both(engine))
    assert [len(results) for results in delivered.values()] == [1, 1]
