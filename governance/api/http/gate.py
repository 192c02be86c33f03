"""HTTP before the gate of operations: who sent the request, what it asks for, and how its answer is sent.

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
from collections import Counter
from collections.abc import Awaitable, Callable, Iterator, Mapping
from contextlib import contextmanager
from functools import partial
from typing import TYPE_CHECKING, Any, TypeVar
from urllib.parse import parse_qsl

import anyio
import structlog
from anyio.to_thread import run_sync
from sqlalchemy.exc import SQLAlchemyError
from starlette.responses import Response

from kvcustody.audit.evidence.processes.marked_processes import history
from kvcustody.audit.kinds import Event
from kvcustody.governance.api.http.console_mount import ADDRESS, Pages, form_token, is_page
from kvcustody.governance.api.http.exchange import (
    ClientGoneError,
    Exchange,
    Message,
    Receive,
    Scope,
    Send,
)
from kvcustody.governance.api.http.json_body import check_json
from kvcustody.governance.api.http.long_poll import told_within
from kvcustody.governance.api.http.session_cookie import check_act, check_origin, cookie_of
from kvcustody.governance.service.access.authenticator import too_many
from kvcustody.governance.service.access.caller import Caller
from kvcustody.governance.service.ingest.traced_writer import CURRENT
from kvcustody.governance.service.operations.answer import Answer, Headers
from kvcustody.governance.service.operations.operation import Operation, Operations
from kvcustody.governance.service.operations.run import OperationCall, OperationGate
from kvcustody.governance.service.problem_details import ProblemError
from kvcustody.governance.service.processes.work_for import WORK_FOR, WorkFor
from kvcustody.governance.service.service import Service

if TYPE_CHECKING:
    from opentelemetry.trace import Span


_log = structlog.get_logger("kvcustody.access")
_PARTIES = 4  # how many it takes to hold every place; and of what a party may hold, what all have without a credential
_INLINE_BYTES = 65_536  # of a body that is read on the loop; a larger one is read on a thread
CALLER = "kvcustody.caller"
HISTORY = b"kvcustody-history"
T = TypeVar("T")
Read = Callable[[Scope, dict[str, str]], Awaitable[Response]]  # of a request, and the parameters in its path


class LoopWaiter:
    """Waits on the loop of a server: what blocks has a thread, and what is recorded has none (rule 3)."""

    def __init__(self, service: Service, threads: anyio.CapacityLimiter) -> None:
        self._service = service
        self._threads = threads

    async def work(self, act: Callable[[], T]) -> T:
        """Do what may block, on a thread."""
        return await run_sync(act, limiter=self._threads)

    async def surely(self, act: Callable[[], None]) -> None:
        """Do what may block, to its end, whether or not the client leaves."""
        with anyio.CancelScope(shield=True):
            await run_sync(act, limiter=self._threads)

    async def record(self, event: Event) -> None:
        """Return once a class A event is durable."""
        async with told_within(self._service.writer.durable_seconds) as decided:
            awaited = self._service.writer.begin_durable(event, decided)
        self._service.end_record(awaited)


class Gate:
    """Wraps the application of operations."""

    def __init__(
        self,
        app: Any,
        operations: Operations,
        service: Service,
        *,
        queries: dict[str, frozenset[str]],
        reads: Mapping[str, Read],
        workers_only: bool = False,
        pages: Pages | None = None,
    ) -> None:
        self._app = app
        self._operations = operations
        self._service = service
        self._queries = queries
        self._reads = reads
        self._pages = pages
        self._of_party: Counter[str] = Counter()
        self._strangers: Counter[str] = Counter()  # requests in work without a credential, by address
        self._threads = anyio.CapacityLimiter(32)
        self._gate = OperationGate(service, LoopWaiter(service, self._threads), workers_only=workers_only)
        self._checks = anyio.CapacityLimiter(
            16
        )  # of credentials: whoever is known already needs none of them

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        """Handle one ASGI connection."""
        if scope["type"] == "lifespan":
            await self._app(scope, receive, send)
        elif scope["type"] == "http":
            settings = self._service.settings
            exchange = Exchange(scope, receive, send, tls=settings.tls, proxies=settings.proxies)
            if not is_page(self._pages, exchange.path):  # a page may tell HEAD from GET: a link is not spent
                exchange.answer_head_as_get()
            operation = self._operations.find(exchange.method, exchange.path)
            CURRENT.set(exchange.trace)
            if self._service.tracing is None:
                await self._http(exchange, operation, None)
            else:
                name = operation.name if operation is not None else "none"
                with self._service.tracing.request(exchange.headers, name) as span:
                    await self._http(exchange, operation, span)
        else:
            await receive()
            await send({"type": "websocket.close", "code": 1008})

    async def _http(self, exchange: Exchange, operation: Operation | None, span: Span | None) -> None:
        started = time.perf_counter()
        caller = None
        try:
            exchange.check_host()
            exchange.check_text(
                query=not is_page(self._pages, exchange.path)
            )  # a page says which field it was
            if operation is not None and operation.action is None:
                with self._place_of(None, exchange.address):
                    await self._app(exchange.scope, exchange.replay(), exchange.send)
                return
            if operation is None and self._operations.are_open(exchange.path):
                raise self._not_allowed(exchange.path)
            if is_page(self._pages, exchange.path):
                caller = await self._page(exchange)
                return
            caller = await self._authenticate(exchange)
            with self._place_of(caller, exchange.address):
                await self._serve(exchange, operation, caller)
        except ProblemError as problem:
            await exchange.refuse(problem)
        except ClientGoneError:
            pass
        except SQLAlchemyError:
            _log.error("database failed", request_id=exchange.request_id, exc_info=True)
            await exchange.refuse(ProblemError("unavailable", headers={"Retry-After": "2"}))
        except Exception:
            _log.error("request failed", request_id=exchange.request_id, exc_info=True)
            await exchange.refuse(ProblemError("internal"))
        finally:
            self._note(exchange, operation, caller, time.perf_counter() - started, span)

    @contextmanager
    def _place_of(self, caller: Caller | None, address: str) -> Iterator[None]:
        """One of the places of the caller's party, a quarter of all: requests that are held open stop nobody else.

        Without a caller, one of as many others (rule 5), of which an address has a quarter.
        """
        whole = self._service.settings.running_requests_max
        places, name = (self._of_party, caller.party) if caller is not None else (self._strangers, address)
        share = max(1, whole // _PARTIES)
        if caller is None:
            whole, share = share, max(1, share // _PARTIES)
        if places.total() >= whole:
            raise ProblemError("unavailable", "too many requests at once", headers={"Retry-After": "1"})
        if places[name] >= share:
            raise ProblemError(
                "unavailable", "too many of your requests at once", headers={"Retry-After": "1"}
            )
        places[name] += 1
        try:
            yield
        finally:
            places[name] -= 1
            if not places[name]:
                del places[name]

    async def _authenticate(self, exchange: Exchange) -> Caller:
        authorization = exchange.header("authorization")
        cookie = None if authorization is not None else cookie_of(exchange.header("cookie"), tls=exchange.tls)
        authenticator, address = self._service.authenticator, exchange.address
        certificate = exchange.certificate
        caller = authenticator.known(authorization, certificate)
        if caller is None:
            ask = (authorization, cookie, address, certificate)
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
            marked = (
                service.marked()
                if service.knows_marked
                else await run_sync(service.marked, limiter=self._threads)
            )
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
        with self._place_of(caller, exchange.address):
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
        exchange.scope[CALLER] = caller
        query = _query(exchange, self._queries[operation.name])
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
        act = partial(self._whole, exchange) if operation.keyed else partial(self._sent, exchange, operation)
        answer = await self._gate.run(call, act)
        if answer is not None:
            await exchange.answer(answer)

    async def _sent(self, exchange: Exchange, operation: Operation) -> None:
        """Call an operation, whose answer is sent as it comes."""
        read = self._reads.get(operation.name)
        if read is not None:
            response = await read(exchange.scope, operation.parameters(exchange.path))
            await response(exchange.scope, exchange.replay(), exchange.send)
        else:
            await self._app(exchange.scope, exchange.replay(), exchange.send)

    async def _whole(self, exchange: Exchange) -> Answer:
        """Call an operation, whose answer is kept."""
        kept: list[Message] = []

        async def keep(message: Message) -> None:
            kept.append(message)

        await self._app(exchange.scope, exchange.replay(), keep)
        body = b"".join(message.get("body", b"") for message in kept[1:])
        return Answer(kept[0]["status"], list(kept[0]["headers"]), body)

    def _not_allowed(self, path: str) -> ProblemError:
        allowed = self._operations.methods(path)
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


def _query(exchange: Exchange, known: frozenset[str]) -> dict[str, str]:
    """The query of a request; raises `invalid` for a parameter that is not declared, or that comes twice."""
    text = exchange.scope.get("query_string", b"").decode("latin-1")
    try:
        pairs = parse_qsl(text, keep_blank_values=True, max_num_fields=64)
    except ValueError:
        raise ProblemError("malformed", "too many query parameters") from None
    query = dict(pairs)
    if not query.keys() <= known:
        errors = [{"at": "query", "what": "a parameter that this operation does not have"}]
        raise ProblemError("invalid", errors=errors)
    if len(query) != len(pairs):
        raise ProblemError("invalid", errors=[{"at": "query", "what": "a parameter came twice"}])
    return query
