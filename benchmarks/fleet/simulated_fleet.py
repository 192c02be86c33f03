"""Simulated workers of a fleet, and control planes that are processes of their own.

1. A worker's requests are leaves as its writer encodes them: an opening, and what the same step released, ended and
   wiped of that tenant as one leaf. Times, blocks and generations go on from batch to batch.
2. Leaves are made before they are sent (as other machines would). They are there at a given rate, a group of requests
   after the other, and are handed in over HTTP as a worker's writer does: what is there as one batch, up to as many
   leaves as it takes, then what has come meanwhile. A connection is kept by each worker.
"""

from __future__ import annotations

import multiprocessing
import os
import random
import signal
import socket
import threading
import time
import uuid
from bisect import bisect_right
from collections.abc import Sequence
from functools import partial
from multiprocessing.connection import Connection
from pathlib import Path
from typing import NamedTuple

import numpy as np
from service_restart import until_taken

from kvcustody.audit.evidence.subjects.pseudonym_directory import SubjectDirectory
from kvcustody.audit.kinds import (
    CustodyChanged,
    CustodyEnded,
    Event,
    KeyEvent,
    ReceiptRecorded,
    ResidencyOpened,
    ResidencyReleased,
    WorkerStarted,
)
from kvcustody.audit.kinds.block_runs import Run
from kvcustody.audit.leaf import Context
from kvcustody.audit.leaf.batch_encoder import BatchEncoder
from kvcustody.audit.write.compression import ENCODING, compress
from kvcustody.audit.write.event_writer import WriterSettings
from kvcustody.governance.api.http.server import serve
from kvcustody.governance.control_plane.connection import ControlPlaneConnection
from kvcustody.governance.service.access.roles import Role
from kvcustody.governance.service.ingest.check_leaves import Name, write_batch
from kvcustody.governance.service.service import open_service
from kvcustody.governance.service.settings import ServiceSettings

LEAVES_A_REQUEST = 2
BATCH_LEAVES = 4000  # at once, of a writer that is behind
RARE_KIND, RARE = "key-event", 0.002  # of groups: something to look for over all tenants
_INTERVAL_SECONDS = WriterSettings().interval_seconds
_MEDIA = "application/x-ndjson"
_BLOCKS, _BLOCK_BYTES = 16, 65_536


class _Group(NamedTuple):
    """Requests that are there at once: the first and the last of their leaves, new names, and the leaves."""

    first: int
    last: int
    names: Sequence[Name]
    leaves: list[bytes]


