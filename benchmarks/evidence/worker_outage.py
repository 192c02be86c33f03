"""A worker behind a control plane: bytes a request on the wire and in the spill, and how an outage is caught up.

`bytes`: requests through the whole Governor (`harness/governed.py`), and ones with four leaves each, encoded as a
worker encodes them, so many requests a batch; plain, as an earlier release sent and spilled them, and as zstd frames.
`day_gib` is a day's spill at 50 requests a second, `leaf_us` processor time for each leaf.
`outage`: a real service in a process of its own on SQLite, and a worker's ledger that is cut off for so many minutes at
50 requests a second (spilled as fast as it goes, five requests a time) and then connected again, while live requests go
on at 50 a second: how long the spill takes to be handed in, and how long live batches take until they are acknowledged,
meanwhile and afterwards. For each `share` of the time that the replay may take.
Run: `python benchmarks/evidence/worker_outage.py [--minutes 10] [--shares 0.5 1.0] [--out FILE]`.
"""

from __future__ import annotations

import multiprocessing
import os
import sys
import tempfile
import threading
import time
import uuid
from collections.abc import Callable
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np
import uvicorn

from kvcustody.audit.evidence.subjects.pseudonym_directory import SubjectDirectory
from kvcustody.audit.kinds import Event
from kvcustody.audit.leaf import Context
from kvcustody.audit.leaf.batch_encoder import BatchEncoder
from kvcustody.audit.write.compression import compress, decompress
from kvcustody.audit.write.event_writer import WriterSettings
from kvcustody.clock import SystemClock
from kvcustody.errors import ServiceError
from kvcustody.governance.api.app import create_app
from kvcustody.governance.control_plane.connection import ControlPlaneConnection
from kvcustody.governance.control_plane.remote_ledger import RemoteLedger
from kvcustody.governance.service.access.roles import Role
from kvcustody.governance.service.ingest.check_leaves import write_batch
from kvcustody.governance.service.service import open_service
from kvcustody.governance.service.settings import ServiceSettings

sys.path.insert(0, str(Path(__file__).resolve().parents[1] / "harness"))
sys.path.insert(0, str(Path(__file__).resolve().parent))

from bench import Bench
from governed import Shelf, govern, principal, serve
from ledger_cost import BLOCK_TOKENS, POOL_BLOCKS, prompts
from ledger_workload import workload

PER_SECOND = 50
GROUPS = (1, 5, 38, 50)
_FRAME, _RECORD = 8, 9  # bytes beside a frame; beside a leaf, in the spill of an earlier release


def governed(conversations: int) -> list[list[Event]]:
    """The events of each request of a trace."""
    shelf, who = Shelf(), principal("reader")
    governor = govern(POOL_BLOCKS, BLOCK_TOKENS, shelf)
    made = []
    for tokens in prompts(conversations):
        shelf.events = []
        serve(governor, who, tokens)
        made.append(shelf.events)
    return made


def whole_lives(requests: int) -> list[list[Event]]:
    """Requests each with an opening, a release, an end and a receipt of its own: the most that one can cost."""
    events = workload(requests, 16, scattered=False)[1:]
    return [events[place : place + 4] for place in range(0, len(events), 4)]


def sizes(requests: list[list[Event]], group: int) -> dict[str, float]:
    """Bytes a request, in batches of so many."""
    directory = SubjectDirectory(clear_names=True)
    encoder = BatchEncoder(Context(uuid.uuid4().hex, 1_790_000_000_000_000, directory))
    sequence = plain = packed = spilled = leaves = batches = 0
    pack_ns = unpack_ns = 0
    for place in range(0, len(requests) - group + 1, group):
        events = [event for request in requests[place : place + group] for event in request]
        items = [(sequence + number, event) for number, event in enumerate(events, 1)]
        sequence += len(events)
        data = encoder.encode(items).batch.data
        names = directory.fresh()
        directory.settle(names)
        body = write_batch(names, data)
        start = time.thread_time_ns()
        frame = compress(body)
        middle = time.thread_time_ns()
        decompress(frame, bytes_max=len(body))
        pack_ns, unpack_ns = pack_ns + middle - start, unpack_ns + time.thread_time_ns() - middle
        plain, packed, leaves, batches = (
            plain + len(body),
            packed + len(frame),
            leaves + len(data),
            batches + 1,
        )
        spilled += len(body) + _RECORD * len(data)
    count = batches * group
    return {
        "leaves_a_batch": round(leaves / batches, 1),
        "wire_before": round(plain / count, 1),
        "wire_after": round(packed / count, 1),
        "ratio": round(plain / packed, 2),
        "spill_before": round(spilled / count, 1),
        "spill_after": round((packed + _FRAME * batches) / count, 1),
        "day_gib": round((packed + _FRAME * batches) / count * PER_SECOND * 86_400 / 2**30, 2),
        "compress_leaf_us": round(pack_ns / leaves / 1e3, 2),
        "decompress_leaf_us": round(unpack_ns / leaves / 1e3, 2),
    }


