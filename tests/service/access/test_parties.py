"""What tenants share in the service is divided by party: one tenant's people hold neither every place nor turn."""

from __future__ import annotations

import asyncio
import threading
import time
from collections.abc import Callable
from typing import Any

import pytest

from kvcustody.governance.api.app import create_app
from kvcustody.governance.api.http import gate
from kvcustody.governance.service import jobs
from kvcustody.governance.service.access.caller import Caller
from kvcustody.governance.service.access.roles import Role
from kvcustody.governance.service.jobs import JobProgress, JobRunner
from kvcustody.governance.service.problem_details import ProblemError
from kvcustody.governance.service.service import Service


def start(runner: JobRunner, party: str, work: Callable[[JobProgress], dict[str, Any]]) -> None:
    runner.start("test", work, principal="somebody", tenant=None, parameters={}, party=party)


def test_a_party_is_a_tenants_people_or_one_of_no_tenant() -> None:
    def party(name: str, tenant: str | None) -> str:
        return Caller(name, frozenset({Role.AUDITOR}), tenant, "key").party

    assert party("ann", "acme") == party("bob", "acme") != party("bob", "acme^partner")
    assert party("ann", None) != party("bob", None) and party("acme", None) != party("ann", "acme")


@pytest.mark.parametrize("divided", [True, False])
def test_one_partys_jobs_keep_no_other_from_being_taken_or_next(
    make_service: Callable[..., Service], monkeypatch: pytest.MonkeyPatch, divided: bool
) -> None:
    if not divided:  # the control: one queue for all
        monkeypatch.setattr(jobs, "_WAITING_MAX_OF_PARTY", jobs._WAITING_MAX)
    runner = make_service().jobs
    begun, go, order = threading.Event(), threading.Event(), list[str]()

    def first(progress: JobProgress) -> dict[str, Any]:
        begun.set()
        go.wait(30)
        return {}

    def work(party: str) -> Callable[[JobProgress], dict[str, Any]]:
        return lambda progress: order.append(party) or {}  # type: ignore[func-returns-value]

    start(runner, "greedy", first)
    assert begun.wait(30)
    taken = 0
    with pytest.raises(ProblemError, match="too many jobs wait"):
        for _ in range(1000):
            start(runner, "greedy", work("greedy"))
            taken += 1
    if divided:
        start(runner, "modest", work("modest"))
        assert taken == jobs._WAITING_MAX // 8
    else:
        with pytest.raises(ProblemError, match="too many jobs wait"):
            start(runner, "modest", work("modest"))
    go.set()
    until = time.monotonic() + 30
    while len(order) < taken + divided and time.monotonic() < until:
        time.sleep(0.01)
    assert order.count("greedy") == taken
    if divided:
        assert order.index("modest") <= 1, "parties take turns"


@pytest.mark.parametrize("parties", [gate._PARTIES, 1])
def test_one_partys_open_requests_keep_no_other_out(
    make_service: Callable[..., Service],
    make_people: Callable[[Service], Any],
    monkeypatch: pytest.MonkeyPatch,
    parties: int,
) -> None:
    """A page of the stream is held open; of four places one is a tenant's to hold."""
    monkeypatch.setattr(gate, "_PARTIES", parties)
    service = make_service(running_requests_max=4)
    people = make_people(service)
    app = create_app(service)
    import httpx

    async def main() -> tuple[list[int], int]:
        async with httpx.AsyncClient(
            transport=httpx.ASGITransport(app=app), base_url="http://testserver"
        ) as http:

            async def ask(path: str, key: str) -> int:
                return (await http.get(path, headers={"Authorization": f"Bearer {key}"})).status_code

            held = "/v1/audit/stream?begin=newest&wait=30"
            greedy = [asyncio.create_task(ask(held, people["tenant-viewer@acme"])) for _ in range(4)]
            places = 4 // parties
            while sum(task.done() for task in greedy) < 4 - places or app._of_party.total() < places:
                await asyncio.sleep(0.01)
            modest = await ask("/v1/custody/live", people["tenant-viewer@labs"])
            for task in greedy:
                task.cancel()
            ended = await asyncio.gather(*greedy, return_exceptions=True)
            return [one for one in ended if isinstance(one, int)], modest

    for name in ("tenant-viewer@acme", "tenant-viewer@labs"):
        assert people[name]
    held, modest = asyncio.run(main())
    if parties == 1:
        assert (held, modest) == ([], 503), "void: undivided, one tenant holds every place"
    else:
        assert (held, modest) == ([503] * 3, 200)
