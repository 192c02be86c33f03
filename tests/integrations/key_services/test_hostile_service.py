"""A key service that lies, fails or does not understand: no key counts as destroyed, and no worker stops for it."""

from __future__ import annotations

import json
import threading
from collections.abc import Iterator
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path
from typing import Any

import pytest

from kvcustody.clock import VirtualClock
from kvcustody.errors import KeyringError, KeyServiceUnavailable
from kvcustody.governance.identity.domain_spec import KeyOwner, tenant_owner
from kvcustody.governance.keys import keyring, service_wrapping
from kvcustody.governance.keys.keyring import Keyring
from kvcustody.governance.keys.locked_buffer import KEY_BYTES, KeyBuffer
from kvcustody.governance.keys.root_key_wrapping import KeyEnd, RootKeyWrapping
from kvcustody.governance.keys.service_wrapping import SCHEMA
from kvcustody.governance.keys.wrapped_key_store import EndingKey, FileKeyStore
from kvcustody.integrations.key_services.document import open_wrapping
from kvcustody.integrations.key_services.openbao import OpenBaoTransit
from kvcustody.integrations.key_services.places import OpenBaoPlace

ACME, LABS = tenant_owner("idp", "acme"), tenant_owner("idp", "labs")
NAME = "kvcustody-" + "0a" * 20
THERE = (200, {"data": {"name": NAME}})
ABSENT = (404, {"errors": []})


class Answering:
    """A server that answers each request as it is told, and keeps what it was asked."""

    def __init__(self) -> None:
        self.asked: list[str] = []
        self.says: dict[str, list[tuple[int, Any]]] = {}
        service = self

        class Handler(BaseHTTPRequestHandler):
            def _answer(self) -> None:
                self.rfile.read(int(self.headers.get("Content-Length", 0)))
                service.asked.append(f"{self.command} {self.path}")
                answers = service.says.get(self.command, [(200, {})])
                status, body = answers.pop(0) if len(answers) > 1 else answers[0]
                content = b"" if body is None else json.dumps(body).encode()
                self.send_response_only(status)
                if 300 <= status < 400:
                    self.send_header("Location", "http://127.0.0.1:1/")
                self.send_header("Content-Length", str(len(content)))
                self.end_headers()
                self.wfile.write(content)

            do_GET = do_POST = do_DELETE = _answer

            def log_message(self, format: str, *args: object) -> None:
                """Nothing."""

        self.server = ThreadingHTTPServer(("127.0.0.1", 0), Handler)
        self.address = f"http://127.0.0.1:{self.server.server_port}"
        threading.Thread(target=self.server.serve_forever, args=(0.01,), daemon=True).start()

    def close(self) -> None:
        self.server.shutdown()
        self.server.server_close()


@pytest.fixture
def hostile() -> Iterator[Answering]:
    made = Answering()
    yield made
    made.close()


@pytest.fixture
def transit(hostile: Answering, tmp_path: Path) -> OpenBaoTransit:
    (tmp_path / "token").write_text("token")
    place = OpenBaoPlace(service="openbao", address=hostile.address, token_path=Path("token"))
    return OpenBaoTransit(place, tmp_path)


def test_a_key_is_gone_where_the_mount_says_so(hostile: Answering, transit: OpenBaoTransit) -> None:
    """The control of what follows."""
    hostile.says = {"GET": [THERE, ABSENT]}
    assert transit.end_key(NAME) == KeyEnd()
    assert sum(asked.startswith("DELETE") for asked in hostile.asked) == 1


@pytest.mark.parametrize(
    "answer",
    [
        (307, None),  # a standby node that sends to the active one
        (302, {"data": {}}),
        (404, {"errors": ['no handler for route "transit/keys/x"; route entry not found.']}),
        (404, None),
        (404, {"data": None}),
        (400, {"errors": ["unsupported path"]}),
        (520, None),
        (599, {"errors": 5}),
    ],
)
def test_no_other_answer_says_that_a_key_is_gone(
    hostile: Answering, transit: OpenBaoTransit, answer: tuple[int, Any]
) -> None:
    for answers in ([answer], [THERE, answer]):
        hostile.says = {"GET": list(answers)}
        with pytest.raises(KeyServiceUnavailable):
            transit.end_key(NAME)


