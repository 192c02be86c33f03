"""A worker at 80 % load whose control plane is away: throughput and queue under the policy lease and the custody lease.

One worker governs real pools and serves one request at a time. A request takes as long as the tokens that it computes,
at a fixed rate: what is modelled is the device alone. Half of the requests reuse their own tenant's prefix, half reuse
it through a grant. The control plane is a process of its own, which is killed and begun again.
Run: `python benchmarks/fleet/plane_away.py`, or `--minutes 10` with the default leases.
"""

from __future__ import annotations

import random
import sys
import tempfile
import time
from collections import deque
from pathlib import Path
from typing import Any, NamedTuple

sys.path.insert(0, str(Path(__file__).resolve().parents[1] / "harness"))
sys.path.insert(0, str(Path(__file__).resolve().parents[2] / "tests" / "lib"))

from bench import Bench

from kvcustody.governance.admission_outcome import Admission
from kvcustody.governance.identity.principal import identify
from standins.service.control_plane_world import MODEL, READS, ControlPlane

PREFIX, SUFFIX = list(range(1, 257)), 129  # tokens that are shared, and of each request alone
SECONDS_A_TOKEN = 0.04 / SUFFIX  # so that a request that reuses its prefix takes 40 ms
LOAD = 0.8
OWN, GRANTED = "holder", "reader"


class Phase(NamedTuple):
    """A part of a run: what it is called, and when it begins, in seconds."""

    name: str
    begins: float


class Tally:
    """What was served in one phase."""

    def __init__(self) -> None:
        self.came = self.served = self.queue_most = 0
        self.asked = dict.fromkeys((OWN, GRANTED), 0)
        self.reused = dict.fromkeys((OWN, GRANTED), 0)
        self.queue_end = 0


def run(away: float, policy_lease: int, custody_lease: int, before: float) -> list[dict[str, Any]]:
    """Rows of the phases: with the control plane, within each lease, past both, and after its return.

    Each worker's custody lease is up to a fifth longer or shorter, so the third phase has some of the fourth.
    """
    with tempfile.TemporaryDirectory() as folder:
        plane = ControlPlane(Path(folder))
        plane.release(READS)
        plane.end()
        plane.start_process()
        worker = plane.worker(policy_lease_seconds=policy_lease, custody_lease_seconds=custody_lease, log_level="error")
        phases = [
            Phase("control plane there", 0),
            Phase("away, within both leases", before),
            Phase("away, past the policy lease", before + policy_lease),
            Phase("away, past both leases", before + 1.2 * custody_lease),
            Phase("back", before + away),
            Phase("back, later", before + 1.5 * away),
        ]
        ends = before + 2 * away
        tallies = [Tally() for _ in phases]
        chance, queue = random.Random(1), deque[tuple[float, str]]()
        governor, began, due = worker.governor, time.monotonic(), 0.0
        gone = back = False
        while (now := time.monotonic() - began) < ends:
            if now >= before and not gone:
                plane.kill()
                gone = True
            if now >= before + away and not back:
                plane.start_process()  # returns when it answers: requests wait meanwhile, as they do for a device
                back = True
            place = max(at for at, phase in enumerate(phases) if phase.begins <= now)
            tally = tallies[place]
            while due <= now:
                queue.append((due, chance.choice((OWN, GRANTED))))
                due += chance.expovariate(LOAD / (SUFFIX * SECONDS_A_TOKEN))
                tally.came += 1
            tally.queue_most, tally.queue_end = max(tally.queue_most, len(queue)), len(queue)
            if not queue:
                governor.step()
                time.sleep(0.002)
                continue
            _, tenant = queue.popleft()
            tokens = PREFIX + [chance.randrange(1000, 30_000) for _ in range(SUFFIX)]
            answer = governor.admit(identify(issuer="idp", tenant=tenant), MODEL, tokens)
            assert isinstance(answer, Admission), answer
            time.sleep(SECONDS_A_TOKEN * (len(tokens) - answer.hit_tokens))
            keeps = tenant == OWN  # the reader's own copy would hide what the grant gives
            if keeps:
                governor.commit([answer.request_id], [len(tokens)])
            governor.release(answer.request_id)
            governor.step()
            tally.served += 1
            tally.asked[tenant] += 1
            tally.reused[tenant] += answer.hit_tokens >= len(PREFIX)
        lengths = [later.begins - one.begins for one, later in zip(phases, [*phases[1:], Phase("", ends)], strict=True)]
        worker.close()
        plane.end()
        return [
            {
                "phase": phase.name,
                "seconds": round(length, 1),
                "came_a_second": round(tally.came / length, 1),
                "served_a_second": round(tally.served / length, 1),
                "queue_most": tally.queue_most,
                "queue_end": tally.queue_end,
                "own_reused": round(tally.reused[OWN] / max(1, tally.asked[OWN]), 3),
                "granted_reused": round(tally.reused[GRANTED] / max(1, tally.asked[GRANTED]), 3),
            }
            for phase, length, tally in zip(phases, lengths, tallies, strict=True)
        ]


def main() -> None:
    """Measure, print and keep."""
    bench = Bench(__doc__, "sqlalchemy", "starlette", facts="")
    bench.add(
        "--minutes",
        type=float,
        default=0,
        help="how long it is away, under leases of 60 and 300 s; 0: 12 s, 2 and 6 s",
    )
    arguments = bench.parse()
    away, policy_lease, custody_lease = (60 * arguments.minutes, 60, 300) if arguments.minutes else (12.0, 2, 6)
    rows = run(away, policy_lease, custody_lease, before=max(5.0, away / 10))
    for row in rows:
        print("  ".join(f"{name}={value}" for name, value in row.items()), flush=True)
    if arguments.json:
        leases = {"policy_lease_seconds": policy_lease, "custody_lease_seconds": custody_lease}
        bench.keep({"away_seconds": away, "load": LOAD, **leases, "phases": rows})


if __name__ == "__main__":
    main()
