"""Runs a service: sockets closed to others, TLS, an orderly end.

1. A Unix socket is created with mode 0600; one that a dead process left is replaced, one that answers is not.
2. At the end the service stops accepting, long answers end, requests in work get their time, then the ledger closes. A
   request that goes on behind its time, as one whose body does not come, is answered as `unavailable`.
3. With a second address, workers have a listener of their own that demands client certificates. The certificate's
   thumbprint comes from the TLS session (`x5t#S256`, RFC 8705), never from anything that a request says.

How long a thread of a process that serves runs before another that waits gets its turn.

The thread that commits gives the interpreter up at each statement and asks for it again a millisecond later. Requests
that are being read keep it busy meanwhile, by the interpreter's default for 5 ms each time. With 24 workers handing in,
a commit then waits longer than it works.
"""

from __future__ import annotations

import asyncio
import logging
import os
import signal
import socket
import ssl
import sys
from collections.abc import Iterator, Sequence
from contextlib import contextmanager, suppress
from pathlib import Path
from typing import Any

import uvicorn

from kvcustody.errors import ConfigError
from kvcustody.governance.api.app import create_app
from kvcustody.governance.api.http.bounded_protocol import BoundedProtocol, Connections, bounded
from kvcustody.governance.api.http.exchange import CERTIFICATE, Message, Receive, Scope, Send
from kvcustody.governance.api.http.gate import Gate
from kvcustody.governance.credentials.certificate_thumbprint import thumbprint_of
from kvcustody.governance.service.gc_tuning import gc_seldom
from kvcustody.governance.service.open_files import allow_files, files_needed
from kvcustody.governance.service.operations.answer import problem_answer
from kvcustody.governance.service.problem_details import ProblemError
from kvcustody.governance.service.service import Service
from kvcustody.governance.service.settings import ServiceSettings, address
from kvcustody.logger import get_logger

_log = get_logger(__name__)
_BACKLOG = 512
_KEEP_ALIVE_SECONDS = 75  # longer than clients keep a connection: they close it, and never meet a closed one


class _Server(uvicorn.Server):
    """A server whose signals are handled outside: there may be two."""

    @contextmanager
    def capture_signals(self) -> Iterator[None]:
        """Leave signals alone."""
        yield


class _Ending:
    """The application, whose requests are answered when the end of the service cuts them off (rule 2)."""

    def __init__(self, app: Gate, service: Service) -> None:
        self._app, self._service = app, service

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        """Handle one ASGI connection."""
        begun = False

        async def sending(message: Message) -> None:
            nonlocal begun
            begun = True
            await send(message)

        try:
            await self._app(scope, receive, sending)
        except asyncio.CancelledError:
            if not self._service.stopping.is_set():
                raise
            _log.info("request cut off at shutdown")
            if not begun:
                status, headers, body = problem_answer(ProblemError("unavailable", "the service ends"))
                headers = [*headers, (b"connection", b"close")]
                await send({"type": "http.response.start", "status": status, "headers": headers})
                await send({"type": "http.response.body", "body": body})


class _ServerLog(logging.Handler):
    """What the HTTP server itself has to say, as our logs say it: an exception is its type, and no traceback."""

    def emit(self, record: logging.LogRecord) -> None:
        """Log it as a warning: what fails inside a request is logged by the gate."""
        kind = record.exc_info[0] if record.exc_info else None
        _log.warning("http server", reason=record.getMessage(), error=None if kind is None else kind.__name__)


@contextmanager
def _server_log() -> Iterator[None]:
    log, handler = logging.getLogger("uvicorn.error"), _ServerLog(logging.WARNING)
    before, log.propagate = log.propagate, False
    log.addHandler(handler)
    try:
        yield
    finally:
        log.removeHandler(handler)
        log.propagate = before


