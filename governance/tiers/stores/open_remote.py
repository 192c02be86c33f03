"""Opens the remote store of a worker's settings.

    place = RemotePlan(url="s3://kv-objects/fleet-1", capacity_bytes=..., ...)
    store = open_remote(place, worker="gpu-1", object_bytes_max=largest, clock=clock, shard=0)

- `s3://BUCKET/PREFIX`: with `endpoint` a store that speaks S3, without it AWS. The secret file has the key's id and its
  secret on one line; without a file the process's environment says both.
- `mooncake://MASTER:PORT/PREFIX`, with `endpoint` for the master's HTTP address. Mooncake knows no secret.
- `valkeys://[USER@]HOST:PORT/DATABASE/PREFIX`, and `valkey://` for loopback alone. The secret file has the password.

Raises `ConfigError` that names the setting, and never shows a secret.
"""

from __future__ import annotations

import os
import re
import stat
from pathlib import Path
from typing import NamedTuple
from urllib.parse import SplitResult, urlsplit

from kvcustody.clock import Clock
from kvcustody.errors import ConfigError
from kvcustody.governance.tiers.stores.guarded_store import GuardedStore
from kvcustody.governance.tiers.stores.mooncake_client import MooncakeClient, MooncakePlace
from kvcustody.governance.tiers.stores.remote_store import ObjectClient, RemoteStore
from kvcustody.governance.tiers.stores.s3_client import S3Client, S3Place
from kvcustody.governance.tiers.stores.s3_requests import S3Key
from kvcustody.governance.tiers.stores.valkey_client import ValkeyClient, ValkeyPlace

SCHEMES = ("s3", "valkey", "valkeys", "mooncake")
_PREFIX = re.compile(r"[A-Za-z0-9._/-]{0,200}")
_SECRET_BYTES_MAX = 4096
_VALKEY_PORT = 6379
_MOONCAKE_BUFFERS = 4  # of one object each, for each that may be on its way
_AWS = ("AWS_ACCESS_KEY_ID", "AWS_SECRET_ACCESS_KEY")


class RemotePlan(NamedTuple):
    """The remote store to open. `labels`: the place's label values by name, for the policy's `match`.

    `heir_of`: workers whose objects there are taken over where they died.
    """

    url: str
    capacity_bytes: int
    endpoint: str | None = None
    region: str = "us-east-1"
    secret_path: Path | None = None
    timeout_seconds: float = 1.0
    in_flight: int = 8
    labels: tuple[tuple[str, str], ...] = ()
    heir_of: tuple[str, ...] = ()

    @property
    def place(self) -> dict[str, tuple[str, ...]]:
        """Labels by name, each with its values."""
        named: dict[str, tuple[str, ...]] = {}
        for name, value in self.labels:
            named[name] = (*named.get(name, ()), value)
        return named


def open_remote(plan: RemotePlan, *, worker: str, object_bytes_max: int, clock: Clock, shard: int = 0) -> GuardedStore:
    """Open the store with its deadline and breaker. Objects of another shard belong to another store."""
    client = _client(plan, shard, object_bytes_max)
    store = RemoteStore(
        client,
        worker=worker,
        capacity_bytes=plan.capacity_bytes,
        object_bytes_max=object_bytes_max,
        in_flight=plan.in_flight,
        heir_of=plan.heir_of,
        utc_us=clock.utc_us,
    )
    return GuardedStore(store, seconds=plan.timeout_seconds, clock=clock)


def _client(plan: RemotePlan, shard: int, object_bytes_max: int) -> ObjectClient:
    try:
        parts = urlsplit(plan.url)
        port = parts.port
    except ValueError:
        raise _wrong(plan.url, "is no address") from None
    if parts.scheme not in SCHEMES:
        raise _wrong(plan.url, f"has another scheme than {', '.join(SCHEMES)}")
    if parts.password is not None:
        raise ConfigError("setting `remote_tier_url`: has a password in it; use `remote_tier_secret_path`")
    if not parts.hostname or parts.query or parts.fragment or not _PREFIX.fullmatch(parts.path):
        raise _wrong(plan.url, "is not a store's address, or its path has characters other than a-z A-Z 0-9 . _ - /")
    seconds = 2 * plan.timeout_seconds  # whoever waits has given up by then
    if parts.scheme == "s3":
        prefix = f"{parts.path.strip('/')}/shard-{shard}"
        place = S3Place(parts.netloc, prefix, plan.endpoint)
        return S3Client(place, _s3_key(plan), seconds=seconds, in_flight=plan.in_flight)
    if parts.scheme == "mooncake":
        if plan.endpoint is None:
            raise ConfigError("setting `remote_tier_endpoint`: name the HTTP address of Mooncake's master")
        prefix = f"{parts.path.strip('/') or 'kvcustody'}/shard-{shard}"
        buffers = _MOONCAKE_BUFFERS * plan.in_flight * (object_bytes_max + 4096)
        return MooncakeClient(MooncakePlace(parts.netloc, plan.endpoint, prefix), buffer_bytes=buffers, seconds=seconds)
    return ValkeyClient(
        _valkey_place(plan, parts, port or _VALKEY_PORT, shard),
        _secret(plan),
        seconds=seconds,
        in_flight=plan.in_flight,
    )


def _valkey_place(plan: RemotePlan, parts: SplitResult, port: int, shard: int) -> ValkeyPlace:
    database, _, prefix = parts.path.strip("/").partition("/")
    if not database.isdecimal():
        raise _wrong(plan.url, "has no number of a database: write valkeys://HOST:PORT/0/PREFIX")
    assert parts.hostname is not None
    named = f"{prefix or 'kvcustody'}:{shard}"
    return ValkeyPlace(parts.hostname, port, named, int(database), parts.scheme == "valkeys", parts.username)


def _s3_key(plan: RemotePlan) -> S3Key:
    text = _secret(plan)
    words = [os.environ.get(name, "") for name in _AWS] if text is None else text.split()
    if len(words) == 2 and all(words):
        return S3Key(words[0], words[1].encode(), plan.region)
    if text is None:
        raise ConfigError(f"setting `remote_tier_secret_path`: name a file, or set {' and '.join(_AWS)}")
    raise ConfigError("setting `remote_tier_secret_path`: must have a key's id and its secret, on one line")


def _secret(plan: RemotePlan) -> str | None:
    """What the file says, without the end of its line; None where no file is named."""
    path = plan.secret_path
    if path is None:
        return None
    try:
        descriptor = os.open(path, os.O_RDONLY | os.O_NOFOLLOW | os.O_NONBLOCK | os.O_CLOEXEC)
        try:
            status = os.fstat(descriptor)
            if not stat.S_ISREG(status.st_mode) or status.st_mode & 0o077:
                raise ConfigError(
                    f"setting `remote_tier_secret_path`: `{path}` must be a file of its owner alone (0600)"
                )
            return os.read(descriptor, _SECRET_BYTES_MAX).decode().strip()
        finally:
            os.close(descriptor)
    except (OSError, UnicodeDecodeError) as error:
        why = error.strerror if isinstance(error, OSError) else "is no text"
        raise ConfigError(f"setting `remote_tier_secret_path`: `{path}` cannot be read ({why})") from None


def _wrong(url: str, why: str) -> ConfigError:
    return ConfigError(f"setting `remote_tier_url`: `{url}` {why}")
