"""`kvcustody door`: the door before a router, for Envoy or by itself, with its key and Envoy's configuration."""

from __future__ import annotations

import asyncio
import sys
from collections.abc import Callable
from contextlib import ExitStack
from dataclasses import dataclass
from pathlib import Path
from typing import Annotated, Any
from urllib.parse import urlsplit

import orjson
import typer

from kvcustody.audit.tlog.signing_key import create_signing_key, read_signing_key
from kvcustody.clock import SystemClock
from kvcustody.errors import ConfigError, IdentityError
from kvcustody.governance.control_plane.opening import connect
from kvcustody.governance.credentials.scope_token_secret import open_scope_key
from kvcustody.governance.credentials.watched_file import WatchedFile
from kvcustody.governance.edge.custody_lease import lease_seconds
from kvcustody.governance.edge.door_token import GROUP, SECONDS_MAX
from kvcustody.governance.edge.name_scopes import NameScopes
from kvcustody.governance.edge.placement_document import read_placement
from kvcustody.governance.observability.logs import configure
from kvcustody.governance.service.operations.parameter_groups import ParameterGroup, grouped
from kvcustody.governance.settings import load_settings
from kvcustody.http_exchange import is_loopback
from kvcustody.integrations.door.envoy_configuration import EnvoyTls, ListenPlace, envoy_configuration
from kvcustody.integrations.identity.from_settings import open_identity
from kvcustody.policies.document.model import Policy
from kvcustody.policies.reading.load_policy import load_policy

app = typer.Typer(
    no_args_is_help=True,
    help="A door in front of a router: identity, namespaces for routers, and tokens that no worker can make.",
    epilog="docs/how-to/fleet/run-a-door.md describes how routers use a request, and how to set up the door.",
)
_KEY = Path("kvcustody-door.key")
_Key = Annotated[Path, typer.Option("--key", help="The file of the door's own private key.", metavar="FILE")]
_Json = Annotated[bool, typer.Option("--json", help="Print one JSON document on stdout.")]
_Door = Annotated[str, typer.Option(help="Where Envoy finds the door.", metavar="HOST:PORT")]
_DOOR = "127.0.0.1:18131"
_Placement = Annotated[
    Path | None,
    typer.Option(
        help="Placement groups, each with a router of its own, over which tenants are spread.", metavar="FILE"
    ),
]


@app.command(epilog="Example: `kvcustody door key door-1.example.org >> doors.vkeys`")
def key(
    name: Annotated[str, typer.Argument(help="The door's name in its tokens, as a domain name.")],
    file: _Key = _KEY,
    *,
    as_json: _Json = False,
) -> None:
    """Print the door's public key for the engines' `doors` file; the private key is made where the file is not there.

    To replace a key: make another file, add its public key to the engines' file, restart the door with it or move it
    over the old file, and remove the old public key a minute later.
    """
    signing_key = read_signing_key(file) if file.exists() else create_signing_key(file, name)
    if signing_key.name != name:
        raise ConfigError(f"`{file}` is the key of `{signing_key.name}`, not of `{name}`", path=file)
    if as_json:
        _print_json({"name": signing_key.name, "key": str(signing_key.verifier), "file": str(file)})
    else:
        typer.echo(str(signing_key.verifier))


@dataclass(frozen=True, kw_only=True)
class TokenOptions(ParameterGroup):
    """The content of the door's tokens."""

    key: _Key = _KEY
    token_seconds: Annotated[
        int, typer.Option(min=1, max=SECONDS_MAX, help="Seconds that a request may take to its engine.")
    ] = 30
    retries: Annotated[int, typer.Option(min=0, max=16, help="How often the router may present one request again.")] = 2
    group: Annotated[str, typer.Option(help="The group of workers that its tokens are for.")] = GROUP
    placement: _Placement = None
    policy: Annotated[
        Path | None,
        typer.Option(
            help="The policy that says by which scope requests are named; with a control plane, that says it.",
            metavar="FILE",
        ),
    ] = None


@dataclass(frozen=True, kw_only=True)
class TransportOptions(ParameterGroup):
    """Envoy's connection to the door."""

    tls_certificate: Annotated[Path | None, typer.Option(help="PEM; without it, no TLS.")] = None
    tls_key: Annotated[Path | None, typer.Option(help="PEM, of the certificate.")] = None
    client_ca: Annotated[Path | None, typer.Option(help="PEM: Envoy must show a certificate of this authority.")] = None


