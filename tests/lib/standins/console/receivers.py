"""A mail server on this machine, for tests: it keeps what it was sent."""

from __future__ import annotations

import socketserver
import threading
from collections.abc import Iterator
from contextlib import contextmanager
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
