"""Erasure in one process: every state, both ways with running requests, deadline, tiers, idempotence."""

from __future__ import annotations

from pathlib import Path

import pytest

from kvcustody.clock import MICROSECONDS
from kvcustody.errors import ConfigError
from kvcustody.governance.erasure.selector import Selector, selector_from
from standins.erasure.erasure_desk import PROMPT, Desk, X
from standins.erasure.file_tier import FileTier
from standins.simulation.governed import MODEL, POLICY

SHARED = POLICY.replace("scope: subject", "scope: tenant")
FINISH = "\nerasure: {within: 10s, running: finish}\n"


def test_cached_and_running_end_at_once_and_the_result_follows_the_receipts() -> None:
    desk = Desk()
    desk.serve("a", "x", PROMPT)
    desk.serve("a", "y", PROMPT)
    running = desk.start("a", "x", [*PROMPT, 7])
    first = desk.governor.erase(X)
    assert (first.aborted_requests, first.lapsed_residencies, first.is_complete) == (1, 1, False)
    assert running.request_id not in desk.governor.running
    assert desk.serve("a", "x", PROMPT) == 0 and desk.serve("a", "y", PROMPT) == 36
    assert desk.serve("a", "x", PROMPT) == 36, "an erased subject's next requests are cached again"
    desk.steps()
    done = desk.governor.erasures.result(first.erasure)
    assert done is not None and done.is_complete and done.remaining_blocks == 0
    assert not desk.governor.erasures.pending and desk.healthy()
    assert desk.governor.erase(X, erasure=first.erasure) == done, "a second time changes nothing"
    assert desk.serve("a", "x", PROMPT) == 36
    assert desk.counts()["ErasureRequested"] == desk.counts()["ErasureCompleted"] == 1


def test_what_another_subject_holds_stays_and_is_counted() -> None:
    desk = Desk(SHARED)
    desk.serve("a", "x", PROMPT)
    desk.serve("a", "y", PROMPT[:21])  # holds five of x's blocks
    user = desk.start("a", "y", PROMPT[:13])
    result = desk.governor.erase(X)
    desk.steps(0.5)
    done = desk.governor.erasures.result(result.erasure)
    assert done is not None and done.is_complete
    assert done.remaining_blocks == 5 and done.remaining_reason == (
        "2 held by other residencies; 3 in use by other requests"
    )
    assert desk.serve("a", "y", [*PROMPT[:20], 1, 2]) == 20
    assert desk.serve("a", "z", PROMPT) == 20, "what only the erased subject held is gone"
    desk.governor.release(user.request_id)
    assert desk.healthy()


@pytest.mark.parametrize("policy", [POLICY, SHARED], ids=["subject", "tenant"])
def test_running_requests_finish_unattachable_and_the_deadline_ends_them(policy: str) -> None:
    desk = Desk(policy + FINISH)
    first, second = desk.start("a", "x", PROMPT), desk.start("a", "x", [*PROMPT, 1])
    result = desk.governor.erase(X)
    assert (result.aborted_requests, result.finishing_requests) == (0, 2)
    assert desk.serve("a", "x", PROMPT) == 0
    other = desk.serve("a", "z" if policy == SHARED else "y", PROMPT)
    assert other == (36 if policy == SHARED else 0)  # of the request before, not of the erased ones
    desk.governor.commit([first.request_id], [len(PROMPT)])
    desk.governor.release(first.request_id)
    desk.steps(2)
    assert list(desk.governor.erasures.pending) == [result.erasure] and desk.healthy()
    assert second.request_id in desk.governor.running
    desk.steps(8.5)
    assert second.request_id not in desk.governor.running, "the deadline is the policy's"
    desk.steps(1)
    done = desk.governor.erasures.result(result.erasure)
    assert done is not None and done.is_complete and desk.healthy()


