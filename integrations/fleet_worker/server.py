"""The process of a worker without a model: `python -m kvcustody.integrations.fleet_worker.server --port 8001`.

It answers chat completions as OpenAI's API does and says its name in the message. Its own door admits requests, by the
settings of this process; routers may ask about it without a credential. With `--ungoverned` there is no door and no
Governor: a worker that a fleet has not put under custody yet.

1. A request is for the engine only under a token that verifies; else it reuses nothing and leaves nothing, which here
   is a 403.
2. SIGTERM ends what runs, releases and scrubs it, and puts the end on record.
3. Where the engine ends by itself, so does the process, with a status other than 0. Meanwhile `/health` is a 503.
"""

from __future__ import annotations

import argparse
import asyncio
import contextlib
import json
import signal
import threading
from collections.abc import Awaitable, Callable, Iterator
from contextlib import ExitStack
from typing import Any, Final

import uvicorn
from starlette.applications import Starlette
from starlette.requests import Request
from starlette.responses import JSONResponse, Response
from starlette.routing import Route

from kvcustody.clock import SystemClock
from kvcustody.governance.credentials.scope_token import VerifiedToken
from kvcustody.governance.observability.logs import configure
from kvcustody.governance.settings import Settings, load_settings
from kvcustody.integrations.fleet_worker.engine import Asked, ModellessEngine, ServedRequest
from kvcustody.integrations.identity.from_settings import open_attempts, open_request_gate, open_verifier
from kvcustody.integrations.identity.middleware import IdentityMiddleware
from kvcustody.integrations.identity.request_body import OUR_TRANSFER_FIELD
from kvcustody.lab.fleet.prompt_tokens import prompt_text, tokens_of

CHAT: Final = "/v1/chat/completions"
RENDER: Final = f"{CHAT}/render"
MODEL: Final = "toy"
ABOUT: Final = (
    *("/health", "/health_generate", "/get_server_info", "/server_info", "/get_model_info"),
    *("/model_info", "/version", "/get_load"),
)
MODELS: Final[dict[str, Any]] = {
    "object": "list",
    "data": [{"id": MODEL, "object": "model", "owned_by": "test", "root": MODEL, "max_model_len": 65_536}],
}
INFO: Final = {
    "model_path": MODEL,
    "served_model_name": MODEL,
    "model_id": MODEL,
    "version": "0",
    "status": "ok",
}
LOOPBACK: Final = "127.0.0.1"
_ANSWER_TOKENS = 16
_ANSWER_TOKENS_MAX = 1024


def completion(content: str, served: ServedRequest) -> dict[str, Any]:
    """Return a chat completion with the message `content`."""
    return {
        "id": "c1",
        "object": "chat.completion",
        "created": 1,
        "model": MODEL,
        "choices": [{"index": 0, "message": {"role": "assistant", "content": content}, "finish_reason": "stop"}],
        "usage": {
            "prompt_tokens": served.prompt_tokens,
            "completion_tokens": served.answer_tokens,
            "total_tokens": served.prompt_tokens + served.answer_tokens,
            "prompt_tokens_details": {"cached_tokens": served.found_tokens},
        },
    }


def rendered(body: dict[str, Any]) -> dict[str, Any]:
    """Return the answer to a router that requests a prompt's tokens: one per character."""
    tokens = [ord(character) for character in prompt_text(body)]
    made = {"request_id": "r1", "token_ids": tokens, "model": MODEL, "sampling_params": {}}
    return {**made, "features": None}


def about_routes(is_healthy: Callable[[], bool] = lambda: True) -> list[Route]:
    """Return the routes that describe a worker to routers; they answer 503 where it is not healthy."""

    async def about(_: Request) -> Response:
        return JSONResponse(INFO) if is_healthy() else _problem(503, "the engine has ended")

    async def models(_: Request) -> Response:
        return JSONResponse(MODELS)

    return [Route("/v1/models", models), *(Route(path, about) for path in ABOUT)]


