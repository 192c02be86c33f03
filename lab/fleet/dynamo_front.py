"""Dynamo's `SelectionService` as a router: `-m kvcustody.lab.fleet.dynamo_front --port 30000 --worker URL=EVENTS`.

It runs in Dynamo's own environment, beside kvcustody[events].

1. The service chooses a worker by the prompt's tokens, the name in `cache_salt` and the load that it has booked.
   Workers tell their blocks at EVENTS. Nothing else of Dynamo runs: no etcd, no NATS, no front end.
2. Only `nvext.routing_constraints.required_taints` and the name are read of a request; it goes on as it came.
3. A worker that does not answer, or that answers 503, is left out, and the request goes to another: `TRIES` in all.
"""

from __future__ import annotations

import argparse
import asyncio
import json
import os
import threading
import time
from collections.abc import Awaitable, Callable
from concurrent.futures import Future
from contextlib import suppress
from functools import partial
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from typing import Any, Final

from kvcustody.http_exchange import HttpReply, exchange
from kvcustody.lab.fleet.dynamo_selection import BLOCK_TOKENS, MODEL, worker_record
from kvcustody.lab.fleet.prompt_tokens import prompt_text, tokens_of
from kvcustody.lab.fleet.router_programs import RETRIES

TRIES: Final = RETRIES + 1
CHAT: Final = "/v1/chat/completions"
_ANSWER_SECONDS: Final = 60.0
_BODY_BYTES_MAX: Final = 8 << 20
_PASSED: Final = ("authorization", "content-type", "x-request-id", "traceparent", "tracestate")


class DynamoFront:
    """The selection service on a thread with its own event loop; request handlers wait for it."""

    def __init__(self, workers: list[tuple[str, str, tuple[str, ...]]]) -> None:
        """Open the service. `workers`: each worker's URL, the address of its events, and its taints."""
        from dynamo.llm import SelectionService

        self._urls = {number: url for number, (url, _, _) in enumerate(workers, 1)}
        self._loop = asyncio.new_event_loop()
        threading.Thread(target=self._loop.run_forever, name="dynamo-selection", daemon=True).start()

        async def opened() -> Any:
            service = SelectionService(indexer_threads=1)
            for number, (url, events, taints) in enumerate(workers, 1):
                await service.upsert_worker(worker_record(number, url, events, taints=[*taints]))
            return service

        self._service = self._wait(opened)

    def _wait(self, work: Callable[[], Awaitable[Any]]) -> Any:
        made: Future[Any] = asyncio.run_coroutine_threadsafe(_begun(work), self._loop)
        return made.result(_ANSWER_SECONDS)

    def is_ready(self) -> bool:
        """Return whether the service would choose every worker that it knows."""
        return bool(self._service.ready()["schedulable_workers"] == len(self._urls))

    def about(self, path: str) -> HttpReply:
        """Return the first worker's answer to this path."""
        for url in self._urls.values():
            found = forward(url, "GET", path, b"", {})
            if found.status == 200:
                return found
        return HttpReply(503, "text/plain", b"no worker answers")

    def complete(self, body: bytes, headers: dict[str, str]) -> HttpReply:
        """Send a request to the worker that the service chooses (rule 3)."""
        try:
            asked = json.loads(body)
            text = prompt_text(asked)
        except (ValueError, AttributeError, TypeError):
            return _refused(400, "not a chat completion")
        selection: dict[str, Any] = {
            "model_name": MODEL,
            "token_ids": [int(token) for token in tokens_of(text, BLOCK_TOKENS)],
        }
        if isinstance(salt := asked.get("cache_salt"), str):
            selection["cache_salt"] = salt
        constraints = (asked.get("nvext") or {}).get("routing_constraints")
        if constraints:
            selection["routing_constraints"] = {"required_taints": constraints.get("required_taints") or []}
        service = self._service
        left, reply = dict(self._urls), _refused(503, "no worker answers")
        for _ in range(TRIES):
            asked_of = selection | {"allowed_worker_ids": [*left]}
            try:
                chosen = self._wait(partial(service.select_and_reserve, asked_of))
            except Exception as error:
                return _refused(int(getattr(error, "status_code", 503)), str(error))
            url = left.pop(int(chosen["worker_id"]))
            try:
                reply = forward(url, "POST", CHAT, body, headers)
            finally:
                with suppress(Exception):  # the service ends a reservation by itself, too
                    self._wait(partial(service.free_reservation, chosen["selection_id"]))
            if reply.status not in (0, 503) or not left:
                break
        return reply if reply.status else _refused(503, "no worker answers")


