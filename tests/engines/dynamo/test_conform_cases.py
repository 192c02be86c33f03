"""The cases of `kvcustody known-bugs` at Dynamo's index: found there, not behind ours; found where a defence is off."""

from __future__ import annotations

import pytest

from kvcustody.governance.edge.router_namespace import RouterNamespaces
from kvcustody.integrations.dynamo import relay
from kvcustody.integrations.events.dynamo_wire import Screened
from kvcustody.testkit.conform.public_cases import TARGET_OF
from kvcustody.testkit.conform.scripts.layers import dynamo_indexer
from kvcustody.testkit.conform.scripts.ours import kvcustody_dynamo


@pytest.mark.parametrize("case", TARGET_OF["kvcustody-dynamo"].cases)
def test_it_holds_behind_ours(case: str) -> None:
    assert kvcustody_dynamo.main(case)["found"] is False


@pytest.mark.parametrize(("case", "found"), [("salt-dropped", False), ("unscoped-events", True), ("index-dump", True)])
def test_dynamo_alone(case: str, found: bool) -> None:
    assert dynamo_indexer.main(case)["found"] is found


def test_one_namespace_for_everybody_is_found(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(RouterNamespaces, "of", lambda self, issuer, tenant, *_: "acme")
    assert kvcustody_dynamo.main("salt-dropped")["found"] is True


def test_a_namespace_that_anybody_can_name_is_found(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(RouterNamespaces, "of", lambda self, issuer, tenant, *_: tenant)
    assert kvcustody_dynamo.main("index-dump")["found"] is True


def test_a_relay_that_screens_nothing_is_found(monkeypatch: pytest.MonkeyPatch) -> None:
    import msgspec

    def everything(payload: bytes) -> Screened:
        return Screened(msgspec.msgpack.decode(payload)[1], 1)

    monkeypatch.setattr(relay, "screen", everything)
    assert kvcustody_dynamo.main("unscoped-events")["found"] is True
