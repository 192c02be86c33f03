"""Route receipts behind a real router: the door as a proxy, the router, and workers that record and govern.

    python benchmarks/fleet/routers/receipts_behind_router.py smg --json benchmarks/results/route-receipts-smg.json

Door and workers are in this process, over HTTP; the router is a process of its own. Each figure of the ledger is held
against what the workers recorded. Exit status 1 where one differs.
"""

from __future__ import annotations

import asyncio
import contextlib
import json
import random
import subprocess
import sys
import tempfile
from collections.abc import AsyncIterator
from pathlib import Path
from typing import Any

import httpx

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))
sys.path.insert(0, str(Path(__file__).resolve().parents[2] / "harness"))
sys.path.insert(0, str(Path(__file__).resolve().parents[3] / "tests" / "lib"))

from bench import Bench
from recording_worker import CHAT, RecordingWorker
from route_receipts import EVER
from running_router import environment_of, version_of

from kvcustody.audit.evidence.routes.route_measures import measure
from kvcustody.audit.evidence.routes.route_receipts import by_problem, read_routes
from kvcustody.audit.store.database.engine import open_store
from kvcustody.governance.admission_outcome import Admission
from kvcustody.governance.credentials.scope_token import VerifiedToken
from kvcustody.integrations.door.envoy_configuration import ListenPlace
from kvcustody.integrations.door.reverse_proxy import ReverseProxy
from kvcustody.integrations.door.server import served
from kvcustody.integrations.identity.middleware import IdentityMiddleware, read_body
from kvcustody.integrations.identity.request_headers import RequestHeaders
from kvcustody.lab.fleet.local_processes import free_ports
from kvcustody.lab.fleet.router_programs import ROUTERS, router_command
from kvcustody.migrations.upgrade import upgrade
from standins.integrations.door_world import make_signers
from standins.integrations.routed_fleet import RoutedFleet, Seen, Truth, Worker, figures_of, truth_of
from standins.redteam.two_worlds import model

AT_ONCE, TENANTS = 8, ("acme", "globex")
START_SECONDS = 60


class GovernedWorker:
    """An engine's server without a model: its own door and Governor before what a router asks beside completions."""

    def __init__(self, fleet: RoutedFleet, worker: Worker) -> None:
        self._fleet, self._worker = fleet, worker
        self._else = RecordingWorker(worker.name).application()
        self._door = IdentityMiddleware(self._complete, worker.door.gate)

    async def __call__(self, scope: Any, receive: Any, send: Any) -> None:
        """Handle one ASGI connection."""
        await (self._door if scope.get("path") == CHAT else self._else)(scope, receive, send)

    async def _complete(self, scope: Any, receive: Any, send: Any) -> None:
        body = json.loads(await read_body(RequestHeaders(scope["headers"]), receive, 1 << 20))
        self._admit(body)
        message = {"role": "assistant", "content": self._worker.name}
        answer = {
            "id": "c1", "object": "chat.completion", "created": 1, "model": "toy",
            "choices": [{"index": 0, "message": message, "finish_reason": "stop"}],
            "usage": {"prompt_tokens": 1, "completion_tokens": 1, "total_tokens": 2},
        }  # fmt: skip
        headers = [(b"content-type", b"application/json")]
        await send({"type": "http.response.start", "status": 200, "headers": headers})
        await send({"type": "http.response.body", "body": json.dumps(answer).encode()})

    def _admit(self, body: dict[str, Any]) -> None:
        fleet, worker = self._fleet, self._worker
        fleet.clock.advance(1000)
        verified = worker.door.verify(body)
        assert isinstance(verified, VerifiedToken), verified
        assert verified.hints.receipt is not None
        tokens = list(map(ord, body["messages"][0]["content"]))
        queue, name = len(worker.running), verified.hints.receipt.name
        outcome = worker.governor.admit(verified.principal, fleet.model, tokens, hints=verified.hints, request_id=name)
        assert isinstance(outcome, Admission), outcome
        seen = (len(tokens), outcome.hit_tokens, queue, None, fleet.clock.utc_us())
        fleet.seen.append(Seen(name, verified.principal.tenant, worker.name, *seen))
        worker.governor.commit([outcome.request_id], [len(tokens)])
        worker.running.append(outcome.request_id)
        if len(worker.running) > worker.running_max:
            worker.governor.release(worker.running.pop(0))
        worker.governor.step()


