"""What tenants share in the service is divided by party: one tenant's people hold neither every place nor turn."""

from __future__ import annotations

import asyncio
import threading
import time
from collections.abc import Callable
from typing import Any

import pytest

from kvcustody.console.web.app import Console
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
    with pytest.raises(ProblemError, match="too many jobs are waiting"):
        for _ in range(1000):
            start(runner, "greedy", work("greedy"))
            taken += 1
    if divided:
        start(runner, "modest", work("modest"))
        assert taken == jobs._WAITING_MAX // 8
    else:
        with pytest.raises(ProblemError, match="too many jobs are waiting"):
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
        async with httpx.AsyncClient(transport=httpx.ASGITransport(app=app), base_url="http://testserver") as http:

            async def ask(path: str, key: str) -> int:
                return (await http.get(path, headers={"Authorization": f"Bearer {key}"})).status_code

            held = "/v1/audit/stream?begin=newest&wait=30"
            greedy = [asyncio.create_task(ask(held, people["tenant-viewer@acme"])) for _ in range(4)]
            places = 4 // parties
            while sum(task.done() for task in greedy) < 4 - places or app._places.total() < places:
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


Held = list[asyncio.Task[None]]


async def request(
    app: Any, path: str, key: str = "", address: str = "192.0.2.1", *, body: Any = None
) -> tuple[int, bytes]:
    """One request as a server hands it over; `body` None: there is none, else what `receive` waits for."""
    sent: list[dict[str, Any]] = []
    headers = [(b"host", b"testserver")] + ([(b"authorization", b"Bearer " + key.encode())] if key else [])
    if body is not None:
        headers += [(b"content-length", b"10"), (b"content-type", b"application/x-www-form-urlencoded")]
    scope = {
        "type": "http", "method": "GET" if body is None else "POST", "path": path, "raw_path": path.encode(),
        "query_string": b"", "headers": headers, "client": (address, 1), "server": ("testserver", 80),
        "scheme": "http", "http_version": "1.1", "root_path": "",
    }  # fmt: skip

    async def receive() -> dict[str, Any]:
        if body is not None:
            await body.wait()
        return {"type": "http.request", "body": b"", "more_body": body is not None}

    async def send(message: dict[str, Any]) -> None:
        sent.append(message)

    await app(scope, receive, send)
    return sent[0]["status"], b"".join(part.get("body", b"") for part in sent[1:])


async def many(make: Callable[[int], Any], count: int, until: Callable[[], bool]) -> Held:
    tasks = [asyncio.create_task(make(number)) for number in range(count)]
    while not until():
        await asyncio.sleep(0.01)
    return tasks


@pytest.mark.parametrize("placed", [False, True], ids=["before", "control"])
def test_a_credential_that_is_being_checked_holds_no_place(
    make_service: Callable[..., Service],
    make_people: Callable[[Service], Any],
    monkeypatch: pytest.MonkeyPatch,
    placed: bool,
) -> None:
    """Eight checks hang; of four places none is taken by them. The control: a place before the check."""
    service = make_service(running_requests_max=4)
    people = make_people(service)
    app = create_app(service)
    go, checking, key = threading.Event(), [0], people["tenant-viewer@labs"]
    real = service.authenticator.caller
    if placed:
        authenticate = gate.Gate._authenticate

        async def holding(self: gate.Gate, exchange: Any, *more: Any) -> Caller:
            with self._place_of(Caller(str(id(exchange)), frozenset(), None, "key"), ""):
                return await authenticate(self, exchange, *more)

        monkeypatch.setattr(gate.Gate, "_authenticate", holding)

    def slow(authorization: str | None, *more: Any) -> Caller:
        if authorization != f"Bearer {key}":
            checking[0] += 1
            go.wait(30)
        return real(authorization, *more)

    async def main() -> int:
        assert (await request(app, "/v1/custody/live", key))[0] == 200  # known from here on, as a client at work is
        monkeypatch.setattr(service.authenticator, "caller", slow)
        held = await many(
            lambda number: request(app, "/v1/custody/live", f"kvc_wrong{number}"),
            8,
            lambda: checking[0] >= (4 if placed else 8),
        )
        status, _ = await request(app, "/v1/custody/live", key)
        go.set()
        assert {status for status, _ in await asyncio.gather(*held)} <= {401, 429, 503}
        return status

    assert asyncio.run(main()) == (503 if placed else 200)


@pytest.mark.parametrize("shared", [False, True], ids=["apart", "control"])
def test_requests_without_a_credential_take_no_callers_place_and_no_other_addresses(
    make_service: Callable[..., Service],
    make_people: Callable[[Service], Any],
    monkeypatch: pytest.MonkeyPatch,
    shared: bool,
) -> None:
    """Sign-ins whose bodies never end: of 64 places 16 are for whoever shows no credential, four for an address."""
    service = make_service(running_requests_max=64)
    people = make_people(service)
    app = create_app(service, pages=Console(service))
    if shared:
        place_of = gate.Gate._place_of
        nobody = Caller("nobody", frozenset(), "labs", "key")  # as if of a party
        monkeypatch.setattr(gate.Gate, "_place_of", lambda self, caller, address: place_of(self, caller or nobody, ""))

    async def main() -> tuple[int, int, int, int]:
        go = asyncio.Event()
        counted = app._places if shared else app._strangers
        held = await many(
            lambda number: request(app, "/console/login", body=go),
            20,
            lambda: counted.total() >= (16 if shared else 4),
        )
        await asyncio.sleep(0.1)
        refused = sum(task.done() for task in held)
        other, _ = await request(app, "/health/live", address="192.0.2.2")
        own, _ = await request(app, "/health/live", address="192.0.2.1")
        caller, _ = await request(app, "/v1/custody/live", people["tenant-viewer@labs"], "192.0.2.1")
        for task in held:
            task.cancel()
        await asyncio.gather(*held, return_exceptions=True)
        return refused, other, own, caller

    if shared:
        assert asyncio.run(main()) == (4, 503, 503, 503), "void: they hold what is a caller's"
    else:
        assert asyncio.run(main()) == (16, 200, 503, 200)
