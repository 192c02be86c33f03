"""Placement groups: where a tenant's requests go, what moves when groups change, and that tokens hold them to it."""

from __future__ import annotations

import asyncio
from collections import Counter
from pathlib import Path
from typing import Any

import httpx
import pytest
import yaml

from kvcustody.errors import ConfigError
from kvcustody.governance.edge.door_token import DoorTokens, PresentedToken, RejectedToken
from kvcustody.governance.edge.placement_document import PlacementDocument, read_placement
from kvcustody.governance.identity.principal import Principal
from kvcustody.integrations.door.envoy_configuration import ListenPlace, envoy_configuration
from kvcustody.integrations.door.placement_groups import (
    PLACEMENT_HEADER,
    PlacementGroups,
)
from kvcustody.integrations.door.reverse_proxy import ReverseProxy
from kvcustody.policies.table.placement import Demand
from standins.integrations.door_world import Signers, make_signers, secret
from standins.integrations.fleet_edge import FleetEdge


def document(groups: int = 4, spread: int = 1, first: int = 0) -> PlacementDocument:
    named = {f"g{number}": {"router": f"http://r{number}"} for number in range(first, groups)}
    return PlacementDocument.model_validate({"schema": "kvcustody/placement@1", "groups": named, "spread": spread})


def of(found: PlacementDocument, *who: Any, **more: Any) -> str | None:
    return PlacementGroups(found, secret()).of(Principal("corp", *who), **more)


GROUPS = ("g0", "g1", "g2", "g3")
TENANTS = [f"t{number}" for number in range(200)]


def test_a_tenants_subjects_go_to_one_group_and_tenants_to_all() -> None:
    groups = PlacementGroups(document(), secret())
    where = {
        tenant: {groups.of(Principal("corp", tenant, subject)) for subject in (None, "ann", "bob")}
        for tenant in TENANTS
    }
    assert all(len(found) == 1 for found in where.values())
    counts = Counter(found.pop() for found in where.values())
    assert set(counts) == {"g0", "g1", "g2", "g3"} and min(counts.values()) > 25


def test_spread_is_how_many_groups_a_tenant_has_and_a_subject_has_one() -> None:
    groups = PlacementGroups(document(spread=2), secret())
    seen = [groups.of(Principal("corp", "acme", f"s{number}")) for number in range(64)]
    assert len(set(seen)) == 2 and min(Counter(seen).values()) > 10
    for subject, session in (("ann", None), (None, "chat")):
        assert len({groups.of(Principal("corp", "acme", subject, session)) for _ in range(8)}) == 1
    sessions = {groups.of(Principal("corp", "acme", "ann", f"c{number}")) for number in range(16)}
    assert len(sessions) == 1, "of a subject all sessions"


def test_a_group_that_goes_moves_its_own_tenants_alone() -> None:
    before, after = document(4), document(4, first=1)
    moved = [tenant for tenant in TENANTS if of(before, tenant) != of(after, tenant)]
    assert moved == [tenant for tenant in TENANTS if of(before, tenant) == "g0"] != []


def test_what_policy_demands_comes_before_rendezvous() -> None:
    demand = Demand(frozenset({"g1", "g2", "elsewhere"}), frozenset({"g1"}))
    assert {of(document(), tenant, demand=demand) for tenant in TENANTS} == {"g2"}
    assert of(document(), "acme", demand=Demand(frozenset({"elsewhere"}))) is None


def test_another_secret_places_otherwise() -> None:
    """A tenant that chooses its name cannot choose its group: without the secret it does not know the weights."""
    other = secret()
    other.writable()[:] = bytes(32)
    theirs = PlacementGroups(document(), other)
    assert [of(document(), tenant) for tenant in TENANTS] != [
        theirs.of(Principal("corp", tenant)) for tenant in TENANTS
    ]


@pytest.mark.parametrize(
    ("text", "why"),
    [
        ("groups: {a: {router: r}}\nspread: 2", "spread"),
        ("groups: {a: {router: r, workers: [w]}, b: {router: s, workers: [w]}}", "two groups"),
        ("groups: {}", "groups"),
        ("groups: {a: {router: r, label: x}}", "label"),
    ],
)
def test_a_document_that_cannot_be_meant_is_refused(tmp_path: Path, text: str, why: str) -> None:
    (tmp_path / "placement.yaml").write_text(f"schema: kvcustody/placement@1\n{text}\n")
    with pytest.raises(ConfigError, match=why):
        read_placement(tmp_path / "placement.yaml")


