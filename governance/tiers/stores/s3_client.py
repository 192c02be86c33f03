"""Objects in an S3 store: bytes through `obstore`, deletions through requests that name versions.

    client = S3Client(S3Place(bucket="kv", prefix="fleet-1", endpoint=None), key, seconds=2.0)

1. A put is conditional (`If-None-Match: *`): the first writer of a name wins.
2. A delete lists every version and delete marker of a name and ends each by its id. A name without either is absent.
3. What the bucket's object lock refuses is `locked` until the latest date that its versions say; what is refused
   without a date (a legal hold, a missing right) failed.
4. Nothing is retried here, and each request has a deadline of its own. A listing that does not end is none: it has
   `_PAGES_MAX` pages at most, and `_LISTING_TIMES` as long as one request may take.
"""

from __future__ import annotations

import re
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from datetime import datetime
from functools import partial
from html import escape, unescape
from typing import Any, NamedTuple, TypeVar

from kvcustody.errors import ConfigError, StoreError
from kvcustody.governance.tiers.stores.s3_requests import S3Key, S3Requests
from kvcustody.governance.tiers.stores.store_protocol import NAME_BYTES, Deleted, Listed, Locked

_KEYS_A_DELETE = 1000
_PAGES_MAX, _LISTING_TIMES = 64, 20
_OK = (200, 204)
_VERSION = re.compile(r"<(Version|DeleteMarker)>(.*?)</\1>", re.DOTALL)
_ERROR = re.compile(r"<Error>(.*?)</Error>", re.DOTALL)
_CODE = re.compile(rb"<Code>([A-Za-z0-9]{1,64})</Code>")
Answer = TypeVar("Answer")


class S3Place(NamedTuple):
    """A bucket, and the prefix of this tier's objects. `endpoint` None: AWS in the key's region."""

    bucket: str
    prefix: str
    endpoint: str | None = None


class _Version(NamedTuple):
    """One version, or one delete marker, of an object."""

    key: str
    id: str
    size: int
    is_marker: bool


