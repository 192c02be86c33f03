"""Decides which service answers a command: a control plane by its address, or the ledger's own files.

1. With `--server` the key of `--api-key-file` asks. Without, the service's own operations run in this process on the
   ledger that the settings name: same checks, same records, as `local:<user>` or as an enrolled principal (`--as`).
2. Whoever may write the ledger's files may do so (administration, rule 1 of `local_administration`), beside a server
   that is running on it.
3. An act on the ledger itself names no person without the ledger's store of subject keys. Its orders are signed as the
   settings of workers say where no other do: workers follow no other order.
"""

from __future__ import annotations

import uuid
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from pathlib import Path
from types import MappingProxyType
from typing import TYPE_CHECKING, Any, Protocol
from urllib.parse import quote

import orjson

from kvcustody.audit.evidence.processes.marked_processes import history
from kvcustody.audit.store.database.engine import check_there
from kvcustody.console.api import operation_commands
from kvcustody.console.api.api_reply import ApiReply, refusal
from kvcustody.console.command import tell_history
from kvcustody.console.opening import control_plane, ledger_of, service_settings
from kvcustody.console.options import ActSource, ServiceSource
from kvcustody.errors import ConfigError
from kvcustody.governance.api.operation_request import OperationRequest
from kvcustody.governance.observability.logs import configure
from kvcustody.governance.service.access.caller import Caller
from kvcustody.governance.service.access.roles import ALONE, OF_TENANTS, Role

if TYPE_CHECKING:
    from kvcustody.governance.api.local_calls import LocalCalls
    from kvcustody.governance.service.service import Service
    from kvcustody.governance.service.settings import ServiceSettings

_LOCAL_ROLES = (frozenset(Role) - OF_TENANTS - ALONE) | {Role.BOOTSTRAP}


class Asker(Protocol):
    """A service that answers operations."""

    lasting: bool  # it goes on with jobs after the command has ended

    def ask(self, asked: OperationRequest) -> ApiReply:
        """Return the reply.

        Raises:
            ServiceError: the reply is no success.
        """


def call(
    asker: Asker,
    operation: str,
    values: Mapping[str, Any],
    *,
    body: bytes | None = None,
    key: str | None = None,
) -> ApiReply:
    """Call an operation by its name.

    Args:
        asker: Whom to ask.
        operation: Its name, as `listEvents`.
        values: Its parameters by their names in the API document, wherever each goes; None: left out.
        body: A whole body, in place of its parts.
        key: The act's own key where the operation has one; None: a new one.

    Raises:
        ServiceError: The call is refused.
    """
    command = operation_commands.by_operation(operation)
    path, query, headers, parts = command.path, {}, {}, {}
    assert values.keys() <= {part.name for part in command.parts}, (operation, values.keys())
    for part in command.parts:
        value = values.get(part.name)
        if value is None:
            continue
        if part.place == "path":
            path = path.replace("{" + part.name + "}", one_segment(str(value)))
        elif part.place == "query":
            query[part.name] = str(value).lower() if isinstance(value, bool) else str(value)
        elif part.place == "header":
            headers[part.name] = str(value)
        else:
            parts[part.name] = value
    if body is not None and parts:
        raise ConfigError("--body is the whole body; leave out its parts")
    if body is None and any(part.place == "body" for part in command.parts):
        body = orjson.dumps(parts)
    if body is not None or command.raw:
        headers["Content-Type"] = command.raw or "application/json"
    if command.keyed:
        headers["Idempotency-Key"] = key or uuid.uuid4().hex
    return asker.ask(OperationRequest(command.method, path, query, headers, body or b""))


def done(
    operation: str,
    source: ServiceSource,
    settings: Mapping[str, str | None] = MappingProxyType({}),
    **values: Any,
) -> dict[str, Any]:
    """Call one operation once, by its name, and return its answer; `asking` and `call` describe the arguments."""
    key = source.key if isinstance(source, ActSource) else None
    with asking(source, operation, settings) as asker:
        return dict(orjson.loads(call(asker, operation, values, key=key).body))


