"""The keys of a fleet's NATS server and what it is configured with; credentials for whoever comes, for a while.

    keys = FleetKeys.create(Path("nats"))                                # operator, account and system account
    text = server_configuration(keys, ServerPlan())                      # for nats-server
    credentials(keys, "gpu-1", worker_permissions("gpu-1"), now=…, seconds=86_400)

1. The server knows the operator and the two accounts. Who a user is and what it may do is in its own JWT, signed by the
   account's key: tenants come and go without a change of the server.
2. A credential ends by itself. To end all at once, make the keys anew.
3. The account has memory alone: no stream of it can be on disk.
"""

from __future__ import annotations

import base64
from pathlib import Path
from typing import Any, Final, NamedTuple

import orjson

from kvcustody.errors import ConfigError
from kvcustody.files import PRIVATE, private_folder, write_file
from kvcustody.integrations.jetstream.nkeys import ACCOUNT, OPERATOR, USER, NatsKey

_OPERATOR_FILE, _FLEET_FILE, _SYSTEM_FILE = "operator.seed", "fleet.seed", "system.seed"
PAYLOAD_BYTES: Final = 1 << 20
SECONDS_MAX: Final = 31 * 86_400


class FleetKeys(NamedTuple):
    """The operator's key, and those of the fleet's account and of the server's own."""

    operator: NatsKey
    fleet: NatsKey
    system: NatsKey

    @classmethod
    def create(cls, folder: Path) -> FleetKeys:
        """Fresh keys in a private folder; raises `ConfigError` where there are some."""
        private_folder(folder)
        made = cls(NatsKey.generate(OPERATOR), NatsKey.generate(ACCOUNT), NatsKey.generate(ACCOUNT))
        for name, key in zip((_OPERATOR_FILE, _FLEET_FILE, _SYSTEM_FILE), made, strict=True):
            try:
                write_file(folder / name, f"{key.seed}\n".encode(), mode=PRIVATE, exclusive=True)
            except FileExistsError:
                raise ConfigError(f"`{folder / name}` is there already", path=folder / name) from None
        return made

    @classmethod
    def read(cls, folder: Path) -> FleetKeys:
        """Those of a folder; raises `ConfigError` where one is missing or malformed."""
        return cls(*(_read(folder / name) for name in (_OPERATOR_FILE, _FLEET_FILE, _SYSTEM_FILE)))


def _read(path: Path) -> NatsKey:
    try:
        text = path.read_text(encoding="ascii").strip()
    except (OSError, UnicodeDecodeError):
        raise ConfigError(
            f"`{path}` cannot be read; `kvcustody events nats-config` makes it", path=path
        ) from None
    return NatsKey.from_seed(text)


class ServerPlan(NamedTuple):
    """Where the server listens and what it holds at most. TLS with `certificate` and `key`, in PEM files."""

    listen: str = "127.0.0.1:4222"
    monitor: str = ""
    memory_bytes: int = 256 << 20
    connections: int = 4096
    certificate: str = ""
    key: str = ""


def server_configuration(keys: FleetKeys, plan: ServerPlan, *, issued: int) -> str:
    """The text of a server's configuration file; `issued` is UTC seconds."""
    sys, fleet = keys.system.public, keys.fleet.public
    operator = keys.operator.claim(
        keys.operator.public,
        "kvcustody",
        {"type": "operator", "version": 2, "system_account": sys},
        issued=issued,
    )
    lines = [
        f"listen: {_quoted(plan.listen)}",
        *([f"http: {_quoted(plan.monitor)}"] if plan.monitor else []),
        f"max_payload: {PAYLOAD_BYTES}",
        f"max_connections: {plan.connections}",
        'write_deadline: "10s"',
        f"jetstream {{ max_memory_store: {plan.memory_bytes}, max_file_store: 0 }}",
        *(
            [
                f"tls {{ cert_file: {_quoted(plan.certificate)}, key_file: {_quoted(plan.key)}",
                "  handshake_first: true }",
            ]
            if plan.certificate
            else []
        ),
        f"operator: {operator}",
        f"system_account: {sys}",
        "resolver: MEMORY",
        "resolver_preload: {",
        f"  {sys}: {_account(keys, keys.system, 'SYS', issued)}",
        f"  {fleet}: {_account(keys, keys.fleet, 'FLEET', issued, plan.memory_bytes)}",
        "}",
    ]
    return "\n".join(lines) + "\n"


def credentials(keys: FleetKeys, name: str, permissions: dict[str, Any], *, now: int, seconds: int) -> str:
    """A user's file as NATS clients read it: its JWT and its seed. `now` is UTC seconds."""
    if not 0 < seconds <= SECONDS_MAX:
        raise ConfigError(f"credentials live from 1 to {SECONDS_MAX} seconds", seconds=seconds)
    user = NatsKey.generate(USER)
    nats = {**permissions, "type": "user", "version": 2}
    token = keys.fleet.claim(user.public, name, nats, issued=now, expires=now + seconds)
    return (
        f"-----BEGIN NATS USER JWT-----\n{token}\n------END NATS USER JWT------\n\n"
        f"-----BEGIN USER NKEY SEED-----\n{user.seed}\n------END USER NKEY SEED------\n"
    )


class Credentials(NamedTuple):
    """What a client shows, as it is in its file."""

    token: str
    key: NatsKey
    name: str


def read_credentials(path: Path) -> Credentials:
    """Raises `ConfigError` for a file that is missing or none of credentials."""
    try:
        lines = [line.strip() for line in path.read_text(encoding="ascii").splitlines()]
        token, seed = (lines[lines.index(head) + 1] for head in _HEADS)
        body = token.split(".")[1]
        claims = orjson.loads(base64.urlsafe_b64decode(body + "=" * (-len(body) % 4)))
        return Credentials(token, NatsKey.from_seed(seed), str(claims["name"]))
    except (OSError, ValueError, IndexError, KeyError, TypeError, UnicodeDecodeError):
        raise ConfigError(f"`{path}` holds no NATS credentials", path=path) from None


_HEADS = ("-----BEGIN NATS USER JWT-----", "-----BEGIN USER NKEY SEED-----")


def _account(keys: FleetKeys, account: NatsKey, name: str, issued: int, memory_bytes: int = 0) -> str:
    limits: dict[str, Any] = dict.fromkeys(
        ("subs", "data", "payload", "imports", "exports", "conn", "leaf"), -1
    )
    limits |= {"wildcards": True, "mem_storage": memory_bytes, "disk_storage": 0}
    if memory_bytes:
        limits |= {"streams": 1, "consumer": 1024}
    nats = {"type": "account", "version": 2, "limits": limits}
    return keys.operator.claim(account.public, name, nats, issued=issued)


def _quoted(text: str) -> str:
    return '"' + text.replace("\\", "\\\\").replace('"', '\\"') + '"'