def serve(service: Service, *, app: Gate | None = None, ready: Any = None) -> None:
    """Serve until a signal ends it; `app` stands in for the API's own, `ready` is called once it accepts."""
    settings = service.settings
    allow_files(files_needed(settings))
    listeners = [(_listener(settings.listen), _config(_Ending(app or create_app(service), service), settings))]
    if settings.workers_listen:
        app = create_app(service, workers_only=True)
        workers = _config(_Ending(app, service), settings, demand_certificates=True)
        listeners.append((_listener(settings.workers_listen), workers))
    try:
        with (
            _server_log(),
            gc_seldom(),
            short_switch_interval(),
            asyncio.Runner(loop_factory=_loop()) as runner,
        ):
            runner.run(_run(service, [(sock, _Server(config)) for sock, config in listeners], ready))
    finally:
        for sock, _ in listeners:
            sock.close()
        host, place = address(settings.listen)
        if host is None:
            Path(str(place)).unlink(missing_ok=True)


def _loop() -> Any:
    """uvloop's event loop where it is installed; it and httptools take half of what a request costs here."""
    try:
        import uvloop
    except ImportError:
        return None
    return uvloop.new_event_loop


async def _run(service: Service, servers: list[tuple[socket.socket, _Server]], ready: Any) -> None:
    loop = asyncio.get_running_loop()

    def end() -> None:
        _log.info("service ending")
        service.stopping.set()
        for _, server in servers:
            server.should_exit = True

    for number in (signal.SIGINT, signal.SIGTERM):
        with suppress(NotImplementedError, RuntimeError, ValueError):
            loop.add_signal_handler(number, end)
    tasks = [asyncio.create_task(server.serve(sockets=[sock])) for sock, server in servers]
    while not all(server.started for _, server in servers) and not any(task.done() for task in tasks):
        await asyncio.sleep(0.01)
    _log.info("service listening", listen=service.settings.listen)
    _notify("READY=1")
    if ready is not None:
        ready()
    contexts = [server.config.ssl for _, server in servers]
    watcher = asyncio.create_task(_watch(service, contexts, end))
    await asyncio.gather(*tasks)
    watcher.cancel()


async def _watch(service: Service, contexts: Sequence[ssl.SSLContext | None], end: Any) -> None:
    """End when the service was told to stop by other means than a signal; read TLS files again that were renewed."""
    files = _tls_files(service.settings)
    while not service.stopping.is_set():
        await asyncio.sleep(0.2)
        now = _tls_files(service.settings)
        if now != files and _renewed(service.settings, contexts):
            files = now
    end()


def _tls_files(settings: ServiceSettings) -> tuple[tuple[int, int] | None, ...]:
    """What tells whether certificate, key or the workers' authority is another file than before."""
    states = []
    for path in (settings.tls_certificate_path, settings.tls_key_path, settings.tls_client_ca_path):
        try:
            state = None if path is None else path.stat()
        except OSError:
            state = None
        states.append(None if state is None else (state.st_mtime_ns, state.st_ino))
    return tuple(states)


def _renewed(settings: ServiceSettings, contexts: Sequence[ssl.SSLContext | None]) -> bool:
    """Whether new connections have the files as they are now; False: they do not belong together yet."""
    certificate, key = settings.tls_certificate_path, settings.tls_key_path
    assert certificate is not None and key is not None
    try:
        ssl.create_default_context().load_cert_chain(certificate, key)  # nothing is half loaded
        for context in contexts:
            if context is not None:
                context.load_cert_chain(certificate, key)
                if context.verify_mode is ssl.CERT_REQUIRED and settings.tls_client_ca_path is not None:
                    context.load_verify_locations(settings.tls_client_ca_path)
    except (OSError, ssl.SSLError):
        return False
    _log.info("TLS files reloaded")
    return True


