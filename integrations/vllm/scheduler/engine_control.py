"""The port's orders to vLLM: forget keys, end requests, withhold blocks, wake up, and show its state of the pool.

1. Requests end between steps, never inside the building of one: vLLM's scheduler has already listed them. Those of
   the step that is being built end right after it, all others at once.
2. A client whose request was ended hears of it: an output with the reason leaves with the next outputs of the engine.
"""

from __future__ import annotations

from collections.abc import Container, Sequence
from typing import TYPE_CHECKING, Any, Protocol

from vllm.v1.engine import EngineCoreOutput, EngineCoreOutputs, FinishReason
from vllm.v1.request import RequestStatus

from kvcustody.governance.external.engine_control import EngineView
from kvcustody.logger import get_logger

if TYPE_CHECKING:
    from vllm.v1.core.sched.scheduler import Scheduler

    from kvcustody.allocator.external.scrub_queue import ScrubOrder
    from kvcustody.integrations.vllm.scheduler.scheduler_state import SchedulerState

_log = get_logger(__name__)


class EngineProcess(Protocol):
    """The engine that runs the scheduler (`engine_patch.EngineHandle`)."""

    def wake(self) -> None:
        """Make an idle engine take a step soon; from any thread."""

    def last_order(self, order: ScrubOrder, /) -> None:
        """Make the workers do a last scrub and take their answers."""


class VllmControl:
    """`EngineControl` over vLLM's scheduler and pool."""

    def __init__(self) -> None:
        self.state: SchedulerState
        self.scheduler: Scheduler | None = None
        self.engine: EngineProcess | None = None
        self.building: Container[str] = ()  # requests of the step that is being built
        self._later: dict[str, tuple[str, RequestStatus]] = {}
        self._outputs: list[tuple[int, EngineCoreOutput]] = []

    # -- EngineControl ------------------------------------------------------------------------------------------------

    def evict(self, blocks: Sequence[int]) -> None:
        """See `EngineControl`."""
        self.state.forget(blocks)

    def abort(self, request_ids: Sequence[object], cause: str) -> None:
        """See `EngineControl`; requests in the step under construction end right after it (rule 1)."""
        self.end([str(one) for one in request_ids], cause, RequestStatus.FINISHED_ABORTED)

    def withhold(self, blocks: Sequence[int]) -> None:
        """See `EngineControl`."""
        self.state.withhold(blocks)

    def wake(self) -> None:
        """See `EngineControl`."""
        if self.engine is not None:
            self.engine.wake()

    def view(self) -> EngineView:
        """See `EngineControl`."""
        return self.state.view(self.scheduler.requests if self.scheduler is not None else ())

    # -- for the adapter ----------------------------------------------------------------------------------------------

    def end(self, request_ids: Sequence[str], cause: str, status: RequestStatus) -> None:
        """End these requests now, or right after the step under construction."""
        now = [one for one in request_ids if one not in self.building]
        self._later.update((one, (cause, status)) for one in request_ids if one in self.building)
        for request_id in now:
            self._end(request_id, cause, status)

    def end_behind_step(self, request_ids: Sequence[str], cause: str, status: RequestStatus) -> None:
        """End these requests right after the step that vLLM is scheduling."""
        self._later.update((one, (cause, status)) for one in request_ids)

    def after_step(self) -> None:
        """End deferred requests after the step was built and run."""
        self.building = ()
        if self._later:
            later, self._later = self._later, {}
            for request_id, (cause, status) in later.items():
                self._end(request_id, cause, status)

    @property
    def has_outputs(self) -> bool:
        """Whether a client has yet to learn that its request ended."""
        return bool(self._outputs or self._later)

    def deliver(self, outputs: dict[int, EngineCoreOutputs] | None) -> dict[int, EngineCoreOutputs] | None:
        """Return a step's `outputs` with those of requests that governance ended (rule 2)."""
        if not self._outputs:
            return outputs
        ended, self._outputs = self._outputs, []
        together = outputs if outputs is not None else {}
        for client, output in ended:
            theirs = together.setdefault(client, EngineCoreOutputs())
            theirs.outputs.append(output)
        return together

    def keep(self, outputs: dict[int, EngineCoreOutputs] | None) -> None:
        """Keep a step's outputs without a receiver for the next step."""
        for client, theirs in (outputs or {}).items():
            self._outputs += [(client, output) for output in theirs.outputs]

    def _end(self, request_id: str, cause: str, status: RequestStatus) -> None:
        scheduler = self.scheduler
        request: Any = scheduler.requests.get(request_id) if scheduler is not None else None
        if scheduler is None or request is None or request.is_finished():
            return
        self.state.name_cause(request_id, cause)
        self.state.is_ending = True
        try:
            scheduler.finish_requests(request_id, status)
        finally:
            self.state.is_ending = False
        reason = FinishReason.ERROR if status is RequestStatus.FINISHED_ERROR else FinishReason.ABORT
        output = EngineCoreOutput(
            request_id,
            [],
            finish_reason=reason,
            stop_reason=f"kvcustody: {cause}",
            events=request.take_events(),
        )
        self._outputs.append((request.client_index, output))
        _log.warning("request ended", request=request_id, cause=cause)
