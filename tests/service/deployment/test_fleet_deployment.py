"""The fleet's chart and Compose file: closed, whole, and no way to a worker but through a door and the router."""

from __future__ import annotations

import re
from pathlib import Path
from typing import Any

import pytest
import yaml
from tests.service.deployment.test_deployment import COMPOSE, PACKAGING
from typer.testing import CliRunner

from kvcustody.console.main import app
from kvcustody.governance.settings import Settings
from standins.service.go_templates import fill

CHART = PACKAGING / "helm" / "kvcustody-fleet"
PARTS = {"door", "router", "worker", "nats", "keeper"}
REACHES = {("door", "router"), ("router", "worker"), ("worker", "nats"), ("door", "nats"), ("keeper", "nats")}
PRINCIPALS = ("gpu-0", "gpu-1", "door-0", "door-1", "keeper")
Objects = list[dict[str, Any]]


def charted(**changed: Any) -> Objects:
    """The chart's objects, with its own values but for those that are changed."""
    values = yaml.safe_load((CHART / "values.yaml").read_text()) | changed
    texts = [fill(path.read_text(), values, "kvcustody-fleet") for path in sorted(CHART.glob("templates/*"))]
    return [one for text in texts for one in yaml.safe_load_all(text) if one]


def pods(objects: Objects) -> Objects:
    """The templates of pods."""
    return [one["spec"]["template"] for one in objects if one["kind"] in ("StatefulSet", "Deployment")]


def part(pod: dict[str, Any]) -> str:
    return str(pod["metadata"]["labels"]["kvcustody.io/part"])


def containers(pod: dict[str, Any]) -> Objects:
    return [*pod["spec"].get("initContainers", ()), *pod["spec"]["containers"]]


def environment(container: dict[str, Any]) -> dict[str, str]:
    return {one["name"]: one["value"] for one in container.get("env", ())}


def unknown(variables: dict[str, str]) -> set[str]:
    """Names of ours that are no setting of a worker or door."""
    names = {name.removeprefix("KVCUSTODY_").lower() for name in variables if name.startswith("KVCUSTODY_")}
    return names - Settings.model_fields.keys()


def test_the_chart_is_closed() -> None:
    made = pods(charted())
    assert {part(pod) for pod in made} == PARTS
    for pod in made:
        assert pod["spec"]["securityContext"]["runAsNonRoot"]
        assert not pod["spec"]["automountServiceAccountToken"]
        volumes = {one["name"] for one in pod["spec"]["volumes"]} | {"state"}
        for container in containers(pod):
            closed = container["securityContext"]
            assert closed["readOnlyRootFilesystem"] and not closed["allowPrivilegeEscalation"]
            assert closed["capabilities"]["drop"] == ["ALL"] and container["resources"]["limits"]
            assert {mount["name"] for mount in container["volumeMounts"]} <= volumes
            assert unknown(environment(container)) == set()
    assert unknown({"KVCUSTODY_WORKER_NAMES": "x"}) == {"worker_names"}, "control"


def test_its_members_are_those_of_its_values() -> None:
    manifests = charted(workers=["a", "b", "c"], doors=["front"])
    names = {
        environment(one)["KVCUSTODY_WORKER_NAME"]
        for pod in pods(manifests)
        for one in pod["spec"]["containers"]
        if "KVCUSTODY_WORKER_NAME" in environment(one)
    }
    assert names == {"a", "b", "c", "front", "keeper"}
    [router] = [pod for pod in pods(manifests) if part(pod) == "router"]
    urls = [word for word in router["spec"]["containers"][0]["args"] if word.startswith("http")]
    assert urls == [f"http://kvcustody-fleet-{name}:8000" for name in ("a", "b", "c")]
    services = {one["metadata"]["name"]: one for one in manifests if one["kind"] == "Service"}
    for url in urls:
        service = services[re.sub(r"^http://(.*):8000$", r"\1", url)]
        chosen = service["spec"]["selector"].items()
        [worker] = [pod for pod in pods(manifests) if chosen <= pod["metadata"]["labels"].items()]
        assert service["spec"]["ports"][0]["port"] == 8000 and part(worker) == "worker"


def ways(objects: Objects) -> set[tuple[str, str]]:
    """Which part may come to which, as both its own policy and the other's let it; `clients` are outside."""
    policies = {
        one["spec"]["podSelector"]["matchLabels"]["kvcustody.io/part"]: one["spec"]
        for one in objects
        if one["kind"] == "NetworkPolicy"
    }

    def named(rules: Objects, side: str) -> set[str]:
        places = [place for rule in rules for place in rule.get(side, ())]
        chosen = [place.get("podSelector", {}).get("matchLabels", {}) for place in places]
        return {labels.get("kvcustody.io/part", "clients") for labels in chosen}

    lets_in = {(who, to) for to, spec in policies.items() for who in named(spec["ingress"], "from")}
    lets_out = {(who, to) for who, spec in policies.items() for to in named(spec["egress"], "to")}
    return {way for way in lets_in if way in lets_out or way[0] == "clients"}


