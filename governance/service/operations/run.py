"""The gate before every operation: authentication, permission, rate, idempotency, and the access record.

HTTP and the command line call it. Neither calls an operation past it.

1. A caller without the action is refused before the operation sees anything.
2. Reads of the ledger by those whose reads are events are on record before they are answered (class A).
3. A mutating POST runs once for its idempotency key; its repetition gives the same bytes.
4. What a tenant's own people take out is asked of the policy first (`exports`).
5. A call does not say how it waits: over HTTP no thread waits for the ledger, and a command has no thread to spare.
"""

from __future__ import annotations

from collections.abc import Awaitable, Callable, Mapping
from functools import partial
from typing import TYPE_CHECKING, NamedTuple, Protocol, TypeVar

from sqlalchemy.exc import SQLAlchemyError

from kvcustody.audit.kinds import AccessRecorded, Event
from kvcustody.audit.store.database.open_changes import SchemaChangedError
from kvcustody.errors import ConfigError, IdentityError, LedgerError, PolicyError
from kvcustody.governance.service.access.caller import Caller
from kvcustody.governance.service.access.rate_limiter import too_many
from kvcustody.governance.service.access.roles import Permission, Reach
from kvcustody.governance.service.idempotency import IdempotencyClaim
from kvcustody.governance.service.operations.answer import Answer, problem_answer, unpacked
from kvcustody.governance.service.operations.operation import Operation, check_permission
from kvcustody.governance.service.problem_details import ProblemError
from kvcustody.governance.service.processes.work_for import WORK_FOR, WorkFor
from kvcustody.logger import get_logger

if TYPE_CHECKING:
    from kvcustody.governance.service.service import Service

_log = get_logger("kvcustody.access")
_KEY_CHARACTERS_MAX = 200
REPLAYED = (b"idempotency-replayed", b"true")
T = TypeVar("T")


class Waiter(Protocol):
    """How a call waits for slow work (rule 5)."""

    async def work(self, act: Callable[[], T]) -> T:
        """Run a function that may block."""

    async def surely(self, act: Callable[[], None]) -> None:
        """Run a function that may block to its end, even if the call is cut off."""

    async def record(self, event: Event) -> None:
        """Return once a class A event is durable; raises `unavailable` where it is not within the deadline."""


class OperationCall(NamedTuple):
    """One call of an operation: its caller and its arguments."""

    operation: Operation
    caller: Caller
    query: Mapping[str, str]  # every filter by its name, as it was given
    request: bytes  # what makes a repetition the same call: the target, what it is conditional on, the body
    key: str | None = None  # the act's own key