class SimulatedWorker:
    """One process of a worker: makes its leaves, and hands them in."""

    def __init__(self, name: str, number: int, tenants: Sequence[str], seed: int) -> None:
        self.name = name
        self._number = number
        self.incarnation = uuid.uuid4().hex
        self.sequence = 0  # of the last leaf that was made
        self.acknowledged = 0
        self.retries = 0
        self.waits_ms: list[float] = []  # of each group, until it was acknowledged
        self.batches = 0
        self._tenants = self._served = tenants
        self._chance = random.Random(seed)
        self._directory = SubjectDirectory(clear_names=True)
        self.offset_us = time.time_ns() // 1000 - time.monotonic_ns() // 1000
        self._encoder = BatchEncoder(Context(self.incarnation, self.offset_us, self._directory))
        self._residency, self._generation = 0, 1
        self._ready: list[_Group] = []

    def make(self, groups: int, requests: int, planes: int) -> None:
        """So many groups of so many requests each, ready to be sent: anybody's, or of its own one of the `planes`."""
        self._served = self._tenants[self._number % planes :: planes]
        for _ in range(groups):
            events: list[Event] = []
            if not self.sequence:
                events.append(WorkerStarted(_now_us(), self.name, 1 << 20, 1, _BLOCK_BYTES, "cpu", "bench"))
            for _ in range(requests):
                events += self._request()
            if self._chance.random() < RARE:
                events.append(KeyEvent(_now_us(), self._chance.choice(self._served), "made", 1, "bench"))
            first = self.sequence + 1
            data = self._encoder.encode(list(enumerate(events, first))).batch.data
            names = self._directory.fresh()
            self._directory.settle(names)
            self.sequence += len(events)
            self._ready.append(_Group(first, self.sequence, names, data))

    def _request(self) -> tuple[Event, Event]:
        self._residency += 1
        now, tenant = _now_us(), self._chance.choice(self._served)
        place = self._chance.randrange((1 << 20) - _BLOCKS)
        runs = (Run(np.arange(place, place + _BLOCKS), self._generation),)
        self._generation += _BLOCKS
        hour = now + 3_600_000_000
        subject, rules = f"user-{self._residency % 31}", ("own-scope",)
        opened = ResidencyOpened(
            *(now, self._residency, tenant, subject, None, False, "internal", (1,), (), rules, 1, hour, runs)
        )
        released = ResidencyReleased(now + 40, self._residency, tenant, "finished", (), 0)
        times = (now + 50, now + 60, now + 50, 1_000_000, hour)
        ended = CustodyEnded(now + 60, tenant, "internal", runs, "expired", *times)
        receipt = ReceiptRecorded(
            *(now + 80, self._residency, 0, tenant, "memset", "cpu:0", _BLOCKS * _BLOCK_BYTES),
            *(now + 65, now + 75, "full", 1.0, _BLOCKS, "ok", runs),
        )
        return opened, CustodyChanged(now + 90, tenant, (released,), (), (ended,), (receipt,))

    def send(self, address: str, key: str, leaves_a_second: float) -> None:
        """All that is ready, as it comes at this rate; returns when it is acknowledged."""
        path = f"/v1/worker/incarnations/{self.incarnation}"
        ready, self._ready = self._ready, []
        with ControlPlaneConnection(address, key, timeout_seconds=60) as connection:
            self.retries += until_taken(lambda: connection.put(path, {"offset_us": self.offset_us}))
            began, done, came = time.perf_counter(), 0, list[float]()
            for group in ready:
                came.append(began + (group.last - ready[0].first + 1) / leaves_a_second)
            while done < len(ready):
                time.sleep(max(0.0, came[done] + _INTERVAL_SECONDS - time.perf_counter()))
                below = min(bisect_right(came, time.perf_counter()), len(ready))
                while ready[below - 1].last - ready[done].first >= BATCH_LEAVES:
                    below -= 1
                some = ready[done:below]
                names = [name for group in some for name in group.names]
                body = compress(write_batch(names, [leaf for group in some for leaf in group.leaves]))
                put = partial(connection.put_bytes, f"{path}/batches/{some[0].first}", body, _MEDIA, encoding=ENCODING)
                self.retries += until_taken(put)
                now = time.perf_counter()
                self.waits_ms += [1e3 * (now - each) for each in came[done:below]]
                self.acknowledged, self.batches, done = some[-1].last, self.batches + 1, below


class Sent(NamedTuple):
    """What one process of workers did in a stretch."""

    leaves: int
    batches: int
    retries: int
    cpu_seconds: float
    waits_ms: list[float]


def _serve_workers(pipe: Connection, names: list[str], tenants: Sequence[str], seed: int) -> None:
    """A process of simulated workers: makes leaves, then sends them, as it is told."""
    workers = [SimulatedWorker(name, number, tenants, seed + number) for number, name in enumerate(names)]
    while (asked := pipe.recv()) is not None:
        for worker in workers:
            worker.make(*asked)
        pipe.send("ready")
        addresses, keys, rate = pipe.recv()
        before, began = [worker.acknowledged for worker in workers], time.process_time()
        threads = [
            threading.Thread(target=worker.send, args=(addresses[number % len(addresses)], keys[worker.name], rate))
            for number, worker in enumerate(workers)
        ]
        for thread in threads:
            thread.start()
        for thread in threads:
            thread.join()
        sent = sum(worker.acknowledged - had for worker, had in zip(workers, before, strict=True))
        waits = [wait for worker in workers for wait in worker.waits_ms]
        batches = sum(worker.batches for worker in workers)
        for worker in workers:
            worker.waits_ms.clear()
            worker.batches = 0
        cpu = time.process_time() - began
        pipe.send(Sent(sent, batches, sum(worker.retries for worker in workers), cpu, waits))
    pipe.send({worker.incarnation: worker.acknowledged for worker in workers})


