"""The HTTP side of the gate: who sent the request, what it asks for, and how its answer is sent.

`service.operations.run` decides about the call itself: permission, record, repetition.

1. A request is authenticated before its path is looked at, so nobody learns which paths exist without a credential.
   Only what needs none is told a wrong method without one: a health check is no attempt to get in.
2. What no operation declares is not served.
3. No thread waits for the record of a read: the writer tells the request's loop when the event is durable, or cannot
   be.
4. A place among those in work is a caller's whose credential is checked: until then a request holds its connection,
   and waits its turn for the check. What needs no credential has places of its own, with a share for an address.
5. An error inside is one problem without details; the log has them, without secrets.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Mapping
from contextlib import AbstractContextManager
from functools import partial
from typing import TYPE_CHECKING, TypeVar
from urllib.parse import parse_qsl

import anyio
from anyio.to_thread import run_sync
from sqlalchemy.exc import SQLAlchemyError
from starlette.responses import FileResponse, Response

from kvcustody.audit.evidence.processes.marked_processes import history
from kvcustody.audit.kinds import Event
from kvcustody.governance.api.declarations import Declarations
from kvcustody.governance.api.given import Wire
from kvcustody.governance.api.http.console_mount import ADDRESS, Pages, form_token
from kvcustody.governance.api.http.exchange import ClientGoneError, Exchange, Receive, Scope, Send
from kvcustody.governance.api.http.json_body import check_json
from kvcustody.governance.api.http.long_poll import told_within
from kvcustody.governance.api.http.places import Places
from kvcustody.governance.api.http.session_cookie import check_act, check_origin, cookie_of
from kvcustody.governance.api.operation_function import OperationFunction
from kvcustody.governance.service.access.caller import Caller
from kvcustody.governance.service.access.rate_limiter import too_many
from kvcustody.governance.service.access.roles import Permission
from kvcustody.governance.service.ingest.traced_writer import CURRENT
from kvcustody.governance.service.operations.answer import Answer, FileContent, Headers
from kvcustody.governance.service.operations.operation import Operation
from kvcustody.governance.service.operations.run import OperationCall, OperationGate, problem_of
from kvcustody.governance.service.problem_details import ProblemError
from kvcustody.governance.service.processes.work_for import WORK_FOR, WorkFor
from kvcustody.governance.service.service import Service
from kvcustody.logger import get_logger

if TYPE_CHECKING:
    from opentelemetry.trace import Span


_log = get_logger("kvcustody.access")
_PARTIES = 4  # how many it takes to hold every place; and of what a party may hold, what all have without a credential
_INLINE_BYTES = 65_536  # of a body that is read on the loop; a larger one is read on a thread
CALLER = "kvcustody.caller"
HISTORY = b"kvcustody-history"
T = TypeVar("T")


class LoopWaiter:
    """Waits on a server's event loop: blocking work runs on a thread, a wait for a record needs none (rule 3)."""

    def __init__(self, service: Service, threads: anyio.CapacityLimiter) -> None:
        self._service = service
        self._threads = threads

    async def work(self, act: Callable[[], T]) -> T:
        """Run a blocking function on a thread."""
        return await run_sync(act, limiter=self._threads)

    async def surely(self, act: Callable[[], None]) -> None:
        """Run a blocking function to its end, even if the client leaves."""
        with anyio.CancelScope(shield=True):
            await run_sync(act, limiter=self._threads)

    async def record(self, event: Event) -> None:
        """Return once a class A event is durable."""
        async with told_within(self._service.writer.durable_seconds) as decided:
            awaited = self._service.writer.begin_durable(event, decided)
        self._service.end_record(awaited)