@dataclass(frozen=True, kw_only=True)
class BoundOptions(ParameterGroup):
    """The door's limits."""

    under_way_mib: Annotated[
        int, typer.Option(min=1, help="MiB of bodies under way; beyond it a request gets 503.")
    ] = 256
    drain_seconds: Annotated[float, typer.Option(min=0, help="Seconds in which it ends what runs, after a signal.")] = (
        30.0
    )


@dataclass(frozen=True, kw_only=True)
class ClientOptions(ParameterGroup):
    """The fields that clients may set."""

    pass_field: Annotated[
        list[str] | None,
        typer.Option(help="A field of bodies that goes on besides those that are listed.", metavar="NAME"),
    ] = None
    pass_header: Annotated[
        list[str] | None,
        typer.Option(help="A header that goes on besides those that are listed.", metavar="NAME"),
    ] = None
    return_header: Annotated[
        list[str] | None,
        typer.Option(help="A header of answers that goes back besides those that are listed.", metavar="NAME"),
    ] = None
    hint_priority: Annotated[str, typer.Option(help="The range that `priority` is clipped to.", metavar="MIN:MAX")] = (
        "0:0"
    )
    hint_retain_seconds: Annotated[
        int, typer.Option(min=0, help="Seconds that hints may ask a cache to keep blocks.")
    ] = 0
    hint_action: Annotated[
        list[str] | None,
        typer.Option(help="A type of action in `kv_hints` that goes on, as `prefetch`.", metavar="TYPE"),
    ] = None


@dataclass(frozen=True, kw_only=True)
class ReceiptOptions(ParameterGroup):
    """The router's headers for route receipts."""

    worker_header: Annotated[
        list[str] | None,
        typer.Option(help="A response header, too, in which the router names the worker.", metavar="NAME"),
    ] = None
    promised_header: Annotated[
        str, typer.Option(help="The one with the tokens that it expects the worker to have.", metavar="NAME")
    ] = "x-kvcustody-promised-tokens"
    score_header: Annotated[str, typer.Option(help="The one with the score that it chose by.", metavar="NAME")] = (
        "x-kvcustody-score"
    )


_About = Annotated[str, typer.Option(help="Where `/ready`, `/live` and `/metrics` are.", metavar="HOST:PORT")]
_ABOUT = "127.0.0.1:18139"


@app.command(
    epilog="Examples:\n\n    kvcustody door serve --ext-proc 127.0.0.1:18131\n\n"
    "    kvcustody door serve --retries 2 --tls-certificate door.pem --tls-key door.key.pem --client-ca envoy-ca.pem"
)
@grouped
def serve(
    *,
    ext_proc: _Door = _DOOR,
    about: _About = _ABOUT,
    tokens: TokenOptions,
    clients: ClientOptions,
    transport: TransportOptions,
    bounds: BoundOptions,
    headers: ReceiptOptions,
) -> None:
    """Serve Envoy as its external processor until a signal ends it.

    The identity document, the secret of namespaces and the largest body are this process's settings (`identity_path`,
    `scope_token_key_path`, `request_bytes_max`). Engines behind the router have the same secret, and the door's public
    key in the file that `doors` of their identity document names. Key files are read again when they change. With
    `control_plane` and `control_plane_key_path` (of a principal with the role `door`), an erasure ends routers' names.
    """
    _run(
        lambda door, *given: door.EnvoyDoor(*given),
        (ext_proc, about),
        tokens,
        clients,
        transport,
        bounds,
        headers,
    )