@pytest.fixture(scope="module")
def signers() -> Signers:
    return make_signers()


def test_a_token_is_for_the_group_that_its_request_goes_to(tmp_path: Path, signers: Signers) -> None:
    fleet = FleetEdge(tmp_path, signers, placement=document())
    tokens = {name: DoorTokens(lambda: [fleet.key.verifier], fleet.clock, group=name) for name in GROUPS}
    sent = fleet.send(fleet.clients.alice, headers={PLACEMENT_HEADER: "g-of-the-victim"})
    assert PLACEMENT_HEADER not in sent.kept
    group = sent.forwarded.group
    assert sent.forwarded.headers[PLACEMENT_HEADER] == group and group in GROUPS
    assert fleet.edge.placed_in(fleet.admit(fleet.clients.alice)).headers == {PLACEMENT_HEADER: group}
    token = sent.forwarded.headers["authorization"].split()[1]
    for name, verifier in tokens.items():
        found = verifier.present(token)
        assert found == RejectedToken("other-group") if name != group else isinstance(found, PresentedToken)


def test_a_proxy_sends_each_request_to_its_groups_router(tmp_path: Path, signers: Signers) -> None:
    placement = document()
    fleet, asked = FleetEdge(tmp_path, signers, placement=placement), list[tuple[str, str | None]]()

    def router(request: httpx.Request) -> httpx.Response:
        asked.append((request.url.host, request.headers.get(PLACEMENT_HEADER)))
        return httpx.Response(200, stream=httpx.ByteStream(b"{}"))

    async def run() -> None:
        behind = httpx.AsyncClient(transport=httpx.MockTransport(router), base_url="http://r-first")
        routers = {name: group.router for name, group in placement.groups.items()}
        proxy = ReverseProxy(fleet.edge, behind, body_bytes_max=4096, under_way_bytes_max=4096, routers=routers)
        async with (
            behind,
            httpx.AsyncClient(transport=httpx.ASGITransport(proxy), base_url="http://door") as client,
        ):
            for key in (fleet.clients.alice, fleet.clients.acme, fleet.clients.globex):
                headers = {"authorization": f"Bearer {key}", PLACEMENT_HEADER: "g9"}
                answer = await client.post("/v1/completions", json={"prompt": "p"}, headers=headers)
                assert answer.status_code == 200
            assert (await client.get("/health", headers={PLACEMENT_HEADER: "g9"})).status_code == 200

    asyncio.run(run())
    *placed, opened = asked
    assert opened == ("r-first", None), "who needs no identity is in no group"
    assert all(host == f"r{(group or '')[1:]}" for host, group in placed)
    assert placed[0] == placed[1], "of a tenant all requests"


def test_envoy_has_a_route_for_each_group_and_none_for_another() -> None:
    places = {name: ListenPlace("127.0.0.1", 1000 + number) for number, name in enumerate(GROUPS)}
    door, listen = ListenPlace("127.0.0.1", 1), ListenPlace("127.0.0.1", 2)
    envoy = yaml.safe_load(envoy_configuration(listen, door, places, body_bytes_max=1 << 20))["static_resources"]
    (chain,) = envoy["listeners"][0]["filter_chains"]
    (host,) = chain["filters"][0]["typed_config"]["route_config"]["virtual_hosts"]
    *grouped, unknown, rest = host["routes"]
    matched = {each["route"]["cluster"]: each["match"]["headers"] for each in grouped}
    assert matched == {
        f"router-{name}": [{"name": PLACEMENT_HEADER, "string_match": {"exact": name}}] for name in GROUPS
    }
    assert unknown["direct_response"] == {"status": 503}
    assert unknown["match"]["headers"] == [{"name": PLACEMENT_HEADER, "present_match": True}]
    assert rest == {"match": {"prefix": "/"}, "route": {"cluster": "router", "timeout": "0s"}}
    assert {f"router-{name}" for name in GROUPS} < {cluster["name"] for cluster in envoy["clusters"]}
