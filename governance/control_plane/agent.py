"""The worker's agent: reports its status to the control plane and takes its scan orders, on its own thread.

1. Counters are taken on the thread that owns the state. It takes them when it opens, and at the first step after each
   report. It also takes them when a Governor becomes idle, because nobody may step it then. They are reported with
   their age, counted from when they were taken. So the control plane can distinguish a report from a new count.
2. The control plane decides nothing by a worker's statements about itself. A lost report is followed by the next.
3. Where the control plane is unreachable or refuses, the agent asks less and less often, up to `_WAIT_SECONDS_MAX`. It
   never disturbs the engine.
4. A wall clock that is in doubt here is accepted if it agrees with the control plane's time.
5. A scan that was asked for runs on the thread that owns the state, once in this process. It is answered when its
   findings are in the ledger, and repeatedly until the answer is accepted. A process that ends before that leaves the
   order to the next.
"""

from __future__ import annotations

import random
import threading
import time
from collections.abc import Mapping
from concurrent.futures import Future
from concurrent.futures import TimeoutError as NotYet
from concurrent.futures import wait as wait_for
from contextlib import ExitStack
from typing import Any, Protocol

from kvcustody.deadline_clock import DeadlineClock
from kvcustody.errors import ServiceError
from kvcustody.governance.control_plane.connection import ControlPlaneConnection
from kvcustody.governance.control_plane.remote_ledger import RemoteLedger
from kvcustody.governance.observability.metrics import worker_status
from kvcustody.governance.observability.stats import Counted, Stats
from kvcustody.governance.orphans.scans import Scanned
from kvcustody.guarding_thread import GuardingThread
from kvcustody.logger import get_logger
from kvcustody.policies.table.decision_table import DecisionTable

REPORT_SECONDS = 10.0
CHARGED_MAX, STATUS_MAX = 1000, 512  # what a report may hold
_SNAPSHOT_SECONDS, _SCAN_SECONDS, _END_SECONDS = 1.0, 0.1, 0.5
_WAIT_SECONDS, _WAIT_SECONDS_MAX = 1.0, 60.0
_log = get_logger(__name__)


class AgentFacade(Protocol):
    """A `Governor` or an `EnginePort`."""

    table: DecisionTable
    block_tokens: int

    def call(self, command: Any) -> Future[Any]:
        """Run a command on the owning thread."""

    counted: Counted | None

    def count(self) -> None:
        """Read the counters now, on the owning thread."""

    def scan_and_recover(self) -> Scanned:
        """Scan in full and repair, on the owning thread."""


