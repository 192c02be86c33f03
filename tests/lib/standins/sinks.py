"""Receivers of leaves that fail as a test asks."""

from __future__ import annotations

import threading
from http.server import BaseHTTPRequestHandler, HTTPServer
from typing import Any, Self

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
    """Keeps what a webhook is sent, on loopback; answers `status`, and leads elsewhere where that is a redirect."""

    def __init__(self) -> None:
        self.status = 200
        self.batches: list[tuple[dict[str, str], bytes]] = []  # headers by lowercase name, and the body
        self.taken: list[tuple[dict[str, str], bytes]] = []  # those that were answered with success
        receiver = self

        class Handler(BaseHTTPRequestHandler):
            def do_POST(self) -> None:
                body = self.rfile.read(int(self.headers["Content-Length"]))
                batch = {name.lower(): value for name, value in self.headers.items()}, body
                receiver.batches.append(batch)
                if receiver.status < 300:
                    receiver.taken.append(batch)
                self.send_response(receiver.status)
                self.send_header("Location", f"{receiver.url}elsewhere")
                self.end_headers()

            do_PUT = do_POST  # what an S3 client would send

            def log_message(self, *_: object) -> None:
                """Be quiet."""

        self._server = HTTPServer(("127.0.0.1", 0), Handler)
        self.port = self._server.server_port
        self.address = f"http://127.0.0.1:{self.port}"
        self.url = f"{self.address}/"
        threading.Thread(target=self._server.serve_forever, kwargs={"poll_interval": 0.02}, daemon=True).start()

    def leaves(self) -> set[tuple[str, int]]:
        """The log and idx of each leaf that came, in the shape `leaf`."""
        return {(item["log"], item["idx"]) for body in self.bodies() for item in body}

    def bodies(self) -> list[Any]:
        """What came, as JSON."""
        return [orjson.loads(body) for _, body in list(self.batches)]

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        self._server.shutdown()
        self._server.server_close()
