"""Objects in a store that speaks S3: bytes through `obstore`, ends through `boto3`, which can name versions.

    client = S3Client(S3Place(bucket="kv", prefix="fleet-1", region="eu-central-1", endpoint=None), key, seconds=2.0)

1. A put is conditional (`If-None-Match: *`): the first writer of a name wins.
2. A delete lists every version and delete marker of a name and ends each by its id. A name without either is absent.
3. What the bucket's object lock refuses is `locked` until the latest date that its versions say; what is refused
   without a date (a legal hold, a missing right) failed.
4. Nothing is retried here, and each request has a deadline of its own.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from functools import partial
from typing import Any, NamedTuple, TypeVar

from kvcustody.errors import ConfigError, StoreError
from kvcustody.governance.tiers.stores.store_protocol import NAME_BYTES, Deleted, Listed, Locked

_KEYS_A_DELETE = 1000
_LOOPBACK = ("http://127.0.0.1", "http://localhost", "http://[::1]")
Answer = TypeVar("Answer")


class S3Place(NamedTuple):
    """A bucket, and the prefix under which this tier's objects are. `endpoint` None: AWS itself."""

    bucket: str
    prefix: str
    region: str
    endpoint: str | None = None


class S3Secret(NamedTuple):
    """An access key. Its text never shows the secret."""

    id: str
    secret: str

    def __repr__(self) -> str:
        return f"S3Secret({self.id!r})"


class _Version(NamedTuple):
    """One version, or one delete marker, of an object."""

    key: str
    id: str
    size: int
    is_marker: bool


