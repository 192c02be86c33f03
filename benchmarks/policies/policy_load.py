"""Does one author's work on a large policy slow anybody else? `prove`, `review`, `diff` and `simulate`, beside others.

The service runs as a process of its own on a Unix socket, as in `service.py`. An auditor asks 200 times a second, open
loop: request n is sent at n/rate and its latency counts from then. Of 20 requests, 10 read 50 events of a tenant, 2
list workers, 2 erasures, 1 cases, 1 reports, and 4 ask for capacity, metrics, health, and who asks (`MIXES`). With
`--mix events` all read events. Work on policies is not in it: an explanation waits its turn behind the author's.
Readiness is asked for ten times a second besides. In turns, an author asks for one kind of work on a policy of 1,000
grants and 10,000 tenants, again as soon as it is answered, or for nothing. Reported for each kind, as medians over the
pairs of turns: p99 of the auditor with and without the author, their ratio, the longest answer on readiness, and what
the author's answers took. Goals: the ratio is at most 2, and readiness is answered within 100 ms. Where the machine
does not keep the rate without the author either (`rate_kept_alone`), a row shows nothing of the author: take a lower
`--rate`. Each kind has a service and a ledger of its own. It ends within five minutes. Run:
`python benchmarks/policies/policy_load.py --json benchmarks/results/policy-load-cpu.json` [--pairs 5].
"""

from __future__ import annotations

import argparse
import asyncio
import statistics
import sys
import tempfile
import time
from collections.abc import Awaitable, Callable
from contextlib import suppress
from itertools import cycle
from pathlib import Path
from typing import Any

import orjson

from kvcustody.audit.tlog.signing_key import create_signing_key
from kvcustody.clock import SystemClock
from kvcustody.governance.api.http.server import serve
from kvcustody.governance.observability.logs import configure
from kvcustody.governance.release.release_desk import ReleaseWorkflow
from kvcustody.governance.release.signer import FileSigner
from kvcustody.governance.release.store import SqlStore
from kvcustody.governance.release.trust import read_trust, write_trust
from kvcustody.governance.service.access.roles import Role
from kvcustody.governance.service.service import open_service
from kvcustody.policies.bundle.trust import KeyRole

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))
sys.path.insert(0, str(Path(__file__).resolve().parents[1] / "harness"))

from bench import Bench, frozen, table
from plain_http import PlainClient
from policy import many
from service import START_US, Service, fill, settings

RATE, HEALTH_RATE = 200, 10
KEPT_MS_MAX = 100.0  # median of a rate that is kept
LATE_SECONDS = 3.0
RATIO_MAX, HEALTH_MS_MAX = 2.0, 100.0
KINDS = ("prove", "review", "diff", "simulate")
EVENTS = f"/v1/audit/events?tenant=tenant-7&since={START_US}&until={START_US + 3600 * 1_000_000}&limit=50"
MIXES = {
    "events": (EVENTS,),
    "ordinary": (
        *(EVENTS, "/v1/workers", EVENTS, "/v1/erasures", EVENTS, "/v1/cases", EVENTS, "/v1/capacity"),
        *(EVENTS, "/v1/whoami", EVENTS, "/v1/workers", EVENTS, "/v1/erasures", EVENTS, "/v1/reports"),
        *(EVENTS, "/metrics", EVENTS, "/v1/health"),
    ),
}


