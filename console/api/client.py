"""The one place that decides whom a command asks: a control plane by its address, or the ledger's own files.

1. With `--server` the key of `--api-key-file` asks. Without, the service's own operations run in this process on the
   ledger that the settings name: same checks, same records, as `local:<user>` or as an enrolled principal (`--as`).
2. Whoever may write the ledger's files may do so (administration, rule 1 of `local_administration`). A ledger that a
   server has open is asked over that server.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass
from typing import TYPE_CHECKING, Annotated, Any, NamedTuple, Protocol

import orjson
import typer

from kvcustody.audit.evidence.processes.marked_processes import history
from kvcustody.audit.store.database.engine import check_there
from kvcustody.console.command import tell_history
from kvcustody.console.opening import connect, service_settings
from kvcustody.console.options import Config, ControlPlane, SettledLedger
from kvcustody.errors import ConfigError, ServiceError
from kvcustody.governance.observability.logs import configure
from kvcustody.governance.service.access.caller import Caller
from kvcustody.governance.service.access.roles import ALONE, OF_TENANTS, Role
from kvcustody.governance.service.operations.parameter_groups import ParameterGroup

if TYPE_CHECKING:
    from kvcustody.governance.api.local_calls import LocalCalls
    from kvcustody.governance.service.service import Service

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


As = Annotated[
    str | None,
    typer.Option("--as", help="On the ledger itself: act as this enrolled principal.", metavar="NAME"),
]


@dataclass(frozen=True, kw_only=True)
class Where(ParameterGroup):
    """The options that say whom to ask."""

    plane: ControlPlane
    config: Config = None
    ledger: SettledLedger = None
    as_name: As = None


@contextmanager
def asking(where: Where) -> Iterator[Asker]:
    """Whom the options name (rule 1)."""
    if where.plane.server is not None:
        if where.as_name is not None:
            raise ConfigError("--as works on the ledger itself; against a server the key says who asks")
        with connect(where.plane) as connection:
            yield _Remote(connection)
        return
    from kvcustody.console.documents import ConsoleDocuments
    from kvcustody.governance.api.local_calls import LocalCalls
    from kvcustody.governance.service.service import open_service

    configure("warning", "console")
    settings = service_settings(where.config, where.ledger)
    check_there(settings.database_url)
    alone = {"webhooks": (), "requests_per_second": 1e6, "requests_burst": 1_000_000, "console": False}
    with open_service(settings.model_copy(update=alone), documents=ConsoleDocuments()) as service:
        caller = _local(service, where.as_name)
        with LocalCalls(service) as calls:
            yield LocalAsker(service, calls, caller)


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


class LocalAsker:
    """The service's own operations in this process, as one caller."""

    lasting = False

    def __init__(self, service: Service, calls: LocalCalls, caller: Caller) -> None:
        self._service = service
        self._calls = calls
        self._caller = caller

    def ask(
        self,
        method: str,
        path: str,
        *,
        query: Mapping[str, Any],
        headers: Mapping[str, str],
        body: bytes | None,
    ) -> ApiReply:
        """One call through the gate."""
        from kvcustody.governance.api.local_calls import LocalRequest

        asked = {name: str(value) for name, value in query.items()}
        found = self._calls.call(self._caller, LocalRequest(method, path, asked, headers, body or b""))
        marked = self._service.marked()
        if marked:
            tell_history(history(marked))
        made = ApiReply(found.status, found.header("content-type"), found.header("etag"), found.body)
        if made.status >= 400:
            raise _refusal(made)
        return made


def _local(service: Service, name: str | None) -> Caller:
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
