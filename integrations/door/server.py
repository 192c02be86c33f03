"""The process of a door: a server for Envoy or clients, and one for health and metrics, until a signal ends it.

1. `/ready` says 200 while the door is open: not before, nor from the moment that a signal asks it to end. What is under
   way then is answered within `drain_seconds`. A line says what the door lacks to find what routers hold.
2. With TLS and a certificate authority of clients, only those are served that show a certificate of it.
"""

from __future__ import annotations

import asyncio
import contextlib
import signal
import socket
import ssl
from abc import ABC, abstractmethod
from collections.abc import AsyncIterator, Callable, Mapping
from pathlib import Path
from typing import Any, NamedTuple

import httpx
import uvicorn
from prometheus_client import generate_latest
from starlette.applications import Starlette
from starlette.requests import Request
from starlette.responses import PlainTextResponse, Response
from starlette.routing import Route

from kvcustody.errors import ConfigError
from kvcustody.integrations.door.edge_gate import EdgeGate
from kvcustody.integrations.door.envoy_configuration import MESSAGE_OVERHEAD_BYTES, ListenPlace
from kvcustody.integrations.door.reverse_proxy import ReverseProxy
from kvcustody.logger import get_logger

_LOG = get_logger("kvcustody.door")


class DoorTls(NamedTuple):
    """TLS files in PEM. `client_ca`: the CA of required client certificates; None requires none."""

    certificate: Path
    key: Path
    client_ca: Path | None = None

    def check(self) -> None:
        """Check the files.

        Raises:
            ConfigError: a file cannot be read.
        """
        for path in (self.certificate, self.key, self.client_ca):
            try:
                if path is not None:
                    path.read_bytes()
            except OSError as problem:
                raise ConfigError(f"`{path}` cannot be read ({problem.strerror})", path=path) from None


class DoorBounds(NamedTuple):
    """The limits: bytes of one body, bytes of all running bodies, and seconds to finish running requests."""

    body_bytes_max: int
    under_way_bytes_max: int
    drain_seconds: float = 30.0


class DoorProcess(ABC):
    """A door at one address, and its health and metrics at another."""

    def __init__(
        self, gate: EdgeGate, place: ListenPlace, about: ListenPlace, bounds: DoorBounds, tls: DoorTls | None
    ) -> None:
        """Raises `ConfigError` where a file of TLS cannot be read."""
        if tls is not None:
            tls.check()
        self._gate, self._place, self._about, self._bounds, self._tls = gate, place, about, bounds, tls
        self._opened, self._ending = asyncio.Event(), asyncio.Event()

    async def run(self) -> None:
        """Serve until SIGTERM, SIGINT or `end`.

        Raises:
            ConfigError: an address is taken.
        """
        loop = asyncio.get_running_loop()
        for number in (signal.SIGTERM, signal.SIGINT):
            with contextlib.suppress(ValueError, NotImplementedError):  # only a main thread may
                loop.add_signal_handler(number, self.end)
        async with served(self._about_application(), self._about):
            _LOG.info("the door opens", door=str(self._place), about=str(self._about))
            await self._serve()

    def end(self) -> None:
        """Accept no more requests, and finish the running ones."""
        self._ending.set()

    @abstractmethod
    async def _serve(self) -> None:
        """Serve until `end`, then finish the running requests."""

    def _about_application(self) -> Starlette:
        async def ready(_: Request) -> Response:
            state = "ending" if self._ending.is_set() else "ready" if self._opened.is_set() else "opening"
            lacks = "".join(f"\nlacks: {each}" for each in self._gate.lacks())
            return PlainTextResponse(state + lacks, 200 if state == "ready" else 503)

        async def live(_: Request) -> Response:
            return PlainTextResponse("live")

        async def metrics(_: Request) -> Response:
            return Response(generate_latest(self._gate.metrics.registry), media_type="text/plain; version=0.0.4")

        routes = [Route("/ready", ready), Route("/live", live), Route("/metrics", metrics)]
        return Starlette(routes=routes)