@app.command(
    epilog="Example: `kvcustody door proxy --listen 0.0.0.0:8443 --router http://127.0.0.1:30000 "
    "--tls-certificate door.pem --tls-key door.key.pem`"
)
@grouped
def proxy(
    *,
    router: Annotated[
        str, typer.Option(help="The router's address; that of each group with --placement.", metavar="URL")
    ] = "",
    listen: Annotated[
        str, typer.Option(help="Where it takes clients' requests.", metavar="HOST:PORT")
    ] = "127.0.0.1:18130",
    about: _About = _ABOUT,
    tokens: TokenOptions,
    clients: ClientOptions,
    transport: TransportOptions,
    bounds: BoundOptions,
    headers: ReceiptOptions,
) -> None:
    """Serve clients as a reverse proxy before a router, without Envoy, until a signal ends it.

    Its settings are those of `serve`. Answers are streamed; a client that leaves ends its request at the router.
    """
    routers = _routers(router, tokens.placement)
    for url in routers.values():
        if not url.startswith(("http://", "https://")):
            raise ConfigError(f"router `{url}` is no URL; write it as http://127.0.0.1:30000")
        if url.startswith("http://") and load_settings().windowed_token_seconds and not is_loopback(_host(url)):
            raise ConfigError(
                f"router `{url}`: windowed tokens may not cross a network unencrypted; write it as https://, or set"
                " `windowed_token_seconds` to 0"
            )
    first = next(iter(routers.values()))
    _run(
        lambda door, *given: door.ProxyDoor(*given, router=first, routers=routers),
        (listen, about),
        tokens,
        clients,
        transport,
        bounds,
        headers,
    )


def _host(url: str) -> str:
    return urlsplit(url).hostname or ""


def _run(
    make: Callable[..., Any],
    places: tuple[str, str],
    tokens: TokenOptions,
    clients: ClientOptions,
    transport: TransportOptions,
    bounds: BoundOptions,
    headers: ReceiptOptions,
) -> None:
    """Serve with `make` of the module `server`, a gate, addresses, bounds and TLS."""
    settings = load_settings()
    configure(settings.log_level, settings.log_format)
    try:
        from kvcustody.integrations.door import server
    except ImportError as error:
        raise ConfigError(f"`{error.name}` is not installed; pip install 'kvcustody[door]'") from None
    from kvcustody.integrations.door.client_hints import HintBounds
    from kvcustody.integrations.door.door_metrics import DoorMetrics
    from kvcustody.integrations.door.door_record import DoorRecord, open_door_record
    from kvcustody.integrations.door.edge_gate import EdgeGate
    from kvcustody.integrations.door.follow_epochs import follow_epochs
    from kvcustody.integrations.door.passed_fields import PassedFields
    from kvcustody.integrations.door.route_receipts import DoorReceipts, RouterHeaders

    clock = SystemClock()
    watched = WatchedFile(tokens.key, read_signing_key, clock)
    stack, metrics, epochs, receipts = ExitStack(), DoorMetrics(), None, None
    record: DoorRecord | None = None
    if settings.control_plane:
        connection = connect(settings, stack)
        record = open_door_record(settings, connection, clock, stack)
        lease = lease_seconds(settings.custody_lease_seconds, erased_within_us=0)
        epochs = follow_epochs(connection, clock, metrics, stack, lease_seconds=lease, record=record)
        if settings.nats:
            from kvcustody.integrations.jetstream.connection import NatsPlace
            from kvcustody.integrations.jetstream.hints import hear_hints

            place = NatsPlace(settings.nats, settings.nats_credentials_path, settings.nats_ca_path)
            hear_hints(place, stack)
        targets = (*RouterHeaders().targets, *(each.lower() for each in headers.worker_header or ()))
        names = RouterHeaders(targets, headers.promised_header.lower(), headers.score_header.lower())
        receipts = DoorReceipts(record.ledger, clock, metrics, headers=names)
        stack.callback(receipts.close)
    with open_scope_key(settings.scope_token_key_path) as secret:
        gate = EdgeGate(
            open_identity(settings),
            settings.identity_path.parent,
            watched.content,
            secret,
            clock,
            token_seconds=tokens.token_seconds,
            retries=tokens.retries,
            group=tokens.group,
            placement=None if tokens.placement is None else read_placement(tokens.placement),
            scopes=_scopes(tokens.policy, clock, is_told=epochs is not None),
            namespace_days=settings.namespace_days,
            window_seconds=settings.windowed_token_seconds,
            epochs=epochs,
            receipts=receipts,
            metrics=metrics,
            record_hints=(lambda _: None) if record is None else record.hints,
            passed=PassedFields(clients.pass_field or (), clients.pass_header or (), clients.return_header or ()),
            hints=HintBounds(
                _range(clients.hint_priority),
                clients.hint_retain_seconds,
                frozenset(clients.hint_action or ()),
            ),
        )
    certificate, key_file, authority = transport.tls_certificate, transport.tls_key, transport.client_ca
    if (certificate is None) != (key_file is None) or (authority and certificate is None):
        raise ConfigError("--tls-certificate, --tls-key and --client-ca: give the first two together")
    tls = server.DoorTls(certificate, key_file, authority) if certificate and key_file else None
    limits = server.DoorBounds(int(settings.request_bytes_max), bounds.under_way_mib << 20, bounds.drain_seconds)

    async def run() -> None:
        await make(server, gate, *map(_place, places), limits, tls).run()

    with stack:
        asyncio.run(run())


