"""Receivers of leaves that fail as a test asks."""

from __future__ import annotations

import threading
import time
from collections.abc import Callable
from http.server import BaseHTTPRequestHandler, HTTPServer
from typing import Self

import orjson


class Flaky:
    """A sink that fails as it is told, and remembers what it took."""

    name = "flaky"
    content_type = "application/json"

    def __init__(self, *outcomes: Exception | None) -> None:
        self.outcomes = list(outcomes)
        self.taken: list[tuple[str, bytes]] = []
        self.tried: list[str] = []

    def deliver(self, identity: str, body: bytes, content_type: str = "") -> None:
        self.tried.append(identity)
        problem = self.outcomes.pop(0) if self.outcomes else None
        if problem is not None:
            raise problem
        self.taken.append((identity, body))


class WebhookReceiver:
    """Keeps what a webhook is sent, on loopback; answers `status`."""

    def __init__(self) -> None:
        self.status = 200
        self.batches: list[tuple[dict[str, str], bytes]] = []
        receiver = self

        class Handler(BaseHTTPRequestHandler):
            def do_POST(self) -> None:
                body = self.rfile.read(int(self.headers["Content-Length"]))
                receiver.batches.append((dict(self.headers), body))
                self.send_response(receiver.status)
                self.end_headers()

            def log_message(self, *_: object) -> None:
                """Be quiet."""

        self._server = HTTPServer(("127.0.0.1", 0), Handler)
        self.url = f"http://127.0.0.1:{self._server.server_port}/"
        threading.Thread(
            target=self._server.serve_forever, kwargs={"poll_interval": 0.02}, daemon=True
        ).start()

    def leaves(self) -> set[tuple[str, int]]:
        """The log and idx of each leaf that came, in the shape `leaf`."""
        items = [item for _, body in list(self.batches) for item in orjson.loads(body)]
        return {(item["log"], item["idx"]) for item in items}

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        self._server.shutdown()
        self._server.server_close()


def until(holds: Callable[[], bool]) -> None:
    """Wait for what another thread does."""
    for _ in range(3000):
        if holds():
            return
        time.sleep(0.02)
    raise AssertionError("never")
