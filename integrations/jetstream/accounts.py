"""The keys and the configuration of a fleet's NATS server, and temporary credentials for its clients.

    keys = FleetKeys.create(Path("nats"))                                # operator and the accounts
    text = server_configuration(keys, ServerPlan())                      # for nats-server
    credentials(keys.fleet, "gpu-1", worker_permissions("gpu-1"), now=…, seconds=86_400)

1. The server knows the operator and the accounts. Who a user is and what it may do is in its own JWT, signed by the
   account's key: tenants come and go without a change of the server.
2. A credential ends by itself. To end all at once, make the keys anew.
3. The fleet's account has memory alone: no stream of it can be on disk.
4. Readers have an account of their own, to which the fleet's exports what `subjects` lists. The server answers a
   question to whatever subject it asks to be answered at, whoever may publish there. So in the fleet's account a reader
   could have its answers arrive as another worker's events, or as hints.
"""

from __future__ import annotations

import base64
import binascii
import hashlib
import secrets
from pathlib import Path
from typing import Any, Final, NamedTuple

import orjson
from cryptography.hazmat.primitives.asymmetric.ed25519 import Ed25519PrivateKey
from cryptography.hazmat.primitives.serialization import Encoding, PublicFormat

from kvcustody.errors import ConfigError
from kvcustody.files import PRIVATE, private_folder, write_file
from kvcustody.integrations.jetstream.subjects import ASKED_SUBJECTS, READ_SUBJECTS, for_readers

_FILES: Final = ("operator.seed", "fleet.seed", "readers.seed", "system.seed")
PAYLOAD_BYTES: Final = 1 << 20
SECONDS_MAX: Final = 31 * 86_400


class FleetKeys(NamedTuple):
    """The keys of the operator, the fleet's account, its readers' account and the server's own."""

    operator: NatsKey
    fleet: NatsKey
    readers: NatsKey
    system: NatsKey

    @classmethod
    def create(cls, folder: Path) -> FleetKeys:
        """Create keys in a private folder.

        Raises:
            ConfigError: the folder has keys.
        """
        private_folder(folder)
        keys = cls(NatsKey.generate(OPERATOR), *(NatsKey.generate(ACCOUNT) for _ in _FILES[1:]))
        for name, key in zip(_FILES, keys, strict=True):
            try:
                write_file(folder / name, f"{key.seed}\n".encode(), mode=PRIVATE, exclusive=True)
            except FileExistsError:
                raise ConfigError(f"`{folder / name}` is there already", path=folder / name) from None
        return keys

    @classmethod
    def read(cls, folder: Path) -> FleetKeys:
        """Read the keys in a folder.

        Raises:
            ConfigError: a key is missing or malformed.
        """
        return cls(*(_read(folder / name) for name in _FILES))


def _read(path: Path) -> NatsKey:
    try:
        text = path.read_text(encoding="ascii").strip()
    except (OSError, UnicodeDecodeError):
        raise ConfigError(f"`{path}` cannot be read; `kvcustody events nats-config` makes it", path=path) from None
    return NatsKey.from_seed(text)


class ServerPlan(NamedTuple):
    """The server's addresses and limits. TLS with `certificate` and `key`, in PEM files."""

    listen: str = "127.0.0.1:4222"
    monitor: str = ""
    memory_bytes: int = 256 << 20
    connections: int = 4096
    certificate: str = ""
    key: str = ""


def server_configuration(keys: FleetKeys, plan: ServerPlan, *, issued: int) -> str:
    """Return the text of a server's configuration file; `issued` is UTC seconds."""
    sys = keys.system.public
    stored = {"mem_storage": plan.memory_bytes, "streams": 1, "consumer": 1024}
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
        f"  {keys.fleet.public}: {_account(keys, keys.fleet, 'FLEET', issued, stored, exports=_shared())}",
        f"  {keys.readers.public}: {_account(keys, keys.readers, 'READERS', issued, imports=_shared(keys.fleet))}",
        "}",
    ]
    return "\n".join(lines) + "\n"


def credentials(account: NatsKey, name: str, permissions: dict[str, Any], *, now: int, seconds: int) -> str:
    """Return an account user's file as NATS clients read it: its JWT and its seed. `now` is UTC seconds."""
    if not 0 < seconds <= SECONDS_MAX:
        raise ConfigError(f"credentials live from 1 to {SECONDS_MAX} seconds", seconds=seconds)
    user = NatsKey.generate(USER)
    nats = {**permissions, "type": "user", "version": 2}
    token = account.claim(user.public, name, nats, issued=now, expires=now + seconds)
    return (
        f"-----BEGIN NATS USER JWT-----\n{token}\n------END NATS USER JWT------\n\n"
        f"-----BEGIN USER NKEY SEED-----\n{user.seed}\n------END USER NKEY SEED------\n"
    )


class Credentials(NamedTuple):
    """A client's credentials, as in its file."""

    token: str
    key: NatsKey
    name: str


def read_credentials(path: Path) -> Credentials:
    """Read credentials.

    Raises:
        ConfigError: the file is missing or holds none.
    """
    try:
        lines = [line.strip() for line in path.read_text(encoding="ascii").splitlines()]
        token, seed = (lines[lines.index(head) + 1] for head in _HEADS)
        body = token.split(".")[1]
        claims = orjson.loads(base64.urlsafe_b64decode(body + "=" * (-len(body) % 4)))
        return Credentials(token, NatsKey.from_seed(seed), str(claims["name"]))
    except (OSError, ValueError, IndexError, KeyError, TypeError, UnicodeDecodeError):
        raise ConfigError(f"`{path}` holds no NATS credentials", path=path) from None


