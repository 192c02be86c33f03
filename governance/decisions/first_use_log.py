"""First uses: under a revision, a grant or segment serves a reader only after the ledger has it (class A).

- Until the first use is durable the granted domain is not searched: a miss, not a wait.
- While the clock is in doubt, nothing is used for the first time: what was in use goes on.
- A failed recording is tried again at the next request; it is never taken for done.
"""

from __future__ import annotations

from concurrent.futures import Future, ThreadPoolExecutor, wait

from kvcustody.audit.kinds import DecisionRecorded
from kvcustody.deadline_clock import DeadlineClock
from kvcustody.governance.ledger_protocol import Ledger
from kvcustody.policies.table.model import AccessRequest, Decision

_Key = tuple[str, str, int]


class FirstUseLog:
    """The (reader, source, revision) triples that are durable, and those being recorded."""

    def __init__(self, ledger: Ledger, clock: DeadlineClock) -> None:
        self._ledger = ledger
        self._clock = clock
        self._durable: set[_Key] = set()
        self._pending: dict[_Key, Future[int]] = {}
        self._executor: ThreadPoolExecutor | None = None

    def may(
        self,
        request: AccessRequest,
        classification: str,
        decision: Decision,
        trace: str = "",
    ) -> bool:
        """Whether a permitted reuse may happen now; starts recording a first use, under its trace."""
        assert request.source is not None, "a reuse across tenants names its grant or segment"
        key = (request.reader, request.source, decision.revision)
        if key in self._durable:
            return True
        future = self._pending.get(key)
        if future is None:
            if self._clock.in_doubt:
                return False
            event = DecisionRecorded(
                self._clock.now_us(),
                action="reuse",
                effect="permit",
                reader=request.reader,
                owner=request.owner,
                classification=classification,
                reasons=decision.reasons,
                revision=decision.revision,
                via=request.via.name.lower(),
                trace=trace,
            )
            if self._executor is None:
                self._executor = ThreadPoolExecutor(1, thread_name_prefix="kvcustody-first-use")
            self._pending[key] = self._executor.submit(self._ledger.submit_durable, event)
            return False
        if not future.done():
            return False
        del self._pending[key]
        if future.exception() is not None:
            return False
        self._durable.add(key)
        return True

    @property
    def in_doubt(self) -> bool:
        """Whether the time is in doubt, so that no use can count as a first one."""
        return self._clock.in_doubt

    @property
    def recording(self) -> bool:
        """Whether the ledger records now; False while it records only later."""
        return self._ledger.recording

    def forget(self) -> None:
        """Start anew for a new revision: every use is a first use again."""
        self._durable.clear()
        self._pending.clear()

    def settle(self, timeout_seconds: float) -> None:
        """Wait for recordings under way."""
        wait(list(self._pending.values()), timeout_seconds)

    def close(self) -> None:
        """Finish what is under way and stop."""
        if self._executor is not None:
            self._executor.shutdown(wait=True)