class Agent:
    """The agent of one worker; `stop` ends its thread."""

    def __init__(
        self,
        connection: ControlPlaneConnection,
        facade: AgentFacade,
        ledger: RemoteLedger,
        clock: DeadlineClock,
        *,
        bytes_per_block: int,
    ) -> None:
        self._connection = connection
        self._facade = facade
        self._ledger = ledger
        self._clock = clock
        self._bytes_per_block = bytes_per_block
        self._pending: Future[None] | None = None
        self._wait_seconds = _WAIT_SECONDS
        self._scans: dict[str, Future[Scanned]] = {}  # by order, those that were not answered
        self.problem = ""  # why the control plane was told nothing last time; empty when it was
        self._stop = threading.Event()
        self._thread = GuardingThread(self._run, name="kvcustody-agent")

    def start(self) -> None:
        """Start reporting."""
        self._thread.start()

    def stop(self) -> None:
        """Stop reporting; a second call changes nothing. A request in flight ends by itself."""
        self._stop.set()
        if self._thread.is_alive():
            self._thread.end(_END_SECONDS)

    # -- the thread -----------------------------------------------------------------------------------------

    def _run(self) -> None:
        pause = 0.0
        while not self._stop.wait(pause):
            began = time.monotonic()
            try:
                for act in (self._ledger.check_kept, self._report, self._take_orders, self._answer):
                    if not self._stop.is_set():
                        act()
            except ServiceError as error:
                pause = self._refused(error)
                continue
            self.problem, self._wait_seconds = "", _WAIT_SECONDS
            left = began + REPORT_SECONDS - time.monotonic()
            pause = _SCAN_SECONDS if self._scans else max(_SCAN_SECONDS, left)

    def _refused(self, error: ServiceError) -> float:
        """How long to say nothing (rule 3)."""
        if not self.problem and not self._stop.is_set():
            _log.warning("status is not taken", reason=error.message)
        self.problem = error.message
        wait = max(self._wait_seconds, float(error.operands.get("wait_seconds") or 0.0))
        self._wait_seconds = min(2 * self._wait_seconds, _WAIT_SECONDS_MAX)
        return wait * random.uniform(0.75, 1.25)  # noqa: S311 - spacing, no secret

    def _report(self) -> None:
        self._count()
        counted = self._facade.counted
        report: dict[str, Any] = {
            "policy_revision": self._facade.table.revision,
            "status": self._status(counted),
        }
        if counted is not None:
            report["charged"] = _most(counted.stats.charged)
            by_tenant = _by_tenant(counted.stats, self._facade.block_tokens)
            report["tenants"] = {measure: _most(values) for measure, values in by_tenant.items()}
        heard = self._connection.put(f"/v1/worker/incarnations/{self._ledger.incarnation}/status", report)
        self._ledger.note_unlinkings(int(heard["unlinkings"]))
        self._clock.agree(int(heard["at_us"]))

    def _take_orders(self) -> None:
        """Have the owning thread do what is asked for and was not yet (rule 4); held open until there is something."""
        wait = 0 if self._scans else int(REPORT_SECONDS)
        found = self._connection.get("/v1/worker/scans", wait=wait, known=",".join(self._scans) or None)
        for order in found["orders"]:
            if order not in self._scans and not self._stop.is_set():
                self._scans[order] = self._facade.call(lambda facade: facade.scan_and_recover())

    def _answer(self) -> None:
        """Say what became of the scans that have ended (rule 4)."""
        done, _ = wait_for(self._scans.values(), _SNAPSHOT_SECONDS)
        for order, scan in list(self._scans.items()):
            if scan not in done:
                continue
            error = scan.exception()
            if error is not None:
                _log.error("a requested scan failed", order=order, exc_info=error)
                self._tell(order, {"reason": type(error).__name__})
            elif self._ledger.flush():
                self._tell(order, {"scan": scan.result().number})

    def _tell(self, order: str, what: dict[str, Any]) -> None:
        try:
            self._connection.put(f"/v1/worker/incarnations/{self._ledger.incarnation}/scans/{order}", what)
        except ServiceError as refused:
            if refused.operands.get("problem") == "conflict":  # the ledger there is behind: once more, later
                return
            raise
        del self._scans[order]

    def _count(self) -> None:
        """Take the counters anew, where the engine steps within a second (rule 1)."""
        if self._pending is None or self._pending.done():  # what was late is of an earlier moment
            self._pending = self._facade.call(lambda facade: facade.count())
        try:
            self._pending.result(_SNAPSHOT_SECONDS)
        except NotYet:
            return
        except Exception:
            _log.error("counters could not be taken", exc_info=True)

    def _status(self, counted: Counted | None) -> dict[str, float]:
        ledger = self._ledger.status()
        figures: dict[str, float] = {
            "ledger.backlog": float(ledger.backlog),
            "ledger.spilled_bytes": float(ledger.spilled_bytes),
            "ledger.replaying": float(ledger.replaying),
            "ledger.kept_bytes": float(self._ledger.kept.size_bytes()),
            "ledger.kept_dropped_bytes": float(self._ledger.kept.dropped_bytes),
            "ledger.kept_unverified": float(bool(self._ledger.unverified)),
        }
        if ledger.spill_seconds is not None:
            figures["ledger.spill_seconds"] = ledger.spill_seconds
        if counted is not None:
            figures["status_age_seconds"] = time.monotonic() - counted.at
            said = worker_status(counted.stats, self._facade.block_tokens, self._bytes_per_block)
            figures |= {name: float(value) for name, value in said.items()}
        return dict(list(figures.items())[:STATUS_MAX])


def _by_tenant(stats: Stats, block_tokens: int) -> dict[str, Mapping[str, int]]:
    """Return tenants' figures by measure, since the Governor began; none of hits where their tokens are not known."""
    tallies = stats.tenants.items()
    figures: dict[str, Mapping[str, int]] = {
        "active_tokens": stats.tenant_tokens,
        "denials": {name: sum(list(tally.denials.values())) for name, tally in tallies},  # the engine goes on counting
        "prompt_tokens": {name: tally.prompt_tokens for name, tally in tallies},
        "recomputed_blocks": {name: tally.recomputed_blocks for name, tally in tallies},
        "thrashing": stats.thrashing,
    }
    if stats.are_hits_leading:
        figures["hit_tokens"] = {name: tally.hit_blocks * block_tokens for name, tally in tallies}
    return figures


def _most(values: Mapping[str, int]) -> dict[str, int]:
    """Of tenants for which there is anything, as many as a report may hold, the greatest first."""
    most = sorted(((name, int(value)) for name, value in values.items() if value), key=lambda item: (-item[1], item[0]))
    return dict(most[:CHARGED_MAX])


def start_agent(
    connection: ControlPlaneConnection | None,
    facade: AgentFacade,
    ledger: object,
    clock: DeadlineClock,
    stack: ExitStack,
    *,
    bytes_per_block: int,
) -> Agent | None:
    """Start an agent that `stack` ends; None where the settings name no control plane."""
    if connection is None:
        return None
    assert isinstance(ledger, RemoteLedger)
    facade.count()  # whoever opens it owns it yet
    agent = Agent(connection, facade, ledger, clock, bytes_per_block=bytes_per_block)
    agent.start()
    stack.callback(agent.stop)
    return agent