class S3Client:
    """One bucket's prefix. Raises `ConfigError` where the libraries are missing or the endpoint is in clear."""

    def __init__(
        self, place: S3Place, secret: S3Secret | None, *, seconds: float, in_flight: int = 8
    ) -> None:
        """`secret` None: what the environment of the process says. `seconds`: what one request may take."""
        obstore, boto3 = _libraries()
        clear = place.endpoint is not None and place.endpoint.startswith("http://")
        if clear and not str(place.endpoint).startswith(_LOOPBACK):
            raise ConfigError(f"remote tier: `{place.endpoint}` is in clear; give an https address")
        self.place = f"remote tier `s3://{place.bucket}/{place.prefix}`"
        self._obstore, self._bucket = obstore, place.bucket
        under = f"{place.prefix.strip('/')}/".lstrip("/")
        self._objects, self._notes = f"{under}objects/", f"{under}holders/"
        self._taken: type[Exception] = obstore.exceptions.AlreadyExistsError
        given: dict[str, Any] = {"region": place.region}
        if place.endpoint is not None:
            given |= {"endpoint": place.endpoint}
        if secret is not None:
            given |= {"access_key_id": secret.id, "secret_access_key": secret.secret}
        self._store = obstore.store.S3Store(
            place.bucket,
            client_options={"allow_http": clear, "timeout": f"{seconds}s", "connect_timeout": f"{seconds}s"},
            retry_config={"max_retries": 0},
            **given,
        )
        import botocore.config

        options = botocore.config.Config(
            connect_timeout=seconds,
            read_timeout=seconds,
            retries={"total_max_attempts": 1},
            max_pool_connections=2 * in_flight,
        )
        self._client = boto3.client(
            "s3",
            region_name=place.region,
            endpoint_url=place.endpoint,
            config=options,
            aws_access_key_id=None if secret is None else secret.id,
            aws_secret_access_key=None if secret is None else secret.secret,
        )
        self._listing = ThreadPoolExecutor(in_flight, thread_name_prefix="kvcustody-versions")

    def put(self, name: bytes, data: memoryview, lives_us: int) -> bool:
        """One request. A bucket's lifecycle rule knows no object's own time, so `lives_us` is not told."""
        try:
            self._call(
                partial(
                    self._obstore.put, self._store, self._key(name), data, mode="create", use_multipart=False
                )
            )
        except self._taken:
            return False
        return True

    def get(self, name: bytes, size_max: int) -> memoryview | None:
        """One request; a second where the object is longer than it may be."""

        def read() -> memoryview:
            found = self._obstore.get(self._store, self._key(name))
            if found.meta["size"] > size_max:
                return memoryview(
                    self._obstore.get_range(self._store, self._key(name), start=0, length=size_max)
                )
            return memoryview(found.bytes())

        try:
            return self._call(read)
        except FileNotFoundError:
            return None

    def peek(self, name: bytes, size: int) -> bytes | None:
        """One request."""
        try:
            return self._call(
                lambda: bytes(self._obstore.get_range(self._store, self._key(name), start=0, length=size))
            )
        except FileNotFoundError:
            return None

    def delete(self, names: Sequence[bytes]) -> Deleted:
        """Rules 2 and 3."""
        kept = list(self._listing.map(self._versions, names))
        absent = tuple(name for name, versions in zip(names, kept, strict=True) if not versions)
        refused: dict[str, list[str]] = {}
        every = [version for versions in kept for version in versions]
        for start in range(0, len(every), _KEYS_A_DELETE):
            for key, id_ in self._end(every[start : start + _KEYS_A_DELETE]):
                refused.setdefault(key, []).append(id_)
        objects = size = versions_ended = markers = 0
        failed, locked = [], []
        for name, versions in zip(names, kept, strict=True):
            stays = refused.get(self._key(name), [])
            versions_ended += sum(one.id not in stays and not one.is_marker for one in versions)
            markers += sum(one.id not in stays and one.is_marker for one in versions)
            if stays:
                until_us = self._locked_until_us(name, stays)
                if until_us:
                    locked.append(Locked(name, until_us))
                else:
                    failed.append(name)
            elif versions:
                objects += 1
                size += max((one.size for one in versions), default=0)
        return Deleted(objects, size, absent, tuple(failed), versions_ended, markers, tuple(locked))

    def page(self, after: bytes, limit: int) -> list[Listed]:
        """One request of at most a thousand names. Names that only have markers or old versions are listed too."""
        found: dict[bytes, int] = {}
        ask: dict[str, Any] = {"KeyMarker": self._objects + after.hex()} if after else {}
        while True:
            said = self._call(
                partial(
                    self._client.list_object_versions,
                    Bucket=self._bucket,
                    Prefix=self._objects,
                    MaxKeys=min(1000, limit),
                    **ask,
                )
            )
            for one in self._of_listing(said):
                name = self._name(one.key)
                if name is not None and name > after:
                    found[name] = max(found.get(name, 0), one.size)
            if len(found) >= limit or not said["IsTruncated"]:
                break
            ask = {"KeyMarker": said["NextKeyMarker"]}
            if "NextVersionIdMarker" in said:
                ask["VersionIdMarker"] = said["NextVersionIdMarker"]
        return [Listed(name, found[name]) for name in sorted(found)[:limit]]

    def read_note(self, name: str) -> bytes:
        """One request."""
        try:
            return self._call(
                lambda: bytes(self._obstore.get_range(self._store, self._notes + name, start=0, length=4096))
            )
        except FileNotFoundError:
            return b""

    def write_note(self, name: str, data: bytes) -> None:
        """One request."""
        self._call(partial(self._obstore.put, self._store, self._notes + name, data, use_multipart=False))

    def close(self) -> None:
        """Threads and connections."""
        self._listing.shutdown(wait=False, cancel_futures=True)
        self._client.close()

    def _key(self, name: bytes) -> str:
        return self._objects + name.hex()

    def _name(self, key: str) -> bytes | None:
        text = key[len(self._objects) :]
        if len(text) != 2 * NAME_BYTES:
            return None
        try:
            return bytes.fromhex(text)
        except ValueError:
            return None

    def _versions(self, name: bytes) -> list[_Version]:
        """Every version and marker of one name."""
        key = self._key(name)
        found: list[_Version] = []
        ask: dict[str, Any] = {}
        while True:
            said = self._call(
                partial(self._client.list_object_versions, Bucket=self._bucket, Prefix=key, **ask)
            )
            found += [one for one in self._of_listing(said) if one.key == key]
            if not said["IsTruncated"]:
                return found
            ask = {"KeyMarker": said["NextKeyMarker"]}
            if "NextVersionIdMarker" in said:
                ask["VersionIdMarker"] = said["NextVersionIdMarker"]

    @staticmethod
    def _of_listing(said: Mapping[str, Any]) -> list[_Version]:
        versions = [
            _Version(one["Key"], one["VersionId"], one["Size"], False) for one in said.get("Versions", [])
        ]
        markers = [_Version(one["Key"], one["VersionId"], 0, True) for one in said.get("DeleteMarkers", [])]
        return versions + markers

    def _end(self, versions: Sequence[_Version]) -> list[tuple[str, str]]:
        """End these; keys and ids of those that stay."""
        named = [{"Key": one.key, "VersionId": one.id} for one in versions]
        said = self._call(
            partial(
                self._client.delete_objects, Bucket=self._bucket, Delete={"Objects": named, "Quiet": True}
            )
        )
        return [(one["Key"], one.get("VersionId", "null")) for one in said.get("Errors", [])]

    def _locked_until_us(self, name: bytes, ids: Sequence[str]) -> int:
        """The latest date to which these versions are locked (UTC); 0 where the store names none."""
        latest = 0
        for id_ in ids:
            try:
                said = self._call(
                    partial(self._client.head_object, Bucket=self._bucket, Key=self._key(name), VersionId=id_)
                )
            except (StoreError, FileNotFoundError):
                return 0
            until = said.get("ObjectLockRetainUntilDate")
            if until is None:
                return 0
            latest = max(latest, int(until.timestamp() * 1_000_000))
        return latest

    def _call(self, request: Callable[[], Answer]) -> Answer:
        """What it answers; a name that is absent or taken as the library's error, all else as `StoreError`."""
        try:
            return request()
        except (FileNotFoundError, self._taken):
            raise
        except Exception as error:  # of two libraries and their transports
            raise StoreError(f"{self.place}: {_why(error)}") from error


def _why(error: Exception) -> str:
    """The error's kind and the store's code: texts of these libraries may show addresses with signatures."""
    said = getattr(error, "response", None)
    code = said.get("Error", {}).get("Code") if isinstance(said, dict) else None
    return f"request failed ({type(error).__name__}{f', {code}' if code else ''})"


def _libraries() -> tuple[Any, Any]:
    try:
        import boto3
        import obstore
        import obstore.store
    except ImportError as error:
        raise ConfigError(
            f"remote tier: `{error.name}` is not installed (pip install 'kvcustody[s3]')"
        ) from None
    return obstore, boto3
