"""A file of API keys for an engine's door: whom each key speaks for, found by a salted digest of the key.

1. A key is found by its digest under the file's random salt, and that digest is compared in constant time. What a
   caller sends is never compared with anything directly, and the file does not give a key away.
2. Who may write the file decides who is who: a file that others may write is refused.
3. Changes replace the file in one step, under a lock.
"""

from __future__ import annotations

import datetime
import fcntl
import os
import secrets
import stat
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Annotated, Any, Literal

from pydantic import Field, field_validator, model_validator

from kvcustody.clock import MICROSECONDS, Clock
from kvcustody.errors import ConfigError
from kvcustody.errors import credential_refused as refused
from kvcustody.files import write_file
from kvcustody.governance.credentials.api_key import ENGINE_MARK, digest_of, new_key, same_digest
from kvcustody.governance.credentials.watched_file import WatchedFile
from kvcustody.governance.identity.document_fields import Identifier, RouteName
from kvcustody.policies.document.yaml_document import YamlModel, parse_model, read_model
from kvcustody.policies.document.yaml_nodes import write_values
from kvcustody.tenants import OWN

SCHEMA = "kvcustody/api-keys@1"
ISSUER = "api-keys"
CHARACTERS_MIN, CHARACTERS_MAX = 20, 512

Hex = Annotated[str, Field(pattern=r"^[0-9a-f]{64}$")]


class KeyEntry(YamlModel):
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


class KeyFile(YamlModel):
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


class EngineKeys:
    """The keys of one file, read again when it changes."""

    def __init__(self, path: Path, clock: Clock) -> None:
        self._clock = clock
        self._file = WatchedFile(path, _read_index, clock)

    def find(self, key: str) -> KeyEntry:
        """Whom the key speaks for; `IdentityError` if it is unknown, malformed or past its date."""
        salt, entries = self._file.content()
        if not CHARACTERS_MIN <= len(key) <= CHARACTERS_MAX:
            raise refused("an API key of this length does not exist")
        digest = digest_of(key, salt)
        entry = entries.get(digest)
        if not same_digest(digest, entry.digest if entry else "0" * 64) or entry is None:
            raise refused("unknown API key")
        if entry.until is not None and self._clock.utc_us() >= _utc_us(entry.until):
            raise refused("API key past its date")
        return entry


def add_key(path: Path, entry: dict[str, object], *, key: str | None = None) -> str:
    """Add a key to the file, made if absent, and return it; it is not kept anywhere.

    `entry` holds a `KeyEntry`'s fields but the digest. `key` is an existing key to adopt, of at least 20
    characters. Raises `ConfigError` if the entry is malformed or its name is taken.
    """
    key = key or new_key(ENGINE_MARK)[1]
    if not CHARACTERS_MIN <= len(key) <= CHARACTERS_MAX:
        raise ConfigError(f"api key: must have {CHARACTERS_MIN} to {CHARACTERS_MAX} characters")
    with _changing(path) as file:
        if any(known["name"] == entry["name"] for known in file["keys"]):
            raise ConfigError(f"api key `{entry['name']}`: exists; revoke it first, or choose another name")
        file["keys"].append({**entry, "digest": digest_of(key, bytes.fromhex(file["salt"]))})
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
    return read_model(KeyFile, path)


def _read_index(path: Path) -> tuple[bytes, dict[str, KeyEntry]]:
    file = read_keys(path)
    return bytes.fromhex(file.salt), {entry.digest: entry for entry in file.keys}


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
        _replace(path, write_values(data))
    finally:
        os.close(descriptor)


def _replace(path: Path, content: bytes) -> None:
    """Put `content` under `path` in one step, durable on return, if it is a well-formed key file."""
    parse_model(KeyFile, content, str(path))
    write_file(path, content)


def _utc_us(date: datetime.date) -> int:
    midnight = datetime.datetime.combine(date, datetime.time(), datetime.UTC)
    return int(midnight.timestamp()) * MICROSECONDS
