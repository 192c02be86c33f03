"""Mooncake's master and clients as pip has them: our namespaces as its tenants, and what its build says of events."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

import pytest
import zmq

from kvcustody.governance.edge.router_namespace import RouterNamespaces
from kvcustody.governance.keys.locked_buffer import KeyBuffer
from kvcustody.integrations.events import incoming
from standins.engines.mooncake.store_world import Client, Master


def names() -> tuple[str, str]:
    with KeyBuffer() as secret:
        secret.writable()[:] = bytes(range(32))
        made = RouterNamespaces(secret)
        return made.of("issuer", "acme"), made.of("issuer", "globex")


ACME, GLOBEX = names()


@pytest.fixture
def master(tmp_path: Path) -> Iterator[Master]:
    made = Master(tmp_path, [ACME, GLOBEX])
    yield made
    made.close()


def test_a_namespace_is_a_tenant_of_its_own(master: Master) -> None:
    """One key, two tenants: each reads its own, and neither removes the other's."""
    with Client(master, ACME) as acme, Client(master, GLOBEX) as globex:
        assert acme.setup == globex.setup == 0
        assert acme("put", "block", "of-acme") == 0
        assert globex("is_exist", "block") == 0 and globex("get", "block") == ""
        assert globex("put", "block", "of-globex") == 0
        assert (acme("get", "block"), globex("get", "block")) == ("of-acme", "of-globex")
        assert globex("remove", "block", True) == 0
        assert acme("is_exist", "block") == 1 and globex("is_exist", "block") == 0
    with Client(master, GLOBEX.replace(GLOBEX[0], "x")) as nobody:
        assert nobody("put", "block", "of-nobody") != 0, "a name without a quota stores nothing"


def test_without_tenancy_names_mean_nothing(tmp_path: Path) -> None:
    """The control: the same clients, and a master that was not told of tenants, which is its default."""
    master = Master(tmp_path, None)
    try:
        with Client(master, ACME) as acme, Client(master, GLOBEX) as globex:
            assert acme("put", "block", "of-acme") == 0
            assert globex("get", "block") == "of-acme"
    finally:
        master.close()


def test_a_client_may_name_any_tenant(master: Master) -> None:
    """What the store does not do: a tenant is whatever a client says. Only a name that cannot be guessed helps."""
    with Client(master, ACME) as acme:
        assert acme("put", "block", "of-acme") == 0
        with Client(master, ACME) as somebody:
            assert somebody("get", "block") == "of-acme"


def test_events_of_the_master_are_read(master: Master) -> None:
    """Where the build publishes any: version 0.3.13.post1 of the package was built without."""
    context = zmq.Context()
    try:
        sub: zmq.Socket[bytes] = context.socket(zmq.SUB)
        sub.setsockopt(zmq.SUBSCRIBE, b"")
        sub.connect(master.events)
        payloads = []
        with Client(master, ACME) as acme, Client(master, GLOBEX) as globex:
            for number in range(10):
                for client in (acme, globex):
                    assert client("put", f"block-{number}", "x") == 0
                while sub.poll(200):
                    payloads.append(sub.recv_multipart()[2])
    finally:
        context.destroy(linger=0)
    if not payloads:
        pytest.skip("this build of the master publishes no events")
    read = [incoming.read(payload) for payload in payloads]
    events = [event for one in read for event in one.events]
    assert not sum(one.malformed + one.unknown for one in read)
    assert {event.salts for event in events if isinstance(event, incoming.StoredBlocks)} == {
        (ACME,),
        (GLOBEX,),
    }