@pytest.mark.parametrize(
    "body", [None, [], {}, {"data": 1}, {"data": {"plaintext": 7}}, {"data": {"plaintext": "AA=="}}]
)
def test_what_is_no_secret_opens_nothing(hostile: Answering, transit: OpenBaoTransit, body: Any) -> None:
    """A secret of another kind is refused for good; an answer without one is none."""
    hostile.says = {"POST": [(200, body)]}
    is_secret = isinstance(body, dict) and isinstance(body.get("data"), dict)
    with pytest.raises(KeyringError if is_secret else KeyServiceUnavailable):
        transit.unwrap(NAME, b"vault:v1:x", b"context")


@pytest.mark.parametrize("key", ["../../sys/mounts/transit", "x?y=", NAME + "/../other", "", NAME.upper()])
def test_a_root_file_that_somebody_wrote_asks_the_service_for_no_other_path(
    hostile: Answering, transit: OpenBaoTransit, tmp_path: Path, key: str
) -> None:
    document, root = tmp_path / "service.yaml", tmp_path / "root.wrapped"
    document.write_text(
        f"key_service:\n  service: openbao\n  address: {hostile.address}\n  token_path: {tmp_path}/token\n"
    )

    def written(name: str) -> None:
        root.write_text(json.dumps({"schema": SCHEMA, "key": name, "wrapped": "AAAA"}))
        root.chmod(0o600)

    written(key)
    with pytest.raises(KeyringError, match=SCHEMA):
        open_wrapping(document, root)
    assert hostile.asked == []
    written(NAME)
    with pytest.raises(KeyServiceUnavailable):
        open_wrapping(document, root)
    assert hostile.asked == [f"POST /v1/transit/decrypt/{NAME}"], "control: its own name is asked for"


class Service(RootKeyWrapping):
    """Each epoch has a key of its own, whose end is what `ends` says."""

    def __init__(self) -> None:
        super().__init__(KeyBuffer.random(KEY_BYTES))
        self.ends: dict[KeyOwner, BaseException | KeyEnd] = {}
        self.asked: list[KeyOwner] = []
        self.root = "root-1"

    @property
    def ends_under(self) -> str:
        return self.root

    def end_epoch(self, owner: KeyOwner, epoch: int) -> KeyEnd:
        self.asked.append(owner)
        end = self.ends.get(owner, KeyEnd())
        if isinstance(end, BaseException):
            raise end
        return end


def ring_over(service: Service, folder: Path) -> Keyring:
    return Keyring(FileKeyStore(folder / "keys.json"), service, VirtualClock())


def test_a_key_that_the_service_refuses_to_end_holds_up_no_other(tmp_path: Path) -> None:
    service = Service()
    ring = ring_over(service, tmp_path)
    ring.ensure([ACME, LABS])
    for owner in (ACME, LABS):
        ring.destroy(owner, 1)
    service.ends = {ACME: KeyringError("deletion is not allowed for this key")}
    assert [fact.owner for fact in ring.end_in_service()] == [LABS]
    assert ring.end_in_service() == ()
    service.ends = {}
    assert [fact.owner for fact in ring.end_in_service()] == [ACME], "control: it was asked for again"


