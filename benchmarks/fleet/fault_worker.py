"""A governed worker without a model in a process of its own, with its door, its events and its control plane.

    python benchmarks/fleet/fault_worker.py PORT '{"worker_name": "gpu-0", ...}'

It answers chat completions under a door's token, and says in `usage` how many tokens it found. Beside its spill it
appends to `durable` what its writer knows to be durable, and to `found` when it served whom and how much it found.
"""

from __future__ import annotations

import asyncio
import contextlib
import json
import os
import signal
import sys
import time
from pathlib import Path
from typing import Any

sys.path.insert(0, str(Path(__file__).resolve().parent / "routers"))
sys.path.insert(0, str(Path(__file__).resolve().parents[2] / "tests" / "lib"))

from recording_worker import CHAT, RecordingWorker

from kvcustody.governance.admission_outcome import Admission
from kvcustody.governance.credentials.scope_token import ScopeTokens, VerifiedToken
from kvcustody.governance.credentials.scope_token_secret import open_scope_key
from kvcustody.governance.settings import Settings
from kvcustody.governance.worker.worker import Worker
from kvcustody.integrations.door.envoy_configuration import ListenPlace
from kvcustody.integrations.door.server import served
from kvcustody.integrations.identity.from_settings import open_request_gate
from kvcustody.integrations.identity.middleware import IdentityMiddleware, read_body
from kvcustody.integrations.identity.request_body import OUR_TRANSFER_FIELD
from kvcustody.integrations.identity.request_headers import RequestHeaders
from kvcustody.integrations.transformers.batching.kv_events import open_events
from standins.service.control_plane_world import MODEL, opened

STEP_SECONDS, DURABLE_SECONDS = 0.01, 0.05


class GovernedServer:
    """Its application; every call of the Governor is on the thread that opened it."""

    def __init__(self, settings: Settings, worker: Worker) -> None:
        self._worker, self._name = worker, settings.worker_name
        with open_scope_key(settings.scope_token_key_path) as secret:
            self._tokens = ScopeTokens(secret, worker.governor.clock)
        self._else = RecordingWorker(self._name).application()
        self._found = _appended(settings, "found")
        self._door = IdentityMiddleware(self._complete, open_request_gate(settings, worker.governor.clock))

    async def __call__(self, scope: Any, receive: Any, send: Any) -> None:
        """Handle one ASGI connection."""
        await (self._door if scope.get("path") == CHAT else self._else)(scope, receive, send)

    async def _complete(self, scope: Any, receive: Any, send: Any) -> None:
        body = json.loads(await read_body(RequestHeaders(scope["headers"]), receive, 1 << 20))
        transfer = (body.get("kv_transfer_params") or {}).get(OUR_TRANSFER_FIELD)
        verified = self._tokens.verify(body.get("cache_salt"), transfer)
        tokens = list(map(ord, body["messages"][0]["content"]))
        status, hits, refused = 200, 0, ""
        if isinstance(verified, VerifiedToken):
            governor = self._worker.governor
            answer = governor.admit(verified.principal, MODEL, tokens, hints=verified.hints)
            if isinstance(answer, Admission):
                hits = answer.hit_tokens
                who = body["messages"][0]["content"].split(maxsplit=1)[0]
                os.write(self._found, f"{time.monotonic()} {who} {hits}\n".encode())
                governor.commit([answer.request_id], [len(tokens)])
                governor.release(answer.request_id)
                governor.step()
            else:
                status, refused = 503, str(answer)
        else:
            status, refused = 401, str(verified)
        message = {"role": "assistant", "content": self._name if status == 200 else refused}
        usage = {"prompt_tokens": len(tokens), "completion_tokens": hits, "total_tokens": len(tokens) + hits}
        document = {
            "id": "c1", "object": "chat.completion", "created": 1, "model": "toy", "usage": usage,
            "choices": [{"index": 0, "message": message, "finish_reason": "stop"}],
        }  # fmt: skip
        headers = [(b"content-type", b"application/json")]
        await send({"type": "http.response.start", "status": status, "headers": headers})
        await send({"type": "http.response.body", "body": json.dumps(document).encode()})


def _appended(settings: Settings, name: str) -> int:
    return os.open(Path(settings.spill_path).parent / name, os.O_APPEND | os.O_CREAT | os.O_WRONLY, 0o600)


async def serve(settings: Settings, worker: Worker, port: int) -> None:
    """Until a signal ends it."""
    ending = asyncio.Event()
    for number in (signal.SIGTERM, signal.SIGINT):
        asyncio.get_running_loop().add_signal_handler(number, ending.set)
    events = open_events(None, worker.governor, worker, settings)
    descriptor = _appended(settings, "durable")
    last, due = -1, 0.0
    async with served(GovernedServer(settings, worker), ListenPlace("127.0.0.1", port)):
        while not ending.is_set():
            worker.governor.step()
            if events is not None:
                events.publish_pending()
            now = asyncio.get_running_loop().time()
            durable = worker.writer.durable_sequence
            if now >= due and durable != last:
                last, due = durable, now + DURABLE_SECONDS
                os.write(descriptor, f"{worker.writer.incarnation} {durable}\n".encode())
            with contextlib.suppress(TimeoutError):
                await asyncio.wait_for(ending.wait(), STEP_SECONDS)
    if events is not None:
        events.close()


def main() -> None:
    """See the module."""
    settings = Settings(**json.loads(sys.argv[2]))
    worker = opened(settings)
    try:
        asyncio.run(serve(settings, worker, int(sys.argv[1])))
    finally:
        worker.close()


if __name__ == "__main__":
    main()