class ModellessServer:
    """The server in front of one engine; `verify` returns a body's owner, and is None where identity is not checked."""

    def __init__(self, name: str, engine: ModellessEngine | None, verify: Callable[..., Any] | None) -> None:
        self._name, self._engine, self._verify = name, engine, verify

    def application(self, door: Callable[[Any], Any] | None) -> Starlette:
        """Return the application; `door` wraps the paths that need an identity."""
        served = Starlette(
            routes=[
                Route(CHAT, self._chat, methods=["POST"]),
                Route(RENDER, self._render, methods=["POST"]),
            ]
        )
        inner: Any = served if door is None else door(served)
        about = Starlette(routes=about_routes(self._is_healthy))
        open_paths = {"/v1/models", *ABOUT}

        async def chosen(scope: Any, receive: Any, send: Any) -> None:
            is_open = scope["type"] == "http" and scope["path"] in open_paths and scope["method"] == "GET"
            await (about if is_open else inner)(scope, receive, send)

        return chosen  # type: ignore[return-value]

    def _is_healthy(self) -> bool:
        return self._engine is None or self._engine.is_running

    async def _chat(self, request: Request) -> Response:
        body = json.loads(await request.body())
        wanted = min(int(body.get("max_tokens") or _ANSWER_TOKENS), _ANSWER_TOKENS_MAX)
        if self._engine is None or self._verify is None:
            size = len(prompt_text(body).split())
            return JSONResponse(completion(self._name, ServedRequest(200, size, 0, wanted)))
        transfer = (body.get("kv_transfer_params") or {}).get(OUR_TRANSFER_FIELD)
        found = self._verify(body.get("cache_salt"), transfer)
        if not isinstance(found, VerifiedToken):
            return _problem(403, "no identity")
        tokens = tokens_of(prompt_text(body), self._engine.block_tokens)
        asked = Asked(found.principal, found.hints, tokens, wanted)
        served = await asyncio.wrap_future(self._engine.ask(asked))
        if served.status != 200:
            return _problem(served.status, served.reason)
        return JSONResponse(completion(self._name, served))

    async def _render(self, request: Request) -> Response:
        return JSONResponse(rendered(json.loads(await request.body())))


def _problem(status: int, reason: str) -> Response:
    return JSONResponse({"error": {"message": reason, "code": status}}, status_code=status)


class LocalServer(uvicorn.Server):
    """Serves an application; `end` ends it in order, from any thread, even before it began."""

    def __init__(self, application: Callable[..., Awaitable[None]], port: int, *, host: str = LOOPBACK) -> None:
        super().__init__(
            uvicorn.Config(
                application, host=host, port=port, log_level="error", access_log=False,
                timeout_graceful_shutdown=5,
            )
        )  # fmt: skip

    def end(self, *_: object) -> None:
        """End the server; running requests are answered first, for at most five seconds."""
        self.should_exit = True

    @contextlib.contextmanager
    def capture_signals(self) -> Iterator[None]:
        """Leave signals alone: uvicorn raises them again at its end, before its application has ended."""
        yield


def main() -> None:
    """Serve until a signal ends it."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--port", type=int, required=True)
    parser.add_argument(
        "--host", default=LOOPBACK, help="address to listen at, unencrypted: loopback, or a network with only routers"
    )
    parser.add_argument("--blocks", type=int, default=2048, help="of the pool (default: %(default)s)")
    parser.add_argument("--ungoverned", metavar="NAME", default="", help="serve without custody, under this name")
    parser.add_argument("--hangs-every", type=float, default=0.0, help="seconds between hangs of its device; 0: never")
    given = parser.parse_args()
    if given.ungoverned:
        plain = LocalServer(
            ModellessServer(given.ungoverned, None, None).application(None), given.port, host=given.host
        )
        with ended_by_signals(plain):
            plain.run()
        return
    settings = load_settings()
    configure(settings.log_level, settings.log_format)
    engine = ModellessEngine(settings, blocks=given.blocks, hangs_every=given.hangs_every)
    serve(engine, settings, given.port, host=given.host)


@contextlib.contextmanager
def ended_by_signals(server: LocalServer) -> Iterator[None]:
    """Let SIGTERM and SIGINT end only the server while the block runs; main thread only."""
    if threading.current_thread() is not threading.main_thread():
        yield
        return
    before = {number: signal.signal(number, server.end) for number in (signal.SIGTERM, signal.SIGINT)}
    try:
        yield
    finally:
        for number, handler in before.items():
            signal.signal(number, handler)


def serve(engine: ModellessEngine, settings: Settings, port: int, *, host: str = LOOPBACK) -> None:
    """Serve until a signal ends it, or until its engine ends; then raise the engine's error (rule 3)."""
    with ExitStack() as stack:
        clock = SystemClock()
        gate = open_request_gate(settings, clock, stack=stack)
        attempts = open_attempts(settings, clock)
        stack.callback(attempts.close)
        handlers = ModellessServer(settings.worker_name, engine, open_verifier(settings, clock).verify)
        server = LocalServer(
            handlers.application(lambda app: IdentityMiddleware(app, gate, refused=attempts.note)),
            port,
            host=host,
        )
        stack.enter_context(ended_by_signals(server))
        stack.callback(engine.stop)
        engine.start(when_ended=server.end)
        engine.serving.wait()
        if engine.error is None:
            server.run()
    if engine.error is not None:
        raise engine.error


if __name__ == "__main__":
    main()