def test_a_fence_makes_it_partial_at_the_deadline_and_complete_when_it_retires() -> None:
    desk = Desk()
    request = desk.start("a", "x", PROMPT)
    fence = desk.governor.fence([request.request_id])
    result = desk.governor.erase(X, deadline_us=desk.clock.now_us() + 2 * MICROSECONDS)
    desk.steps(3)
    assert desk.counts()["ErasureCompleted"] == 1 and desk.governor.erasures.pending
    desk.governor.retire(fence)
    desk.steps(2)
    assert desk.counts()["ErasureCompleted"] == 2 and not desk.governor.erasures.pending
    done = desk.governor.erasures.result(result.erasure)
    assert done is not None and done.is_complete


def test_the_owner_s_erasure_takes_readers_of_its_grant_with_it() -> None:
    policy = SHARED.replace(
        "rules:",
        'grants:\n  - {id: g, owner: a, reader: b, at_most: low, until: 2099-01-01, reason: "x"}\nrules:',
    )
    desk = Desk(policy)
    desk.serve("a", "x", PROMPT)
    desk.serve("b", "q", PROMPT[:9])  # the first use goes on record
    desk.governor.settle()
    desk.serve("b", "q", [*PROMPT, *range(100, 140)])
    reader = desk.start("b", "q", [*PROMPT, *range(100, 140), 5])
    assert reader.hit_tokens >= 36
    result = desk.governor.erase(Selector("a"))
    assert result.aborted_requests == 1 and reader.request_id not in desk.governor.running
    desk.steps(1)
    assert desk.serve("a", "x", PROMPT) == 0
    assert desk.healthy()


def test_only_what_was_before_the_sequence_point() -> None:
    desk = Desk()
    desk.serve("a", "x", PROMPT)
    asked_us = desk.clock.now_us()
    desk.clock.advance(MICROSECONDS)
    later = desk.start("a", "x", list(range(500, 540)))
    result = desk.governor.erase(X, before_us=asked_us)
    assert result.aborted_requests == 0 and later.request_id in desk.governor.running
    assert desk.serve("a", "x", PROMPT) == 0 and desk.healthy()


def test_domains_and_models_by_their_parts() -> None:
    desk = Desk()
    desk.serve("a", "x", PROMPT)
    desk.serve("b", "x", PROMPT)
    assert desk.governor.erase(Selector(classification="high")).ended_blocks == 0
    assert desk.governor.erase(Selector(key_epoch=99)).ended_blocks == 0
    assert desk.serve("a", "x", PROMPT) == 36
    assert desk.governor.erase(Selector("a", classification="low", key_epoch=1)).ended_blocks >= 9
    assert (desk.serve("a", "x", PROMPT), desk.serve("b", "x", PROMPT)) == (0, 36)
    assert desk.governor.erase(Selector(model=MODEL.digest)).ended_blocks >= 18
    assert (desk.serve("a", "x", PROMPT), desk.serve("b", "x", PROMPT)) == (0, 0)


def test_a_tier_is_erased_in_its_own_time_and_awaited(tmp_path: Path) -> None:
    desk = Desk()
    tier = FileTier(tmp_path / "tier")
    desk.governor.erasures.tiers.append(tier)
    for number in range(7):
        tier.store(bytes([number]) * 32, "a", desk.clock.now_us())
    tier.store(b"b" * 32, "b", desk.clock.now_us())
    result = desk.governor.erase(Selector("a"))
    assert set(tier.entries) == {b"b" * 32}, "nothing of it is found from here on"
    desk.steps(0.1)
    assert desk.governor.erasures.pending
    desk.steps(1)
    done = desk.governor.erasures.result(result.erasure)
    assert done is not None and done.is_complete and set(tier.objects()) == {b"b" * 32}


def test_a_selector_is_written_and_read_back_and_never_empty() -> None:
    whole = Selector("a", "x", "s", b"m" * 32, "low", "seg", 3, (("region", "eu"),))
    assert selector_from(whole.text()) == whole and whole.kind == "domain"
    assert [Selector("a").kind, X.kind, Selector("a", session="s").kind] == ["tenant", "subject", "session"]
    for wrong in (Selector(), Selector(subject="x"), Selector(session="s", model=b"m")):
        with pytest.raises(ConfigError):
            Desk().governor.erase(wrong)
