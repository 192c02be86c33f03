"""Calls of operations from a page: by their functions, for a caller whom the gate permits.

1. The gate decides who may, as of a request of the same operation.
2. What hands leaves over later is asked of the policy here, as `exports`. A page shows, and hands nothing over.
3. The read is not recorded here: a page that shows others' data has recorded itself (rule 3 of `console_mount`).
"""

from __future__ import annotations

import inspect
from collections.abc import Callable
from functools import cache
from typing import Any, TypeVar

from kvcustody.governance.api.declarations import every_operation
from kvcustody.governance.api.local_calls import InlineWaiter
from kvcustody.governance.service.access.caller import Caller
from kvcustody.governance.service.operations.operation import Operation
from kvcustody.governance.service.operations.run import OperationGate
from kvcustody.governance.service.service import Service

T = TypeVar("T")


def ask(service: Service, caller: Caller, function: Callable[..., T], *given: Any, **named: Any) -> T:
    """Call an operation's function.

    Args:
        service: The service that is asked.
        caller: Who asks.
        function: What answers the operation. It is given the service and the caller where it takes them.
        given: Its other arguments, in their order.
        named: Its other arguments, by their names.

    Returns:
        What the function returns.

    Raises:
        ProblemError: The caller may not ask this, or the function refuses it.
    """
    operation, takes = _operation_of(function)
    OperationGate(service, InlineWaiter(service)).permit(operation, caller)
    if operation.exports and operation.method != "GET":  # rule 2
        service.export(caller)
    own: dict[str, Any] = {"desk": service, "service": service, "caller": caller}
    first = [own[name] for name in takes if name in own]
    return function(*first, *given, **named)


@cache
def _operation_of(function: Callable[..., Any]) -> tuple[Operation, tuple[str, ...]]:
    """The operation that a function answers, and the names of what it takes."""
    [operation] = (one.operation for one in every_operation().by_name.values() if one.function is function)
    takes = tuple(inspect.signature(function).parameters)
    own = [one for one in takes if one in ("caller", "desk", "service")]
    assert list(takes[: len(own)]) == own, f"`{function.__name__}` takes its caller and its service first"
    return operation, takes
