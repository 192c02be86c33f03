"""Objects in Mooncake Store: memory of many machines behind one master.

    place = MooncakePlace("master.example:50051", "http://master.example:9003", "fleet-1")
    client = MooncakeClient(place, buffer_bytes=1 << 30, seconds=2.0)

1. Mooncake says 0 to a put whose name is taken, and keeps what was there. So what lies there then is compared with
   what was put: its beginning has a nonce that is never drawn twice.
2. `remove` is forced: leases of readers would hold an erasure up, and a reader whose bytes are replaced opens nothing.
3. A removed object's bytes stay in its segment until another's are written there. A delete proves nothing: only the end
   of a key ends a copy.
4. Names are listed by the master's HTTP address, sizes by its clients'. There is no TLS and no authentication: whoever
   reaches the master reads, removes and lists. A tenant of Mooncake's is a quota, not a wall.
5. This process gives the store no memory of its own.
"""

from __future__ import annotations

import ctypes
import socket
import threading
from bisect import bisect_right
from collections.abc import Callable, Sequence
from typing import Any, NamedTuple

from kvcustody.errors import ConfigError, StoreError
from kvcustody.governance.tiers.stores.store_protocol import NAME_BYTES, Deleted, Listed
from kvcustody.http_exchange import exchange, host_and_port, is_loopback

_ABSENT = -704  # OBJECT_NOT_FOUND of its error codes
_PEEK_BYTES, _COMPARED_BYTES = 4096, 128  # of an object's beginning: at most, and with its nonce
_LISTING_BYTES_MAX = 256 << 20


class MooncakePlace(NamedTuple):
    """A master (HOST:PORT), its HTTP address, and the prefix of this tier's names."""

    master: str
    http: str
    prefix: str = "kvcustody"


