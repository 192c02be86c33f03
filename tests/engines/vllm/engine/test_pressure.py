"""A tenant that wants more than its share waits alone; the others neither wait for it nor lose what they have."""

from __future__ import annotations

from standins.engines.vllm.deployment import SMALL_CAP
from standins.engines.vllm.local_engine import BLOCK, BLOCKS, LocalEngine

HOARDERS = 10
HOARDED_TOKENS = 100
NEIGHBOUR_TOKENS = 60
MESSAGES_BEFORE = 20  # few of what the hoarders take, as the EngineCore may be steps ahead of its messages


def crowd(engine: LocalEngine) -> tuple[int, int, int]:
    """Requests of one tenant that together want more than the whole pool, then a neighbour's, which comes last.

    Returns (the EngineCore's steps from the neighbour's arrival to its end, how often it was preempted, the most blocks
    in use before it came). Its messages, which `engine.step` takes one by one, say nothing of that: it waits for nobody
    who reads them, so how many lie ready when the neighbour is sent is a matter of the machine's load.
    """
    engine.probe("preemptions")
    hoarders = [
        engine.submit([(number * 53 + at) % 480 + 20 for at in range(150)], tenant="small", max_tokens=HOARDED_TOKENS)
        for number in range(HOARDERS)
    ]
    used = 0
    done = {}
    for _ in range(MESSAGES_BEFORE):
        done |= engine.step()
        used = max(used, sum(1 for refs in engine.probe("pool")["refs"] if refs) - 1)
    late = engine.submit(list(range(40, 140)), tenant="neighbour", max_tokens=NEIGHBOUR_TOKENS)
    done |= engine.finish()
    assert len(done[late].tokens) == NEIGHBOUR_TOKENS
    assert [len(done[one].tokens) for one in hoarders] == [HOARDED_TOKENS] * HOARDERS
    return engine.probe("steps_lived", late), engine.probe("preemptions").count(late), used


def test_an_over_quota_tenant_neither_stalls_nor_preempts_another(governed: LocalEngine, plain: LocalEngine):
    steps, preempted, used = crowd(plain)
    print("plain:", steps, preempted, used)
    assert used > 40
    assert preempted > 0 or steps > NEIGHBOUR_TOKENS + 20, "positive control: ungoverned, the last to come loses"

    before = governed.governance("stats")["tenants"].get("small", {"requests": 0})["requests"]
    steps, preempted, used = crowd(governed)
    print("governed:", steps, preempted, used)
    assert used <= SMALL_CAP * BLOCKS
    assert preempted == 0
    assert steps <= NEIGHBOUR_TOKENS + 8  # its prompt, its tokens, and answers that were under way
    small = governed.governance("stats")["tenants"]["small"]
    assert small["requests"] - before == HOARDERS, "every one of them was served in the end"
    assert small["deferred"]["over-quota"] > 0


def test_a_request_that_can_never_fit_its_share_is_refused_at_once(governed: LocalEngine):
    answer = governed.ask([(7 * at) % 480 + 20 for at in range(int(SMALL_CAP * BLOCKS + 1) * BLOCK)], tenant="small")
    assert answer.tokens == []
    assert answer.reason in ("error", "abort")
    assert governed.ask([21, 22, 23], tenant="small").reason == "length"


def test_a_client_that_leaves_takes_its_request_along(governed: LocalEngine):
    running = governed.submit(list(range(60, 200)), tenant="leaver", max_tokens=300)
    waiting = [governed.submit(list(range(60 + n, 200)), tenant="small", max_tokens=130) for n in range(4)]
    for _ in range(10):
        governed.step()
    governed.abort(running, *waiting)
    governed.finish()
    queues = governed.probe("requests")
    assert queues == {"running": [], "waiting": [], "skipped": []}
    assert governed.governance("stats")["running"] == 0
    assert governed.governance("check") == []