def run_service(folder: Path) -> None:
    """The other process: people and one proposal, then serve until SIGTERM."""
    configure("error", "json")
    trust, tenants = folder / "trust.toml", int((folder / "tenants").read_text())
    roles = (KeyRole.AUTHOR, KeyRole.APPROVER, KeyRole.OPERATOR, KeyRole.BREAK_GLASS)
    keys = [create_signing_key(folder / f"{role}.key", role) for role in roles]
    rows = [(str(key.verifier), role, None) for key, role in zip(keys, roles, strict=True)]
    trust.write_text(write_trust("benchmark", rows))
    with open_service(settings(folder).model_copy(update={"policy_trust": trust})) as service:
        people = {"auditor": Role.AUDITOR, "author": Role.AUTHOR}
        made = {}
        for name, role in people.items():
            service.principals.enrol(name, [role], by="benchmark")
            made[name] = service.principals.issue_key(name, days=1, by="benchmark").key
        (folder / "keys.json").write_bytes(orjson.dumps(made))
        workflow = ReleaseWorkflow(
            SqlStore(service.engine), read_trust(trust), clock=SystemClock(), ledger=service.writer
        )
        workflow.propose(document(tenants), FileSigner(keys[0]), note="benchmark")
        serve(service, ready=lambda: print("ready", flush=True))


