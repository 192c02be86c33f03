"""Objects in Valkey, or in what speaks its protocol.

    client = ValkeyClient(ValkeyPlace("cache.example", 6379, is_tls=True), "password", seconds=1.0)

1. A put is `SET NX`: the first writer of a name wins. `PX` has the server let go of it at its time, which is a second
   net and proves nothing.
2. A delete is `UNLINK`, whose answer says whether the name was there. The server frees the memory and does not zero
   it; replicas, append-only files and snapshots keep what they have: there a key's end is the only end.
3. `page` goes through the keys once (`SCAN`) when it is asked from the beginning, and answers from that. One node is
   spoken to: no cluster. A listing of more than `_SCANS_MAX` rounds or `_NAMES_MAX` names is none.
"""

from __future__ import annotations

import re
import socket
import ssl
from bisect import bisect_right
from collections.abc import Callable, Sequence
from typing import Any, NamedTuple, TypeVar

from kvcustody.errors import ConfigError, StoreError
from kvcustody.governance.tiers.stores.store_protocol import NAME_BYTES, Deleted, Listed

_KEYS_A_SCAN, _SCANS_MAX, _NAMES_MAX = 1_000, 100_000, 20_000_000
_HEAD_BYTES = 4096  # of an answer: its length, and what of the object comes with it
_LOOPBACK = ("127.0.0.1", "localhost", "::1")
Answer = TypeVar("Answer")


class ValkeyPlace(NamedTuple):
    """A server, its database, and what this tier's keys begin with."""

    host: str
    port: int
    prefix: str = "kvcustody"
    database: int = 0
    is_tls: bool = False
    username: str | None = None


