"""Placement that policy demands: the door sends a request to no other group, and refuses what no group may serve."""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path

import pytest

from kvcustody.governance.edge.erase_epochs import EpochTags, EraseEpochs, KnownEpochs
from kvcustody.governance.edge.name_scopes import NameScopes
from kvcustody.governance.edge.placement_document import PlacementDocument
from kvcustody.integrations.door.placement_groups import PLACEMENT_HEADER
from kvcustody.integrations.identity.refusal import RequestRefused
from kvcustody.policies.reading.load_policy import load_policy
from standins.integrations.door_world import Signers, make_signers
from standins.integrations.fleet_edge import FleetEdge

RULES = """\
placement:
  - {id: acme-own, groups: [g1], tenants: [acme], dedicated: true}
  - {id: sealed, groups: [g2], classification: [high]}
on_worker_death: {high: fail}
"""
BASE = Path(__file__).parents[2] / "policies/base.yaml"
HIGH = {"x-kvcustody-classification": "high"}
FOUR = PlacementDocument.model_validate(
    {
        "schema": "kvcustody/placement@1",
        "groups": {f"g{number}": {"router": f"http://r{number}"} for number in range(4)},
    }
)


@pytest.fixture(scope="module")
def signers() -> Signers:
    return make_signers()


def scopes(rules: str = RULES) -> NameScopes:
    return NameScopes.of_policies([load_policy(BASE.read_text() + rules, name="p.yaml")])


Edge = Callable[..., FleetEdge]


@pytest.fixture
def edge(tmp_path: Path, signers: Signers) -> Edge:
    def make(said: NameScopes, **more: object) -> FleetEdge:
        return FleetEdge(tmp_path, signers, **{"scopes": lambda: said, **more})

    return make


def test_a_dedicated_tenant_goes_to_its_group_and_nobody_else_does(edge: Edge) -> None:
    for said in (scopes(), NameScopes.from_data(scopes().data())):
        fleet = edge(said, placement=FOUR)
        sent = [fleet.send(fleet.clients.acme) for _ in range(4)]
        assert {one.forwarded.group for one in sent} == {"g1"}
        placed = fleet.edge.placed_in(fleet.admit(fleet.clients.acme))
        assert placed.headers == {PLACEMENT_HEADER: "g1"}, "before its body is there"
        others = {fleet.send(fleet.clients.globex).forwarded.group for _ in range(4)}
        assert len(others) == 1 and "g1" not in others
    control = edge(scopes("placement: []\n"), placement=FOUR)
    homes = {control.send(key).forwarded.group for key in (control.clients.acme, control.clients.globex)}
    assert homes <= set(FOUR.groups), "the control: rendezvous alone says where"


def test_what_no_group_may_serve_is_refused_with_its_code(edge: Edge) -> None:
    fleet = edge(scopes(), placement=FOUR)
    with pytest.raises(RequestRefused) as refused:
        fleet.send(fleet.clients.acme, headers=HIGH)
    assert refused.value.status == 403
    assert json.loads(refused.value.body())["error"]["code"] == "placement_unmet"
    with pytest.raises(RequestRefused):
        fleet.edge.placed_in(fleet.admit(fleet.clients.acme, HIGH))
    assert fleet.send(fleet.clients.globex, headers=HIGH).forwarded.group == "g2", "the control"


def test_nothing_goes_to_a_group_before_a_policy_is_known(edge: Edge) -> None:
    fleet = edge(NameScopes(), placement=FOUR)
    with pytest.raises(RequestRefused) as refused:
        fleet.send(fleet.clients.acme)
    assert (refused.value.status, refused.value.client_code) == (503, "placement_unknown")
    assert fleet.edge.metrics.registry.get_sample_value("kvcustody_door_misplaced_total", {"code": "placement_unknown"})


def test_a_door_without_groups_refuses_what_its_own_may_not_serve(edge: Edge) -> None:
    fleet = edge(scopes())
    with pytest.raises(RequestRefused, match="no worker here"):
        fleet.send(fleet.clients.acme)
    assert fleet.send(fleet.clients.globex).forwarded.group == ""
    own = edge(scopes(), group="g1")
    assert own.send(own.clients.acme).json, "the control"


def test_a_request_that_fails_with_its_worker_is_presented_once(edge: Edge) -> None:
    """By the token: at each worker. No worker sees what another was given."""
    doors = "schema: kvcustody/identity@1\ndoors: {keys: doors.vkeys, group: g2}\n"
    fleet = edge(scopes(), retries=3, group="g2", doors=doors)
    uses = []
    for headers in ({}, HIGH):
        sent = fleet.send(fleet.clients.globex, headers=headers)
        uses.append(sum(fleet.workers[0].ask(sent.forwarded).status == 200 for _ in range(6)))
    assert uses == [4, 1]


def test_a_group_behind_a_shared_router_has_its_taints_in_the_body(edge: Edge) -> None:
    """Beside the hints of a client that go on; a client names no taint."""
    groups = {"g1": {"router": "http://r", "taints": ["east"]}, "g2": {"router": "http://r"}}
    document = PlacementDocument.model_validate({"schema": "kvcustody/placement@1", "groups": groups})
    fleet = edge(scopes(), placement=document)
    hints = {"prompt": "p", "nvext": {"agent_hints": {"osl": 7}}}
    sent = fleet.send(fleet.clients.acme, hints).json
    assert sent["nvext"] == {"agent_hints": {"osl": 7}, "routing_constraints": {"required_taints": ["east"]}}
    assert "routing_constraints" not in fleet.send(fleet.clients.globex, hints).json["nvext"], "the control"
    theirs = {"prompt": "p", "nvext": {"routing_constraints": {"required_taints": ["west"]}}}
    with pytest.raises(RequestRefused, match="nvext"):
        fleet.send(fleet.clients.acme, theirs)


def status_of(fleet: FleetEdge, headers: dict[str, str] | None = None) -> int:
    with pytest.raises(RequestRefused) as refused:
        fleet.send(fleet.clients.acme, headers=headers)
    return refused.value.status


@pytest.mark.parametrize("has_named", [True, False])
def test_past_its_lease_a_door_acts_by_the_last_rules_that_it_heard(edge: Edge, has_named: bool) -> None:
    """Whether or not it has named anybody by them. The control: one that heard none sends nobody anywhere."""
    known: list[KnownEpochs | None] = [KnownEpochs(EraseEpochs(), EpochTags(bytes(32)), None, scopes())]
    fleet, deaf = (
        edge(NameScopes(), placement=FOUR, scopes=None, epochs=epochs) for epochs in (lambda: known[0], lambda: None)
    )
    assert status_of(fleet, HIGH) == 403
    if has_named:
        fleet.send(fleet.clients.acme)
    known[0] = None
    assert fleet.send(fleet.clients.acme).forwarded.group == "g1" and status_of(fleet, HIGH) == 403
    assert status_of(deaf) == 503