def _config(app: _Ending, settings: ServiceSettings, *, demand_certificates: bool = False) -> uvicorn.Config:
    tls: dict[str, Any] = {}
    if settings.tls_certificate_path is not None and settings.tls_key_path is not None:
        if settings.tls_key_path.stat().st_mode & 0o077:
            raise ConfigError(f"tls key `{settings.tls_key_path}`: is open to others; chmod 600 it")
        tls = {"ssl_certfile": settings.tls_certificate_path, "ssl_keyfile": settings.tls_key_path}
        if demand_certificates:
            tls |= {"ssl_ca_certs": settings.tls_client_ca_path, "ssl_cert_reqs": ssl.CERT_REQUIRED}
    protocol = CertifiedProtocol if demand_certificates else BoundedProtocol
    config = uvicorn.Config(
        app,
        http=bounded(protocol, Connections(settings)),
        log_config=None,
        access_log=False,
        server_header=False,
        proxy_headers=False,
        lifespan="off",
        ws="none",
        timeout_graceful_shutdown=settings.shutdown_seconds,
        backlog=_BACKLOG,
        timeout_keep_alive=_KEEP_ALIVE_SECONDS,
        **tls,
    )
    config.load()
    if config.ssl is not None:
        config.ssl.minimum_version = ssl.TLSVersion.TLSv1_2
    return config


def _listener(listen: str) -> socket.socket:
    host, place = address(listen)
    try:
        if host is None:
            return _unix(Path(str(place)))
        family = socket.AF_INET6 if ":" in host else socket.AF_INET
        sock = socket.create_server((host, int(place)), family=family, backlog=_BACKLOG)
    except OSError as error:
        raise ConfigError(f"listen `{listen}`: {error.strerror or error}", listen=listen) from None
    sock.setblocking(False)
    return sock


def _unix(path: Path) -> socket.socket:
    """A listening Unix socket that its user alone can open (rule 1)."""
    sock = socket.socket(socket.AF_UNIX, socket.SOCK_STREAM)
    if path.is_socket():
        with socket.socket(socket.AF_UNIX, socket.SOCK_STREAM) as probe:
            probe.settimeout(1.0)
            try:
                probe.connect(str(path))
            except OSError:
                path.unlink()
            else:
                raise ConfigError(f"listen `unix:{path}`: another process serves it", path=path)
    mask = os.umask(0o177)
    try:
        sock.bind(str(path))
    finally:
        os.umask(mask)
    sock.listen(_BACKLOG)
    sock.setblocking(False)
    return sock


def _notify(state: str) -> None:
    """Tell systemd, where it asks to be told."""
    place = os.environ.get("NOTIFY_SOCKET")
    if place:
        with suppress(OSError), socket.socket(socket.AF_UNIX, socket.SOCK_DGRAM) as sock:
            sock.connect("\0" + place[1:] if place.startswith("@") else place)
            sock.sendall(state.encode())


_TURN_SECONDS = 0.0005  # the default is 0.005


@contextmanager
def short_switch_interval() -> Iterator[None]:
    """Shorten the interpreter's thread switch interval inside the block."""
    before = sys.getswitchinterval()
    sys.setswitchinterval(_TURN_SECONDS)
    try:
        yield
    finally:
        sys.setswitchinterval(before)


class CertifiedProtocol(BoundedProtocol):
    """The bounded protocol, whose requests carry the thumbprint of their connection's certificate."""

    app: Any

    def connection_made(self, transport: asyncio.Transport) -> None:  # type: ignore[override]
        """Read the connection's certificate once, for all of its requests."""
        super().connection_made(transport)
        self.app = _Certified(self.app, _thumbprint(transport))


class _Certified:
    def __init__(self, app: Any, thumbprint: str | None) -> None:
        self._app = app
        self._thumbprint = thumbprint

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        scope[CERTIFICATE] = self._thumbprint
        await self._app(scope, receive, send)


def _thumbprint(transport: asyncio.Transport) -> str | None:
    """Of the verified certificate; None where the connection has none (rule 1)."""
    connection = transport.get_extra_info("ssl_object")
    if not isinstance(connection, (ssl.SSLObject, ssl.SSLSocket)):
        return None
    if connection.context.verify_mode is not ssl.CERT_REQUIRED:
        return None
    der = connection.getpeercert(binary_form=True)
    return None if der is None else thumbprint_of(der)