class ValkeyClient:
    """One prefix of one database. Raises `ConfigError` where the library is missing or the address is in clear."""

    ends_by, deletes_max = "deleted", 1000

    def __init__(self, place: ValkeyPlace, password: str | None, *, seconds: float, in_flight: int = 8) -> None:
        """`seconds`: what one request may take."""
        try:
            import valkey
        except ImportError:
            raise ConfigError("remote tier: `valkey` is not installed (pip install 'kvcustody[valkey]')") from None
        if not place.is_tls and place.host not in _LOOPBACK:
            raise ConfigError(f"remote tier: `valkey://{place.host}` is in clear; give `valkeys://`")
        self.place = f"remote tier `valkey://{place.host}:{place.port}/{place.database}`"
        self._prefix = place.prefix.strip(":").encode() + b":"
        self._error: type[Exception] = valkey.exceptions.ValkeyError
        pooled: Any = valkey.BlockingConnectionPool
        pool = pooled(
            max_connections=2 * in_flight,
            timeout=seconds,
            connection_class=valkey.SSLConnection if place.is_tls else valkey.Connection,
            host=place.host,
            port=place.port,
            db=place.database,
            username=place.username,
            password=password,
            socket_timeout=seconds,
            socket_connect_timeout=seconds,
        )
        self._client: Any = valkey.Valkey(connection_pool=pool)
        self._names: list[bytes] = []  # as the last listing found them

    def put(self, name: bytes, data: memoryview, lives_us: int) -> bool:
        """One request, in one piece: the library sends it in three."""
        key, expiry = self._key(name), b"%d" % max(1, lives_us // 1000)
        expires = b"$2\r\nPX\r\n$%d\r\n%b\r\n" % (len(expiry), expiry) if lives_us else b""
        words = 6 if lives_us else 4
        head = b"*%d\r\n$3\r\nSET\r\n$%d\r\n%b\r\n$%d\r\n" % (words, len(key), key, len(data))

        def ask(connection: Any) -> bool:
            _send(connection._sock, (head, data, b"\r\n$2\r\nNX\r\n" + expires))
            return connection.read_response() is not None

        return self._call(lambda: self._over("SET", ask))

    def get(self, name: bytes, size_max: int, room: Callable[[int], memoryview]) -> memoryview | None:
        """One request. Its answer is received into one buffer: the library's parser copies a large one three times."""
        key = self._key(name)

        def ask(connection: Any) -> memoryview:
            connection.send_command("GETRANGE", key, 0, size_max - 1)
            return _bulk(connection._sock, size_max, room)

        found = self._call(lambda: self._over("GETRANGE", ask))
        return found if len(found) else None  # an absent key reads as empty, and no object is

    def _over(self, command: str, ask: Callable[[Any], Answer]) -> Answer:
        """What one connection answers."""
        connection = self._client.connection_pool.get_connection(command)
        is_whole = False
        try:
            answer = ask(connection)
            is_whole = True
            return answer
        finally:
            if not is_whole:  # what is left of an answer would be taken for the next one
                connection.disconnect()
            self._client.connection_pool.release(connection)

    def peek(self, name: bytes, size: int) -> bytes | None:
        """One request."""
        found: bytes = self._call(lambda: self._client.getrange(self._key(name), 0, size - 1))
        return found or None

    def delete(self, names: Sequence[bytes]) -> Deleted:
        """One exchange for all."""

        def end() -> list[int]:
            with self._client.pipeline(transaction=False) as asked:
                for name in names:
                    asked.strlen(self._key(name))
                    asked.unlink(self._key(name))
                return list(asked.execute())

        said = self._call(end)
        lengths, gone = said[::2], said[1::2]
        absent = tuple(name for name, was_there in zip(names, gone, strict=True) if not was_there)
        size = sum(length for length, was_there in zip(lengths, gone, strict=True) if was_there)
        return Deleted(sum(gone), size, absent)

    def page(self, after: bytes, limit: int) -> list[Listed]:
        """Rule 3; what went since the listing began is left out."""
        if not after:
            self._names = self._call(self._scan)
        entries: list[Listed] = []
        begin = bisect_right(self._names, after)
        while len(entries) < limit and begin < len(self._names):
            names = self._names[begin : begin + limit - len(entries)]
            begin += len(names)
            sizes = self._call(lambda: self._sizes(names))  # noqa: B023 - it is called here
            entries += [Listed(name, size) for name, size in zip(names, sizes, strict=True) if size]
        return entries

    def read_note(self, name: str) -> bytes:
        """One request."""
        found: bytes = self._call(lambda: self._client.getrange(self._note(name), 0, 4095))
        return found

    def write_note(self, name: str, data: bytes) -> None:
        """One request."""
        self._call(lambda: self._client.set(self._note(name), data))

    def write_first_note(self, name: str, data: bytes) -> bool:
        """One request."""
        return self._call(lambda: bool(self._client.set(self._note(name), data, nx=True)))

    def close(self) -> None:
        """Connections."""
        self._client.connection_pool.disconnect()

    def _scan(self) -> list[bytes]:
        pattern, at = self._prefix.replace(b"*", b"\\*") + b"o:*", len(self._prefix) + 2
        names: set[bytes] = set()
        cursor = 0
        for _ in range(_SCANS_MAX):
            cursor, keys = self._client.scan(cursor, match=pattern, count=_KEYS_A_SCAN)
            names.update(key[at:] for key in keys if len(key) == at + NAME_BYTES)
            if not cursor:
                return sorted(names)
            if len(names) > _NAMES_MAX:
                break
        raise StoreError(f"{self.place}: its listing does not end")

    def _sizes(self, names: Sequence[bytes]) -> list[int]:
        with self._client.pipeline(transaction=False) as asked:
            for name in names:
                asked.strlen(self._key(name))
            return list(asked.execute())

    def _key(self, name: bytes) -> bytes:
        return self._prefix + b"o:" + name

    def _note(self, name: str) -> bytes:
        return self._prefix + b"holder:" + name.encode()

    def _call(self, request: Callable[[], Answer]) -> Answer:
        try:
            return request()
        except (self._error, OSError) as error:
            raise StoreError(f"{self.place}: request failed ({type(error).__name__})") from None


def _send(connected: socket.socket, parts: Sequence[bytes | memoryview]) -> None:
    """All of these, with one call as far as the socket takes them."""
    sent = 0 if isinstance(connected, ssl.SSLSocket) else connected.sendmsg(parts)
    for part in parts:
        if sent < len(part):
            connected.sendall(part[sent:])
        sent = max(0, sent - len(part))


def _bulk(connected: socket.socket, size_max: int, room: Callable[[int], memoryview]) -> memoryview:
    """One string of an answer, received in place. Raises `OSError` for anything else, and for more than was asked."""
    head = b""
    while b"\r\n" not in head:
        more = connected.recv(_HEAD_BYTES)
        if not more or len(head) > _HEAD_BYTES:
            raise OSError("the answer ends before its length")
        head += more
    length, _, begun = head.partition(b"\r\n")
    if not re.fullmatch(rb"\$[0-9]{1,10}", length):
        raise OSError("the answer is no string")
    if int(length[1:]) > size_max:
        raise OSError("the answer is longer than was asked for")
    size, at = int(length[1:]) + 2, len(begun)
    if at > size:
        raise OSError("the answer is longer than it says")
    view = room(size)[:size]
    view[:at] = begun
    while at < size:
        count = connected.recv_into(view[at:])
        if not count:
            raise OSError("the answer ends before its end")
        at += count
    return view[:-2]
