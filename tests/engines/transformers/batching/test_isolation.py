"""Who may reuse what in a real engine: own blocks, nobody else's; unknown ids nothing; the plain engine beside it."""

from __future__ import annotations

import pytest

from kvcustody.errors import IdentityError
from kvcustody.governance.erasure.selector import Selector
from kvcustody.governance.governor import pool_books as erasure
from kvcustody.integrations.transformers.batching.request_claims import RequestClaim, RequestClaims
from kvcustody.tenants import OWN
from standins.engines.transformers.continuous_world import (
    ANYBODY,
    PAGE,
    TENANTS,
    batching,
    generation,
    governed,
    person,
    plain,
    policy,
    prompt,
)

PROMPT = prompt(50)
HIT = (len(PROMPT) - 1) // PAGE * PAGE


def test_own_prompts_hit_in_full_and_anothers_never() -> None:
    with governed() as engine:
        first = engine.submit(person("a"), PROMPT)
        engine.run()
        again, other_tenant = engine.submit(person("a"), PROMPT), engine.submit(person("b"), PROMPT)
        other_subject = engine.submit(person("a", "eve"), PROMPT)
        engine.run()
        reused = engine.reused
        assert reused == {first: 0, again: HIT, other_tenant: 0, other_subject: 0}
        outputs = [engine.output(name) for name in (first, again, other_tenant, other_subject)]
        assert outputs == [outputs[0]] * 4
        engine.sound()


def test_the_plain_engine_serves_anybody_from_anybodys_blocks() -> None:
    with plain() as engine:
        first = engine.add(PROMPT)
        engine.run()
        second = engine.add(PROMPT)
        engine.run()
        assert engine.reused == {first: 0, second: HIT}