class MooncakeClient:
    """One prefix of one store. Raises `ConfigError` where the library is missing or the master does not answer."""

    ends_by, deletes_max = "key-destroyed", 256

    def __init__(self, place: MooncakePlace, *, buffer_bytes: int, seconds: float) -> None:
        """`buffer_bytes`: of the library's own buffers, for all that is on its way. `seconds`: for a listing."""
        try:
            from mooncake.store import MooncakeDistributedStore
        except ImportError as error:
            raise ConfigError(
                f"remote tier: `mooncake` does not load ({error}); pip install 'kvcustody[mooncake]', and see "
                "docs/how-to/storage/remote-store.md for the system's libraries"
            ) from None
        self.place = f"remote tier `mooncake://{place.master}/{place.prefix}`"
        self._http, self._seconds = place.http.rstrip("/"), seconds
        self._objects, self._notes = f"{place.prefix}/objects/", f"{place.prefix}/holders/"
        try:  # the library itself would try for a minute and a half
            host, port = host_and_port(place.master)
            socket.create_connection((host, port), seconds).close()
        except (OSError, ValueError):
            raise ConfigError(f"{self.place}: the master does not answer") from None
        self._store: Any = MooncakeDistributedStore()
        code = self._store.setup(
            local_hostname="127.0.0.1" if is_loopback(host) else socket.gethostname(),
            metadata_server="P2PHANDSHAKE",
            global_segment_size=0,
            local_buffer_size=buffer_bytes,
            protocol="tcp",
            rdma_devices="",
            master_server_addr=place.master,
        )
        if code:
            raise ConfigError(f"{self.place}: the master does not answer (error {code})")
        self._lock = threading.Lock()  # of the buffer that beginnings are read into
        self._begins = bytearray(_PEEK_BYTES)
        self._address = ctypes.addressof(ctypes.c_char.from_buffer(self._begins))
        self._checked(self._store.register_buffer(self._address, _PEEK_BYTES), "a buffer is not registered")
        self._names: list[bytes] = []  # as the last listing found them

    def put(self, name: bytes, data: memoryview, lives_us: int) -> bool:
        """Put as rule 1 says. Mooncake has no expiry of its own, so `lives_us` is not passed on."""
        key, begins = self._key(name), min(len(data), _COMPARED_BYTES)
        self._checked(self._store.put(key, data), "a put failed")
        return self._beginning(key, begins) == bytes(data[:begins])

    def get(self, name: bytes, size_max: int, room: Callable[[int], memoryview]) -> memoryview | None:
        """Return the object in the library's own buffer, which lives as long as the view."""
        key = self._key(name)
        held = self._store.get_buffer(key)
        if held is not None:
            return memoryview(held).cast("B")[:size_max]
        if self._size(key) is None:
            return None
        raise StoreError(f"{self.place}: an object cannot be read")

    def peek(self, name: bytes, size: int) -> bytes | None:
        """A range of it."""
        key = self._key(name)
        length = self._size(key)
        if length is None:
            return None
        return self._beginning(key, min(size, length, _PEEK_BYTES))

    def _beginning(self, key: str, size: int) -> bytes | None:
        """Of an object that has so many bytes."""
        with self._lock:
            [[[read]]] = self._store.get_into_ranges([self._address], [[key]], [[[0]]], [[[0]]], [[[size]]])
            if read == size:
                return bytes(self._begins[:size])
        if read == _ABSENT:
            return None
        raise StoreError(f"{self.place}: an object's beginning cannot be read (error {read})")

    def delete(self, names: Sequence[bytes]) -> Deleted:
        """Delete as rules 2 and 3 say."""
        objects = size = 0
        absent, failed = [], []
        for name in names:
            key = self._key(name)
            length = self._size(key)
            code = _ABSENT if length is None else self._store.remove(key, True)
            if code == 0 and length is not None:
                objects, size = objects + 1, size + length
            elif code == _ABSENT:
                absent.append(name)
            else:
                failed.append(name)
        return Deleted(objects, size, tuple(absent), tuple(failed))

    def page(self, after: bytes, limit: int) -> list[Listed]:
        """Return a page of the list that the master gave when the listing began."""
        if not after:
            self._names = self._list()
        entries: list[Listed] = []
        at = bisect_right(self._names, after)
        while len(entries) < limit and at < len(self._names):
            length = self._size(self._key(self._names[at]))
            if length is not None:
                entries.append(Listed(self._names[at], length))
            at += 1
        return entries

    def read_note(self, name: str) -> bytes:
        """One small object."""
        found: bytes = self._store.get(self._notes + name)
        return found

    def write_note(self, name: str, data: bytes) -> None:
        """It takes the place of the one before."""
        key = self._notes + name
        self._store.remove(key, True)
        self._checked(self._store.put(key, data), "a note is not written")

    def write_first_note(self, name: str, data: bytes) -> bool:
        """Put it as an object: an existing one stays, and its content decides (rule 1)."""
        key = self._notes + name
        if self._size(key) is not None:
            return False
        self._checked(self._store.put(key, data), "a note is not written")
        return self.read_note(name) == data

    def close(self) -> None:
        """Leave the store."""
        self._store.unregister_buffer(self._address)
        self._store.close()

    def _list(self) -> list[bytes]:
        try:
            answer = exchange(
                "GET",
                f"{self._http}/get_all_keys",
                deadline_seconds=self._seconds,
                bytes_max=_LISTING_BYTES_MAX,
            )
        except (OSError, ValueError) as error:
            raise StoreError(f"{self.place}: names cannot be listed ({error})") from None
        if answer.status != 200:
            raise StoreError(f"{self.place}: names cannot be listed (answered {answer.status})")
        begin, at = self._objects.encode(), len(self._objects)
        keys = [key for key in answer.body.split() if key.startswith(begin) and len(key) == at + 2 * NAME_BYTES]
        try:
            return sorted({bytes.fromhex(key[at:].decode()) for key in keys})
        except ValueError:
            raise StoreError(f"{self.place}: lists names that are none") from None

    def _size(self, key: str) -> int | None:
        """Its bytes; None where it is not there."""
        length: int = self._store.get_size(key)
        if length == _ABSENT:
            return None
        return self._checked(length, "an object cannot be looked up")

    def _checked(self, code: int, what: str) -> int:
        if code < 0:
            raise StoreError(f"{self.place}: {what} (error {code})")
        return code

    def _key(self, name: bytes) -> str:
        return self._objects + name.hex()
