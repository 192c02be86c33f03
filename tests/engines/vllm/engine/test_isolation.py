"""Who may read what, in a governed engine of three processes; beside each, what the same engine does ungoverned."""

from __future__ import annotations

import time

import pytest

from standins.engines.vllm.local_engine import BLOCK, LocalEngine

PREFIX = 3  # whole blocks
_places = iter(range(1000))


def fresh_prompt(blocks: int = PREFIX) -> list[int]:
    """A prompt that nobody has sent: `blocks` whole blocks and one token."""
    place = next(_places)
    return [(place * 97 + at * (place % 7 + 1)) % 480 + 20 for at in range(blocks * BLOCK)] + [17]


def test_own_tenant_hits_in_full_and_a_foreign_one_never(governed: LocalEngine):
    prompt = fresh_prompt()
    assert governed.ask(prompt, tenant="alpha").cached_tokens == 0
    assert governed.ask(prompt, tenant="beta").cached_tokens == 0
    assert governed.ask(prompt, tenant="alpha").cached_tokens == PREFIX * BLOCK
    assert governed.ask(prompt, tenant="beta").cached_tokens == PREFIX * BLOCK
    assert governed.ask(prompt, tenant="alpha", subject="other").cached_tokens == 0


def test_the_answers_are_those_of_the_plain_engine(governed: LocalEngine, plain: LocalEngine):
    for _ in range(4):
        prompt = fresh_prompt()
        expected = plain.ask(prompt, tenant="alpha", max_tokens=24).tokens
        for tenant in ("alpha", "alpha", "beta"):
            assert governed.ask(prompt, tenant=tenant, max_tokens=24).tokens == expected


def flipped(token: str) -> str:
    return token[:-1] + ("A" if token[-1] != "A" else "B")


@pytest.mark.parametrize("how", ["missing", "client's own", "forged", "replayed", "expired", "of another key"])
def test_without_a_valid_token_nothing_is_reused_nor_left(governed: LocalEngine, new_deployment, how: str):
    deployment = governed.deployment
    prompt = fresh_prompt()
    assert governed.ask(prompt, tenant="alpha").cached_tokens == 0
    assert governed.ask(prompt, tenant="alpha").cached_tokens == PREFIX * BLOCK, "positive control"

    def without() -> str | None:
        match how:
            case "missing":
                return None
            case "client's own":
                return "alpha-s"
            case "forged":
                return flipped(deployment.token("alpha"))
            case "of another key":
                return new_deployment().token("alpha")
            case "expired":
                token = deployment.token("alpha", seconds=1)
                time.sleep(1.1)
                return token
        token = deployment.token("alpha")
        governed.ask(prompt, salt=token)  # spent
        return token

    entries = governed.probe("pool")["entries"]
    for _ in range(2):  # not what others left, and not what it left itself
        assert governed.ask(prompt, salt=without()).cached_tokens == 0
    if how != "replayed":
        assert governed.probe("pool")["entries"] == entries
    assert governed.ask(prompt, tenant="alpha").cached_tokens == PREFIX * BLOCK


def test_a_restricted_request_leaves_nothing(governed: LocalEngine):
    prompt = fresh_prompt()
    for _ in range(2):
        assert governed.ask(prompt, tenant="secret").cached_tokens == 0


def test_erasing_a_subject_leaves_the_others(governed: LocalEngine):
    prompt = fresh_prompt()
    for subject in ("one", "two"):
        governed.ask(prompt, tenant="gamma", subject=subject)
    erased = governed.governance("erase", "gamma", "one", None)
    assert erased["ended_blocks"] >= PREFIX
    assert governed.ask(prompt, tenant="gamma", subject="one").cached_tokens == 0
    assert governed.ask(prompt, tenant="gamma", subject="two").cached_tokens == PREFIX * BLOCK


def test_an_expired_residency_is_not_found_and_wiped_without_a_request(governed: LocalEngine):
    prompt = fresh_prompt(5)
    governed.ask(prompt, tenant="brief")
    held = governed.governance("stats")["residencies"]
    time.sleep(4.5)  # idle: no request, no step of ours
    assert governed.governance("stats")["residencies"] == held - 1
    assert governed.free_residue() == 0
    assert governed.ask(prompt, tenant="brief").cached_tokens == 0


def test_the_books_agree_with_the_engine(governed: LocalEngine):
    assert governed.governance("check") == []
    assert governed.governance("scan") == []
