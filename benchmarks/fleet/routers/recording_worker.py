"""A worker without a model: it answers as OpenAI's API does, says its name, and keeps every request that reached it.

    python benchmarks/fleet/routers/recording_worker.py w1 28101

`GET /recorded` gives the requests since the last such question and forgets them. `POST /fail/N` makes the next N
requests for a completion fail with 503. `/v1/chat/completions/render` answers with one token a character. A completion
of `SLOW_TOKENS` tokens is answered after `SLOW_SECONDS`.
"""

from __future__ import annotations

import asyncio
import json
import sys

import uvicorn
from starlette.applications import Starlette
from starlette.requests import Request
from starlette.responses import JSONResponse, Response
from starlette.routing import Route

CHAT, RENDER = "/v1/chat/completions", "/v1/chat/completions/render"
NAME_HEADER = "x-worker-name"
SLOW_SECONDS, SLOW_TOKENS = 0.06, 2
_MODEL = {"id": "toy", "object": "model", "owned_by": "test", "root": "toy", "max_model_len": 4096}
_INFO = {"model_path": "toy", "served_model_name": "toy", "model_id": "toy", "version": "0", "status": "ok"}


class RecordingWorker:
    """The state of one worker: what it was sent, and how many requests still fail."""

    def __init__(self, name: str) -> None:
        self.name = name
        self._recorded: list[dict[str, object]] = []
        self._failing = 0

    def application(self) -> Starlette:
        """The worker as an ASGI application."""
        about = ("/health", "/health_generate", "/get_server_info", "/server_info", "/get_model_info")
        return Starlette(
            routes=[
                Route(CHAT, self._chat, methods=["POST"]),
                Route(RENDER, self._render, methods=["POST"]),
                Route("/recorded", self._take),
                Route("/fail/{count:int}", self._fail, methods=["POST"]),
                Route("/v1/models", lambda _: JSONResponse({"object": "list", "data": [_MODEL]})),
                *(Route(path, _about) for path in (*about, "/model_info", "/version", "/get_load")),
                Route("/{path:path}", self._other, methods=["GET", "POST"]),
            ]
        )

    async def _record(self, request: Request) -> str:
        body = (await request.body()).decode("utf-8", "replace")
        headers = [[name.decode("latin-1"), value.decode("latin-1")] for name, value in request.headers.raw]
        self._recorded.append({"path": request.url.path, "body": body, "headers": headers})
        return body

    async def _chat(self, request: Request) -> Response:
        body = json.loads(await self._record(request))
        if body.get("max_tokens") == SLOW_TOKENS:
            await asyncio.sleep(SLOW_SECONDS)
        if self._failing:
            self._failing -= 1
            return JSONResponse({"error": {"message": "busy"}}, status_code=503)
        message = {"role": "assistant", "content": self.name}
        answer = {
            "id": "c1",
            "object": "chat.completion",
            "created": 1,
            "model": "toy",
            "choices": [{"index": 0, "message": message, "finish_reason": "stop"}],
            "usage": {"prompt_tokens": 1, "completion_tokens": 1, "total_tokens": 2},
        }
        return JSONResponse(answer, headers={NAME_HEADER: self.name})

    async def _render(self, request: Request) -> Response:
        body = json.loads(await self._record(request))
        text = "".join(str(message["content"]) for message in body.get("messages", []))
        tokens = [ord(character) for character in text]
        rendered = {"request_id": "r1", "token_ids": tokens, "model": "toy", "sampling_params": {}}
        return JSONResponse({**rendered, "features": None})

    async def _other(self, request: Request) -> Response:
        await self._record(request)
        return JSONResponse({"detail": "Not Found"}, status_code=404)

    async def _take(self, request: Request) -> Response:
        taken, self._recorded = self._recorded, []
        return JSONResponse(taken)

    async def _fail(self, request: Request) -> Response:
        self._failing = request.path_params["count"]
        return JSONResponse({})


async def _about(request: Request) -> Response:
    return JSONResponse(_INFO)


if __name__ == "__main__":
    uvicorn.run(
        RecordingWorker(sys.argv[1]).application(),
        host="127.0.0.1",
        port=int(sys.argv[2]),
        log_level="error",
    )
