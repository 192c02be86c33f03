"""Calls of operations on a service that is open in this process: through the gate, without HTTP.

1. A call is refused, recorded and answered as a request of the same caller is, to the byte of its body.
2. A call waits for its answer. Nothing else runs in it meanwhile.
3. Of the operations only those are imported that may have the path, and no framework for HTTP.
"""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Mapping
from types import TracebackType
from typing import TYPE_CHECKING, TypeVar

from kvcustody.audit.kinds import Event
from kvcustody.governance.api.declarations import operations_at
from kvcustody.governance.api.given import Wire
from kvcustody.governance.api.http.json_body import check_json
from kvcustody.governance.api.operation_function import OperationFunction
from kvcustody.governance.api.operation_request import OperationRequest
from kvcustody.governance.service.access.caller import Caller
from kvcustody.governance.service.operations.answer import Answer, FileContent, etag_of, problem_answer
from kvcustody.governance.service.operations.operation import Operation
from kvcustody.governance.service.operations.run import OperationCall, OperationGate, problem_of
from kvcustody.governance.service.problem_details import ProblemError
from kvcustody.logger import get_logger

if TYPE_CHECKING:
    from kvcustody.governance.service.service import Service

_log = get_logger(__name__)
T = TypeVar("T")


class InlineWaiter:
    """Waits in the calling thread (rule 2)."""

    def __init__(self, service: Service) -> None:
        self._service = service

    async def work(self, act: Callable[[], T]) -> T:
        """Run a function."""
        return act()

    async def surely(self, act: Callable[[], None]) -> None:
        """Run a function."""
        act()

    async def record(self, event: Event) -> None:
        """Return once the event is durable."""
        self._service.record(event)


class LocalCalls:
    """Calls the operations of one service. Use it as a context manager."""

    def __init__(self, service: Service) -> None:
        self._service, self._waiter = service, InlineWaiter(service)
        self._gate = OperationGate(service, self._waiter)
        self._loop = asyncio.new_event_loop()

    def call(self, caller: Caller, asked: OperationRequest) -> Answer:
        """Return an operation's answer; a refusal is an answer too (rule 1)."""
        try:
            declared = operations_at(asked.path)
            operation = declared.operations.find(asked.method, asked.path)
            if operation is None:
                raise ProblemError("not-found")
            function = declared.functions[operation.name]
            answer = self._loop.run_until_complete(self._permitted(operation, function, caller, asked))
        except Exception as error:
            problem = problem_of(error)
            if problem is None:
                _log.error("call failed", exc_info=True)
            return problem_answer(problem or ProblemError("internal"))
        if answer.status == 200 and asked.method == "GET" and not answer.header("etag"):
            answer = answer._replace(headers=[*answer.headers, (b"etag", etag_of(answer.body).encode())])
        return answer

    async def _permitted(
        self, operation: Operation, function: OperationFunction, caller: Caller, asked: OperationRequest
    ) -> Answer:
        self._gate.admit(caller)
        self._gate.permit(operation, caller)
        headers = {"content-type": "application/json"}
        headers |= {name.lower(): value for name, value in asked.headers.items()}
        function.check_query(asked.query)
        self._check(operation, asked, headers)
        target = f"{asked.path}?{'&'.join(f'{name}={value}' for name, value in asked.query.items())}"
        request = b"\0".join((target.encode(), headers.get("if-match", "").encode(), asked.body))
        call = OperationCall(operation, caller, asked.query, request, headers.get("idempotency-key"))
        wire = Wire(operation.parameters(asked.path), asked.query, headers, asked.body)

        async def act() -> Answer:
            found = await function.call(self._service, caller, wire, self._waiter.work)
            return found.answer() if isinstance(found, FileContent) else found

        answer = await self._gate.run(call, act)
        assert answer is not None
        return answer.without_length()

    def _check(self, operation: Operation, asked: OperationRequest, headers: Mapping[str, str]) -> None:
        """Raise a problem for a body that is too large, or one that is no JSON."""
        settings = self._service.settings
        bytes_max = int(settings.batch_bytes_max if operation.batch else settings.body_bytes_max)
        if len(asked.body) > bytes_max:
            raise ProblemError("too-large", f"a body may have {bytes_max} bytes")
        if asked.body and not operation.batch:
            check_json(asked.body, headers.get("content-type", ""))

    def __enter__(self) -> LocalCalls:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self._loop.run_until_complete(self._loop.shutdown_default_executor())
        self._loop.close()