class EnvoyDoor(DoorProcess):
    """The door as Envoy's external processor, over gRPC."""

    async def _serve(self) -> None:
        import grpc

        from kvcustody.integrations.door.external_processor import ExternalProcessor, add_processor

        largest = self._bounds.body_bytes_max + MESSAGE_OVERHEAD_BYTES
        server = grpc.aio.server(options=[("grpc.max_receive_message_length", largest)])
        processor = ExternalProcessor(
            self._gate,
            body_bytes_max=self._bounds.body_bytes_max,
            under_way_bytes_max=self._bounds.under_way_bytes_max,
        )
        add_processor(server, processor)
        try:
            if self._tls is None:
                server.add_insecure_port(str(self._place))
            else:
                server.add_secure_port(str(self._place), _credentials(grpc, self._tls))
        except RuntimeError:
            raise _taken(self._place) from None
        await server.start()
        self._opened.set()
        await self._ending.wait()
        await server.stop(self._bounds.drain_seconds)


class ProxyDoor(DoorProcess):
    """The door as a reverse proxy in front of `router`, the router's URL; `routers`: each placement group's."""

    def __init__(
        self,
        gate: EdgeGate,
        place: ListenPlace,
        about: ListenPlace,
        bounds: DoorBounds,
        tls: DoorTls | None,
        *,
        router: str,
        routers: Mapping[str, str] | None = None,
    ) -> None:
        super().__init__(gate, place, about, bounds, tls)
        self._router, self._routers = router, routers

    async def _serve(self) -> None:
        endless = httpx.Timeout(None, connect=5.0)  # an answer takes as long as its tokens
        limits = httpx.Limits(max_connections=None)
        async with httpx.AsyncClient(base_url=self._router, timeout=endless, limits=limits) as client:
            proxy = ReverseProxy(
                self._gate,
                client,
                body_bytes_max=self._bounds.body_bytes_max,
                under_way_bytes_max=self._bounds.under_way_bytes_max,
                routers=self._routers,
            )
            more: dict[str, Any] = {}
            if self._tls is not None:
                more = {"ssl_certfile": self._tls.certificate, "ssl_keyfile": self._tls.key}
                if self._tls.client_ca is not None:
                    more |= {"ssl_ca_certs": self._tls.client_ca, "ssl_cert_reqs": ssl.CERT_REQUIRED}
            drain = max(1, round(self._bounds.drain_seconds))
            async with served(proxy, self._place, timeout_graceful_shutdown=drain, **more):
                self._opened.set()
                await self._ending.wait()


@contextlib.asynccontextmanager
async def served(application: Callable[..., Any], place: ListenPlace, **more: Any) -> AsyncIterator[None]:
    """Serve an ASGI application at an address within the block.

    Raises:
        ConfigError: the address is taken.
    """
    family = socket.AF_INET6 if ":" in place.host else socket.AF_INET
    # Named TCP: asyncio asks a socket of no named protocol to wait for more before it sends, up to 40 ms.
    listening = socket.socket(family, socket.SOCK_STREAM, socket.IPPROTO_TCP)
    listening.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
    try:
        listening.bind((place.host, place.port))
    except OSError:
        listening.close()
        raise _taken(place) from None
    server = uvicorn.Server(uvicorn.Config(application, log_level="warning", **more))
    task = asyncio.ensure_future(server._serve(sockets=[listening]))  # `serve` would take the door's signals
    try:
        while not (server.started or task.done()):
            await asyncio.sleep(0.01)
        yield
    finally:
        server.should_exit = True
        await task


def _taken(place: ListenPlace) -> ConfigError:
    return ConfigError(f"the door cannot listen at `{place}`: is the port taken?", place=str(place))


def _credentials(grpc: Any, tls: DoorTls) -> Any:
    authority = None if tls.client_ca is None else tls.client_ca.read_bytes()
    pair = (tls.key.read_bytes(), tls.certificate.read_bytes())
    return grpc.ssl_server_credentials([pair], authority, require_client_auth=authority is not None)
