"""A store whose listing never ends, or whose answers nobody expects: its worker gives up in bounds and goes on."""

from __future__ import annotations

import socket
import threading
from collections.abc import Iterator
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path
from urllib.parse import parse_qs, urlsplit

import pytest

from kvcustody.errors import StoreError
from kvcustody.governance.tiers.copies import index as index_module
from kvcustody.governance.tiers.stores import remote_store, s3_client, valkey_client
from kvcustody.governance.tiers.stores.guarded_store import GuardedStore
from kvcustody.governance.tiers.stores.remote_store import RemoteStore, owner_of
from kvcustody.governance.tiers.stores.s3_client import S3Client, S3Place
from kvcustody.governance.tiers.stores.s3_requests import S3Key
from kvcustody.governance.tiers.stores.store_protocol import Deleted, Listed
from kvcustody.governance.tiers.stores.valkey_client import ValkeyClient, ValkeyPlace
from standins.governance.tier_place import Place


class Endless:
    """A server that speaks S3 and always has another page; `ends_at`: of so many pages."""

    def __init__(self) -> None:
        self.pages, self.ends_at, self.status = 0, 1 << 30, 200
        server = self

        class Handler(BaseHTTPRequestHandler):
            def do_GET(self) -> None:
                server.pages += 1
                asked = parse_qs(urlsplit(self.path).query, keep_blank_values=True)
                prefix, goes_on = asked["prefix"][0], server.pages < server.ends_at
                key = prefix if len(prefix) > 60 else f"{prefix}{server.pages:064x}"
                body = (
                    f"<R><Version><Key>{key}</Key><VersionId>{server.pages}</VersionId><Size>1</Size></Version>"
                    f"<IsTruncated>{str(goes_on).lower()}</IsTruncated>"
                    f"<NextKeyMarker>{key}{server.pages}</NextKeyMarker></R>"
                ).encode()
                self.send_response_only(server.status)
                self.send_header("Content-Length", str(len(body)))
                self.end_headers()
                self.wfile.write(body)

            def log_message(self, format: str, *args: object) -> None:
                """Nothing."""

        self.server = ThreadingHTTPServer(("127.0.0.1", 0), Handler)
        threading.Thread(target=self.server.serve_forever, args=(0.01,), daemon=True).start()
        place = S3Place("bucket", "p", f"http://127.0.0.1:{self.server.server_port}")
        self.client = S3Client(place, S3Key("id", b"secret", "us-east-1"), seconds=2.0)

    def close(self) -> None:
        self.client.close()
        self.server.shutdown()
        self.server.server_close()


@pytest.fixture
def endless() -> Iterator[Endless]:
    pytest.importorskip("obstore")
    made = Endless()
    yield made
    made.close()


@pytest.mark.parametrize("what", ["names", "versions of one name"])
def test_an_endless_listing_of_s3_is_given_up(endless: Endless, what: str) -> None:
    with pytest.raises(StoreError, match="does not end"):
        if what == "names":
            endless.client.page(b"", 1_000)
        else:
            endless.client.delete([bytes(32)])
    assert endless.pages == s3_client._PAGES_MAX


def test_control_a_long_listing_of_s3_that_ends_is_one(endless: Endless) -> None:
    endless.ends_at = s3_client._PAGES_MAX
    assert len(endless.client.page(b"", 1_000)) == s3_client._PAGES_MAX


