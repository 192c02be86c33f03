"""API keys: random text that a tenant presents, kept only as keyed digests.

1. A key is found by its digest under the file's random salt, and that digest is compared in constant time. What a
   caller sends is never compared with anything directly, and the file does not give a key away.
2. Who may write the file decides who is who: a file that others may write is refused.
3. Changes replace the file in one step, under a lock.
"""

from __future__ import annotations

import datetime
import fcntl
import hashlib
import hmac
import os
import secrets
import stat
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Annotated, Any, Literal

import yaml
from pydantic import Field, field_validator, model_validator

from kvcustody.clock import MICROSECONDS, Clock
from kvcustody.errors import ConfigError
from kvcustody.errors import credential_refused as refused
from kvcustody.files import write_file
from kvcustody.integrations.identity.authentication import Authenticated
from kvcustody.integrations.identity.watched_file import WatchedFile
from kvcustody.integrations.identity.yaml_models import (
    Identifier,
    IdentityDocumentPart,
    RouteName,
    parse_document,
    read_document,
)
from kvcustody.tenants import OWN

SCHEMA = "kvcustody/api-keys@1"
ISSUER = "api-keys"
KEY_PREFIX = "kvc-"
CHARACTERS_MIN, CHARACTERS_MAX = 20, 512

Hex = Annotated[str, Field(pattern=r"^[0-9a-f]{64}$")]


class KeyEntry(IdentityDocumentPart):
    """One key: its digest and whom it speaks for. `until` is a UTC date, exclusive."""

    name: Identifier
    digest: Hex
    tenant: Identifier
    issuer: Identifier = ISSUER
    subject: Identifier | None = None
    classification: Identifier | None = None
    route: RouteName | None = None
    operator: bool = False
    until: datetime.date | None = None

    @field_validator("issuer")
    @classmethod
    def _not_ours(cls, issuer: str) -> str:
        if issuer == OWN:
            raise ValueError(f"`{OWN}` is the issuer of what is nobody's")
        return issuer


class KeyFile(IdentityDocumentPart):
    """The file of API keys."""

    form: Literal["kvcustody/api-keys@1"] = Field(alias="schema")
    salt: Hex
    keys: tuple[KeyEntry, ...] = ()

    @model_validator(mode="after")
    def _distinct(self) -> KeyFile:
        for field in ("name", "digest"):
            values = [getattr(key, field) for key in self.keys]
            if len(set(values)) != len(values):
                raise ValueError(f"two keys have the same `{field}`")
        return self


class ApiKeys:
    """The authenticator over one file of API keys."""

    def __init__(
        self,
        path: Path,
        clock: Clock,
        *,
        subject_header: str | None = None,
        session_header: str | None = None,
    ) -> None:
        self._clock = clock
        self._headers = (subject_header, session_header)
        self._file = WatchedFile(path, _read_index, clock)

    def accepts(self, credential: str) -> bool:
        """Every credential is taken for a key: ask this authenticator last."""
        return True

    def authenticate(self, credential: str) -> Authenticated:
        """Whom the key speaks for; `IdentityError` if it is unknown, malformed or past its date."""
        salt, entries = self._file.content()
        if not CHARACTERS_MIN <= len(credential) <= CHARACTERS_MAX:
            raise refused("an API key of this length does not exist")
        digest = key_digest(salt, credential)
        entry = entries.get(digest)
        if not hmac.compare_digest(digest, entry.digest if entry else "0" * 64) or entry is None:
            raise refused("unknown API key")
        if entry.until is not None and self._clock.utc_us() >= _utc_us(entry.until):
            raise refused("API key past its date")
        return Authenticated(
            entry.issuer,
            entry.tenant,
            entry.subject,
            None,
            entry.classification,
            entry.route,
            *self._headers,
            entry.operator,
        )


def key_digest(salt: str, key: str) -> str:
    """The stored form of a key: BLAKE2b-256 under the file's salt, in hexadecimal."""
    data = key.encode("utf-8", "surrogatepass")
    return hashlib.blake2b(data, digest_size=32, key=bytes.fromhex(salt), person=b"kvc-api-key").hexdigest()


def add_key(path: Path, entry: dict[str, object], *, key: str | None = None) -> str:
    """Add a key to the file, made if absent, and return it; it is not kept anywhere.

    `entry` holds a `KeyEntry`'s fields but the digest. `key` is an existing key to adopt, of at least 20
    characters. Raises `ConfigError` if the entry is malformed or its name is taken.
    """
    key = key or KEY_PREFIX + secrets.token_urlsafe(32)
    if not CHARACTERS_MIN <= len(key) <= CHARACTERS_MAX:
        raise ConfigError(f"api key: must have {CHARACTERS_MIN} to {CHARACTERS_MAX} characters")
    with _changing(path) as file:
        if any(known["name"] == entry["name"] for known in file["keys"]):
            raise ConfigError(f"api key `{entry['name']}`: exists; revoke it first, or choose another name")
        file["keys"].append({**entry, "digest": key_digest(file["salt"], key)})
    return key


def revoke_key(path: Path, name: str) -> None:
    """Remove the key called `name`; servers refuse it within a second of their next request."""
    with _changing(path) as file:
        left = [known for known in file["keys"] if known["name"] != name]
        if len(left) == len(file["keys"]):
            raise ConfigError(f"api key `{name}`: is not in `{path}`", name=name, path=path)
        file["keys"] = left


def read_keys(path: Path) -> KeyFile:
    """The checked file of API keys."""
    try:
        mode = path.stat().st_mode
    except OSError as error:
        raise ConfigError(f"{path}: cannot be read ({error.strerror}); check its path and mode") from None
    if not stat.S_ISREG(mode) or mode & 0o022:
        raise ConfigError(f"{path}: must be a regular file that only its owner can write; chmod 600 it")
    return read_document(KeyFile, path)


def _read_index(path: Path) -> tuple[str, dict[str, KeyEntry]]:
    file = read_keys(path)
    return file.salt, {entry.digest: entry for entry in file.keys}


@contextmanager
def _changing(path: Path) -> Iterator[dict[str, Any]]:
    """The file's content as plain values, written back, if it is then well-formed, when the block ends."""
    descriptor = os.open(path.with_name(f".{path.name}.lock"), os.O_CREAT | os.O_RDWR | os.O_CLOEXEC, 0o600)
    try:
        fcntl.flock(descriptor, fcntl.LOCK_EX)
        if path.exists():
            data = read_keys(path).model_dump(mode="json", by_alias=True, exclude_defaults=True)
            data["keys"] = list(data.get("keys", ()))
        else:
            data = {"schema": SCHEMA, "salt": secrets.token_hex(32), "keys": []}
        yield data
        _replace(path, yaml.dump(data, Dumper=_Quoting, sort_keys=False).encode())
    finally:
        os.close(descriptor)


def _replace(path: Path, content: bytes) -> None:
    """Put `content` under `path` in one step, durable on return, if it is a well-formed key file."""
    parse_document(KeyFile, content, str(path))
    write_file(path, content)


class _Quoting(yaml.SafeDumper):
    """Quotes every text: hexadecimal digits can look like a number."""


_Quoting.add_representer(
    str, lambda dumper, text: dumper.represent_scalar("tag:yaml.org,2002:str", text, style="'")
)


def _utc_us(date: datetime.date) -> int:
    midnight = datetime.datetime.combine(date, datetime.time(), datetime.UTC)
    return int(midnight.timestamp()) * MICROSECONDS
