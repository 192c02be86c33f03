"""The salt that the engine is given: of whom, for how long, and never the caller's."""

from __future__ import annotations

from kvcustody.governance.request import Hints
from kvcustody.integrations.tensorrt_llm.derived_salt import DERIVED_CHARACTERS, DerivedSalts
from standins.engines.vllm.deployment import principal
from standins.integrations.stand_in_engine import BLOCK_TOKENS
from standins.integrations.trtllm_world import PROMPT, WHOLE, TrtllmWorld


def test_a_salt_is_of_one_domain_and_says_no_name(world: TrtllmWorld) -> None:
    mine = world.salt("acme")
    assert mine == world.salt("acme") and len(mine) == DERIVED_CHARACTERS
    assert len({mine, world.salt("beta"), world.salt("acme", "other"), world.salt("brief")}) == 4
    assert "acme" not in mine and b"acme".hex() not in mine


def test_the_caller_s_own_salt_only_narrows(world: TrtllmWorld) -> None:
    plain, thread = world.salt("acme"), world.custody.thread
    salted = thread.derive(principal("acme"), Hints(salt="mine"))
    theirs = thread.derive(principal("beta"), Hints(salt="mine"))
    assert len({plain, salted, theirs}) == 3
    as_if = thread.derive(principal("beta"), Hints(salt=plain[:64]))
    assert as_if[:64] != plain[:64]


def test_a_changed_salt_is_none_of_ours(world: TrtllmWorld) -> None:
    salt, thread = world.salt("acme"), world.custody.thread
    assert thread.standing(salt) is not None, "control"
    for at in (0, 63, 64, 80, 81, 112, 113, DERIVED_CHARACTERS - 1):
        other = "0" if salt[at] != "0" else "1"
        assert thread.standing(salt[:at] + other + salt[at + 1 :]) is None
    assert thread.standing(salt + "0") is None and thread.standing("é" * DERIVED_CHARACTERS) is None
    assert thread.standing(None) is None
    moved = world.salt("beta")[:64] + salt[64:]
    assert thread.standing(moved) is None
    thread.salts = DerivedSalts(reuses_on_device=True)  # another process
    assert thread.standing(salt) is None


def test_where_the_device_reuses_nothing_each_request_has_a_salt_and_the_tier_brings_all(
    world: TrtllmWorld,
) -> None:
    world.custody.thread.salts = DerivedSalts(reuses_on_device=False)  # as in `strict`
    first, second = world.salt("acme"), world.salt("acme")
    assert first != second and first[:64] == second[:64]
    world.engine.run(PROMPT, first)
    own = world.engine.run(PROMPT, second)
    assert (own.device_tokens, own.connector_tokens) == (0, WHOLE)
    assert world.engine.run(PROMPT, world.salt("beta")).connector_tokens == 0
    assert not world.custody.scheduler._had and not world.custody.scheduler._states
    assert world.copies() == 2 * WHOLE // BLOCK_TOKENS


def test_a_salt_of_a_subject_that_was_erased_since_finds_nothing(world: TrtllmWorld) -> None:
    before = world.salt("acme")
    assert (standing := world.custody.thread.standing(before)) is not None and standing.holds
    world.engine.run(PROMPT, before)
    world.erase("acme", "s").result(10)
    world.engine.run([5, *PROMPT], world.salt("acme"))
    late = world.custody.thread.standing(before)
    assert late is not None and not late.holds
    copies = world.copies()
    world.engine.forget_device()
    assert world.engine.run([5, *PROMPT], before).connector_tokens == 0
    assert world.copies() == copies, "nor is anything kept of it"
