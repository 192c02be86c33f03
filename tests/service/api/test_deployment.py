"""Kustomize, Helm and Compose files are whole and closed; the dashboard asks for metrics that are exposed."""

from __future__ import annotations

import json
import re
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import yaml

from kvcustody.console.documentation import render
from kvcustody.governance.observability.metrics import MEASURES
from kvcustody.governance.service.settings import ServiceSettings, load_service_settings

PACKAGING = Path(__file__).resolve().parents[3] / "packaging"
BASE, CHART, COMPOSE = (
    PACKAGING / "kustomize" / "base",
    PACKAGING / "helm" / "kvcustody",
    PACKAGING / "compose",
)
KINDS = {"ServiceAccount", "StatefulSet", "Service", "NetworkPolicy", "PodDisruptionBudget"}


def kustomized() -> tuple[dict[str, Any], dict[str, Any]]:
    """The objects by kind, and the service's settings."""
    listed = yaml.safe_load((BASE / "kustomization.yaml").read_text())["resources"]
    objects = [one for name in listed for one in yaml.safe_load_all((BASE / name).read_text())]
    return {one["kind"]: one for one in objects}, yaml.safe_load((BASE / "settings.yaml").read_text())


def value(place: str, values: dict[str, Any]) -> Any:
    for part in place.split("."):
        values = values[part]
    return values


def filled(template: str, values: dict[str, Any]) -> str:
    """A template of the chart as Helm fills it: the chart uses these three forms and no other."""

    def fill(found: re.Match[str]) -> str:
        form = found[1].strip()
        if form == ".Release.Name":
            return "kvcustody"
        if plain := re.fullmatch(r"\.Values\.([A-Za-z.]+)", form):
            return str(value(plain[1], values))
        if nested := re.fullmatch(r"toJson \.Values\.([A-Za-z.]+)", form):
            return json.dumps(value(nested[1], values))
        raise AssertionError(f"a form that this test does not know: {form}")

    return re.sub(r"\{\{(?!\})(.*?)\}\}", fill, template)


def charted() -> tuple[dict[str, Any], dict[str, Any]]:
    """The same of the chart, with its own values."""
    values = yaml.safe_load((CHART / "values.yaml").read_text())
    objects = [yaml.safe_load(filled(path.read_text(), values)) for path in sorted(CHART.glob("templates/*"))]
    found = {one["kind"]: one for one in objects}
    return found, yaml.safe_load(found.pop("ConfigMap")["data"]["service.yaml"])


@pytest.mark.parametrize("made", [kustomized, charted])
def test_it_is_whole_and_closed(made: Any) -> None:
    found, settings = made()
    assert found.keys() == KINDS
    assert all({"apiVersion", "kind", "metadata"} <= one.keys() for one in found.values())
    assert all(one["metadata"]["name"] == "kvcustody" for one in found.values())
    pod = found["StatefulSet"]["spec"]["template"]["spec"]
    labels = found["StatefulSet"]["spec"]["template"]["metadata"]["labels"]
    chosen = found["StatefulSet"]["spec"]["selector"]["matchLabels"]
    assert chosen == labels == found["Service"]["spec"]["selector"]
    assert found["NetworkPolicy"]["spec"]["podSelector"]["matchLabels"] == labels
    assert pod["securityContext"]["runAsNonRoot"] and not pod["automountServiceAccountToken"]
    volumes = {volume["name"] for volume in pod["volumes"]} | {"state"}
    for container in pod["initContainers"] + pod["containers"]:
        closed = container["securityContext"]
        assert closed["readOnlyRootFilesystem"] and not closed["allowPrivilegeEscalation"]
        assert closed["capabilities"]["drop"] == ["ALL"] and container["resources"]["limits"]
        assert {mount["name"] for mount in container["volumeMounts"]} <= volumes
        for variable in container.get("env", ()):
            named_setting(variable["name"])
    ports = {port["name"]: port["containerPort"] for port in pod["containers"][0]["ports"]}
    served = load_service_settings(**settings)
    assert served.listen.endswith(f":{ports['api']}") and served.workers_listen.endswith(
        f":{ports['workers']}"
    )
    assert served.tls and served.subject_keys_url, "a ledger on a server needs a store of subject keys"


def test_a_form_that_helm_would_fill_otherwise_is_seen() -> None:
    with pytest.raises(AssertionError, match="does not know"):
        filled('{{ include "x" . }}', {})
    with pytest.raises(KeyError):
        filled("{{ .Values.nothing }}", {})


