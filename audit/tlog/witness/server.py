"""A witness over HTTP, with only the standard library: a small process, best on a machine of its own.

1. It listens on loopback or on a Unix socket unless told otherwise. A request is bounded in bytes and in seconds, and
   so is the number that are served at once.
2. Whoever can reach it can make it sign only what extends a log that it trusts, signed by that log's key.
"""

from __future__ import annotations

import socketserver
import stat
import threading
from http.server import BaseHTTPRequestHandler
from pathlib import Path
from typing import Any

import orjson

from kvcustody.audit.tlog.witness.cosign import CosignReply, Witness
from kvcustody.audit.tlog.witness.request import REQUEST_BYTES_MAX
from kvcustody.audit.tlog.witness.state import WitnessError
from kvcustody.guarding_thread import GuardingThread

ADD_CHECKPOINT = "/add-checkpoint"
_SECONDS_MAX = 10
_AT_ONCE_MAX = 32
_JSON = "application/json"


class WitnessServer:
    """Serves one witness at `host:port` or `unix:/path`; `close()` frees the address."""

    def __init__(self, witness: Witness, listen: str) -> None:
        try:
            self._server = _server(witness, listen)
        except (OSError, ValueError, OverflowError) as problem:
            reason = getattr(problem, "strerror", None) or str(problem)
            raise WitnessError(f"witness cannot listen at `{listen}`: {reason}", listen=listen) from None
        self.address = listen
        if not listen.startswith("unix:"):
            host, port = self._server.socket.getsockname()[:2]
            self.address = f"{host}:{port}"

    def serve(self) -> None:
        """Answer requests until `close()` is called from another thread."""
        self._server.serve_forever(poll_interval=0.1)

    def start(self) -> None:
        """Serve in a thread."""
        GuardingThread(self.serve, name="kvcustody-witness").start()

    def close(self) -> None:
        """Stop what `start` began, and free the address."""
        self._server.shutdown()
        self.release()

    def release(self) -> None:
        """Free the address, for callers of `serve` after it returned."""
        self._server.server_close()


class _Bounded(socketserver.ThreadingMixIn):
    """At most so many requests at once; the next ones wait in the kernel's queue."""

    daemon_threads = True
    allow_reuse_address = True

    def __init__(self, *given: Any) -> None:
        self._places = threading.BoundedSemaphore(_AT_ONCE_MAX)
        super().__init__(*given)

    def process_request(self, request: Any, client_address: Any) -> None:
        self._places.acquire()
        super().process_request(request, client_address)

    def handle_error(self, request: Any, client_address: Any) -> None:
        """A client that went away is its own affair."""

    def process_request_thread(self, request: Any, client_address: Any) -> None:
        try:
            super().process_request_thread(request, client_address)
        finally:
            self._places.release()


class _TcpServer(_Bounded, socketserver.TCPServer):
    pass


class _UnixServer(_Bounded, socketserver.UnixStreamServer):
    pass


def _server(witness: Witness, listen: str) -> _TcpServer | _UnixServer:
    handler = type("Handler", (_Handler,), {"witness": witness})
    server: _TcpServer | _UnixServer
    if listen.startswith("unix:"):
        path = Path(listen.removeprefix("unix:"))
        if path.exists() and stat.S_ISSOCK(path.stat().st_mode):
            path.unlink()  # left by a witness that was killed
        server = _UnixServer(str(path), handler)
        path.chmod(0o660)
    else:
        host, found, port = listen.rpartition(":")
        if not found:
            raise ValueError("an address is `host:port` or `unix:/path`")
        server = _TcpServer((host.strip("[]"), int(port)), handler)
    return server


class _Handler(BaseHTTPRequestHandler):
    witness: Witness
    timeout = _SECONDS_MAX
    server_version, sys_version = "kvcustody-witness", ""

    def do_POST(self) -> None:
        """`add-checkpoint`."""
        length = self.headers.get("Content-Length", "")
        if self.path != ADD_CHECKPOINT:
            self._send(CosignReply(404, b"not found\n"))
        elif not length.isascii() or not length.isdigit():
            self._send(CosignReply(411, b"Content-Length is required\n"))
        elif int(length) > REQUEST_BYTES_MAX:
            self._send(CosignReply(413, b"the request is too long\n"))
        else:
            self._send(self.witness.add_checkpoint(self.rfile.read(int(length))))

    def do_GET(self) -> None:
        """The witness's public key, for people and monitors."""
        if self.path == "/healthz":
            key = self.witness.key.verifier
            self._send(CosignReply(200, orjson.dumps({"name": key.name, "vkey": str(key)}), _JSON))
        else:
            self._send(CosignReply(404, b"not found\n"))

    def _send(self, answer: CosignReply) -> None:
        self.send_response(answer.status)
        self.send_header("Content-Type", answer.content_type)
        self.send_header("Content-Length", str(len(answer.body)))
        self.send_header("Connection", "close")
        self.end_headers()
        self.wfile.write(answer.body)
        self.close_connection = True

    def address_string(self) -> str:
        """Who asks; a Unix socket has no address."""
        return str(self.client_address[0]) if self.client_address else "unix"

    def log_message(self, format: str, *args: Any) -> None:
        """Requests are not logged: the memory says what was signed."""
