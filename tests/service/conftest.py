"""A service on a ledger of its own, people in every role, and a client that speaks to it without a socket."""

from __future__ import annotations

import asyncio
import itertools
import shutil
from collections.abc import Callable, Iterator
from contextlib import ExitStack
from pathlib import Path
from typing import Any

import httpx
import pytest

from kvcustody.console.documents import ConsoleDocuments
from kvcustody.governance.api.app import create_app
from kvcustody.governance.service.access.roles import Role
from kvcustody.governance.service.fleet import metrics_samples
from kvcustody.governance.service.health import database_probe, verdict
from kvcustody.governance.service.service import Service, open_service
from standins.postgres import new_ledger
from standins.service.service_world import Worker, register, settings_in, ship


class Client:
    """Requests to a gate, each on an event loop of this client's own."""

    def __init__(self, gate: Any) -> None:
        self.gate = gate
        self._keys = itertools.count()
        self._loop = asyncio.new_event_loop()
        self._http = httpx.AsyncClient(transport=httpx.ASGITransport(app=gate), base_url="http://testserver")

    def __call__(self, method: str, path: str, key: str | None = None, **how: Any) -> httpx.Response:
        headers = dict(how.pop("headers", {}))
        if key is not None:
            headers.setdefault("Authorization", f"Bearer {key}")
        if method == "POST" and how.pop("keyed", True):
            headers.setdefault("Idempotency-Key", f"test-{next(self._keys)}")
        answer = self.run(self._http.request(method, path, headers=headers, **how))
        self._http.cookies.clear()  # a cookie is sent by those tests that mean to
        return answer

    def run(self, work: Any) -> Any:
        return self._loop.run_until_complete(work)

    def close(self) -> None:
        self.run(self._http.aclose())
        self._loop.run_until_complete(self._loop.shutdown_default_executor())
        self._loop.close()


class People:
    """A principal with a key for each role, tenants' roles for each tenant; enrolled when first asked for."""

    def __init__(self, service: Service) -> None:
        self.service = service
        self.keys: dict[str, str] = {}

    def add(self, name: str, role: Role, tenant: str | None = None) -> str:
        self.service.principals.enrol(name, [role], tenant=tenant, by="test")
        self.keys[name] = self.service.principals.issue_key(name, days=1, by="test").key
        return self.keys[name]

    def __getitem__(self, name: str) -> str:
        if name not in self.keys:
            role, _, tenant = name.partition("@")
            self.add(name, Role(role), tenant or None)
        return self.keys[name]


@pytest.fixture(autouse=True)
def patient_scrapes(monkeypatch: pytest.MonkeyPatch) -> None:
    """A scrape, and the verdict, say what is so when it is asked, however busy the machine is."""
    monkeypatch.setattr(metrics_samples, "PATIENCE_SECONDS", 60.0)
    monkeypatch.setattr(verdict, "PATIENCE_SECONDS", 20.0)
    monkeypatch.setattr(database_probe, "FRESH_SECONDS", 0.0)


@pytest.fixture
def make_service(tmp_path: Path, migrated: Path) -> Iterator[Callable[..., Service]]:
    services: list[Service] = []
    shutil.copy(migrated, tmp_path / "ledger.db")

    def make(**explicit: Any) -> Service:
        services.append(open_service(settings_in(tmp_path, **explicit), documents=ConsoleDocuments()))
        return services[-1]

    yield make
    for service in services:
        service.close()


@pytest.fixture(scope="module")
def service(tmp_path_factory: pytest.TempPathFactory, migrated: Path) -> Iterator[Service]:
    folder = tmp_path_factory.mktemp("service")
    shutil.copy(migrated, folder / "ledger.db")
    with open_service(settings_in(folder), documents=ConsoleDocuments()) as opened:
        yield opened


@pytest.fixture(
    scope="module",
    params=["sqlite", pytest.param("postgresql", marks=pytest.mark.system("what PostgreSQL alone refuses"))],
)
def service_on_each(
    request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory, migrated: Path
) -> Iterator[Service]:
    """A service on each database, one after the other."""
    folder = tmp_path_factory.mktemp("on-each")
    if request.param == "sqlite":
        shutil.copy(migrated, folder / "ledger.db")
        with open_service(settings_in(folder), documents=ConsoleDocuments()) as opened:
            yield opened
        return
    with new_ledger(request.getfixturevalue("postgres")) as engine:
        url = engine.url.render_as_string(hide_password=False)
        settings = settings_in(folder, database_url=url, subject_keys_url=f"sqlite:///{folder}/people.db")
        with open_service(settings, documents=ConsoleDocuments()) as opened:
            yield opened


@pytest.fixture(scope="module")
def people(service: Service) -> People:
    return People(service)


@pytest.fixture(scope="module")
def opened_in() -> Iterator[Callable[..., Service]]:
    """Opens services that live as long as the module: `opened_in(folder, **settings)`."""
    with ExitStack() as stack:
        yield lambda folder, **explicit: stack.enter_context(
            open_service(settings_in(folder, **explicit), documents=ConsoleDocuments())
        )


@pytest.fixture(scope="module")
def make_people() -> Callable[[Service], People]:
    """People of any service."""
    return People


@pytest.fixture(scope="module")
def make_client() -> Iterator[Callable[..., Client]]:
    """A client of any service: `make_client(service)`; `pages` are a console's."""
    clients: list[Client] = []

    def make(service: Service, pages: Any = None) -> Client:
        clients.append(Client(create_app(service, pages=pages)))
        return clients[-1]

    yield make
    for client in clients:
        client.close()


@pytest.fixture(scope="module")
def client(service: Service) -> Iterator[Client]:
    made = Client(create_app(service))
    yield made
    made.close()


@pytest.fixture(scope="module")  # not longer: while it serves, the process collects its garbage seldom
def plane(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Any]:
    """One control plane for what a file tries with real workers; every test leaves it serving, with READS in effect."""
    from standins.service.control_plane_world import READS, ControlPlane

    made = ControlPlane(tmp_path_factory.mktemp("cp"))
    made.release(READS)
    yield made
    made.end()


@pytest.fixture(scope="module")
def server(service: Service) -> Iterator[Any]:
    from standins.service.service_world import Server

    running = Server(service)
    yield running
    running.close()


@pytest.fixture(scope="module")
def shipped(service: Any, client: Any, people: Any) -> Any:
    """The service, with requests of two subjects of `acme` and one of `labs` on record."""
    worker = Worker()
    assert register(client, people["worker"], worker).status_code == 200
    events = [
        worker.started(),
        *worker.request("acme"),
        *worker.request("acme", "user-2"),
        *worker.request("labs"),
    ]
    assert ship(client, people["worker"], worker, worker.batch(events)).status_code == 200
    return service
