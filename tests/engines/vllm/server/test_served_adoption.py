"""`vllm serve` is adopted under load, without a restart: monitored, a canary, enforced, and backed out of.

- Sixteen conversations of four tenants run at once over loopback, in every phase and while every order is followed.
- No request fails, and what was foreseen while all were monitored is, within 2 %, what enforcing then gives.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from random import Random
from threading import Barrier

import pytest

from standins.engines.vllm.deployment import Deployment, Desk
from standins.engines.vllm.http_server import HttpServer
from standins.engines.vllm.local_engine import BLOCK

TENANTS = ("red", "green", "blue", "secret")  # `secret` is of a class of which nothing is reused
USERS = 4
TURNS = 6
AT_ONCE = len(TENANTS) * USERS
FLAGS = ("--num-gpu-blocks-override", "512", "--max-num-seqs", "16", "--max-num-batched-tokens", "4096")


@pytest.fixture(scope="module")
def adopted(
    model: Path,
    site: Sequence[str],
    new_deployment: Callable[..., Deployment],
    tmp_path_factory: pytest.TempPathFactory,
) -> Iterator[tuple[HttpServer, Desk]]:
    """A governed server that may be monitored."""
    folder = tmp_path_factory.mktemp("adopted")
    deployment = new_deployment(monitoring="allowed")
    for tenant in TENANTS:
        deployment.api_key(tenant)
    server = HttpServer(model, site, folder, deployment=deployment, flags=FLAGS)
    try:
        yield server.wait(), Desk(deployment, folder)
    finally:
        server.close()


def serve(server: HttpServer, seed: int, halfway: Callable[[], None] = lambda: None) -> Counter[str]:
    """All conversations at once, each turn by turn; cached tokens by tenant. `halfway`: while they run."""
    middle = Barrier(AT_ONCE + 1, timeout=300)
    system = [Random(seed).randrange(20, 500) for _ in range(3 * BLOCK)]

    def converse(place: int) -> tuple[str, int, int]:
        tenant, user = TENANTS[place % len(TENANTS)], f"u{place // len(TENANTS)}"
        random = Random(seed * 1_000 + place)
        said, cached, served = list(system), 0, 0
        for turn in range(TURNS):
            said += [random.randrange(20, 500) for _ in range(random.randrange(15, 45))]
            body = {"prompt": [*said, 17], "max_tokens": 4, "temperature": 0, "ignore_eos": True}
            if turn == TURNS // 2:
                middle.wait()
            reply = server.post("/v1/completions", body, tenant=tenant, **{"x-kvcustody-subject": user})
            assert reply.status == 200, reply.text[:500]
            assert [one["finish_reason"] for one in reply.json["choices"]] == ["length"]
            cached += reply.cached_tokens
            served += 1
        return tenant, cached, served

    with ThreadPoolExecutor(AT_ONCE) as clients:
        running = [clients.submit(converse, place) for place in range(AT_ONCE)]
        try:
            middle.wait()
            halfway()
            done = [one.result() for one in running]
        finally:
            middle.abort()
    assert sum(served for *_, served in done) == AT_ONCE * TURNS, "0 failed"
    found: Counter[str] = Counter()
    for tenant, cached, _ in done:
        found[tenant] += cached
    return found


def test_sixteen_at_once_are_monitored_tried_enforced_and_monitored_again(
    adopted: tuple[HttpServer, Desk],
) -> None:
    server, desk = adopted
    requests = AT_ONCE * TURNS
    serve(server, 1, lambda: desk.order("monitor"))  # from the engine's start on everything is enforced
    desk.await_mode("monitor")
    before = len(desk.bodies("request-monitored"))

    reused = serve(server, 2)
    foreseen = desk.await_leaves("request-monitored", before + requests)[before:]
    assert reused["secret"] > 0, "nothing is enforced"
    assert reused.total() == sum(one["reused_tokens"] for one in foreseen)
    would_deny = Counter(one["tenant"] for one in foreseen if one["effect"] == "would-deny")
    assert would_deny["secret"] == USERS * TURNS
    predicted: Counter[str] = Counter()
    for one in foreseen:
        predicted[one["tenant"]] += one["forecast_tokens"]

    serve(server, 3, lambda: desk.order("canary", ("green",), "25%"))
    desk.await_mode("canary")
    edge = desk.bodies("enforcement-changed")[-1]["at_us"]
    known = len(desk.bodies("request-monitored"))
    serve(server, 4)
    desk.await_leaves("request-monitored", known + 1)
    watched = {one["tenant"] for one in desk.bodies("request-monitored") if one["at_us"] > edge}
    assert watched and "green" not in watched

    serve(server, 5, lambda: desk.order("enforce"))
    desk.await_mode("enforce")
    count = len(desk.bodies("request-monitored"))
    given = serve(server, 2)
    assert len(desk.bodies("request-monitored")) == count, "nobody is monitored"
    off = abs(predicted.total() - given.total()) / given.total()
    print(f"reused {reused.total()}, foreseen {predicted.total()}, given {given.total()}: {off:.2%}")
    assert off <= 0.02, (predicted, given)
    assert given["secret"] == predicted["secret"] == 0

    serve(server, 6, lambda: desk.order("monitor"))  # backing out
    desk.await_mode("monitor")
    assert serve(server, 7)["secret"] > 0, "as before"
    assert [one["mode"] for one in desk.bodies("enforcement-changed")] == [
        "monitor",
        "canary",
        "enforce",
        "monitor",
    ]