_HEADS = ("-----BEGIN NATS USER JWT-----", "-----BEGIN USER NKEY SEED-----")


def _account(
    keys: FleetKeys,
    account: NatsKey,
    name: str,
    issued: int,
    limits: dict[str, int] | None = None,
    **shares: Any,
) -> str:
    """Return an account's claim. `limits` are beyond those without JetStream; `shares`: its exports and imports."""
    without = dict.fromkeys(("subs", "data", "payload", "imports", "exports", "conn", "leaf"), -1)
    without |= {"wildcards": True, "mem_storage": 0, "disk_storage": 0}
    nats = {"type": "account", "version": 2, "limits": {**without, **(limits or {})}, **shares}
    return keys.operator.claim(account.public, name, nats, issued=issued)


def _shared(importing: NatsKey | None = None) -> list[dict[str, Any]]:
    """Return what the fleet's account exports to readers, or what they import from it."""
    shared = [
        {"name": f"s{number}", "subject": export, "type": "stream"} for number, export in enumerate(READ_SUBJECTS)
    ]
    for number, (subject, has_many_answers) in enumerate(ASKED_SUBJECTS.items()):
        export = {"name": f"q{number}", "subject": subject, "type": "service"}
        if importing is None:
            export["response_type"] = "Stream" if has_many_answers else "Singleton"
        shared.append(export)
    if importing is None:
        return shared
    return [
        {**export, "account": importing.public, "local_subject": for_readers(export["subject"])} for export in shared
    ]


def _quoted(text: str) -> str:
    return '"' + text.replace("\\", "\\\\").replace('"', '\\"') + '"'


# NATS's keys and signed claims: nkeys in their text form, and JWTs for servers and clients.
#
# Rules of this section:
# 1. A key's text is base32 of a prefix for its kind, 32 bytes, and a CRC-16; a seed's text begins with `S`.
# 2. The issuing key signs a claim (`ed25519-nkey`). The server checks claims; nothing here reads one.

OPERATOR, ACCOUNT, USER = "O", "A", "U"
_PREFIX: Final = {OPERATOR: 14 << 3, ACCOUNT: 0, USER: 20 << 3}
_SEED: Final = 18 << 3
_RAW_BYTES: Final = 32


class NatsKey(NamedTuple):
    """A private key of one kind. `public` is its name in claims."""

    kind: str
    raw: bytes

    def __repr__(self) -> str:
        return f"NatsKey({self.public})"

    @classmethod
    def generate(cls, kind: str) -> NatsKey:
        """Return a fresh key."""
        return cls(kind, secrets.token_bytes(_RAW_BYTES))

    @classmethod
    def from_seed(cls, text: str) -> NatsKey:
        """Return the key for a seed's text.

        Raises:
            ConfigError: the text is no seed.
        """
        try:
            data = base64.b32decode(text + "=" * (-len(text) % 8))
        except (binascii.Error, ValueError):
            data = b""
        if len(data) == _RAW_BYTES + 4 and _crc(data[:-2]) == data[-2:]:
            kind = (data[0] & 7) << 5 | data[1] >> 3
            for name, prefix in _PREFIX.items():
                if data[0] & 0xF8 == _SEED and kind == prefix:
                    return cls(name, data[2:-2])
        raise ConfigError("this is no seed of a NATS key")

    @property
    def seed(self) -> str:
        """The seed's text."""
        prefix = _PREFIX[self.kind]
        return _text(bytes((_SEED | prefix >> 5, (prefix & 31) << 3)) + self.raw)

    @property
    def public(self) -> str:
        """The public key's text."""
        public = self._key().public_key().public_bytes(Encoding.Raw, PublicFormat.Raw)
        return _text(bytes((_PREFIX[self.kind],)) + public)

    def sign(self, data: bytes) -> bytes:
        """Return the signature, 64 bytes."""
        return self._key().sign(data)

    def claim(self, subject: str, name: str, nats: dict[str, Any], *, issued: int, expires: int | None = None) -> str:
        """Return a JWT by this key about the public key `subject`; times are UTC seconds."""
        claims: dict[str, Any] = {
            "iat": issued,
            "iss": self.public,
            "name": name,
            "sub": subject,
            "nats": nats,
        }
        if expires is not None:
            claims["exp"] = expires
        digest = hashlib.sha256(orjson.dumps(claims, option=orjson.OPT_SORT_KEYS)).digest()
        claims["jti"] = base64.b32encode(digest).decode().rstrip("=")
        head = _url(orjson.dumps({"typ": "JWT", "alg": "ed25519-nkey"}))
        body = f"{head}.{_url(orjson.dumps(claims))}"
        return f"{body}.{_url(self.sign(body.encode()))}"

    def _key(self) -> Ed25519PrivateKey:
        return Ed25519PrivateKey.from_private_bytes(self.raw)


def _text(data: bytes) -> str:
    return base64.b32encode(data + _crc(data)).decode().rstrip("=")


def _url(data: bytes) -> str:
    return base64.urlsafe_b64encode(data).decode().rstrip("=")


def _crc(data: bytes) -> bytes:
    """Return CRC-16/XMODEM, little-endian."""
    return binascii.crc_hqx(data, 0).to_bytes(2, "little")