class Fleet:
    """Processes of simulated workers, who share the tenants."""

    def __init__(self, names: list[str], tenants: Sequence[str], processes: int) -> None:
        spawn = multiprocessing.get_context("spawn")
        self._workers = len(names)
        self._pipes = []
        self._processes = []
        for number in range(processes):
            ours, theirs = spawn.Pipe()
            mine = names[number::processes]
            process = spawn.Process(target=_serve_workers, args=(theirs, mine, tenants, 1000 * number), daemon=True)
            process.start()
            self._pipes.append(ours)
            self._processes.append(process)

    def make(self, groups: int, requests: int, planes: int) -> None:
        """Every worker makes so many groups, of tenants that go to one of so many control planes each."""
        for pipe in self._pipes:
            pipe.send((groups, requests, planes))
        for pipe in self._pipes:
            assert pipe.recv() == "ready"

    def send(self, addresses: Sequence[str], keys: dict[str, str], leaves_a_second: float) -> tuple[float, list[Sent]]:
        """Every worker sends what it made, as it comes at its share of the rate; the seconds, and what each did."""
        rate = leaves_a_second / self._workers
        began = time.perf_counter()
        for pipe in self._pipes:
            pipe.send((list(addresses), keys, rate))
        sent = [pipe.recv() for pipe in self._pipes]
        return time.perf_counter() - began, sent

    def close(self) -> dict[str, int]:
        """End the workers; the last sequence that each incarnation has an acknowledgement for."""
        for pipe in self._pipes:
            pipe.send(None)
        acknowledged: dict[str, int] = {}
        for pipe, process in zip(self._pipes, self._processes, strict=True):
            acknowledged |= pipe.recv()
            process.join()
        return acknowledged


def _serve_plane(
    pipe: Connection, folder: str, url: str, name: str, port: int, given: dict[str, str], enrol: list[str]
) -> None:
    """A control plane, whose log nobody reads."""
    os.dup2(os.open(os.devnull, os.O_WRONLY), 1)
    place = Path(folder) / name
    place.mkdir(mode=0o700, exist_ok=True)
    settings = ServiceSettings(
        name=name,
        database_url=url,
        state_path=place / "state",
        listen=f"127.0.0.1:{port}",
        signing_key_path=Path(folder) / "signing.key",
        subject_names="clear",
        requests_per_second=1e6,
        requests_burst=1_000_000,
        **given,
    )
    with open_service(settings) as service:
        keys = {}
        for worker in enrol:
            role = Role.OPERATOR if worker == "operator" else Role.AUDITOR if worker == "auditor" else Role.WORKER
            service.principals.enrol(worker, [role], tenant=None, by="bench")
            keys[worker] = service.principals.issue_key(worker, days=1, by="bench").key
        address = f"http://127.0.0.1:{port}"
        threading.Thread(target=_end_when_told, args=(pipe,), daemon=True).start()
        serve(service, ready=lambda: pipe.send((address, keys)))


def _end_when_told(told: Connection) -> None:
    told.recv()
    os.kill(os.getpid(), signal.SIGTERM)


class Plane:
    """A control plane in a process of its own; `enrol` makes principals there, and their keys."""

    def __init__(self, folder: Path, url: str, name: str, settings: dict[str, str], enrol: Sequence[str] = ()) -> None:
        with socket.socket() as free:
            free.bind(("127.0.0.1", 0))
            port = free.getsockname()[1]
        self._given = (str(folder), url, name, port, settings)
        self.address, self.keys = self._begin(enrol)

    def _begin(self, enrol: Sequence[str]) -> tuple[str, dict[str, str]]:
        spawn = multiprocessing.get_context("spawn")
        self._pipe, theirs = spawn.Pipe()
        self._process = spawn.Process(target=_serve_plane, args=(theirs, *self._given, list(enrol)))
        self._process.start()
        address, keys = self._pipe.recv()
        return str(address), dict(keys)

    def kill_and_begin(self) -> None:
        """SIGKILL, and another one at the same address."""
        self._process.kill()
        self._process.join()
        self._begin(())

    @property
    def pid(self) -> int:
        """Its process."""
        assert self._process.pid is not None
        return self._process.pid

    def close(self) -> None:
        """End it in order."""
        self._pipe.send(None)
        self._process.join(60)


def _now_us() -> int:
    return time.monotonic_ns() // 1000