class OperationGate:
    """The gate of one service's operations."""

    def __init__(self, service: Service, waiter: Waiter, *, workers_only: bool = False) -> None:
        self._service = service
        self._waiter = waiter
        self._workers_only = workers_only

    def admit(self, caller: Caller, has_gone: Callable[[], bool] | None = None) -> None:
        """Count a caller's call; raises `too-many-requests`.

        Args:
            caller: Who asks.
            has_gone: Says whether whoever asked has gone; None: they wait to the end.
        """
        WORK_FOR.set(WorkFor(caller.party) if has_gone is None else WorkFor(caller.party, has_gone))
        wait_seconds = self._service.rates.take(caller.name)
        if wait_seconds:
            raise too_many(wait_seconds)

    def permit(self, operation: Operation, caller: Caller) -> None:
        """Raise `forbidden` unless the caller may call this (rule 1); `not-found` for an operation that is not served
        here.
        """
        check_permission(operation, caller)
        if self._workers_only and operation.action is not None and not _for_workers(operation, caller):
            raise ProblemError("not-found")

    async def run(self, call: OperationCall, act: Callable[[], Awaitable[Answer | None]]) -> Answer | None:
        """Execute a permitted call (rules 2 to 4).

        Args:
            call: What is asked, and by whom.
            act: Calls the operation. It answers None where it has sent the answer itself, and never so of a keyed
                operation.

        Returns:
            The answer, or None as `act` does.

        Raises:
            ProblemError: The call is refused.
        """
        operation, caller = call.operation, call.caller
        if operation.exports and caller.tenant is not None:
            await self._waiter.work(partial(self._service.export, caller, once=operation.method == "GET"))
        if operation.recorded and caller.recorded:
            about = caller.tenant or ""
            if not about and "tenant" in call.query:
                about = await self._waiter.work(partial(self._service.about, call.query["tenant"]))
            await self._waiter.record(self._access(call, about))
        return await (self._once(call, act) if operation.keyed else act())

    def _access(self, call: OperationCall, about: str) -> AccessRecorded:
        """The event of a read: the names of filters, and of their values the tenant's alone."""
        roles, now_us = tuple(sorted(call.caller.roles)), self._service.clock.now_us()
        filters = tuple(sorted(call.query))
        return AccessRecorded(now_us, call.caller.name, roles, call.operation.name, about, filters)

    async def _once(self, call: OperationCall, act: Callable[[], Awaitable[Answer | None]]) -> Answer:
        """Act for the first time, or answer as the first time did (rule 3)."""
        key = call.key
        if key is None:
            raise ProblemError("idempotency-key-required")
        if not 1 <= len(key) <= _KEY_CHARACTERS_MAX or not key.isascii() or not key.isprintable():
            raise ProblemError("malformed", "`Idempotency-Key` has 1 to 200 printable ASCII characters")
        claim = await self._waiter.work(partial(self._service.answers.claim, call.caller.name, key, call.request))
        if isinstance(claim, bytes):
            kept = unpacked(claim)
            return kept._replace(headers=[*kept.headers, REPLAYED])
        return await self._first(claim, act)

    async def _first(self, claim: IdempotencyClaim, act: Callable[[], Awaitable[Answer | None]]) -> Answer:
        answers = self._service.answers
        answer: Answer | None = None
        try:
            try:
                answer = await act()
            except Exception as error:
                problem = problem_of(error)
                if problem is None:
                    raise
                answer = problem_answer(problem)
            assert answer is not None, "a keyed operation gives its answer"
            if answer.status >= 500:
                raise _FailedError
            await self._waiter.surely(partial(answers.settle, claim, answer.packed()))
        except BaseException as error:
            await self._waiter.surely(partial(answers.give_up, claim))
            if not isinstance(error, _FailedError):
                raise
        assert answer is not None
        return answer.without_length()


def problem_of(error: Exception) -> ProblemError | None:
    """Return the problem of an error; None for a defect of ours.

    The caller's mistakes have their message. What the ledger said is for the operator's log.
    """
    if isinstance(error, ProblemError):
        return error
    if isinstance(error, SQLAlchemyError):
        _log.error("database failed", exc_info=error)
        return ProblemError("unavailable", headers={"Retry-After": "2"})
    if isinstance(error, SchemaChangedError):
        _log.error("the ledger has another schema", reason=error.message)
        return ProblemError("ledger-schema", headers={"Retry-After": "5"})
    if isinstance(error, LedgerError):
        _log.error("the ledger cannot answer", reason=error.message)
        return ProblemError("unavailable", "the ledger cannot answer", headers={"Retry-After": "2"})
    if isinstance(error, PolicyError):
        from kvcustody.governance.release.activation_gates import TooCostlyError

        costly = isinstance(error, TooCostlyError)
        return ProblemError("policy-too-costly" if costly else "conflict", error.message)
    if isinstance(error, (IdentityError, ConfigError)):
        return ProblemError("invalid", error.message)
    return None


def _for_workers(operation: Operation, caller: Caller) -> bool:
    """Whether the workers' own address answers: what workers do, and what they do with their own keys."""
    works = caller.reach(Permission.HAND_IN) is not Reach.NONE
    is_theirs = operation.action in (Permission.WORK, Permission.HAND_IN)
    return is_theirs or (operation.at_workers and works)


class _FailedError(Exception):
    """The first run failed on our side."""
