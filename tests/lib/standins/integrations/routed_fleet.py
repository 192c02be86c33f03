"""A door, a router and several workers in one process, whose receipts go to one ledger; and what a recorder saw.

The door, the workers' own doors, their tokens and Governors are the product's. The router is a stand-in: it sends a
request to the worker that it last sent its namespace to, else to the next one, and says what it expects there.
"""

from __future__ import annotations

import json
import random
from collections.abc import Callable
from pathlib import Path
from typing import Any, NamedTuple

from sqlalchemy import Engine

from kvcustody.allocator.pool.options import PoolOptions
from kvcustody.audit.evidence.routes.route_measures import RouteMeasures
from kvcustody.audit.kinds import IssuerAssigned
from kvcustody.audit.write.event_writer import EventWriter
from kvcustody.clock import VirtualClock
from kvcustody.governance.admission_outcome import Admission
from kvcustody.governance.credentials.scope_token import VerifiedToken
from kvcustody.governance.edge.erase_epochs import EpochTags, EraseEpochs, KnownEpochs
from kvcustody.governance.edge.name_scopes import NameScopes
from kvcustody.governance.governor.governor import Governor
from kvcustody.integrations.door.door_metrics import DoorMetrics
from kvcustody.integrations.door.route_receipts import DoorReceipts
from kvcustody.integrations.identity.identity_document import load_identity
from kvcustody.integrations.identity.request_gate import RequestGate
from kvcustody.integrations.identity.request_headers import WORKER_HEADER
from kvcustody.policies.document.model import Policy
from kvcustody.policies.reading.load_policy import load_policy
from kvcustody.policies.table.compile import compile_policy
from standins import builders
from standins.integrations.door_world import Signers, secret
from standins.integrations.fleet_edge import FleetEdge, WorkerDoor

BLOCK = 16
SHARED_TOKENS = 64
PROMISED, SCORE = "x-kvcustody-promised-tokens", "x-kvcustody-score"
Rule = Callable[[str, int], int]

_DIGITS = 9  # of a quotient: its last bit depends on the order of the arithmetic


class Seen(NamedTuple):
    """What the recorder saw of one request."""

    receipt: str
    tenant: str
    worker: str
    prompt_tokens: int
    found_tokens: int
    queue: int
    promised: int | None
    at_us: int


class Worker:
    """One worker: its own door, its verifier and its Governor, and how many requests it runs."""

    def __init__(self, fleet: FleetEdge, name: str, governor: Governor, writer: EventWriter, running_max: int) -> None:
        self.name, self.governor, self.writer, self.running_max = name, governor, writer, running_max
        self.door = WorkerDoor(fleet.folder, "schema: kvcustody/identity@1\ndoors: {keys: doors.vkeys}\n", fleet.clock)
        document = load_identity(fleet.folder / "worker.yaml")
        self.door.gate = RequestGate(document, fleet.folder, secret(), fleet.clock, worker=name)
        self.running: list[Any] = []
        self.known: dict[str, int] = {}  # tokens by namespace, as a router believes


