"""Patches in the engine's process: waking it, idle steps, its own outputs, and its administration.

1. An engine with a queue (every served one) is woken by a message in it; its own thread does the work.
2. An engine in its caller's process has no loop of its own while idle: the timer's thread steps it then, under a lock
   that every entry of the engine takes.
3. When a step has left for the workers, the engine's thread would wait for them: what governance can do then, it does
   then (`SchedulerSide.run_deferred_work`).
4. Administration runs on the engine's thread, between steps, through vLLM's utility calls, by the names in
   `UTILITIES`.
"""

from __future__ import annotations

import functools
import threading
from collections.abc import Callable
from typing import TYPE_CHECKING, Any

from vllm.distributed.kv_transfer.kv_connector.v1.base import KVConnectorMetadata
from vllm.distributed.kv_transfer.kv_connector.v1.multi_connector import (
    MultiConnector,
    MultiKVConnectorMetadata,
    MultiKVConnectorWorkerMetadata,
)
from vllm.v1.core.sched.output import SchedulerOutput
from vllm.v1.engine import EngineCoreRequestType

from kvcustody.errors import IsolationError
from kvcustody.governance.erasure.selector import Selector
from kvcustody.integrations.vllm.connector import GovernedConnector
from kvcustody.integrations.vllm.model_identity import changes_weights
from kvcustody.integrations.vllm.step_messages import StepOrder, StepReceipt
from kvcustody.logger import get_logger
from kvcustody.policies.reading.load_policy import load_policy
from kvcustody.policies.table.compile import compile_policy

if TYPE_CHECKING:
    from vllm.v1.engine.core import EngineCore

    from kvcustody.allocator.external.scrub_queue import ScrubOrder
    from kvcustody.integrations.vllm.scheduler.scheduler_side import SchedulerSide

_log = get_logger(__name__)


class EngineHandle:
    """One `EngineCore` under governance."""

    def __init__(self, core: EngineCore, side: SchedulerSide) -> None:
        self.side = side
        self._core = core
        self._step: Callable[[], Any] = core.step_fn
        self._queue: Any = getattr(core, "input_queue", None)
        core.step_fn = self.step
        core.model_executor.execute_model = _after_call(core.model_executor.execute_model, side.run_deferred_work)
        core.collective_rpc = _before_weights_change(core.collective_rpc, side.reset)
        if self._queue is None:
            self._lock = threading.RLock()
            for name in ("step_fn", "add_request", "abort_requests"):
                setattr(core, name, _locked(self._lock, getattr(core, name)))
        side.timer.on_due = self.tick
        side.bind_engine(self)

    def step(self) -> Any:
        """Run one engine step, and return its outputs with those of requests that governance ended."""
        outputs, executed = self._step()
        control = self.side.control
        if self._queue is None and not self._core.scheduler.has_unfinished_requests():
            self._go_idle()
        return (control.deliver(outputs) if control.has_outputs else outputs), executed

    def _go_idle(self) -> None:
        """Do as a served engine's loop does when nothing runs: check whether anything is due."""
        if self._core.scheduler.has_requests():
            self.side.timer.arm(0)

    def wake(self) -> None:
        """Make an idle engine take a step soon; from any thread (rule 1, rule 2)."""
        if self._queue is not None:
            self._queue.put_nowait((EngineCoreRequestType.WAKEUP, None))
        else:
            self.side.timer.arm(0)

    def tick(self) -> None:
        """Handle the timer."""
        if self._queue is not None:
            self.wake()
        else:
            self._step_idle()

    def _step_idle(self) -> None:
        core = self._core
        with self._lock:
            while not core.scheduler.has_unfinished_requests() and core.scheduler.has_requests():
                outputs, executed = self._step()
                core.post_step(executed)
                self.side.control.keep(outputs)

    def last_order(self, order: ScrubOrder) -> None:
        """Make the workers do a last scrub and take their answers; log it where they no longer can."""
        output = SchedulerOutput.make_empty()
        tiers = self.side.tiers
        copies = () if tiers is None else tiers.closing_jobs()
        last = StepOrder(0, order, is_idle=True, copies=copies)
        try:
            output.kv_connector_metadata = _with_others(self._core.scheduler.connector, last, output)
            done = self._core.model_executor.execute_model(output)
            receipt = _ours(done.kv_connector_output.kv_connector_worker_meta)
        except Exception as error:
            _log.error("the last scrub could not be done", error=type(error).__name__, blocks=order.blocks)
            return
        for answer in receipt.answers:
            self.side.port.scrubbed(answer.order, answer.shard, answer.results, answer.device_blocks)
        if tiers is not None:
            tiers.receive(receipt.copies)

    def close(self) -> None:
        """Close before the workers end."""
        self.side.close()


