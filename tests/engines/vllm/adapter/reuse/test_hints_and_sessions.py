"""What an orchestrator hints at and the session that a client names: neither reaches a block, or another tenant."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest

from kvcustody.errors import ConfigError
from kvcustody.governance.credentials.owner_tags import OwnerTags
from kvcustody.governance.identity.principal import Principal
from kvcustody.governance.keys.locked_buffer import KEY_BYTES, KeyBuffer
from kvcustody.integrations.vllm.scheduler.scheduler_side import SchedulerSide
from standins.engines.vllm.scheduler_rig import Rig, prompt


def hints() -> Any:
    """An envelope as vLLM 0.32 and later carry it, with a payload that names somebody."""
    kv_hints = pytest.importorskip("vllm.v1.kv_hints.protocol")
    action = kv_hints.KvHintAction("1", "prefetch", "1", {"tenant": "alpha", "ttl": 1 << 40})
    return kv_hints.KvHintsEnvelope("1", "m", [action])


def seen_by_tiers(request: Any) -> Any:
    """The hints with which vLLM's own offloading tells its tiers of a request."""
    from vllm.distributed.kv_transfer.kv_connector.v1.offloading.scheduler import _create_req_context

    return _create_req_context(request).kv_hints


def test_hints_are_dropped_before_another_connector_could_see_them(rig: Callable[..., Rig]) -> None:
    one = rig()
    for tenant in ("alpha", None):  # with an identity, and without
        request = one.add(prompt(40), tenant, kv_hints=hints())
        assert request.kv_hints is None and seen_by_tiers(request) is None
    one.run()
    one.verify()


def test_without_governance_hints_reach_the_tiers(rig: Callable[..., Rig]) -> None:
    assert seen_by_tiers(rig(governed=False).add(prompt(40), kv_hints=hints())).actions


def test_hints_prolong_nothing(rig: Callable[..., Rig]) -> None:
    engine = rig()
    engine.add(prompt(40), "alpha", kv_hints=hints())
    engine.run()
    engine.clock.advance(59_000_000)
    assert engine.ask(prompt(40), "beta") == 0
    assert engine.ask(prompt(40), "alpha") == 32
    engine.clock.advance(61_000_000)
    assert engine.ask(prompt(40), "alpha") == 0


def sessions_of(one: Rig, name: str = "s1") -> list[str | None]:
    """The session of two tenants' requests and of one without identity, as vLLM's events would have it."""
    return [one.add(prompt(40), tenant, session_id=name).session_id for tenant in ("alpha", "beta", None)]


def test_a_session_is_its_owners_however_it_came(rig: Callable[..., Rig]) -> None:
    engine = rig()
    alpha, beta, nobody = sessions_of(engine)
    assert alpha != beta and nobody is None
    assert str(alpha).endswith("-s1") and "alpha" not in str(alpha)
    assert sessions_of(engine)[0] == alpha, "a router finds the session again"
    assert engine.add(prompt(40), "alpha", session_id=alpha).session_id == alpha, "the door had bound it"
    assert str(engine.add(prompt(40), "beta", session_id=alpha).session_id).startswith(str(beta)[:17])
    assert engine.add(prompt(40), "alpha", session_id="jane doe").session_id is None
    assert engine.add(prompt(40), "alpha").session_id is None
    engine.run()
    assert engine.ask(prompt(40), "beta", session_id="s1") == 32, "its own, whatever the session"


def test_unbound_sessions_would_meet(rig: Callable[..., Rig], monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(SchedulerSide, "_bind", lambda *_: None)
    assert sessions_of(rig()) == ["s1"] * 3


def test_an_engine_binds_as_its_door_does() -> None:
    secret, jane = KeyBuffer.random(KEY_BYTES), Principal("idp", "acme", subject="jane")
    door, engine = OwnerTags(secret), OwnerTags(secret)
    assert engine.bound(jane, f"{door.tag(jane)}-chat") == f"{door.tag(jane)}-chat" == engine.bound(jane, "chat")
    assert OwnerTags(KeyBuffer.random(KEY_BYTES)).bound(jane, "chat") != engine.bound(jane, "chat")
    assert [engine.bound(jane, each) for each in ("", "a b", "x" * 129, 7, f"{door.tag(jane)}-")][:4] == [None] * 4


def test_ours_comes_first_among_connectors(rig: Callable[..., Rig]) -> None:
    """Another that came before would be told of a request with its token and hints."""
    example = {"kv_connector": "ExampleConnector", "kv_role": "kv_both"}
    with pytest.raises(ConfigError, match="not the first"):
        rig(connectors=[example, {"kv_connector": "KVCustody", "kv_role": "kv_both"}])
