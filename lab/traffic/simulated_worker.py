"""The simulated worker of `kvcustody up`: a real pool, Governor and control-plane agent under generated traffic.

1. It is a worker as any: identity, policy, keys, evidence and erasures go the way of an engine's. Its leaves say
   `simulated`, so no page takes it for people's traffic.
2. Now and then something goes wrong as it does in engines, so that its traces can be seen. The engine stalls, and
   blocks that end meanwhile are scrubbed late. Or a step of the device hangs, and its blocks wait in quarantine until
   it retires.
3. It ends between two steps: everything that runs is released, scrubbed and handed to the ledger.
"""

from __future__ import annotations

import threading
from collections.abc import Callable, Iterator
from dataclasses import dataclass, replace

import torch

from kvcustody.audit.kinds import SIMULATED
from kvcustody.clock import MICROSECONDS, SystemClock
from kvcustody.errors import CustodyError
from kvcustody.governance.governor.governor import Governor
from kvcustody.governance.settings import Settings
from kvcustody.governance.worker.worker import MemoryPlan, open_worker
from kvcustody.lab.replay.options import RunnerOptions
from kvcustody.lab.replay.run.environment import shape_for
from kvcustody.lab.replay.run.marked_tensors import PatternCache
from kvcustody.lab.replay.run.model_identity import replay_model
from kvcustody.lab.replay.run.runner import Runner
from kvcustody.lab.replay.workload.generator import WorkloadSpec, generate
from kvcustody.lab.replay.workload.model import Job
from kvcustody.lab.traffic.device_hangs import DeviceHangs
from kvcustody.lab.traffic.traffic_tenants import TrafficTenants

POOL_BLOCKS = 2048
_TRIES_OF_CLOSING_SECONDS = 30.0


@dataclass(frozen=True, slots=True)
class Faults:
    """The intervals and lengths of faults (rule 2): seconds between two, and seconds that one lasts. 0: never."""

    stall_every: float = 75.0
    stall_seconds: float = 6.0
    hang_every: float = 60.0
    hang_seconds: float = 40.0


class _StoppedError(Exception):
    """The worker was asked to end."""


class PacedClock:
    """Boot time that cannot be skipped: waiting takes real time, and a stop interrupts it."""

    def __init__(self, stop: threading.Event, between: Callable[[], None]) -> None:
        self._clock = SystemClock()
        self._stop = stop
        self._between = between

    def now_us(self) -> int:
        """Return boot time."""
        return self._clock.now_us()

    def skip_to(self, at_us: int) -> None:
        """Wait until `at_us`."""
        if self._stop.wait(max(0, at_us - self.now_us()) / MICROSECONDS):
            raise _StoppedError
        self._between()


class SimulatedWorker:
    """A worker on its own thread; `error` is why it ended unexpectedly, None while it runs or after a stop."""

    def __init__(
        self,
        settings: Settings,
        spec: WorkloadSpec,
        tenants: TrafficTenants,
        *,
        faults: Faults | None = None,
        stalls: Callable[[], None] = lambda: None,
    ) -> None:
        """Prepare the worker. `tenants` follow its policy; `stalls` is called before the engine stalls."""
        self._settings, self._spec, self._tenants = settings, spec, tenants
        self._faults = faults or Faults()
        self._stalls = stalls
        self._stop = threading.Event()
        self._governor: Governor | None = None
        self._next_stall = self._faults.stall_every / 2
        self._hangs = DeviceHangs(self._faults.hang_every, self._faults.hang_seconds)
        self._began_us = SystemClock().now_us()
        self.error: BaseException | None = None
        self.serving = threading.Event()
        self.requests = 0
        self._thread = threading.Thread(target=self._run, name="kvcustody-simulated", daemon=True)

    def start(self) -> None:
        """Open the worker and serve; `serving` is set once it serves, or has failed."""
        self._thread.start()

    def stop(self) -> None:
        """End in order (rule 3); a second call does nothing."""
        self._stop.set()
        if self._thread.is_alive():
            self._thread.join(_TRIES_OF_CLOSING_SECONDS)

    @property
    def ended(self) -> bool:
        """Whether the worker has ended."""
        return self._thread.ident is not None and not self._thread.is_alive()

    def _run(self) -> None:
        try:
            self._serve()
        except _StoppedError:
            pass
        except CustodyError as error:
            self.error = error
        except BaseException as error:
            self.error = error
            raise
        finally:
            self.serving.set()

    def _serve(self) -> None:
        torch.set_num_threads(1)  # its writes are small: waking threads costs more than they save
        size = self._spec.block_tokens
        cache = PatternCache(POOL_BLOCKS, shape_for(size), device="cpu", clock=SystemClock())
        plan = MemoryPlan(lambda _: cache.memory, POOL_BLOCKS, 1, cache.memory.bytes_per_block)
        clock = PacedClock(self._stop, self._between)
        with open_worker(self._settings, plan, origin=SIMULATED) as worker:
            governor = self._governor = worker.governor
            population = self._tenants.population
            self._began_us = clock.now_us()
            self.serving.set()
            options = RunnerOptions(seed=self._spec.seed)
            span_us = round(self._spec.span_seconds * MICROSECONDS)
            try:
                while True:
                    runner = Runner(governor, cache, clock, replay_model(size), population, options=options)
                    runner.run(self._jobs(governor), span_us)
            finally:
                self._hangs.end(governor)

    def _jobs(self, governor: Governor) -> Iterator[Job]:
        """Yield the workload's requests for the tenants of the policy in effect, and count each."""
        made = generate(self._spec)
        for request, label in zip(made.requests, made.labels, strict=True):
            if request.at_us <= self._spec.span_seconds * MICROSECONDS:
                self.requests += 1
                self._tenants.follow(governor.table.policy)
                yield request, self._tenants.label(label)

    # -- what goes wrong ----------------------------------------------------------------------------------------------

    def _between(self) -> None:
        """Begin and end faults between two steps, on the thread that owns the state (rule 2)."""
        at, governor, faults = self._seconds(), self._governor, self._faults
        if governor is None:
            return
        self._hangs.look(at, governor)
        if faults.stall_every and at >= self._next_stall:
            self._next_stall = at + faults.stall_every
            self._stalls()
            if self._stop.wait(faults.stall_seconds):
                raise _StoppedError

    def _seconds(self) -> float:
        return (SystemClock().now_us() - self._began_us) / MICROSECONDS


def lively(tenants: int, seed: int) -> WorkloadSpec:
    """Return two hours of conversations, about two requests per second, with impatient people's think times."""
    spec = WorkloadSpec(seed=seed, tenants=tenants, conversations=4800, span_seconds=7200.0)
    return replace(spec, think_seconds=replace(spec.think_seconds, median=8))