def _with_others(connector: Any, order: StepOrder, output: SchedulerOutput) -> KVConnectorMetadata:
    """Return an order for the workers' connector, beside the empty ones for other connectors where there are
    several.
    """
    if not isinstance(connector, MultiConnector):
        return order
    parts = (
        order if isinstance(child, GovernedConnector) else child.build_connector_meta(output)
        for child in connector.sub_connectors
    )
    return MultiKVConnectorMetadata(metadata=tuple(parts))


def _ours(answer: Any) -> StepReceipt:
    """Return our part of the workers' connector's answer.

    Raises:
        IsolationError: there is none.
    """
    parts = answer.metadata if isinstance(answer, MultiKVConnectorWorkerMetadata) else (answer,)
    for part in parts:
        if isinstance(part, StepReceipt):
            return part
    raise IsolationError("the workers did not answer the last order")


def _after_call(call: Callable[..., Any], act: Callable[[], None]) -> Callable[..., Any]:
    def dispatched(*args: Any, **kwargs: Any) -> Any:
        result = call(*args, **kwargs)
        act()
        return result

    return dispatched


def _before_weights_change(call: Callable[..., Any], reset: Callable[[], object]) -> Callable[..., Any]:
    """Replace `EngineCore.collective_rpc`: a call that may change weights gets new keys before and after it."""

    @functools.wraps(call)
    def called(method: Any, *given: Any, **named: Any) -> Any:
        if not changes_weights(method):
            return call(method, *given, **named)
        reset()
        try:
            return call(method, *given, **named)
        finally:
            reset()

    return called


def _locked(lock: threading.RLock, call: Callable[..., Any]) -> Callable[..., Any]:
    def locked(*args: Any, **kwargs: Any) -> Any:
        with lock:
            return call(*args, **kwargs)

    return locked


# -- administration: methods of EngineCore, reached by vLLM's utility calls --------------------------------------


def _side(core: Any) -> SchedulerSide:
    handle: EngineHandle = core.kvcustody
    handle.side.state.deferred.flush_unchecked()
    return handle.side


def kvcustody_erase(
    core: Any, tenant: str | None = None, subject: str | None = None, session: str | None = None
) -> dict[str, Any]:
    """Erase everything of a tenant, subject or session now."""
    side = _side(core)
    erased = side.port.erase(Selector(tenant, subject, session))
    return dict(erased._asdict())


def kvcustody_scan(core: Any, recover: bool = False) -> list[str]:
    """Return the findings of the orphan scan against vLLM's own pool; empty when clean.

    With `recover` the ledger is joined, every finding is repaired, and both are on record; the engine stands meanwhile.
    """
    side = _side(core)
    findings = side.recover().findings if recover else side.port.scan()
    return [
        f"{one.orphan}: tenant `{one.tenant}`, {one.cause}, blocks {list(one.blocks)}"
        + (f": {one.action}, {one.outcome}" if recover else "")
        for one in findings
    ]


def kvcustody_check(core: Any) -> list[str]:
    """Return the violated invariants of the books, recomputed; empty when all hold."""
    return _side(core).port.check()


def kvcustody_stats(core: Any) -> dict[str, Any]:
    """Return counters.

    They are blocks by state and compared, requests, the serving measures (`ServingMeasures`), each tier's work, and
    each tenant's tally.
    """
    side = _side(core)
    stats, tiers = side.port.stats(), side.tiers
    pool = stats.pools[0]
    return {
        "running": stats.running,
        "blocks": pool.total,
        "by_state": dict(pool.by_state),
        "allocated": pool.allocated,
        "scrubbed": list(pool.scrubbed),
        "evicted": dict(pool.evicted),
        "expired_residencies": pool.expired_residencies,
        "residencies": pool.residencies,
        "integrity": {"checked": pool.checked_blocks, "mismatched": pool.mismatched_blocks},
        "serving": dict(stats.serving),
        "tiers": {one.tier: one._asdict() for one in tiers.by_tier()} if tiers is not None else {},
        "tier_figures": dict(stats.tiers),
        "tenants": {
            name: {
                "requests": tally.requests,
                "prompt_tokens": tally.prompt_tokens,
                "hit_requests": tally.hit_requests,
                "hit_blocks": tally.hit_blocks,
                "deferred": dict(tally.deferred),
                "refused": dict(tally.refused),
            }
            for name, tally in stats.tenants.items()
        },
    }


def kvcustody_activate(core: Any, policy: str, revision: int, actor: str) -> dict[str, Any]:
    """Make a policy document (YAML text) the active revision."""
    side = _side(core)
    table = compile_policy(load_policy(policy, name="activated.yaml"), revision=revision)
    side.port.activate(table, actor=actor)
    return {"revision": revision, "digest": table.digest}


def kvcustody_weights_changed(core: Any) -> dict[str, Any]:
    """Make earlier results unreachable after a change of weights that no call of vLLM reports."""
    _side(core).reset()
    return {"changed": True}


UTILITIES: tuple[Callable[..., Any], ...] = (
    kvcustody_erase,
    kvcustody_scan,
    kvcustody_check,
    kvcustody_stats,
    kvcustody_activate,
    kvcustody_weights_changed,
)