def document(tenants: int) -> str:
    """A policy of so many tenants, and a grant for every tenth."""
    text = many(tenants)
    lines = text.splitlines()
    first = lines.index("grants:") + 1
    grants = [line for line in lines[first:] if line.startswith("  - {id: g-")]
    kept = set(grants[: tenants // 10])
    return "\n".join(line for line in lines if line not in grants or line in kept) + "\n"


class Author:
    """Asks for one kind of work again and again, until it is told to stop."""

    def __init__(self, client: PlainClient, kind: str, tenants: int) -> None:
        source = document(tenants)
        old = source.replace("at_most: internal", "at_most: public")
        self._client, self._kind = client, kind
        self.seconds: list[float] = []
        self.not_answered = 0
        if kind == "review":
            self._request = ("GET", "/v1/policies/1/review", b"")
        else:
            both = kind != "prove"
            body = {"source": source, **({"old": old} if both else {})}
            self._request = ("POST", f"/v1/policies:{kind}", orjson.dumps(body))

    async def run(self) -> None:
        """Until it is cancelled."""
        while True:
            begun = time.perf_counter()
            answer = await self._client(*self._request, headers="content-type: application/json\r\n")
            self.not_answered += answer.status != 200
            self.seconds.append(time.perf_counter() - begun)


async def steady(ask: Callable[[], Awaitable[int]], rate: float, seconds: float) -> tuple[list[float], int]:
    """(latencies in ms, answers other than 200) of requests at a rate, open loop.

    A machine that cannot keep the rate falls behind without end: what is not answered some seconds after the last
    request was sent is counted with the time that it waited until then.
    """
    waits: list[float] = []
    wrong = 0

    async def one(due: float) -> None:
        nonlocal wrong
        try:
            wrong += await ask() != 200
        finally:
            waits.append(1000 * (time.perf_counter() - due))

    begun, tasks = time.perf_counter(), []
    for number in range(int(rate * seconds)):
        due = begun + number / rate
        await asyncio.sleep(max(0.0, due - time.perf_counter()))
        tasks.append(asyncio.create_task(one(due)))
    done, late = await asyncio.wait(tasks, timeout=LATE_SECONDS)
    for task in late:
        task.cancel()
    await asyncio.gather(*late, return_exceptions=True)
    for task in done:
        task.result()
    return sorted(waits), wrong


async def turn(service: Service, kind: str | None, options: argparse.Namespace) -> dict[str, Any]:
    """One turn: others at work, and the author or nobody beside them."""
    rate, seconds = options.rate, options.seconds
    paths = cycle(MIXES[options.mix])
    async with service.client("auditor") as auditor, service.client("author") as client:

        async def query() -> int:
            return (await auditor("GET", next(paths))).status

        async def health() -> int:
            return (await auditor("GET", "/health/ready")).status

        author = None if kind is None else Author(client, kind, options.tenants)
        await steady(query, rate, 1.0)  # connections and threads are begun
        work = None if author is None else asyncio.create_task(author.run())
        others, healthy = await asyncio.gather(steady(query, rate, seconds), steady(health, HEALTH_RATE, seconds))
        if work is not None:
            work.cancel()
            with suppress(asyncio.CancelledError):
                await work
    waits, wrong = others
    figures = {
        "p50_ms": statistics.median(waits),
        "p99_ms": waits[int(0.99 * (len(waits) - 1))],
        "wrong": wrong,
    }
    figures |= {"health_ms_max": healthy[0][-1], "health_wrong": healthy[1]}
    if author is not None:
        figures |= {"author_seconds": author.seconds, "author_not_answered": author.not_answered}
    return figures


def measured(kind: str, options: argparse.Namespace) -> dict[str, Any]:
    """The row of one kind of work, on a service and a ledger of its own."""
    with tempfile.TemporaryDirectory(prefix="kvcustody-policy-") as text:
        folder, pairs = Path(text), []
        (folder / "tenants").write_text(str(options.tenants))
        fill(folder, options.events)
        service = PolicyService(folder)
        try:
            for number in range(options.pairs):
                order = (None, kind) if number % 2 == 0 else (kind, None)
                with frozen():
                    turns = {who: asyncio.run(turn(service, who, options)) for who in order}
                pairs.append((turns[None], turns[kind]))
        finally:
            service.close()
    return summary(kind, pairs)


def summary(kind: str, pairs: list[tuple[dict[str, Any], dict[str, Any]]]) -> dict[str, Any]:
    """Medians over the pairs; of health the worst."""
    answers = [seconds for _, busy in pairs for seconds in busy["author_seconds"]]
    return {
        "work": kind,
        "p99_alone_ms": round(statistics.median(alone["p99_ms"] for alone, _ in pairs), 2),
        "p99_beside_ms": round(statistics.median(busy["p99_ms"] for _, busy in pairs), 2),
        "rate_kept_alone": all(alone["p50_ms"] <= KEPT_MS_MAX for alone, _ in pairs),
        "ratio": round(statistics.median(busy["p99_ms"] / alone["p99_ms"] for alone, busy in pairs), 2),
        "health_ms_max": round(max(busy["health_ms_max"] for _, busy in pairs), 1),
        "wrong": sum(busy["wrong"] + busy["health_wrong"] + busy["author_not_answered"] for _, busy in pairs),
        "answers": len(answers),
        "answer_s": round(statistics.median(answers), 2) if answers else None,
        "pairs": pairs,
    }


class PolicyService(Service):
    """The service of this benchmark: with an author, and a proposal."""

    script = Path(__file__)


def main() -> int:
    """Measure, print, write; exit 1 with `--strict` where a goal is missed."""
    bench = Bench(__doc__, "kvcustody", "uvicorn", "PyYAML", strict=True)
    bench.add("--serve", type=Path, help="serve this folder (for the benchmark itself)")
    bench.add("--tenants", type=int, default=10_000, help="of the policy; a tenth as many grants")
    bench.add("--events", type=int, default=100_000, help="in the ledger")
    bench.add("--pairs", type=int, default=2, help="turns with and without the author, of each kind")
    bench.add("--seconds", type=float, default=12.0, help="of each turn")
    bench.add("--rate", type=float, default=RATE, help="requests of others a second")
    bench.add("--mix", default="ordinary", choices=MIXES, help="of what others ask for")
    bench.add("--kinds", default=",".join(KINDS), help="of work, with commas")
    options = bench.parse()
    if options.serve is not None:
        run_service(options.serve)
        return 0
    rows = [measured(kind, options) for kind in options.kinds.split(",")]
    names = [name for name in rows[0] if name != "pairs"]
    print(table(names, [[str(row[name]) for name in names] for row in rows]))
    asked = {
        "tenants": options.tenants,
        "grants": options.tenants // 10,
        "rate": options.rate,
        "mix": options.mix,
    }
    bench.keep({"benchmark": "policy_load", "settings": asked, "rows": rows})
    met = all(
        row["rate_kept_alone"]
        and row["ratio"] <= RATIO_MAX
        and row["health_ms_max"] <= HEALTH_MS_MAX
        and not row["wrong"]
        for row in rows
    )
    return bench.status(met)


if __name__ == "__main__":
    sys.exit(main())
