"""What a router behind the door looks in: the tenant's namespace, made at the door, whatever the client sent."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

from kvcustody.governance.edge.current_namespaces import CurrentNamespaces
from kvcustody.governance.edge.erase_epochs import (
    EpochScope,
    EpochTags,
    EraseEpochs,
    KnownEpochs,
    RaisedEpoch,
)
from kvcustody.governance.edge.router_namespace import RouterNamespaces
from kvcustody.integrations.identity import authenticate_request
from kvcustody.integrations.identity.request_headers import RequestHeaders
from standins.integrations.door_world import Deployment, Signers, ask, make_signers, secret

HEADER = "x-tenant-id"
TAGS = EpochTags(bytes(32))
FORGED = [
    [(b"x-tenant-id", b"globex")],
    [(b"X-Tenant-Id", b"globex")],
    [(b"x_tenant_id", b"globex")],
    [(b"x-tenant-id", b"globex"), (b"x-tenant-id", b"\xff"), (b"X_Tenant-ID", b"a")],
]


@pytest.fixture(scope="module")
def signers() -> Signers:
    return make_signers()


@pytest.fixture
def deployment(tmp_path: Path, signers: Signers) -> Deployment:
    return Deployment(tmp_path, signers)


def seen(deployment: Deployment, key: str, headers: Any = None, path: str = "/v1/completions") -> str:
    """The namespace that reached the application, and nothing else under any spelling of its name."""
    method = "GET" if path == "/v1/models" else "POST"
    received = ask(deployment.gate, path, headers=headers, key=key, method=method).passed
    spelt = [name for name in received.headers if name.replace("_", "-").lower() == HEADER]
    assert spelt == [HEADER]
    return received.headers[HEADER]


@pytest.mark.parametrize("forged", FORGED)
def test_it_is_the_credentials_tenant(deployment: Deployment, forged: list[tuple[bytes, bytes]]) -> None:
    own = seen(deployment, deployment.acme)
    assert seen(deployment, deployment.acme, list(forged)) == own
    assert seen(deployment, deployment.acme, list(forged), "/v1/models") == own
    assert seen(deployment, deployment.globex) not in (own, "globex")
    assert seen(deployment, deployment.alice) == own, "one for the tenant, whoever asks"


def test_without_it_the_clients_header_gets_through(deployment: Deployment, monkeypatch: pytest.MonkeyPatch) -> None:
    """The control: the door does not know the header."""
    monkeypatch.setattr(authenticate_request, "NAMESPACE_HEADER", "x-other")
    assert seen(deployment, deployment.acme, [(b"x-tenant-id", b"globex")]) == "globex"


def test_it_is_the_one_that_engines_publish(deployment: Deployment) -> None:
    with secret() as same:
        names = CurrentNamespaces(RouterNamespaces(same), deployment.clock)
    headers = RequestHeaders([(b"authorization", b"Bearer " + deployment.acme.encode())])
    who = deployment.gate.authenticate("POST", "/v1/completions", headers).principal
    assert seen(deployment, deployment.acme) == names.of(who.issuer, who.tenant)


def test_it_ends_with_each_erase_epoch_of_its_tenant(tmp_path: Path, signers: Signers) -> None:
    raised: list[RaisedEpoch] = []
    is_known = True

    def known() -> KnownEpochs | None:
        epochs = EraseEpochs(raised, version=len(raised))
        return KnownEpochs(epochs, TAGS) if is_known else None

    deployment = Deployment(tmp_path, signers, epochs=known)
    headers = RequestHeaders([(b"authorization", b"Bearer " + deployment.acme.encode())])
    who = deployment.gate.authenticate("POST", "/v1/completions", headers).principal
    names = CurrentNamespaces(RouterNamespaces(secret()), deployment.clock)
    first = seen(deployment, deployment.acme)
    assert first == names.of(who.issuer, who.tenant), "control: nothing was raised"
    for scope, ends in (
        (EpochScope(who.issuer, who.tenant, "ann"), False),
        (EpochScope(who.issuer, "globex"), False),
        (EpochScope(who.issuer, who.tenant, is_shared=True), True),
        (EpochScope(who.issuer, who.tenant), True),
        (EpochScope(), True),
    ):
        before = seen(deployment, deployment.acme)
        raised.append(RaisedEpoch(len(raised) + 1, TAGS.of(scope)))
        after = seen(deployment, deployment.acme)
        assert (after != before) == ends, scope
        assert after == names.of(who.issuer, who.tenant, known=known()), "as events of the engine do"
    is_known = False
    assert len({seen(deployment, deployment.acme) for _ in range(3)}) == 3, "past the lease: nothing is found"


def test_equal_tenants_of_two_issuers_are_apart(deployment: Deployment) -> None:
    token = deployment.token(org="acme")
    assert seen(deployment, token) != seen(deployment, deployment.acme)


@pytest.mark.parametrize("sent", [{"nvext": {"cache_salt": "s"}}, {"nvext": {"cache_salt": "s"}, "cache_salt": "s"}])
def test_a_salt_for_the_router_narrows_and_goes_no_further(deployment: Deployment, sent: dict[str, Any]) -> None:
    got = ask(deployment.gate, body={"prompt": "p", **sent}, key=deployment.acme).passed.json
    assert got["nvext"] == {} and got["cache_salt"] != "s"
    found = deployment.verify(got)
    assert found.hints.salt is not None  # type: ignore[union-attr]
    bare = deployment.verify(ask(deployment.gate, body={"prompt": "p"}, key=deployment.acme).passed.json)
    assert bare.hints.salt is None  # type: ignore[union-attr]


def test_two_salts_are_refused(deployment: Deployment) -> None:
    body = {"prompt": "p", "nvext": {"cache_salt": "a"}, "cache_salt": "b"}
    reply = ask(deployment.gate, body=body, key=deployment.acme)
    assert reply.status == 400 and reply.received is None
