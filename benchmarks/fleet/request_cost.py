"""CPU time of one request to the service, in process: its application is called as a server calls it, without a socket.

    python benchmarks/fleet/request_cost.py [--events 20000] [--requests 400] [--json FILE]

Ten events, what a tenant holds and who one is are asked as a viewer of one tenant; ten events also as an auditor, whose
reads are on record before they are answered. A figure is what the fastest tenth of the requests takes at most.
"""

from __future__ import annotations

import asyncio
import gc
import sys
import tempfile
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

from kvcustody.governance.api.app import create_app
from kvcustody.governance.service.access.roles import Role
from kvcustody.governance.service.service import Service, open_service
from kvcustody.governance.service.settings import ServiceSettings

sys.path.insert(0, str(Path(__file__).resolve().parents[1] / "harness"))
sys.path.insert(0, str(Path(__file__).resolve().parents[1] / "evidence"))

from bench import Bench
from report_time import fill

ASKED = {
    "ten events, a viewer": (Role.TENANT_VIEWER, "/v1/audit/events", b"limit=10"),
    "what a tenant holds, a viewer": (Role.TENANT_VIEWER, "/v1/custody/totals", b""),
    "who one is, a viewer": (Role.TENANT_VIEWER, "/v1/whoami", b""),
    "ten events, an auditor": (Role.AUDITOR, "/v1/audit/events", b"limit=10"),
}


async def answered(app: Callable[..., Any], path: str, query: bytes, key: str) -> int:
    """The status of one GET."""
    scope = {
        "type": "http",
        "asgi": {"version": "3.0"},
        "http_version": "1.1",
        "method": "GET",
        "scheme": "http",
        "path": path,
        "raw_path": path.encode(),
        "query_string": query,
        "root_path": "",
        "client": ("127.0.0.1", 5),
        "server": ("testserver", 80),
        "headers": [(b"host", b"testserver"), (b"authorization", b"Bearer " + key.encode())],
    }
    got: list[dict[str, Any]] = []

    async def receive() -> dict[str, Any]:
        return {"type": "http.request", "body": b"", "more_body": False}

    async def send(message: dict[str, Any]) -> None:
        got.append(message)

    await app(scope, receive, send)
    return int(got[0]["status"])


async def measured(service: Service, requests: int) -> dict[str, float]:
    """Microseconds of CPU of each question."""
    app, keys = create_app(service), {}
    for role in {role for role, _, _ in ASKED.values()}:
        tenant = "tenant-0" if role is Role.TENANT_VIEWER else None
        service.principals.enrol(role.value, [role], tenant=tenant, by="benchmark")
        keys[role] = service.principals.issue_key(role.value, days=1, by="benchmark").key
    figures = {}
    for name, (role, path, query) in ASKED.items():
        took = []
        for number in range(requests + 20):
            if number == 20:
                gc.collect()
            began = time.process_time()
            status = await answered(app, path, query, keys[role])
            took.append(time.process_time() - began)
            assert status == 200, (name, status)
        figures[name] = sorted(took[20:])[requests // 10] * 1e6
    return figures


def main() -> None:
    """Print one JSON object."""
    bench = Bench(__doc__, "pydantic", "starlette")
    bench.add("--events", type=int, default=20_000)
    bench.add("--requests", type=int, default=400)
    options = bench.parse()
    with tempfile.TemporaryDirectory() as folder:
        path = Path(folder, "ledger.db")
        fill(path, options.events)
        settings = ServiceSettings(
            database_url=f"sqlite:///{path}",
            state_path=Path(folder) / "state",
            listen=f"unix:{folder}/api.sock",
            signing_key_path=Path(folder) / "signing.key",
            checkpoint_seconds=60.0,
            figures_seconds=300.0,
            requests_per_second=100_000.0,
            requests_burst=100_000,
        )
        with open_service(settings) as service:
            found = asyncio.run(measured(service, options.requests))
    bench.keep({"cpu_us": found}, show=True)


if __name__ == "__main__":
    main()