def serving(folder: str, pipe: Any) -> None:
    """A control plane in a process of its own, whose log nobody reads."""
    os.dup2(os.open(os.devnull, os.O_WRONLY), 1)
    settings = ServiceSettings(
        database_url=f"sqlite:///{folder}/ledger.db",
        state_path=Path(folder) / "state",
        listen=f"unix:{folder}/api.sock",
        signing_key_path=Path(folder) / "signing.key",
        requests_per_second=1e6,
        requests_burst=1_000_000,
    )
    with open_service(settings) as service:
        service.principals.enrol("gpu-0", [Role.WORKER], tenant=None, by="bench")
        key = service.principals.issue_key("gpu-0", days=1, by="bench").key
        server = uvicorn.Server(uvicorn.Config(create_app(service), port=0, log_config=None, lifespan="off", ws="none"))
        threading.Thread(target=server.run, daemon=True).start()
        while not server.started:
            time.sleep(0.01)
        pipe.send((f"http://127.0.0.1:{server.servers[0].sockets[0].getsockname()[1]}", key))
        pipe.recv()
        server.should_exit = True


class Cut(ControlPlaneConnection):
    """A connection that can be cut off."""

    away = False

    def request(self, method: str, path: str, **how: Any) -> Any:
        """As ever, or nobody there."""
        if self.away:
            raise ServiceError("cut off", problem="unreachable")
        return super().request(method, path, **how)


def live(ledger: RemoteLedger, request: Callable[[], list[Event]], until: Callable[[], bool]) -> list[float]:
    """50 requests a second until then; milliseconds from each tenth of a second's requests to their acknowledgement."""
    waits, next_at = [], time.monotonic()
    while not until():
        for _ in range(PER_SECOND // 10):
            ledger.submit(request())
        start = time.monotonic()
        assert ledger.flush(60)
        waits.append((time.monotonic() - start) * 1e3)
        next_at += 0.1
        time.sleep(max(0.0, next_at - time.monotonic()))
    return waits


def outage(minutes: float, share: float) -> dict[str, float]:
    """One outage and its end."""
    spawn = multiprocessing.get_context("spawn")
    ours, theirs = spawn.Pipe()
    with tempfile.TemporaryDirectory() as folder:
        process = spawn.Process(target=serving, args=(folder, theirs))
        process.start()
        address, key = ours.recv()
        connection = Cut(address, key)
        ledger = RemoteLedger(
            connection,
            worker="gpu-0",
            clock=SystemClock(),
            spill_directory=Path(folder) / "spill",
            settings=WriterSettings(interval_seconds=0.1, replay_share=share),
        )
        lives = iter(whole_lives(int(minutes * 60 * PER_SECOND) + 60_000))
        request = partial(next, lives)
        ledger.submit(request())
        ledger.flush()
        connection.away = True
        for _ in range(int(minutes * 60 * PER_SECOND / 5)):
            for _ in range(5):
                ledger.submit(request())
            assert ledger.flush(60)
        spilled_bytes = ledger.status().spilled_bytes
        connection.away = False
        start = time.monotonic()
        meanwhile = live(ledger, request, lambda: ledger.status().healthy)
        drained = time.monotonic() - start
        end = time.monotonic() + 20
        after = live(ledger, request, lambda: time.monotonic() > end)
        ledger.close()
        connection.close()
        ours.send("end")
        process.join()
    return {
        "spilled_mib": round(spilled_bytes / 2**20, 1),
        "spill_bytes_a_request": round(spilled_bytes / (minutes * 60 * PER_SECOND), 1),
        "drain_seconds": round(drained, 1),
        "live_ms_p50": round(float(np.percentile(meanwhile, 50)), 1),
        "live_ms_p99": round(float(np.percentile(meanwhile, 99)), 1),
        "undisturbed_ms_p50": round(float(np.percentile(after, 50)), 1),
        "undisturbed_ms_p99": round(float(np.percentile(after, 99)), 1),
    }


def main() -> None:
    """Print one JSON object."""
    bench = Bench(__doc__, "zstandard", "orjson", facts="hardware")
    bench.add("--minutes", type=float, default=10.0)
    bench.add("--shares", type=float, nargs="*", default=[0.5, 1.0])
    bench.add("--conversations", type=int, default=300)
    options = bench.parse()
    kinds = {"governed": governed(options.conversations), "whole_lives": whole_lives(5000)}
    figures: dict[str, Any] = {
        "bytes": {
            kind: {f"{group} requests a batch": sizes(requests, group) for group in GROUPS}
            for kind, requests in kinds.items()
        },
        "outage": {f"share {share:g}": outage(options.minutes, share) for share in options.shares},
    }
    bench.keep(figures, show=True)


if __name__ == "__main__":
    main()