@app.command(epilog="Example: `kvcustody door envoy --listen 0.0.0.0:8443 --router 127.0.0.1:30000 > envoy.yaml`")
def envoy(
    router: Annotated[
        str,
        typer.Option(help="Where the router listens; of each group with --placement.", metavar="HOST:PORT"),
    ] = "",
    placement: _Placement = None,
    listen: Annotated[
        str, typer.Option(help="Where Envoy takes clients' requests.", metavar="HOST:PORT")
    ] = "127.0.0.1:18130",
    ext_proc: _Door = _DOOR,
    tls_certificate: Annotated[str, typer.Option(help="PEM that clients see; without it, no TLS.")] = "",
    tls_key: Annotated[str, typer.Option(help="PEM, of the certificate.")] = "",
    door_ca: Annotated[
        str, typer.Option(help="PEM: the authority of the door's certificate, where the door has one.")
    ] = "",
    *,
    as_json: _Json = False,
) -> None:
    """Print Envoy's configuration: its bounds agree with the door's, and nothing passes where the door is away."""
    if bool(tls_certificate) != bool(tls_key):
        raise ConfigError("--tls-certificate and --tls-key: give both, or neither")
    tls = EnvoyTls(tls_certificate, tls_key, door_ca) if tls_certificate else None
    bound = int(load_settings().request_bytes_max)
    routers = {group: _place(given) for group, given in _routers(router, placement).items()}
    behind = routers if placement else routers[""]
    text = envoy_configuration(_place(listen), _place(ext_proc), behind, body_bytes_max=bound, tls=tls)
    if as_json:
        _print_json({"configuration": text})
    else:
        typer.echo(text, nl=False)


def _routers(router: str, placement: Path | None) -> dict[str, str]:
    """Return each group's router address; without groups, the address of the single unnamed router."""
    if bool(router) == (placement is not None):
        raise ConfigError("--router or --placement: give one of the two")
    if placement is None:
        return {"": router}
    return {name: group.router for name, group in read_placement(placement).groups.items()}


def _place(text: str) -> ListenPlace:
    try:
        return ListenPlace.parse(text)
    except ValueError as problem:
        raise ConfigError(str(problem)) from None


def _scopes(path: Path | None, clock: SystemClock, *, is_told: bool) -> Callable[[], NameScopes] | None:
    """Return a function for the policy scopes at each moment. `is_told`: a control plane provides them."""
    if path is None:
        return None
    if is_told:
        raise ConfigError("--policy: the control plane says which policies are in effect; leave it out")

    watched = WatchedFile(path, lambda file: NameScopes.of_policies([_policy(file)]), clock)

    last = NameScopes()

    def scopes() -> NameScopes:
        nonlocal last
        try:
            last = watched.content()
        except IdentityError:  # unreadable: where requests may go stays as it was last said
            last = last.without_names()
        return last

    return scopes


def _policy(path: Path) -> Policy:
    try:
        return load_policy(path.read_bytes(), name=str(path))
    except OSError as problem:
        raise ConfigError(f"--policy `{path}` cannot be read ({problem.strerror})", path=path) from None


def _range(text: str) -> tuple[int, int]:
    least, _, most = text.partition(":")
    try:
        bounds = int(least), int(most)
    except ValueError:
        bounds = (1, 0)
    if bounds[0] > bounds[1]:
        raise ConfigError(f"--hint-priority `{text}` is not MIN:MAX, as -10:0")
    return bounds


def _print_json(document: dict[str, Any]) -> None:
    sys.stdout.write(orjson.dumps(document, option=orjson.OPT_INDENT_2).decode() + "\n")