def test_what_was_refused_is_asked_for_behind_the_others_and_a_call_ends(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    service = Service()
    ring = ring_over(service, tmp_path)
    owners = [tenant_owner("idp", f"t{number}") for number in range(4)]
    ring.ensure(owners)
    for owner in owners:
        ring.destroy(owner, 1)
    service.ends = dict.fromkeys(owners[:2], KeyringError("refused"))
    monkeypatch.setattr(keyring, "_ENDS_SECONDS", 0.0)
    now = iter(range(1_000_000))
    monkeypatch.setattr(keyring.time, "monotonic", lambda: next(now) // 3)
    for _ in range(8):
        ring.end_in_service()
    assert {owner for owner in owners if (owner, 1) not in ring._document.ending} == set(owners[2:])


def test_an_epoch_that_lives_is_never_ended_in_the_service_whoever_wrote_the_file(tmp_path: Path) -> None:
    service = Service()
    ring = ring_over(service, tmp_path)
    ring.ensure([ACME, LABS])
    ring.destroy(LABS, 1)
    store = FileKeyStore(tmp_path / "keys.json")
    document = store.load()
    document.ending[ACME, 1] = EndingKey(0, service.root)
    store.save(document)
    again = ring_over(service, tmp_path)
    assert [fact.owner for fact in again.end_in_service()] == [LABS]
    assert service.asked == [LABS]


def test_what_a_crash_left_owed_is_told_once_by_the_next_process(tmp_path: Path) -> None:
    service = Service()
    ring = ring_over(service, tmp_path)
    ring.ensure([ACME, LABS])
    ring.destroy(ACME, 1)
    assert ring.take_left_owed() == (), "it has said so itself"
    service.ends = {ACME: KeyServiceUnavailable("away")}
    again = ring_over(service, tmp_path)
    assert [(fact.owner, fact.in_service) for fact in again.take_left_owed()] == [(ACME, "still-owed")]
    assert again.take_left_owed() == again.end_in_service() == ()
    service.ends = {}
    assert [fact.in_service for fact in again.end_in_service()] == ["gone"]
    assert ring_over(service, tmp_path).take_left_owed() == ()


def test_under_another_root_no_destroyed_key_counts_as_gone(tmp_path: Path) -> None:
    """Whoever removes the wrapped root key has the next process make another, whose keys have other names."""
    service = Service()
    ring = ring_over(service, tmp_path)
    ring.ensure([ACME])
    ring.destroy(ACME, 1)
    service.root = "root-2"
    assert ring_over(service, tmp_path).end_in_service() == () and service.asked == []
    service.root = "root-1"
    assert [fact.in_service for fact in ring_over(service, tmp_path).end_in_service()] == ["gone"], "control"


def test_epochs_move_under_no_other_root_while_a_service_is_to_destroy_keys(tmp_path: Path) -> None:
    service = Service()
    ring = ring_over(service, tmp_path)
    ring.ensure([ACME, LABS])
    ring.destroy(ACME, 1)
    with pytest.raises(KeyringError, match="1 key of destroyed epochs"):
        ring.rewrap(RootKeyWrapping(KeyBuffer.random(KEY_BYTES)))
    assert ring.end_in_service()
    moved = ring.rewrap(RootKeyWrapping(KeyBuffer.random(KEY_BYTES)))
    assert [fact.owner for fact in moved] == [LABS], "control"


class Confused:
    """A service whose library raises what nobody expects."""

    place = "a service"

    def __getattr__(self, name: str) -> Any:
        def call(*given: object) -> Any:
            raise AttributeError("'NoneType' object has no attribute 'data'")

        return call


def test_what_a_services_library_raises_is_no_answer_and_ends_no_thread(tmp_path: Path) -> None:
    with pytest.raises(KeyServiceUnavailable, match="cannot be understood"):
        service_wrapping.ServiceWrapping(Confused(), tmp_path / "root.wrapped")


class Hanging:
    """A service that is away: it takes so long to say nothing."""

    place = "a service"

    def __init__(self) -> None:
        self.now, self.asked, self.takes = 1_000.0, 0, 2.0

    def probe(self) -> None:
        self.asked += 1
        self.now += self.takes
        raise KeyServiceUnavailable("no answer")


@pytest.mark.parametrize(("takes", "asked"), [(2.0, 10), (0.0, 100)])
def test_a_service_that_hangs_is_waited_for_a_fifth_of_the_time_at_most(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, takes: float, asked: int
) -> None:
    """An engine asks for each tenant that it has not opened. Control: who says no at once is asked once a second."""
    service = Hanging()
    service.takes = takes
    port = service_wrapping.ServiceWrapping.__new__(service_wrapping.ServiceWrapping)
    port._service, port._asks_from = service, 0.0  # type: ignore[assignment]
    monkeypatch.setattr(service_wrapping.time, "monotonic", lambda: service.now)
    while service.now < 1_100:
        with pytest.raises(KeyServiceUnavailable):
            port._ask(service.probe)
        service.now += 0.05
    assert asked * 0.9 <= service.asked <= asked