def named_setting(name: str) -> None:
    setting = name.removeprefix("KVCUSTODY_SERVICE_").lower()
    assert setting in ServiceSettings.model_fields or setting == "config", name


def test_compose_is_closed_and_every_file_that_it_names_is_there_or_a_secret() -> None:
    made = yaml.safe_load((COMPOSE / "compose.yaml").read_text())
    service = made["services"]["service"]
    assert service["read_only"] and service["cap_drop"] == ["ALL"] and service["user"] == "10001:10001"
    for name in service["environment"]:
        named_setting(name)
    settings = load_service_settings(**yaml.safe_load((COMPOSE / "service.yaml").read_text()))
    published = {port.rpartition(":")[2] for port in service["ports"]}
    assert {settings.listen.rpartition(":")[2], settings.workers_listen.rpartition(":")[2]} == published
    assert settings.tls and settings.subject_keys_url
    assert made["networks"]["ledger"]["internal"] and made["services"]["database"]["networks"] == ["ledger"]
    assert "ports" not in made["services"]["database"]
    for one in made["services"].values():
        for mount in one.get("volumes", ()):
            source = mount.split(":")[0]
            assert source in made["volumes"] or (COMPOSE / source).exists(), source
        for secret in one.get("secrets", ()):
            assert (secret if isinstance(secret, str) else secret["source"]) in made["secrets"]
    assert all(one["file"].startswith("secrets/") for one in made["secrets"].values())
    assert (
        COMPOSE / made["services"]["service"]["build"]["context"] / "packaging" / "Containerfile"
    ).exists()
    scraped = yaml.safe_load((COMPOSE / "prometheus.yaml").read_text())["scrape_configs"][0]
    assert scraped["static_configs"][0]["targets"] == [f"service:{settings.listen.rpartition(':')[2]}"]


# -- the dashboard --------------------------------------------------------------------------------------------------


def known() -> dict[str, set[str]]:
    """Every name that a query may ask for, with the labels that it has."""
    names: dict[str, set[str]] = {}
    for measure in MEASURES:
        name, labels = f"kvcustody_{measure.name}", set(measure.labels)
        if measure.kind == "histogram":
            names |= {f"{name}_bucket": labels | {"le"}, f"{name}_sum": labels, f"{name}_count": labels}
        else:
            names[name] = labels
    return names


def queries(dashboard: dict[str, Any]) -> Iterator[tuple[str, str]]:
    for panel in dashboard["panels"]:
        for target in panel.get("targets", ()):
            yield target["expr"], target["legendFormat"]


def wrong(expression: str, legend: str) -> list[str]:
    """What of a query is of no metric: names, labels that are chosen, grouped by or shown."""
    metrics = known()
    named = re.findall(r"kvcustody_\w+", expression)
    labels: set[str] = set().union(*(metrics.get(name, set()) for name in named))
    used = re.findall(r"(\w+)\s*(?:=~|!=|=)\s*\"", expression) + re.findall(r"\{\{(\w+)\}\}", legend)
    for group in re.findall(r"by \(([^)]*)\)", expression):
        used += [part.strip() for part in group.split(",")]
    return [name for name in named if name not in metrics] + [one for one in used if one not in labels]


def test_every_query_of_the_dashboard_asks_for_what_is_exposed() -> None:
    dashboard = json.loads((PACKAGING / "grafana" / "kvcustody.json").read_text())
    asked = list(queries(dashboard))
    assert len(asked) > 20 and {expression: wrong(expression, legend) for expression, legend in asked} == {
        expression: [] for expression, _ in asked
    }
    assert len({panel["id"] for panel in dashboard["panels"]}) == len(dashboard["panels"])
    text = " ".join(expression for expression, _ in asked)
    for needed in (
        "erasure_overdue",
        "erasure_next_deadline",
        "ledger_unwitnessed",
        "next_end",
        "inbox_items",
    ):
        assert f"kvcustody_{needed}" in text, needed


def test_a_query_for_what_is_not_there_is_seen() -> None:
    assert wrong("sum by (tenat) (kvcustody_erasure)", "{{x}}") == ["kvcustody_erasure", "x", "tenat"]
    assert wrong('kvcustody_erasures{state="missed"}', "{{state}}") == []


def test_the_page_of_metrics_has_what_the_dashboard_shows() -> None:
    page = render((PACKAGING.parent / "docs" / "operate" / "metrics.md").read_text(encoding="utf-8"))
    dashboard = (PACKAGING / "grafana" / "kvcustody.json").read_text()
    for name in set(re.findall(r"kvcustody_\w+", dashboard)):
        assert re.sub(r"_bucket$", "", name) in page, name
