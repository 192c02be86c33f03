"""Runs the scrubs of a step before everything else that a model runner does in it.

vLLM calls a connector's `handle_preemptions` early in one runner and late in the other. The V2 GPU runner first moves
recurrent state into new blocks (`preprocess_state`), so a scrub of the same step would erase live state. So
`execute_model` of whichever runner is loaded is wrapped, and the connector's own call finds the order done.

1. A runner's class is wrapped once, in the worker's process, when the connector is made there. A runner that takes
   other arguments is refused by name (`versions.check_signatures`).
2. An order is done once, by whoever calls first: the wrapper and the connector are given the same object.
3. A run without work of a scheduler (profiling, warm-up, capture) carries no order.
"""

from __future__ import annotations

import functools
import sys
from collections.abc import Callable
from typing import Any

from kvcustody.integrations.vllm.step_messages import StepOrder
from kvcustody.integrations.vllm.versions import check_signatures

RUNNERS = {
    "vllm.v1.worker.gpu_model_runner": "GPUModelRunner",
    "vllm.v1.worker.gpu.model_runner": "GPUModelRunner",
}
_EXECUTE = ("scheduler_output", "intermediate_tensors")
_WRAPPED = "kvcustody_wrapped"


def wrap_runners(execute: Callable[[StepOrder], None]) -> list[str]:
    """Call `execute` with a step's order before any loaded runner begins the step; return the runners, by place.

    Raises `ConfigError` where a runner's `execute_model` is not the one that this adapter knows.
    """
    wrapped = []
    for module, name in RUNNERS.items():
        loaded = sys.modules.get(module)
        runner: Any = getattr(loaded, name, None)
        if runner is None:
            continue
        place = f"{module}:{name}.execute_model"
        original = getattr(runner.execute_model, _WRAPPED, None)
        if original is None:
            check_signatures({place: _EXECUTE})
            original = runner.execute_model
        runner.execute_model = _first(original, execute)
        wrapped.append(place)
    return wrapped


def _first(original: Callable[..., Any], execute: Callable[[StepOrder], None]) -> Callable[..., Any]:
    @functools.wraps(original)
    def execute_model(self: Any, scheduler_output: Any, *args: Any, **kwargs: Any) -> Any:
        order = order_in(getattr(scheduler_output, "kv_connector_metadata", None))
        if order is not None:
            execute(order)
        return original(self, scheduler_output, *args, **kwargs)

    setattr(execute_model, _WRAPPED, original)
    return execute_model


def order_in(metadata: Any) -> StepOrder | None:
    """Return our order in the step's message from the scheduler's connectors, alone or among several."""
    for one in (metadata, *getattr(metadata, "metadata", ())):
        if isinstance(one, StepOrder):
            return one
    return None
