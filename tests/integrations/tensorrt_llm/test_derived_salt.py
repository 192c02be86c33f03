"""The salt that the engine is given: of whom, for how long, and never the caller's."""

from __future__ import annotations

from kvcustody.allocator.pool.block_state import NEVER_US
from kvcustody.governance.edge.custody_lease import ERASURES
from kvcustody.governance.edge.erase_epochs import (
    EpochScope,
    EpochTags,
    EraseEpochs,
    KnownEpochs,
    RaisedEpoch,
)
from kvcustody.governance.request import Hints
from kvcustody.integrations.tensorrt_llm.derived_salt import DERIVED_CHARACTERS, DerivedSalts
from standins.engines.vllm.deployment import principal
from standins.integrations.stand_in_engine import BLOCK_TOKENS
from standins.integrations.trtllm_world import PROMPT, WHOLE, TrtllmWorld

TAGS = EpochTags(bytes(32))
HELD_NO_MORE = "hits on the device under an expired salt"


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


def epochs_of(*scopes: EpochScope) -> KnownEpochs:
    raised = [RaisedEpoch(number, TAGS.of(scope)) for number, scope in enumerate(scopes, 1)]
    return KnownEpochs(EraseEpochs(raised, version=len(raised)), TAGS)


def hear(world: TrtllmWorld, known: KnownEpochs) -> None:
    world.on_thread(lambda chunks: chunks.governor.take_epochs(known, NEVER_US))


def test_a_request_that_was_let_in_before_an_epoch_and_attaches_after_finds_nothing(
    world: TrtllmWorld,
) -> None:
    who = principal("acme")
    hear(world, epochs_of())
    before, of_beta = world.salt("acme"), world.salt("beta")
    for salt in (before, of_beta):
        world.engine.run(PROMPT, salt)
    world.engine.forget_device()
    assert world.engine.run(PROMPT, before).connector_tokens == WHOLE, "control"
    world.engine.forget_device()
    hear(world, epochs_of(EpochScope(who.issuer, who.tenant, who.subject)))
    late = world.custody.thread.standing(before)
    assert late is not None and not late.holds
    copies = world.copies()
    assert world.engine.run(PROMPT, before).connector_tokens == 0
    assert world.copies() == copies, "nor is anything kept of it"
    assert world.engine.run(PROMPT, of_beta).connector_tokens == WHOLE, "another subject's is as before"
    again = world.engine.run(PROMPT, before)
    assert again.device_tokens and world.custody.scheduler.counts[HELD_NO_MORE] == 1, "the engine's own is counted"


def test_a_request_that_was_let_in_within_the_lease_and_attaches_after_it_finds_nothing(
    world: TrtllmWorld,
) -> None:
    salt = world.salt("acme")
    world.engine.run(PROMPT, salt)
    world.engine.forget_device()
    assert world.engine.run(PROMPT, salt).connector_tokens == WHOLE, "control"
    world.engine.forget_device()
    world.on_thread(lambda chunks: chunks.governor.custody.require(ERASURES))
    assert world.engine.run(PROMPT, salt).connector_tokens == 0
    world.engine.forget_device()
    world.on_thread(lambda chunks: chunks.governor.renew_custody(ERASURES, NEVER_US))
    assert world.engine.run(PROMPT, salt).connector_tokens == WHOLE, "heard again"