def every_page(asker: Asker, operation: str, values: Mapping[str, Any], first: ApiReply) -> ApiReply:
    """Return all pages of a list as one."""
    page = orjson.loads(first.body)
    items = page["items"]
    while page["next"] is not None:
        page = orjson.loads(call(asker, operation, {**values, "cursor": page["next"]}).body)
        items += page["items"]
    return first._replace(body=orjson.dumps(page | {"items": items}))


def one_segment(text: str) -> str:
    """Return `text` as one path segment.

    Raises:
        ConfigError: the text would change the path.
    """
    if not text or "/" in text or "?" in text or "#" in text or text in (".", ".."):
        raise ConfigError(f"`{text}` is not a single name")
    return text


@contextmanager
def asking(
    source: ServiceSource, operation: str, settings: Mapping[str, str | None] = MappingProxyType({})
) -> Iterator[Asker]:
    """Yield the service that the options name (rule 1), for one operation; an operation that only reads opens no
    service.

    Args:
        source: The options.
        operation: The operation, by its name.
        settings: What a command states of the service's settings itself; None: as they are.

    Raises:
        ConfigError: A control plane is asked, which has its own settings.
    """
    stated = {name: value for name, value in settings.items() if value is not None}
    if source.plane.server is not None:
        if source.as_name is not None:
            raise ConfigError("--as works only on the ledger itself; at a server the key identifies the caller")
        if stated:
            raise ConfigError(f"with --server, the control plane's settings say `{'`, `'.join(stated)}`")
        with control_plane(source) as connection:
            yield _Remote(connection)
        return
    if operation_commands.by_operation(operation).reads and source.as_name is None:
        from kvcustody.console.api.ledger_asker import open_ledger

        with open_ledger(source) as reader:
            yield reader
        return
    from kvcustody.console.documents import ConsoleDocuments
    from kvcustody.governance.api.local_calls import LocalCalls
    from kvcustody.governance.service.service import open_local_service

    configure("warning", "console")
    own = service_settings(source.config, ledger_of(source), subject_keys_url=source.subject_keys, **stated)
    check_there(own.database_url)
    own = own.model_copy(update=_of_workers(own))
    with open_local_service(own, documents=ConsoleDocuments()) as service:
        caller = _local(service, source.as_name)
        with LocalCalls(service) as calls:
            yield LocalAsker(service, calls, caller)


class _Remote:
    """A control plane, over the network."""

    lasting = True

    def __init__(self, connection: Any) -> None:
        self._connection = connection

    def ask(self, asked: OperationRequest) -> ApiReply:
        """Send one request over the network and return the reply."""
        response = self._connection.request(
            asked.method,
            quote(asked.path, safe="/:"),
            params=asked.query,
            headers=asked.headers,
            content=asked.body or None,
        )
        media = response.headers.get("content-type", "")
        return ApiReply(response.status_code, media, response.headers.get("etag", ""), response.content)


class LocalAsker:
    """The service's own operations in this process, for one caller."""

    lasting = False

    def __init__(self, service: Service, calls: LocalCalls, caller: Caller) -> None:
        self._service = service
        self._calls = calls
        self._caller = caller

    def ask(self, asked: OperationRequest) -> ApiReply:
        """Make one call through the gate and return the reply."""
        found = self._calls.call(self._caller, asked)
        marked = self._service.marked()
        if marked:
            tell_history(history(marked))
        made = ApiReply(found.status, found.header("content-type"), found.header("etag"), found.body)
        if made.status >= 400:
            raise refusal(made)
        return made


def _of_workers(own: ServiceSettings) -> dict[str, Path]:
    """Return the trusted order keys and the signing key from workers' settings, where no other settings name them (rule
    3).
    """
    from kvcustody.governance.settings import load_settings

    if own.policy_trust is not None:
        return {}
    workers = load_settings()
    found = {
        "policy_trust": workers.policy_trust,
        "order_key_path": own.order_key_path or workers.order_key_path,
    }
    return {name: Path(path) for name, path in found.items() if workers.policy_trust and path}


def _local(service: Service, name: str | None) -> Caller:
    from kvcustody.governance.service.access.local_administration import local_name

    if name is None:
        return Caller(local_name(), _LOCAL_ROLES, None, "local")
    found = service.principals.find(name)
    if found is None or found.disabled_us is not None:
        raise ConfigError(f"--as `{name}`: no principal has that name", name=name)
    return Caller(found.name, found.roles, found.tenant, "local")
