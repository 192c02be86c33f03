"""A mail server and a webhook's receiver on this machine, for tests: they keep what they were sent."""

from __future__ import annotations

import socketserver
import threading
from collections.abc import Iterator
from contextlib import contextmanager
from http.server import BaseHTTPRequestHandler, HTTPServer
from typing import Any


class _Mail(socketserver.StreamRequestHandler):
    """As much of RFC 5321 and of AUTH PLAIN as a client needs."""

    def handle(self) -> None:
        self._say("220 here")
        while line := self.rfile.readline().decode().strip():
            word = line.upper()
            if word.startswith("EHLO"):
                self._say("250-here\r\n250 AUTH PLAIN")
            elif word.startswith("AUTH"):
                self.server.logins.append(line)  # type: ignore[attr-defined]
                self._say("235 welcome")
            elif word == "DATA":
                self._say("354 go on")
                text = b""
                while not text.endswith(b"\r\n.\r\n"):
                    text += self.rfile.readline()
                self.server.letters.append(text.decode())  # type: ignore[attr-defined]
                self._say("250 taken")
            elif word == "QUIT":
                self._say("221 bye")
                return
            else:
                self._say("250 well")

    def _say(self, text: str) -> None:
        self.wfile.write(text.encode() + b"\r\n")


class _Hook(BaseHTTPRequestHandler):
    def do_POST(self) -> None:
        body = self.rfile.read(int(self.headers["Content-Length"]))
        if not self.server.refuses:  # type: ignore[attr-defined]
            self.server.posts.append((dict(self.headers), body))  # type: ignore[attr-defined]
        self.send_response(503 if self.server.refuses else 204)  # type: ignore[attr-defined]
        self.end_headers()

    def log_message(self, *_: Any) -> None:
        pass


@contextmanager
def serving(server: Any) -> Iterator[Any]:
    thread = threading.Thread(target=server.serve_forever, kwargs={"poll_interval": 0.05})
    thread.start()
    try:
        yield server
    finally:
        server.shutdown()
        server.server_close()
        thread.join()


def mail_server() -> Any:
    server = socketserver.TCPServer(("127.0.0.1", 0), _Mail)
    server.letters, server.logins = [], []  # type: ignore[attr-defined]
    return server


def hook_server() -> Any:
    server = HTTPServer(("127.0.0.1", 0), _Hook)
    server.posts, server.refuses = [], False  # type: ignore[attr-defined]
    return server