async def _begun(work: Callable[[], Awaitable[Any]]) -> Any:
    """Start a call of Dynamo's on the loop that awaits it."""
    return await work()


def forward(url: str, method: str, path: str, body: bytes, headers: dict[str, str]) -> HttpReply:
    """Forward one request to a worker; the status is 0 when the worker does not answer."""
    try:
        return exchange(method, url + path, body, headers, deadline_seconds=_ANSWER_SECONDS, bytes_max=_BODY_BYTES_MAX)
    except (OSError, ValueError):
        return HttpReply(0, "", b"")


def _refused(status: int, reason: str) -> HttpReply:
    body = json.dumps({"error": {"message": reason, "code": status}}).encode()
    return HttpReply(status, "application/json", body)


def server(front: DynamoFront, port: int) -> ThreadingHTTPServer:
    """Return the HTTP server on loopback that serves `front`."""

    class Handler(BaseHTTPRequestHandler):
        protocol_version = "HTTP/1.1"

        def log_message(self, *_: object) -> None:
            """Log nothing: a line would reveal the request."""

        def _answer(self, made: HttpReply) -> None:
            self.send_response(made.status)
            self.send_header("content-type", made.kind or "application/json")
            self.send_header("content-length", str(len(made.body)))
            self.end_headers()
            self.wfile.write(made.body)

        def do_GET(self) -> None:
            """Answer clients' questions about the fleet."""
            if self.path == "/v1/models":
                self._answer(front.about(self.path) if front.is_ready() else _refused(503, "not ready"))
            else:
                self._answer(_refused(404, "no such path"))

        def do_POST(self) -> None:
            """Answer a chat completion."""
            size = self.headers.get("content-length", "")
            if self.path != CHAT or not size.isdigit() or int(size) > _BODY_BYTES_MAX:
                self.close_connection = True
                self._answer(_refused(404 if self.path != CHAT else 413, "no such path, or too long"))
                return
            body = self.rfile.read(int(size))
            headers = {name: value for name in _PASSED if (value := self.headers.get(name)) is not None}
            self._answer(front.complete(body, headers))

    made = ThreadingHTTPServer(("127.0.0.1", port), Handler)
    made.daemon_threads = True
    return made


def _worker(text: str) -> tuple[str, str, tuple[str, ...]]:
    url, _, rest = text.partition("=")
    events, *taints = rest.split(",")
    if not url.startswith("http://") or not events.startswith("tcp://"):
        raise argparse.ArgumentTypeError("write http://HOST:PORT=tcp://HOST:PORT, and taints behind commas")
    return url, events, tuple(taints)


def main() -> None:
    """Serve until a signal ends it."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--port", type=int, required=True)
    parser.add_argument("--worker", type=_worker, action="append", required=True, metavar="URL=EVENTS[,TAINT...]")
    given = parser.parse_args()
    os.environ.setdefault("DYN_LOG", "error")
    front = DynamoFront(given.worker)
    made = server(front, given.port)
    threading.Thread(target=made.serve_forever, daemon=True).start()
    while True:  # until SIGTERM ends the process: nothing here is to be put on record
        time.sleep(3600)


if __name__ == "__main__":
    main()