class S3Client:
    """One bucket's prefix. Raises `ConfigError` where the libraries are missing or the endpoint is in clear."""

    ends_by, deletes_max = "deleted", 64  # each is a listing of its own

    def __init__(self, place: S3Place, key: S3Key, *, seconds: float, in_flight: int = 8) -> None:
        """`seconds`: what one request may take."""
        obstore = _library()
        endpoint = place.endpoint or f"https://s3.{key.region}.amazonaws.com"
        try:
            self._requests = S3Requests(endpoint, place.bucket, key, seconds=seconds, connections=2 * in_flight)
        except ValueError as error:
            raise ConfigError(f"remote tier: {error}") from None
        self.place = f"remote tier `s3://{place.bucket}/{place.prefix}`"
        self._listing_seconds = _LISTING_TIMES * seconds
        under = f"{place.prefix.strip('/')}/".lstrip("/")
        self._objects, self._notes = f"{under}objects/", f"{under}holders/"
        self._obstore = obstore
        self._taken: type[Exception] = obstore.exceptions.AlreadyExistsError
        self._store = obstore.store.S3Store(
            place.bucket,
            endpoint=endpoint,
            region=key.region,
            access_key_id=key.id,
            secret_access_key=key.secret.decode(),
            virtual_hosted_style_request=False,
            client_options={
                "allow_http": endpoint.startswith("http://"),
                "timeout": f"{seconds}s",
                "connect_timeout": f"{seconds}s",
            },
            retry_config={"max_retries": 0},
        )
        self._listing = ThreadPoolExecutor(in_flight, thread_name_prefix="kvcustody-versions")

    def put(self, name: bytes, data: memoryview, lives_us: int) -> bool:
        """Put in one request. A bucket's lifecycle rule knows no object's own time, so `lives_us` is not passed on."""
        return self._put_first(self._key(name), data)

    def _put_first(self, key: str, data: memoryview | bytes) -> bool:
        """Rule 1."""
        try:
            self._call(partial(self._obstore.put, self._store, key, data, mode="create", use_multipart=False))
        except self._taken:
            return False
        return True

    def get(self, name: bytes, size_max: int, room: Callable[[int], memoryview]) -> memoryview | None:
        """Get in one request; a second one where the object is longer than allowed. The library owns the memory."""

        def read() -> memoryview:
            found = self._obstore.get(self._store, self._key(name))
            if found.meta["size"] > size_max:
                return memoryview(self._obstore.get_range(self._store, self._key(name), start=0, length=size_max))
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
        """Delete as rules 2 and 3 say."""
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
        """Return a page of at most a thousand versions. Names with only old versions or markers are listed too."""
        sizes: dict[bytes, int] = {}
        start = {"key-marker": self._objects + after.hex()} if after else {}
        for versions in self._pages(self._objects, start):
            for one in versions:
                name = self._name(one.key)
                if name is not None and name > after:
                    sizes[name] = max(sizes.get(name, 0), one.size)
            if len(sizes) > limit:  # of the last name there may be more versions
                break
        return [Listed(name, sizes[name]) for name in sorted(sizes)[:limit]]

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

    def write_first_note(self, name: str, data: bytes) -> bool:
        """One request."""
        return self._put_first(self._notes + name, data)

    def close(self) -> None:
        """Threads and connections."""
        self._listing.shutdown(wait=False, cancel_futures=True)
        self._requests.close()

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
        return [one for versions in self._pages(key, {}) for one in versions if one.key == key]

    def _pages(self, prefix: str, ask: dict[str, str]) -> Iterator[list[_Version]]:
        """A listing, page by page (rule 4)."""
        by = time.monotonic() + self._listing_seconds
        for _ in range(_PAGES_MAX):
            versions, ask = self._list({"prefix": prefix, **ask})
            yield versions
            if not ask:
                return
            if time.monotonic() > by:
                break
        raise StoreError(f"{self.place}: its listing does not end")

    def _list(self, ask: Mapping[str, str]) -> tuple[list[_Version], dict[str, str]]:
        """A page of versions, and what to ask for the next; nothing where that was all."""
        text = self._asked("GET", "", {"versions": "", **ask}).decode(errors="replace")
        versions = []
        for kind, inside in _VERSION.findall(text):
            size = _field(inside, "Size")
            length = int(size) if size.isdecimal() else 0
            versions.append(
                _Version(_field(inside, "Key"), _field(inside, "VersionId"), length, kind == "DeleteMarker")
            )
        behind = _VERSION.sub("", text)
        if _field(behind, "IsTruncated") != "true":
            return versions, {}
        marks = {"key-marker": "NextKeyMarker", "version-id-marker": "NextVersionIdMarker"}
        following = {name: said for name, tag in marks.items() if (said := _field(behind, tag))}
        if following.items() <= dict(ask).items():
            raise StoreError(f"{self.place}: its listing does not go on")
        return versions, following

    def _end(self, versions: Sequence[_Version]) -> list[tuple[str, str]]:
        """End these; keys and ids of those that stay."""
        named = "".join(
            f"<Object><Key>{escape(one.key)}</Key><VersionId>{escape(one.id)}</VersionId></Object>" for one in versions
        )
        body = f"<Delete><Quiet>true</Quiet>{named}</Delete>".encode()
        text = self._asked("POST", "", {"delete": ""}, body).decode(errors="replace")
        return [(_field(inside, "Key"), _field(inside, "VersionId") or "null") for inside in _ERROR.findall(text)]

    def _locked_until_us(self, name: bytes, ids: Sequence[str]) -> int:
        """The latest date to which these versions are locked (UTC); 0 where the store names none."""
        latest = 0
        for id_ in ids:
            try:
                said = self._asked("GET", self._key(name), {"retention": "", "versionId": id_})
                until = datetime.fromisoformat(_field(said.decode(errors="replace"), "RetainUntilDate"))
                latest = max(latest, int(until.timestamp() * 1_000_000))
            except (StoreError, ValueError, OverflowError):
                return 0
        return latest

    def _asked(self, method: str, name: str, query: Mapping[str, str], body: bytes = b"") -> bytes:
        """What the store says to a signed request. Raises `StoreError` with its code, also where there is no bucket."""
        try:
            answer = self._requests.ask(method, name, query, body)
        except OSError as error:
            raise StoreError(f"{self.place}: {error}") from None
        if answer.status not in _OK:
            code = _CODE.search(answer.body)
            said = f" {code[1].decode()}" if code else ""
            raise StoreError(f"{self.place}: answered {answer.status}{said}")
        return answer.body

    def _call(self, request: Callable[[], Answer]) -> Answer:
        """What it answers; a name that is absent or taken as the library's error, all else as `StoreError`."""
        try:
            return request()
        except (FileNotFoundError, self._taken):
            raise
        except Exception as error:  # of the library and its transport, whose texts may show signatures
            raise StoreError(f"{self.place}: request failed ({type(error).__name__})") from None


def _field(text: str, tag: str) -> str:
    """What stands in the first element of this name; nothing where there is none."""
    found = re.search(f"<{tag}>([^<]*)</{tag}>", text)
    return unescape(found[1]) if found else ""


def _library() -> Any:
    try:
        import obstore
        import obstore.exceptions
        import obstore.store
    except ImportError:
        raise ConfigError("remote tier: `obstore` is not installed (pip install 'kvcustody[s3]')") from None
    return obstore