class Gate:
    """The ASGI application of a service: its operations, and a console's pages where one is mounted."""

    def __init__(
        self,
        declared: Declarations,
        service: Service,
        *,
        workers_only: bool = False,
        pages: Pages | None = None,
    ) -> None:
        self._declared = declared
        self._service = service
        self._pages = pages
        self._tls, self._proxies = service.settings.tls, service.settings.proxies
        whole = service.settings.running_requests_max
        share = max(1, whole // _PARTIES)
        self._places = Places(whole, share)
        self._strangers = Places(share, max(1, share // _PARTIES))  # without a credential, by address
        self._threads = anyio.CapacityLimiter(32)
        self._gate = OperationGate(service, LoopWaiter(service, self._threads), workers_only=workers_only)
        self._run_health = partial(run_sync, limiter=anyio.CapacityLimiter(4))  # whatever others wait for
        self._checks = anyio.CapacityLimiter(16)  # of credentials: whoever is known already needs none of them

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        """Handle one ASGI connection."""
        if scope["type"] != "http":
            await receive()
            await send({"type": "websocket.close", "code": 1008})
            return
        exchange = Exchange(scope, receive, send, tls=self._tls, proxies=self._proxies)
        is_page = self._pages is not None and _is_below(self._pages.prefix, exchange.path)
        if not is_page:  # a page may tell HEAD from GET: a link is not spent
            exchange.answer_head_as_get()
        operation = self._declared.operations.find(exchange.method, exchange.path)
        CURRENT.set(exchange.trace)
        if self._service.tracing is None:
            await self._http(exchange, operation, None, is_page=is_page)
        else:
            name = operation.name if operation is not None else "none"
            with self._service.tracing.request(exchange.headers, name) as span:
                await self._http(exchange, operation, span, is_page=is_page)

    async def _http(self, exchange: Exchange, operation: Operation | None, span: Span | None, *, is_page: bool) -> None:
        started = time.perf_counter()
        caller = None
        try:
            exchange.check_host()
            exchange.check_text(query=not is_page)  # a page says which field it was
            if operation is not None and operation.action is None:
                with self._place_of(None, exchange):
                    await self._sent(exchange, operation, None, {})
            elif operation is None and self._declared.operations.are_open(exchange.path):
                raise self._not_allowed(exchange.path)
            elif is_page:
                caller = await self._page(exchange)
            else:
                caller = await self._authenticate(exchange, operation)
                exchange.tell_known(caller.party)
                with self._place_of(caller, exchange):
                    await self._serve(exchange, operation, caller)
        except ClientGoneError:
            pass
        except SQLAlchemyError:
            _log.error("database failed", request_id=exchange.request_id, exc_info=True)
            await exchange.refuse(ProblemError("unavailable", headers={"Retry-After": "2"}))
        except Exception as error:
            problem = problem_of(error)
            if problem is None:
                _log.error("request failed", request_id=exchange.request_id, exc_info=True)
            await exchange.refuse(problem or ProblemError("internal"))
        finally:
            self._note(exchange, operation, caller, time.perf_counter() - started, span)

    def _place_of(self, caller: Caller | None, exchange: Exchange) -> AbstractContextManager[None]:
        """One of the places of the caller's party, a quarter of all, so that it stops nobody else.

        Without a caller, one of as many others (rule 4), of which an address has a quarter.
        """
        if caller is None:
            return self._strangers.taken(exchange.address)
        return self._places.taken(caller.party)

    async def _authenticate(self, exchange: Exchange, operation: Operation | None) -> Caller:
        authorization = exchange.header("authorization")
        cookie = None if authorization is not None else cookie_of(exchange.header("cookie"), tls=exchange.tls)
        authenticator, certificate = self._service.authenticator, exchange.certificate
        caller = authenticator.known(authorization, certificate)
        if caller is None and operation is not None and operation.action is Permission.READ_HEALTH:
            remembered = authenticator.remembered(authorization, certificate)
            if remembered is not None and not await self._run_health(self._service.verdict.database_answers):
                self._gate.admit(remembered, exchange.has_gone)
                return remembered
        if caller is None:
            ask = (authorization, cookie, exchange.address, certificate)
            caller = await run_sync(authenticator.caller, *ask, limiter=self._checks)
        try:
            self._gate.admit(caller, exchange.has_gone)
        finally:
            left = str(self._service.rates.left(caller.name)).encode()
            exchange.more = [(b"ratelimit-remaining", left), *await self._history()]
        if cookie is not None and exchange.method not in ("GET", "HEAD"):
            check_act(exchange, self._service.sessions, cookie)
        return caller

    async def _history(self) -> Headers:
        """What every answer to somebody says of a ledger with replayed or generated history."""
        service = self._service
        try:
            marked = service.marked() if service.knows_marked else await run_sync(service.marked, limiter=self._threads)
        except SQLAlchemyError:  # nothing of it can be shown either
            return []
        return [(HISTORY, history(marked).encode("ascii", "replace"))] if marked else []

    async def _page(self, exchange: Exchange) -> Caller | None:
        """A request of the pages: with its session, where it has one that is not over."""
        assert self._pages is not None
        cookie = cookie_of(exchange.header("cookie"), tls=exchange.tls)
        caller = None
        if cookie is not None:
            find = self._service.authenticator.of_session
            caller = await run_sync(find, cookie, limiter=self._checks)
            WORK_FOR.set(WorkFor("" if caller is None else caller.party, exchange.has_gone))
        rate = caller.name if caller is not None else f"page:{exchange.address}"
        reads = exchange.method in (
            "GET",
            "HEAD",
        )  # whoever signs in is told to wait for a key that fails alone
        wait_seconds = self._service.rates.take(rate) if caller is not None or reads else 0.0
        if wait_seconds:
            raise too_many(wait_seconds)
        with self._place_of(caller, exchange):
            await exchange.read(int(self._service.settings.body_bytes_max))
            if exchange.method not in ("GET", "HEAD"):
                if caller is None or cookie is None:
                    check_origin(exchange)
                else:
                    check_act(exchange, self._service.sessions, cookie, form_token(exchange))
            exchange.scope[CALLER] = caller
            exchange.scope[ADDRESS] = exchange.address
            await self._pages(exchange.scope, exchange.replay(), exchange.send)
        return caller

    async def _serve(self, exchange: Exchange, operation: Operation | None, caller: Caller) -> None:
        if operation is None:
            raise self._not_allowed(exchange.path)
        self._gate.permit(operation, caller)
        query = _query(exchange, self._declared.functions[operation.name])
        settings = self._service.settings
        await exchange.read(int(settings.batch_bytes_max if operation.batch else settings.body_bytes_max))
        if exchange.body and not operation.batch:
            kind = exchange.header("content-type") or ""
            if len(exchange.body) > _INLINE_BYTES:
                await run_sync(check_json, exchange.body, kind, limiter=self._threads)
            else:
                check_json(exchange.body, kind)
        target = exchange.path.encode() + b"?" + exchange.scope.get("query_string", b"")
        request = b"\0".join((target, (exchange.header("if-match") or "").encode(), exchange.body))
        key = exchange.header("idempotency-key") if operation.keyed else None
        call = OperationCall(operation, caller, query, request, key)
        act = partial(self._kept if operation.keyed else self._sent, exchange, operation, caller, query)
        answer = await self._gate.run(call, act)
        if answer is not None:
            await exchange.answer(answer)

    async def _sent(
        self, exchange: Exchange, operation: Operation, caller: Caller | None, query: Mapping[str, str]
    ) -> None:
        """Call an operation, whose answer is sent as it comes."""
        found = await self._called(exchange, operation, caller, query)
        await _response(found)(exchange.scope, exchange.replay(), exchange.send)

    async def _kept(
        self, exchange: Exchange, operation: Operation, caller: Caller | None, query: Mapping[str, str]
    ) -> Answer:
        """Call an operation, whose answer is kept."""
        found = await self._called(exchange, operation, caller, query)
        return found.answer() if isinstance(found, FileContent) else found

    async def _called(
        self, exchange: Exchange, operation: Operation, caller: Caller | None, query: Mapping[str, str]
    ) -> Answer | FileContent:
        path, headers = operation.parameters(exchange.path), exchange.texts()
        wire = Wire(path, query, headers, exchange.body, exchange.tls, exchange.certificate)
        run = self._run_health if operation.action in (None, Permission.READ_HEALTH) else run_sync
        return await self._declared.functions[operation.name].call(self._service, caller, wire, run)

    def _not_allowed(self, path: str) -> ProblemError:
        allowed = self._declared.operations.methods(path)
        if not allowed:
            return ProblemError("not-found")
        return ProblemError("method-not-allowed", headers={"Allow": ", ".join(allowed)})

    # -- the access log -------------------------------------------------------------------------------------

    def _note(
        self,
        exchange: Exchange,
        operation: Operation | None,
        caller: Caller | None,
        seconds: float,
        span: Span | None,
    ) -> None:
        name = operation.name if operation is not None else "none"
        count = self._service.measuring.requests.setdefault((name, exchange.status), [0, 0.0])
        count[0] += 1
        count[1] += seconds
        tracing, more = self._service.tracing, {}
        if tracing is not None and span is not None:
            more["trace_id"] = tracing.tell(
                span, caller, method=exchange.method, status=exchange.status, request_id=exchange.request_id
            )
        _log.info(
            "request",
            request_id=exchange.request_id,
            **more,
            operation=name,
            method=exchange.method,
            status=exchange.status,
            caller=caller.name if caller is not None else None,
            authenticated_by=caller.by if caller is not None else None,
            milliseconds=round(seconds * 1000, 1),
        )


def _response(found: Answer | FileContent) -> Response:
    if isinstance(found, FileContent):
        return FileResponse(found.path, media_type=found.media, headers=dict(found.headers))
    headers = {name.decode(): value.decode("latin-1") for name, value in found.headers}
    return Response(found.body, found.status, headers)


def _is_below(prefix: str, path: str) -> bool:
    """Whether a path belongs to the pages below this prefix."""
    return path in ("/", prefix) or path.startswith(prefix + "/")


def _query(exchange: Exchange, function: OperationFunction) -> dict[str, str]:
    """The query of a request; raises `invalid` for a parameter that is not declared, or that comes twice."""
    text = exchange.scope.get("query_string", b"").decode("latin-1")
    try:
        pairs = parse_qsl(text, keep_blank_values=True, max_num_fields=64)
    except ValueError:
        raise ProblemError("malformed", "too many query parameters") from None
    query = dict(pairs)
    function.check_query(query)
    if len(query) != len(pairs):
        raise ProblemError("invalid", errors=[{"at": "query", "what": "a parameter is given twice"}])
    return query