def test_a_listing_of_s3_that_is_slow_ends_by_time(endless: Endless, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(endless.client, "_listing_seconds", 0.0)
    with pytest.raises(StoreError, match="does not end"):
        endless.client.page(b"", 1_000)
    assert endless.pages == 1


def test_an_endless_listing_of_valkey_is_given_up(monkeypatch: pytest.MonkeyPatch) -> None:
    pytest.importorskip("valkey")
    monkeypatch.setattr(valkey_client, "_SCANS_MAX", 8)
    with socket.create_server(("127.0.0.1", 0)) as listening:
        scans: list[int] = []
        threading.Thread(target=_scanned, args=(listening, scans), daemon=True).start()
        port = listening.getsockname()[1]
        client = ValkeyClient(ValkeyPlace("127.0.0.1", port), None, seconds=2.0)
        with pytest.raises(StoreError, match="does not end"):
            client.page(b"", 10)
        assert len(scans) == 8
        client.close()


def _scanned(listening: socket.socket, scans: list[int]) -> None:
    """Answers one connection: every scan has a cursor of its own and nothing else."""
    connection, _ = listening.accept()
    with connection:
        while data := connection.recv(65_536):
            for _ in range(data.count(b"SCAN\r\n")):
                scans.append(len(scans))
                connection.sendall(b"*2\r\n$1\r\n7\r\n*0\r\n")
            for _ in range(data.count(b"*") - data.count(b"SCAN\r\n") - data.count(b"o:*")):
                connection.sendall(b"+OK\r\n")


class Inventing:
    """A client whose every page has names that nobody stored; with an owner's mark, or another's."""

    place, ends_by, deletes_max = "a store", "deleted", 1_000

    def __init__(self, owner: bytes) -> None:
        self.owner, self.listed = owner, 0

    def page(self, after: bytes, limit: int) -> list[Listed]:
        self.listed += limit
        begin = int.from_bytes(after, "big") + 1
        return [Listed(number.to_bytes(32, "big"), 1) for number in range(begin, begin + limit)]

    def peek(self, name: bytes, size: int) -> bytes | None:
        return self.owner + bytes(8) + bytes(size - 24)

    def delete(self, names: list[bytes]) -> Deleted:
        return Deleted(0, 0, tuple(names))

    def read_note(self, name: str) -> bytes:
        return b""

    def write_note(self, name: str, data: bytes) -> None:
        """Nothing is kept."""

    def close(self) -> None:
        """Nothing is open."""


def remote(client: Inventing) -> RemoteStore:
    return RemoteStore(client, worker="w1", capacity_bytes=1 << 20, object_bytes_max=1 << 16)  # type: ignore[arg-type]


class InventedPlace(Place):
    """A tier over such a store."""

    def made(self) -> RemoteStore:  # type: ignore[override]
        self.client = Inventing(owner_of("w1"))
        return remote(self.client)


def test_a_worker_starts_beside_a_store_that_invents_copies_of_its_own(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(index_module, "_NAMES_MIN", 2_000)
    place = InventedPlace(tmp_path, "remote")
    most = 2_000 + 2 * (1 << 20) // 256
    assert place.tier.found_at_start == 0 and place.client.listed <= most + 1_000
    with pytest.raises(StoreError, match="more than it has room for"):
        place.tier.objects()
    place.tier.close()
    place.staging.close()
    place.world.close()


def test_a_listing_in_which_nothing_is_an_owners_is_given_up(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(remote_store, "_PAGES_MAX", 5)
    client = Inventing(owner_of("another"))
    store = remote(client)
    with pytest.raises(StoreError, match="does not end"):
        store.page(b"", 100)
    assert client.listed == 500
    store.close()


@pytest.mark.parametrize("status", [404, 301, 500])
def test_a_bucket_that_is_gone_or_moved_is_a_store_that_fails(endless: Endless, status: int) -> None:
    """Nothing of a bucket that does not answer is absent: its objects may be there when it does."""
    endless.status = status
    for ask in (lambda: endless.client.page(b"", 10), lambda: endless.client.delete([bytes(32)])):
        with pytest.raises(StoreError, match=str(status)):
            ask()


def test_what_a_store_raises_that_nobody_expects_is_a_store_that_fails(tmp_path: Path) -> None:
    """Its answers are read by libraries: none of their errors reaches the thread of an engine."""
    place = Place(tmp_path, "host")
    store = GuardedStore(place.made(), seconds=1.0, clock=place.world.clock, failures=2)
    assert store.page(b"", 10) == [], "control"

    def raises(after: bytes, limit: int) -> list[Listed]:
        raise OverflowError("a date that is none")

    store._store.page = raises  # type: ignore[method-assign]
    for _ in range(2):
        with pytest.raises(StoreError, match="OverflowError"):
            store.page(b"", 10)
    assert not store.is_open, "and it counts as a failure"
    store.close()
    place.tier.close()
    place.staging.close()
    place.world.close()