@pytest.mark.parametrize("tokens", [PAGE, PAGE + 1, 2 * PAGE, 2 * PAGE + 1])
def test_the_last_token_is_always_computed_so_no_shared_block_is_written(tokens: int) -> None:
    with governed() as engine:
        engine.submit(person(), prompt(tokens))
        engine.run()
        again = engine.submit(person(), prompt(tokens))
        engine.step()
        shared = engine.tables()[again][: (tokens - 1) // PAGE]
        written = engine.allocator.get_write_indices(again, engine.reused[again], tokens - engine.reused[again])
        assert engine.reused[again] == (tokens - 1) // PAGE * PAGE
        assert not {index // engine.allocator.block_physical_stride for index in written} & set(shared)
        engine.run()


def test_generated_tokens_are_reused_by_the_next_turn_of_a_conversation() -> None:
    with governed(generate=generation(max_new_tokens=20)) as engine:
        first = engine.submit(person(), PROMPT)
        engine.run()
        turn = PROMPT + engine.output(first) + prompt(5, seed=9)
        second = engine.submit(person(), turn)
        engine.run()
        # The K/V of the last generated token is never computed.
        assert engine.reused[second] == (len(PROMPT) + 20 - 1) // PAGE * PAGE


def test_the_engines_own_unkeyed_index_stays_empty_and_nothing_is_merged_afterwards() -> None:
    with governed(config=batching(max_batch_tokens=256)) as engine:
        for principal in (person("a"), person("b"), person("a")):
            engine.submit(principal, PROMPT)
        engine.step()
        tables = engine.tables()
        engine.run()
        assert not engine.allocator.ledger.hash_to_block and not engine.allocator.ledger.cached_blocks
        blocks = [block for table in tables.values() for block in table]
        assert len(blocks) == len(set(blocks)) == 3 * 7  # at once: nothing was published yet
    with plain() as engine:
        engine.add(PROMPT)
        engine.run()
        assert engine.allocator.ledger.hash_to_block


def test_ids_that_nobody_claimed_reuse_nothing_not_even_their_own() -> None:
    with governed(text=policy(TENANTS + ANYBODY)) as engine:
        known = engine.submit(person(), PROMPT)
        engine.run()
        names = [engine.add(PROMPT) for _ in range(2)]
        engine.run()
        names.append(engine.add(PROMPT))
        engine.run()
        assert [engine.reused[name] for name in names] == [0, 0, 0]
        assert {tuple(engine.output(name)) for name in names} == {tuple(engine.output(known))}
        cached = {name: account.cached_blocks for name, account in engine.governor.managers[0].accounts.items()}
        assert cached == {
            "a": 7,
            "b": 0,
            f"anonymous^{OWN}": 0,
        }  # nobody could find them, so they are not kept
        engine.sound()


def test_positive_control_one_name_for_all_strangers(monkeypatch: pytest.MonkeyPatch) -> None:
    """Without its random key and as a tenant's subject, an unclaimed request finds what others left."""
    monkeypatch.setattr(RequestClaim, "private", lambda claim: RequestClaim(person()))
    with governed(text=policy(TENANTS + ANYBODY)) as engine:
        engine.submit(person(), PROMPT)
        engine.run()
        name = engine.add(PROMPT)
        engine.run()
        assert engine.reused[name] == HIT


@pytest.mark.parametrize("is_private", [True, False])
def test_strangers_are_kept_apart_by_a_random_key_even_where_their_tenant_shares(
    is_private: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The control is the parameter: the key off, the second stranger finds the first one's blocks."""
    if not is_private:
        monkeypatch.setattr(RequestClaim, "private", lambda claim: claim)
    shared = policy(TENANTS + ANYBODY).replace("scope: subject", "scope: tenant")
    with governed(text=shared) as engine:
        names = []
        for _ in range(2):
            names.append(engine.add(PROMPT))
            engine.run()
        assert [engine.reused[name] for name in names] == [0, 0 if is_private else HIT]


def test_ids_that_nobody_claimed_are_refused_where_the_policy_admits_no_strangers() -> None:
    with governed() as engine:
        name, known = engine.add(PROMPT), engine.submit(person(), PROMPT)
        engine.run()
        assert "tenant is not in the policy" in engine.results[name].error
        assert engine.results[name].generated_tokens == []
        assert engine.output(known)


def test_an_id_that_looks_like_a_child_inherits_nothing() -> None:
    with governed(text=policy(TENANTS + ANYBODY)) as engine:
        engine.submit(person(), PROMPT, request_id="one")
        engine.run()
        with pytest.raises(IdentityError, match="poses as a forked child"):
            engine.add(PROMPT, request_id="one__child#0")
        with pytest.raises(IdentityError, match="poses as a forked child"):
            engine.submit(person(), PROMPT, request_id="two__child#0")


def test_a_claim_serves_one_request() -> None:
    claims = RequestClaims()
    with governed() as engine:
        engine.batching.identify("mine", person())
        with pytest.raises(IdentityError, match="claimed already"):
            engine.batching.identify("mine", person("b"))
        engine.add(PROMPT, request_id="mine")
        engine.run()
        engine.add(PROMPT, request_id="mine")
        engine.run()
        assert "not in the policy" in engine.results["mine"].error
    assert claims.take("mine").is_private


def test_erasing_one_subject_leaves_the_others_hits() -> None:
    with governed() as engine:
        ada, eve = person("a", "ada"), person("a", "eve")
        for principal in (ada, eve, person("b")):
            engine.submit(principal, PROMPT)
            engine.run()
        erased = engine.governor.call(lambda governor: governor.erase(Selector(tenant="a", subject="ada")))
        engine.step()
        assert erased.result(0).ended_blocks == 7
        names = [engine.submit(principal, PROMPT) for principal in (ada, eve, person("b"))]
        engine.run()
        assert [engine.reused[name] for name in names] == [0, HIT, HIT]


def test_erasing_a_subject_ends_its_running_requests_with_an_error() -> None:
    with governed(generate=generation(max_new_tokens=30)) as engine:
        doomed, other = engine.submit(person("a"), PROMPT), engine.submit(person("b"), PROMPT)
        for _ in range(4):
            engine.step()
        engine.governor.call(lambda governor: governor.erase(Selector(tenant="a")))
        engine.run()
        assert "ended by policy or erasure" in engine.results[doomed].error
        assert len(engine.output(other)) == 30
        engine.sound()


def test_positive_control_an_erasure_that_misses_what_is_cached(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(erasure, "matches_plan", lambda *operands: False)
    monkeypatch.setattr(erasure, "matches_label", lambda *operands: False)
    with governed() as engine:
        engine.submit(person(), PROMPT)
        engine.run()
        engine.batching.erase(Selector(tenant="a", subject="ada"))
        again = engine.submit(person(), PROMPT)
        engine.run()
        assert engine.reused[again] == HIT


def test_positive_control_an_erasure_that_misses_what_runs(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(erasure, "matches_plan", lambda *operands: False)
    monkeypatch.setattr(erasure, "matches_label", lambda *operands: False)
    with governed(generate=generation(max_new_tokens=30)) as engine:
        doomed = engine.submit(person("a"), PROMPT)
        engine.step()
        engine.governor.call(lambda governor: governor.erase(Selector(tenant="a")))
        engine.run()
        assert len(engine.output(doomed)) == 30


def test_prefix_caching_off_keeps_nothing() -> None:
    with governed(config=batching(allow_block_sharing=False)) as engine:
        names = []
        for _ in range(2):
            names.append(engine.submit(person(), PROMPT))
            engine.run()
        assert [engine.reused[name] for name in names] == [0, 0]
        assert engine.output(names[0]) == engine.output(names[1])
        assert engine.governor.managers[0].accounts["a"].cached_blocks == 0
        engine.sound()


def test_a_requests_trace_is_its_residencys_and_what_is_none_is_refused() -> None:
    trace = "4bf92f3577b34da6a3ce929d0e0e4736"
    with governed() as engine:
        traced, bare = engine.submit(person(), PROMPT, trace=trace), engine.submit(person("b"), PROMPT)
        engine.step()
        records = engine.custody.records
        live = engine.governor.running
        found = {name: live[records[name].handle].residency.trace for name in (traced, bare)}
        assert found == {traced: trace, bare: ""}
        with pytest.raises(IdentityError, match="trace"):
            engine.submit(person(), PROMPT, trace="x")
        engine.run()
        engine.sound()