class RoutedFleet:
    """See the module; `share` of requests, as policies write it, have a receipt. `more`: of the policy."""

    def __init__(
        self,
        folder: Path,
        signers: Signers,
        store: Engine,
        model: Any,
        *,
        workers: int = 3,
        share: str = "all",
        more: str = "",
        seed: int = 1,
        utc_us: int = 0,
    ) -> None:
        self.random = random.Random(seed)
        text = builders.policy(
            ("acme", "globex", "initech"),
            scope="subject",
            more=f"{more}route_receipts: {{default: {share}}}\n",
        )
        policy = load_policy(text, name="fleet.yaml")
        known = KnownEpochs(EraseEpochs(), EpochTags(bytes(32)), scopes=NameScopes.of_policies([policy]))
        self.metrics = DoorMetrics()
        clock = VirtualClock(utc_us=utc_us) if utc_us else None
        self.edge = FleetEdge(folder, signers, clock=clock, epochs=lambda: known, scopes=None, retries=2)
        self.clock, self.model, self.store = self.edge.clock, model, store
        self.door = builders.writer(store, folder / "spill-door", worker="door-1", clock=self.clock)
        self.door.submit_durable(IssuerAssigned(self.clock.now_us(), "api-keys", "bare", "test"))
        self.receipts = DoorReceipts(self.door, self.clock, self.metrics, look_seconds=0.01)
        self.edge.edge._receipts = self.receipts
        self.workers = [self._worker(folder, f"gpu-{number}", policy) for number in range(workers)]
        self.seen: list[Seen] = []
        self.homes: dict[str, int] = {}
        self._asked = 0

    def _worker(self, folder: Path, name: str, policy: Policy) -> Worker:
        writer = builders.writer(self.store, folder / f"spill-{name}", worker=name, clock=self.clock)
        options = PoolOptions(block_tokens=BLOCK)
        table = compile_policy(policy, revision=1)
        governor = builders.governor(table, self.clock, ledger=writer, blocks=2048, options=options)
        return Worker(self.edge, name, governor, writer, self.random.randint(1, 6))

    def ask(self, key: str, subject: str, tenant: str, words: int, *, status: int = 200, mute: str = "") -> Seen | None:
        """One request through door, router and worker; `mute`: whose half is not written, `door` or `worker`."""
        self.clock.advance(self.random.randint(500, 20_000))
        self._asked += 1
        headers = {"x-request-id": f"r{self._asked}", "x-kvcustody-subject": subject}
        forwarded = self.edge.send(key, {"prompt": f"{subject} {words}"}, headers).forwarded
        namespace = json.loads(forwarded.body or b"{}")["cache_salt"]
        place = self.homes.setdefault(namespace, self._asked % len(self.workers))
        if self.random.random() < 0.2:  # a router also looks at load
            place = self.homes[namespace] = self.random.randrange(len(self.workers))
        worker = self.workers[place]
        promised = worker.known.get(namespace, 0)
        if status != 200:
            if forwarded.receipt is not None:
                forwarded.receipt.answered(status, ())
            return None
        reply = worker.door.ask(forwarded)
        verified = worker.door.verify(reply.passed.json)
        assert isinstance(verified, VerifiedToken), verified
        assert verified.hints.receipt is not None
        seed = sum(map(ord, subject + tenant))
        tokens = [(seed * 7919 + place_ * 31) % 30_000 for place_ in range(SHARED_TOKENS + words)]
        queue = len(worker.running)
        hints = verified.hints._replace(receipt=None) if mute == "worker" else verified.hints
        outcome = worker.governor.admit(verified.principal, self.model, tokens, hints=hints, request_id=self._asked)
        assert isinstance(outcome, Admission), outcome
        at_us = self.clock.utc_us()
        worker.governor.commit([outcome.request_id], [len(tokens)])
        worker.running.append(outcome.request_id)
        if len(worker.running) > worker.running_max:
            worker.governor.release(worker.running.pop(0))
        worker.governor.step()
        worker.known[namespace] = len(tokens) // BLOCK * BLOCK - BLOCK
        told = [(name, value.encode()) for name, value in reply.headers.items()]
        told += [(PROMISED, b"%d" % promised), (SCORE, b"%.3f" % (promised / len(tokens)))]
        if forwarded.receipt is not None and mute != "door":
            forwarded.receipt.answered(200, told)
        assert reply.headers[WORKER_HEADER] == worker.name
        seen = Seen(
            verified.hints.receipt.name,
            tenant,
            worker.name,
            len(tokens),
            outcome.hit_tokens,
            queue,
            promised,
            at_us,
        )
        self.seen.append(seen)
        return seen

    def run(self, requests: int) -> None:
        """So many requests of eight subjects of two tenants, conversations that grow."""
        lengths: dict[str, int] = {}
        for _ in range(requests):
            tenant = self.random.choice(("acme", "globex"))
            subject = f"{tenant}-{self.random.randrange(4)}"
            lengths[subject] = lengths.get(subject, 0) + self.random.randint(1, 12)
            if lengths[subject] > 90:  # a new conversation, of which the router expects as much as of the last
                lengths[subject] = 1
            key = self.edge.clients.acme if tenant == "acme" else self.edge.clients.globex
            self.ask(key, subject, tenant, lengths[subject])

    def close(self) -> None:
        """Everything is in the ledger, and every process has ended."""
        self.receipts.close()
        for worker in self.workers:
            while worker.running:
                worker.governor.release(worker.running.pop(0))
            worker.governor.step()
        for writer in (self.door, *(worker.writer for worker in self.workers)):
            assert writer.flush(60)
            writer.close(60)


class Truth(NamedTuple):
    """The figures that follow from what the recorder saw, in plain arithmetic."""

    requests: int
    prompt_tokens: int
    found_tokens: int
    promised_tokens: int
    stale_misses: int
    stale_tokens: int
    queue_deltas: int
    queue_delta_mean: float | None
    queue_delta_most: int | None
    imbalance: float
    by_worker: dict[str, tuple[int, int, int]]
    by_tenant: dict[str, tuple[int, int, int]]


def figures_of(measures: RouteMeasures) -> Truth:
    """Those that the recorder has, too, as they follow from the ledger."""
    return Truth(
        measures.requests,
        measures.prompt_tokens,
        measures.found_tokens,
        measures.promised_tokens,
        measures.stale_misses,
        measures.stale_tokens,
        measures.queue_deltas,
        measures.queue_delta_mean,
        measures.queue_delta_most,
        round(measures.imbalance or 0, _DIGITS),
        {one.worker: one[1:4] for one in measures.workers},
        {one.tenant: one[1:4] for one in measures.tenants},
    )


def truth_of(seen: list[Seen]) -> Truth:
    """What routing was, as the recorder saw it."""
    short = [(one.promised or 0) - one.found_tokens for one in seen if one.found_tokens < (one.promised or 0)]
    deltas, last = [], dict[str, Seen]()
    for one in sorted(seen, key=lambda each: each.at_us):
        near = [o.queue for o in last.values() if o.worker != one.worker and one.at_us - o.at_us <= 60_000_000]
        if near:
            deltas.append(one.queue - min(near))
        last[one.worker] = one

    def sums(of: str) -> dict[str, tuple[int, int, int]]:
        names = sorted({getattr(one, of) for one in seen})
        some = {name: [one for one in seen if getattr(one, of) == name] for name in names}
        return {
            name: (len(own), sum(one.prompt_tokens for one in own), sum(one.found_tokens for one in own))
            for name, own in some.items()
        }

    by_worker = sums("worker")
    counts = [requests for requests, _, _ in by_worker.values()]
    return Truth(
        len(seen),
        sum(one.prompt_tokens for one in seen),
        sum(one.found_tokens for one in seen),
        sum(one.promised or 0 for one in seen),
        len(short),
        sum(short),
        len(deltas),
        sum(deltas) / len(deltas) if deltas else None,
        max(deltas, default=None),
        round(max(counts) * len(counts) / sum(counts), _DIGITS),
        by_worker,
        sums("tenant"),
    )