def test_a_worker_is_reached_through_a_door_and_the_router_alone() -> None:
    manifests = charted()
    assert ways(manifests) == REACHES | {("clients", "door")}
    policies = [one for one in manifests if one["kind"] == "NetworkPolicy"]
    assert {one["spec"]["podSelector"]["matchLabels"]["kvcustody.io/part"] for one in policies} == PARTS
    ports = {part(pod): {p["name"] for c in containers(pod) for p in c.get("ports", ())} for pod in pods(manifests)}
    for one in policies:
        named = {port["port"] for rule in one["spec"]["ingress"] for port in rule["ports"]}
        assert named <= ports[one["spec"]["podSelector"]["matchLabels"]["kvcustody.io/part"]]
    [router] = [one for one in policies if one["metadata"]["name"].endswith("-router")]
    router["spec"]["ingress"][0]["from"].append({"namespaceSelector": {}})
    assert ("clients", "router") in ways(manifests), "control"


def test_every_file_that_a_setting_names_is_put_there() -> None:
    for pod in pods(charted()):
        sources = [
            source for volume in pod["spec"]["volumes"] for source in volume.get("projected", {}).get("sources", ())
        ]
        put = {item["path"] for source in sources for one in source.values() for item in one["items"]}
        words = [
            word for one in pod["spec"]["containers"] for word in (*environment(one).values(), *one.get("args", ()))
        ]
        used = {Path(word).name for word in words if str(word).startswith("/run/kvcustody/")}
        beside = {"doors.vkeys", "clients.yaml", "tls.crt", "tls.key"}  # named by documents, and by Envoy's
        assert used <= put <= used | beside, part(pod)


def test_settings_of_each_member_are_accepted() -> None:
    for pod in pods(charted()):
        for container in pod["spec"]["containers"]:
            given = {
                name.removeprefix("KVCUSTODY_").lower(): value
                for name, value in environment(container).items()
                if name.startswith("KVCUSTODY_")
            }
            assert not given or Settings(**given).worker_name in PRINCIPALS  # type: ignore[arg-type]


def test_envoy_is_made_for_the_door_beside_it_and_for_the_router(tmp_path: Path) -> None:
    manifests = charted()
    [first, *_] = [pod for pod in pods(manifests) if part(pod) == "door"]
    script = first["spec"]["initContainers"][0]["args"][0].replace("\\\n", " ")
    [command] = [line for line in script.splitlines() if "kvcustody door envoy" in line]
    words = command.split(">")[0].split()[1:]
    said = CliRunner().invoke(app, words)
    assert said.exit_code == 0, said.output
    places = re.findall(r"'address': '([^']+)'\n\s+'port_value': (\d+)", said.output)
    assert {("0.0.0.0", "8443"), ("127.0.0.1", "18131"), ("kvcustody-fleet-router", "30000")} == {*places}
    [door] = [one for one in first["spec"]["containers"] if one["name"] == "door"]
    assert door["args"][door["args"].index("--ext-proc") + 1] == "127.0.0.1:18131"
    services = {one["metadata"]["name"]: one["spec"] for one in manifests if one["kind"] == "Service"}
    assert services["kvcustody-fleet-router"]["ports"][0]["port"] == 30000


# -- Compose ----------------------------------------------------------------------------------------------------------


def composed() -> dict[str, Any]:
    made: dict[str, Any] = yaml.safe_load((COMPOSE / "fleet.yaml").read_text())
    return made


def test_compose_has_the_same_fleet_and_every_file_that_it_names() -> None:
    compose, plane = composed(), yaml.safe_load((COMPOSE / "compose.yaml").read_text())
    services = compose["services"]
    secrets = compose["secrets"].keys() | plane["secrets"].keys()
    named = {services[name]["environment"]["KVCUSTODY_WORKER_NAME"] for name in PRINCIPALS}
    assert named == {*PRINCIPALS} and {"envoy-0", "envoy-1", "router", "nats"} <= services.keys()
    for name, one in services.items():
        if name in plane["services"] or name == "envoy-configuration":
            continue
        assert one["read_only"] and one["cap_drop"] == ["ALL"] and one["user"] == "10001:10001", name
        assert unknown(one.get("environment", {})) == set()
        assert {secret["source"] for secret in one.get("secrets", ())} <= secrets
        for mount in one.get("volumes", ()):
            source = mount.split(":")[0]
            assert source in compose["volumes"] or (COMPOSE / source).exists(), source
        put = {secret["target"] for secret in one.get("secrets", ())}
        put |= {mount.split(":")[1] for mount in one.get("volumes", ())}
        used = {value for value in one.get("environment", {}).values() if str(value).startswith(("/run/", "/var/lib/"))}
        assert {path for path in used if not any(path.startswith(place) for place in put)} == set(), name
    assert all((PACKAGING / name).exists() for name in ("Containerfile", "Containerfile.router"))


def test_in_compose_too_a_worker_is_reached_by_the_router_alone() -> None:
    compose = composed()
    on = {
        network: {name for name, one in compose["services"].items() if network in one.get("networks", ())}
        for network in compose["networks"]
    }
    assert on["workers"] == {"gpu-0", "gpu-1", "router"} and on["routed"] == {"router", "door-0", "door-1"}
    assert on["clients"] == {"door-0", "door-1"}
    assert all(compose["networks"][name]["internal"] for name in ("workers", "routed", "events", "plane"))
    published = {name for name, one in compose["services"].items() if "ports" in one}
    assert published == {"door-0", "door-1"}
    for number in (0, 1):
        assert compose["services"][f"envoy-{number}"]["network_mode"] == f"service:door-{number}"


@pytest.mark.parametrize("name", ["worker-identity.yaml", "door-identity.yaml"])
def test_identity_documents_are_read(name: str) -> None:
    document = yaml.safe_load((COMPOSE / name).read_text())
    assert document["schema"] == "kvcustody/identity@1"
