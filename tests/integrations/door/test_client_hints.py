"""Hints that lengthen: within the operator's bounds they go on, beyond them less does, and both values are told."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

from kvcustody.integrations.door.client_hints import ClippedHint, HintBounds, clip_hints
from kvcustody.integrations.identity.refusal import RequestRefused
from standins.integrations.door_world import Signers, make_signers
from standins.integrations.fleet_edge import FleetEdge

WIDE = HintBounds((-100, 100), 3600, frozenset({"prefetch", "pin"}))


def action(kind: str, **payload: Any) -> dict[str, Any]:
    return {"action_id": "1", "action_type": kind, "action_version": "1", "payload": payload}


def envelope(*actions: dict[str, Any]) -> dict[str, Any]:
    return {"kv_hints": {"protocol_version": "1", "message_id": "m", "actions": list(actions)}}


def agent(**hints: Any) -> dict[str, Any]:
    return {"nvext": {"agent_hints": hints}}


def control(ttl: str) -> dict[str, Any]:
    return {"nvext": {"cache_control": {"type": "ephemeral", "ttl": ttl}}}


GIVEN = [
    {"priority": -7},
    agent(priority=5, strict_priority=1, osl=1024, speculative_prefill=True),
    control("5m"),
    envelope(action("pin", ttl_seconds=60, blocks=[1]), action("prefetch")),
]


@pytest.mark.parametrize("given", GIVEN)
def test_what_is_within_the_bounds_goes_on_as_it_is(given: dict[str, Any]) -> None:
    expected = control("300s") if given == control("5m") else given
    kept, told = clip_hints(body := {"prompt": "p", **given}, WIDE)
    assert kept == expected and body == {"prompt": "p"}
    assert told and not any(hint.is_less for hint in told)


@pytest.mark.parametrize(
    ("given", "bounds", "passed", "told"),
    [
        ({"priority": -7}, HintBounds(), {"priority": 0}, [("priority", -7, 0)]),
        ({"priority": 9}, HintBounds((-1, 2)), {"priority": 2}, [("priority", 9, 2)]),
        (
            agent(priority=5, osl=9, speculative_prefill=True),
            HintBounds(),
            agent(priority=0, osl=9, speculative_prefill=False),
            [("nvext.agent_hints.priority", 5, 0), ("nvext.agent_hints.speculative_prefill", True, False)],
        ),
        (
            control("1h"),
            HintBounds(retain_seconds=90),
            control("90s"),
            [("nvext.cache_control.ttl", 3600, 90)],
        ),
        (control("1h"), HintBounds(), {}, [("nvext.cache_control.ttl", 3600, None)]),
        (envelope(action("pin", ttl=9)), HintBounds(), {}, [("kv_hints.action", "pin", None)]),
        (
            envelope(action("pin", ttl_ms=9000, ttl=9), action("share")),
            HintBounds(retain_seconds=2, actions=frozenset({"pin"})),
            envelope(action("pin", ttl_ms=2000, ttl=2)),
            [
                ("kv_hints.action", "pin", "pin"),
                ("kv_hints.ttl", 9, 2),
                ("kv_hints.ttl_ms", 9000, 2000),
                ("kv_hints.action", "share", None),
            ],
        ),
    ],
)
def test_what_is_beyond_them_is_lowered_and_both_values_are_told(
    given: dict[str, Any], bounds: HintBounds, passed: dict[str, Any], told: list[tuple[Any, ...]]
) -> None:
    assert clip_hints(dict(given), bounds) == (passed, [ClippedHint(*each) for each in told])


@pytest.mark.parametrize(
    "given",
    [
        {"priority": True},
        {"priority": "9"},
        {"nvext": 1},
        agent(prefix_id="victim"),
        agent(osl=-1),
        control("for ever"),
        {"nvext": {"backend_instance_id": 1}},
        {"nvext": {"agent_hints": 1}},
        {"kv_hints": []},
        envelope({"action_type": "pin"}),
        envelope(action("pin", ttl="x")) | {},
        envelope(*[action("pin")] * 65),
        {"kv_hints": {"actions": [], "more": 1}},
    ],
)
def test_what_is_malformed_is_refused(given: dict[str, Any]) -> None:
    with pytest.raises(RequestRefused) as refused:
        clip_hints(dict(given), WIDE)
    assert refused.value.status == 400


@pytest.fixture(scope="module")
def signers() -> Signers:
    return make_signers()


def test_the_door_passes_hints_on_and_counts_what_it_clipped(tmp_path: Path, signers: Signers) -> None:
    fleet = FleetEdge(tmp_path, signers, hints=HintBounds((-1, 1)))
    for priority, passed, counted in ((1, 1, 0), (-5, -1, 1)):
        assert fleet.send(fleet.clients.acme, {"prompt": "p", "priority": priority}).json["priority"] == passed
        found = fleet.edge.metrics.registry.get_sample_value("kvcustody_door_hints_clipped_total", {"hint": "priority"})
        assert (found or 0) == counted