@contextlib.asynccontextmanager
async def routed(name: str, fleet: RoutedFleet, log: Any) -> AsyncIterator[str]:
    """The door's address, before the router over the fleet's workers."""
    ports = free_ports(3 + len(fleet.workers))
    async with contextlib.AsyncExitStack() as stack:
        urls = []
        for port, worker in zip(ports[3:], fleet.workers, strict=True):
            await stack.enter_async_context(served(GovernedWorker(fleet, worker), ListenPlace("127.0.0.1", port)))
            urls.append(f"http://127.0.0.1:{port}")
        program = environment_of(name) / "bin" / ROUTERS[name].program
        command = router_command(name, program, urls, port=ports[0], metrics_port=ports[1])
        process = await asyncio.create_subprocess_exec(*command, stdout=log, stderr=subprocess.STDOUT)
        stack.push_async_callback(process.wait)
        stack.callback(process.terminate)
        base = f"http://127.0.0.1:{ports[0]}"
        client = await stack.enter_async_context(httpx.AsyncClient(base_url=base, timeout=60))
        proxy = ReverseProxy(fleet.edge.edge, client, body_bytes_max=1 << 20, under_way_bytes_max=1 << 26)
        await stack.enter_async_context(served(proxy, ListenPlace("127.0.0.1", ports[2])))
        yield f"http://127.0.0.1:{ports[2]}"


async def ask_all(name: str, fleet: RoutedFleet, requests: int, log: Any) -> None:
    """Conversations of eight subjects of two tenants, some requests at once."""
    draw = random.Random(7)
    keys = {"acme": fleet.edge.clients.acme, "globex": fleet.edge.clients.globex}
    async with routed(name, fleet, log) as url, httpx.AsyncClient(base_url=url, timeout=60) as client:

        async def ask(number: int, tenant: str, subject: str, length: int) -> int:
            headers = {
                "authorization": f"Bearer {keys[tenant]}",
                "x-kvcustody-subject": subject,
                "x-request-id": f"r{number}",
            }
            text = (f"{subject} asks this. " * 60)[: 64 + length]
            body = {"model": "toy", "messages": [{"role": "user", "content": text}], "max_tokens": 1}
            return (await client.post(CHAT, json=body, headers=headers)).status_code

        async with asyncio.timeout(START_SECONDS):
            while await ask(0, "acme", "first", 1) != 200:
                await asyncio.sleep(0.2)
        lengths: dict[str, int] = {}
        for start in range(1, requests, AT_ONCE):
            some = []
            for number in range(start, min(start + AT_ONCE, requests)):
                tenant = draw.choice(TENANTS)
                subject = f"{tenant}-{draw.randrange(4)}"
                lengths[subject] = (lengths.get(subject, 0) + draw.randint(1, 12)) % 400
                some.append(ask(number, tenant, subject, lengths[subject]))
            statuses = await asyncio.gather(*some)
            assert set(statuses) == {200}, statuses


def main() -> None:
    """Print one JSON object; exit status 1 where a figure differs."""
    bench = Bench(__doc__, "httpx", "starlette")
    bench.add("router", choices=("smg", "vllm-router"))
    bench.add("--requests", type=int, default=10_000)
    bench.add("--workers", type=int, default=4)
    options = bench.parse()
    with tempfile.TemporaryDirectory() as place, tempfile.TemporaryFile() as log:
        folder = Path(place)
        store = open_store(folder / "ledger.db")
        upgrade(store)
        fleet = RoutedFleet(folder, make_signers(), store, model(), workers=options.workers)
        asyncio.run(ask_all(options.router, fleet, options.requests, log))
        fleet.close()
        with store.connect() as connection:
            routes = read_routes(connection, EVER, now_us=1 << 60)
        store.dispose()
    measures, whole = measure(routes.receipts), truth_of(fleet.seen)
    seen = figures_of(measures)
    differing = [name for name in Truth._fields if getattr(seen, name) != getattr(whole, name)]
    targets = {one.sent.target for one in routes.receipts if one.sent is not None}
    figures = {
        "router": options.router,
        "version": version_of(environment_of(options.router), options.router),
        "requests": len(fleet.seen),
        "workers": options.workers,
        "receipts": len(routes.receipts),
        "figures_that_differ": differing,
        "locality": measures.locality,
        "hit_length": measures.hit_length,
        "queue_delta_mean": measures.queue_delta_mean,
        "imbalance": measures.imbalance,
        "targets_told": len(targets - {""}),
        "findings": {name: number for name, number in by_problem(routes.findings).items() if number},
    }
    bench.keep(figures, show=True)
    if differing or len(routes.receipts) < options.requests:
        raise SystemExit(f"not as it must be: {differing}")


if __name__ == "__main__":
    main()
