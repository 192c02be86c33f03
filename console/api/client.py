"""The one place that decides whom a command asks: a control plane by its address, or the ledger's own files.

1. With `--server` the key of `--api-key-file` asks. Without, the service's own operations run in this process on the
   ledger that the settings name: same checks, same records, as `local:<user>` or as an enrolled principal (`--as`).
2. Whoever may write the ledger's files may do so (administration, rule 1 of `local_administration`). A ledger that a
   server has open is asked over that server.
"""

from __future__ import annotations

import asyncio
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from pathlib import Path
from typing import Any, NamedTuple, Protocol
from urllib.parse import urlencode

import orjson

from kvcustody.console.command import tell_history
from kvcustody.console.opening import connect, service_settings
from kvcustody.errors import ConfigError, ServiceError
from kvcustody.governance.control_plane.connection import HISTORY
from kvcustody.governance.observability.logs import configure
from kvcustody.governance.service.access.caller import Caller
from kvcustody.governance.service.access.roles import ALONE, OF_TENANTS, Role

_LOCAL_ROLES = (frozenset(Role) - OF_TENANTS - ALONE) | {Role.BOOTSTRAP}


class ApiReply(NamedTuple):
    """A success: its status, media type, `ETag` and bytes."""

    status: int
    media: str
    etag: str
    body: bytes


class Asker(Protocol):
    """Whom a command asks."""

    lasting: bool  # it goes on with jobs after the command has ended

    def ask(
        self,
        method: str,
        path: str,
        *,
        query: Mapping[str, Any],
        headers: Mapping[str, str],
        body: bytes | None,
    ) -> ApiReply:
        """One request; raises `ServiceError` for whatever is not a success."""


class Where(NamedTuple):
    """The options that say whom to ask."""

    server: str | None
    key_file: Path | None
    authority: Path | None
    config: Path | None
    as_name: str | None
    ledger: str | None = None


@contextmanager
def asking(where: Where) -> Iterator[Asker]:
    """Whom the options name (rule 1)."""
    if where.server is not None:
        if where.as_name is not None:
            raise ConfigError("--as works on the ledger itself; against a server the key says who asks")
        with connect(where.server, where.key_file, where.authority) as connection:
            yield _Remote(connection)
        return
    from kvcustody.console.documents import ConsoleDocuments
    from kvcustody.governance.service.service import open_service

    configure("warning", "console")
    settings = service_settings(where.config, where.ledger)
    alone = {"webhooks": (), "requests_per_second": 1e6, "requests_burst": 1_000_000, "console": False}
    with open_service(settings.model_copy(update=alone), documents=ConsoleDocuments()) as service:
        made = _Embedded(service, _local(service, where.as_name))
        try:
            yield made
        finally:
            made.close()


class _Remote:
    """A control plane."""

    lasting = True

    def __init__(self, connection: Any) -> None:
        self._connection = connection

    def ask(
        self,
        method: str,
        path: str,
        *,
        query: Mapping[str, Any],
        headers: Mapping[str, str],
        body: bytes | None,
    ) -> ApiReply:
        """One request over the network."""
        found = self._connection.request(method, path, params=query, headers=headers, content=body)
        media = found.headers.get("content-type", "")
        return ApiReply(found.status_code, media, found.headers.get("etag", ""), found.content)


class _Embedded:
    """The service's own operations in this process."""

    lasting = False

    def __init__(self, service: Any, caller: Caller) -> None:
        from kvcustody.governance.api.app import create_app

        service.authenticator = _Known(caller)
        self._app = create_app(service)
        self._loop = asyncio.new_event_loop()

    def ask(
        self,
        method: str,
        path: str,
        *,
        query: Mapping[str, Any],
        headers: Mapping[str, str],
        body: bytes | None,
    ) -> ApiReply:
        """One request through the gate, without a socket."""
        found = self._loop.run_until_complete(
            self._answer(method, path, urlencode(query), headers, body or b"")
        )
        if found.status >= 400:
            raise _refusal(found)
        return found

    async def _answer(
        self, method: str, path: str, query: str, headers: Mapping[str, str], body: bytes
    ) -> ApiReply:
        sent: list[Any] = []
        given = [(b"host", b"localhost")]
        given += [(name.lower().encode(), value.encode("latin-1")) for name, value in headers.items()]
        scope = {
            "type": "http", "asgi": {"version": "3.0"}, "http_version": "1.1", "scheme": "http", "method": method,
            "path": path, "raw_path": path.encode(), "query_string": query.encode(), "root_path": "",
            "headers": given, "client": None, "server": None, "state": {},
        }  # fmt: skip

        unread = [{"type": "http.request", "body": body, "more_body": False}]

        async def receive() -> Any:
            if not unread:
                await asyncio.Event().wait()  # this client stays until it is answered
            return unread.pop()

        async def send(message: Any) -> None:
            sent.append(message)

        await self._app(scope, receive, send)
        start = {name.decode(): value.decode("latin-1") for name, value in sent[0]["headers"]}
        if HISTORY in start:
            tell_history(start[HISTORY])
        content = b"".join(message.get("body", b"") for message in sent[1:])
        return ApiReply(sent[0]["status"], start.get("content-type", ""), start.get("etag", ""), content)

    def close(self) -> None:
        """End the loop and its threads."""
        self._loop.run_until_complete(self._loop.shutdown_default_executor())
        self._loop.close()


class _Known:
    """Stands in for the authenticator: whoever may open the files is known already (rule 2)."""

    def __init__(self, caller: Caller) -> None:
        self._caller = caller

    def caller(self, *_: object) -> Caller:
        """The one caller there is."""
        return self._caller

    known = caller

    def check_still_valid(self, caller: Caller) -> None:
        """Whoever holds the files stands."""


def _local(service: Any, name: str | None) -> Caller:
    from kvcustody.governance.service.access.local_administration import local_name

    if name is None:
        return Caller(local_name(), _LOCAL_ROLES, None, "local")
    found = service.principals.find(name)
    if found is None or found.disabled_us is not None:
        raise ConfigError(f"--as `{name}`: nobody of that name is enrolled", name=name)
    return Caller(found.name, found.roles, found.tenant, "local")


def _refusal(found: ApiReply) -> ServiceError:
    """A problem document as the error that a command prints."""
    if not found.media.startswith("application/problem+json"):
        return ServiceError(f"answered {found.status}", problem="unknown", status=found.status)
    problem = orjson.loads(found.body)
    says = problem.get("detail") or problem["title"]
    for item in problem.get("errors", ())[:3]:
        says += f"; `{item['at']}` {item['what']}"
    return ServiceError(says, problem=problem["type"].rpartition(":")[2], status=found.status)
