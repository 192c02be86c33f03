"""Kustomize, Helm and Compose files are whole and closed; the dashboard asks for metrics that are exposed."""

from __future__ import annotations

import json
import re
from collections.abc import Iterator
from pathlib import Path
from typing import Any, get_args

import pytest
import yaml

from kvcustody.governance.api.declarations import every_operation
from kvcustody.governance.api.openapi_document import routed
from kvcustody.governance.observability.metrics import MEASURES
from kvcustody.governance.service.settings import ServiceSettings, load_service_settings
from kvcustody.governance.settings import Settings
from standins.service.go_templates import fill

PACKAGING = Path(__file__).resolve().parents[3] / "packaging"
BASE, CHART, COMPOSE = (
    PACKAGING / "kustomize" / "base",
    PACKAGING / "helm" / "kvcustody",
    PACKAGING / "compose",
)
KINDS = {"ServiceAccount", "StatefulSet", "Service", "NetworkPolicy", "PodDisruptionBudget", "Job"}


def kustomized() -> tuple[dict[str, Any], dict[str, Any]]:
    """The objects by kind, and the service's settings."""
    listed = yaml.safe_load((BASE / "kustomization.yaml").read_text())["resources"]
    objects = [one for name in listed for one in yaml.safe_load_all((BASE / name).read_text())]
    return {one["kind"]: one for one in objects}, yaml.safe_load((BASE / "settings.yaml").read_text())


def charted(**changed: Any) -> tuple[dict[str, Any], dict[str, Any]]:
    """The same of the chart, with its own values but for those that are changed."""
    values = yaml.safe_load((CHART / "values.yaml").read_text())
    values |= changed | {"settings": values["settings"] | changed.get("settings", {})}
    texts = [path.read_text() for path in sorted(CHART.glob("templates/*"))]
    objects = [yaml.safe_load(fill(text, values, "kvcustody")) for text in texts]
    found = {one["kind"]: one for one in objects if one is not None}
    return found, yaml.safe_load(found.pop("ConfigMap")["data"]["service.yaml"])


@pytest.mark.parametrize("made", [kustomized, charted])
def test_it_is_whole_and_closed(made: Any) -> None:
    manifests, settings = made()
    assert manifests.keys() == KINDS
    assert all({"apiVersion", "kind", "metadata"} <= one.keys() for one in manifests.values())
    names = {kind: one["metadata"]["name"] for kind, one in manifests.items()}
    assert names == dict.fromkeys(KINDS, "kvcustody") | {"Job": "kvcustody-upgrade"}
    pod = manifests["StatefulSet"]["spec"]["template"]["spec"]
    labels = manifests["StatefulSet"]["spec"]["template"]["metadata"]["labels"]
    chosen = manifests["StatefulSet"]["spec"]["selector"]["matchLabels"]
    assert chosen == labels == manifests["Service"]["spec"]["selector"]
    assert manifests["NetworkPolicy"]["spec"]["podSelector"]["matchLabels"] == labels
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
    assert served.listen.endswith(f":{ports['api']}") and served.workers_listen.endswith(f":{ports['workers']}")
    assert served.tls and served.subject_keys_url, "a ledger on a server needs a store of subject keys"


@pytest.mark.parametrize("made", [kustomized, charted])
def test_a_job_upgrades_the_schema_and_the_service_does_not(made: Any) -> None:
    manifests, settings = made()
    assert settings["migrate"] is False
    service = manifests["StatefulSet"]["spec"]["template"]["spec"]["containers"][0]
    job = manifests["Job"]["spec"]["template"]
    assert job["metadata"]["labels"]["app.kubernetes.io/name"] != "kvcustody", "the Service would lead clients to it"
    [container] = job["spec"]["containers"]
    assert (container["image"], container["args"]) == (service["image"], ["db", "upgrade"])
    assert job["spec"]["securityContext"]["runAsNonRoot"] and container["securityContext"]["readOnlyRootFilesystem"]
    [variable] = container["env"]
    assert variable["name"] == "KVCUSTODY_DATABASE_URL", "what `kvcustody db upgrade` reads"
    assert variable["valueFrom"] in [one.get("valueFrom") for one in service["env"]], "the service's own database"


def test_helm_upgrades_before_the_service_is_replaced() -> None:
    hooks = charted()[0]["Job"]["metadata"]["annotations"]
    assert hooks["helm.sh/hook"] == "pre-install,pre-upgrade"


@pytest.mark.parametrize("made", [kustomized, charted])
def test_a_slow_start_and_a_roll_end_nobody(made: Any) -> None:
    pod = made()[0]["StatefulSet"]["spec"]["template"]["spec"]
    service = pod["containers"][0]
    started, live = service["startupProbe"], service["livenessProbe"]
    assert started["httpGet"] == live["httpGet"] and started["periodSeconds"] * started["failureThreshold"] >= 300
    word, seconds = service["lifecycle"]["preStop"]["exec"]["command"]
    assert word == "sleep" and 0 < int(seconds) < pod["terminationGracePeriodSeconds"]


def test_the_chart_mounts_what_the_settings_of_a_user_need() -> None:
    volume = {"name": "trust", "secret": {"secretName": "policy-trust"}}
    mount = {"name": "trust", "mountPath": "/etc/trust", "readOnly": True}
    pod = charted(volumes=[volume], mounts=[mount])[0]["StatefulSet"]["spec"]["template"]["spec"]
    assert volume in pod["volumes"] and mount in pod["containers"][0]["volumeMounts"]


def test_the_chart_has_prometheus_scrape_with_a_key_where_there_is_one() -> None:
    assert "ServiceMonitor" not in charted()[0]
    manifests = charted(metrics_secret="metrics-key")[0]
    monitor = manifests["ServiceMonitor"]["spec"]
    assert monitor["selector"]["matchLabels"] == manifests["Service"]["metadata"]["labels"]
    [endpoint] = monitor["endpoints"]
    assert endpoint["authorization"]["credentials"] == {"name": "metrics-key", "key": "key"}
    assert endpoint["port"] in {port["name"] for port in manifests["Service"]["spec"]["ports"]}


def test_open_files_suffice_for_the_connections() -> None:
    """The process raises its own limit, up to what the system lets it."""
    needed = 2 * ServiceSettings.model_fields["connections_max"].default
    unit = (PACKAGING / "systemd" / "kvcustody.service").read_text(encoding="utf-8")
    limit = re.search(r"^LimitNOFILE=(\d+)$", unit, re.MULTILINE)
    assert limit is not None and int(limit[1]) >= needed and "TimeoutStartSec=" in unit
    compose = yaml.safe_load((COMPOSE / "compose.yaml").read_text())["services"]
    assert compose["service"]["ulimits"]["nofile"] >= needed
    assert compose["service"]["depends_on"] == {"upgrade": {"condition": "service_completed_successfully"}}
    assert "kvcustody db upgrade" in compose["upgrade"]["entrypoint"][-1]


def test_a_form_that_helm_would_fill_otherwise_is_seen() -> None:
    with pytest.raises(AssertionError, match="does not know"):
        fill('{{ include "x" . }}', {}, "kvcustody")
    with pytest.raises(KeyError):
        fill("{{ .Values.nothing }}", {}, "kvcustody")


REACHED = {
    "issuers": [{"keys": "https://login.example:1443/jwks"}, {"keys": "/etc/kvcustody/keys.json"}],
    "webhooks": [{"url": "https://siem.example:2443/in?to=x:9999"}],
    "inbox_webhook": {"url": "https://chat.example/hook"},
    "inbox_mail": {"server": "[2001:db8::25]:587"},
    "report_destinations": [
        {"kind": "folder", "path": "/srv/reports"},
        {"kind": "s3", "endpoint": "https://store.example:3443"},
        {"kind": "webhook", "url": "https://[2001:db8::1]"},
    ],
    "subject_keys_url": "postgresql+psycopg://custody:pass@one.example,two.example:6432/subjects",
}
"""Settings that ask for outbound connections, each to a port of its own."""
PORTS = {
    "issuers": {1443},
    "webhooks": {2443},
    "inbox_webhook": {443},
    "inbox_mail": {587},
    "report_destinations": {443, 3443},
    "subject_keys_url": {5432, 6432},
}


def egress(**changed: Any) -> set[int]:
    policy = charted(**changed)[0]["NetworkPolicy"]
    return {at["port"] for rule in policy["spec"]["egress"] for at in rule["ports"]} - {53}


@pytest.mark.parametrize("setting", REACHED)
def test_the_chart_lets_out_what_a_setting_asks_for(setting: str) -> None:
    assert egress(settings={setting: REACHED[setting]}) == PORTS[setting] | {5432}


def test_the_chart_lets_out_no_more_than_that() -> None:
    assert egress() == {5432} and egress(database_port=6432) == {6432}
    assert egress(egress=[{"ports": [{"port": 8443}]}]) == {5432, 8443}
    assert egress(tracing_endpoint="http://collector.example:4318") == {5432, 4318}
    assert egress(tracing_endpoint="http://collector.example") == {5432, 80}


def models_in(annotation: Any) -> Iterator[Any]:
    if hasattr(annotation, "model_fields"):
        yield annotation
    for inner in get_args(annotation):
        yield from models_in(inner)


def addresses(model: Any) -> set[str]:
    """Settings that hold an address which the service connects to, by the names of their fields."""
    names = set()
    for name, field in model.model_fields.items():
        stated = {at for part in models_in(field.annotation) for at in part.model_fields}
        if stated & {"keys", "url", "endpoint", "server"} or name.endswith("_url"):
            names.add(name)
    return names - {"database_url"}  # a secret; `database_port` says its port


def test_every_setting_with_an_address_is_among_these() -> None:
    assert addresses(ServiceSettings) == REACHED.keys()


def named_setting(name: str) -> None:
    setting = name.removeprefix("KVCUSTODY_SERVICE_").lower()
    assert setting in ServiceSettings.model_fields or setting == "config", name


def test_compose_is_closed_and_every_file_that_it_names_is_there_or_a_secret() -> None:
    compose = yaml.safe_load((COMPOSE / "compose.yaml").read_text())
    service = compose["services"]["service"]
    assert service["read_only"] and service["cap_drop"] == ["ALL"] and service["user"] == "10001:10001"
    for name in service["environment"]:
        named_setting(name)
    settings = load_service_settings(**yaml.safe_load((COMPOSE / "service.yaml").read_text()))
    published = {port.rpartition(":")[2] for port in service["ports"]}
    assert {settings.listen.rpartition(":")[2], settings.workers_listen.rpartition(":")[2]} == published
    assert settings.tls and settings.subject_keys_url
    assert compose["networks"]["ledger"]["internal"] and compose["services"]["database"]["networks"] == ["ledger"]
    assert "ports" not in compose["services"]["database"]
    for one in compose["services"].values():
        for mount in one.get("volumes", ()):
            source = mount.split(":")[0]
            assert source in compose["volumes"] or (COMPOSE / source).exists(), source
        for secret in one.get("secrets", ()):
            assert (secret if isinstance(secret, str) else secret["source"]) in compose["secrets"]
    assert all(one["file"].startswith("secrets/") for one in compose["secrets"].values())
    assert (COMPOSE / compose["services"]["service"]["build"]["context"] / "packaging" / "Containerfile").exists()
    scraped = yaml.safe_load((COMPOSE / "prometheus.yaml").read_text())["scrape_configs"][0]
    assert scraped["static_configs"][0]["targets"] == [f"service:{settings.listen.rpartition(':')[2]}"]


# -- closure: every name in these files is one that the service knows -------------------------------------------------

VARIABLE = re.compile(r"\bKVCUSTODY_[A-Z0-9_]+")
DEPLOYED = ("compose", "helm", "kustomize", "systemd", "Containerfile", "Containerfile.router")
SCRATCH = "/tmp"  # of Python itself
CONFIG = "/etc/kvcustody/service.yaml"


def variables(text: str) -> list[str]:
    """Environment variables in a file that are no setting of the service, nor one of a worker or door."""
    named = {name.removeprefix("KVCUSTODY_SERVICE_").lower() for name in VARIABLE.findall(text)}
    workers = {f"kvcustody_{name}" for name in Settings.model_fields}
    return sorted(named - set(ServiceSettings.model_fields) - workers - {"config"})


def test_every_variable_of_the_deployment_files_is_a_setting() -> None:
    files = [
        path
        for name in DEPLOYED
        for path in ((PACKAGING / name).rglob("*") if (PACKAGING / name).is_dir() else [PACKAGING / name])
        if path.is_file() and "secrets" not in path.parts
    ]
    texts = {path: path.read_text(encoding="utf-8") for path in files}
    assert {path: variables(text) for path, text in texts.items()} == {path: [] for path in files}
    assert sum(bool(VARIABLE.search(text)) for text in texts.values()) >= 4, "or nothing was looked at"


def test_a_variable_that_is_no_setting_is_seen() -> None:
    assert variables("KVCUSTODY_SERVICE_LISTENS=x KVCUSTODY_SERVICE_LISTEN=y KVCUSTODY_LEDGER=z") == [
        "kvcustody_ledger",
        "listens",
    ]


def paths_of(settings: dict[str, Any]) -> set[str]:
    """Every path that a settings file names; a database's file too."""
    found = {str(one).partition(":///")[2] or str(one) for one in settings.values()}
    return {one for one in found if one.startswith("/")} | {CONFIG}


def is_in(path: str, folder: str) -> bool:
    return path == folder or path.startswith(folder.rstrip("/") + "/")


def unclosed(mounted: set[str], settings: dict[str, Any]) -> tuple[set[str], set[str]]:
    """What is mounted and used by no setting, and what a setting names that is not mounted."""
    used = paths_of(settings)
    idle = {mount for mount in mounted - {SCRATCH} if not any(is_in(path, mount) for path in used)}
    return idle, {path for path in used if not any(is_in(path, mount) for mount in mounted)}


def composed() -> tuple[set[str], dict[str, Any]]:
    service = yaml.safe_load((COMPOSE / "compose.yaml").read_text())["services"]["service"]
    mounted = {one.split(":")[1] for one in service["volumes"]} | {*service["tmpfs"]}
    mounted |= {one["target"] for one in service["secrets"]}
    return mounted, yaml.safe_load((COMPOSE / "service.yaml").read_text())


@pytest.mark.parametrize("made", [kustomized, charted])
def test_what_kubernetes_mounts_and_probes_is_what_the_service_uses(made: Any) -> None:
    objects, settings = made()
    pod = objects["StatefulSet"]["spec"]["template"]["spec"]
    service, keys = pod["containers"][0], pod["initContainers"][0]
    mounted = {mount["mountPath"] for mount in service["volumeMounts"]}
    assert unclosed(mounted, settings) == (set(), set())
    assert unclosed(mounted - {"/run/tls"}, settings)[1] == {
        settings[name] for name in ("tls_certificate_path", "tls_key_path", "tls_client_ca_path")
    }, "control"
    # what the first container copies is what the second one reads, from a volume that it may write to
    copied = re.search(r"cp (.*) (/\S+)/\s", keys["args"][0])
    assert copied is not None
    targets = {f"{copied[2]}/{Path(source).name}" for source in copied[1].split()}
    assert targets == {one for one in paths_of(settings) if is_in(one, "/run/tls")}
    writable = {mount["mountPath"] for mount in keys["volumeMounts"] if not mount.get("readOnly")}
    assert copied[2] in writable and all(
        any(is_in(source, mount["mountPath"]) for mount in keys["volumeMounts"]) for source in copied[1].split()
    )
    ports = {port["name"] for port in service["ports"]}
    assert {port["targetPort"] for port in objects["Service"]["spec"]["ports"]} == ports
    assert {port["port"] for rule in objects["NetworkPolicy"]["spec"]["ingress"] for port in rule["ports"]} == ports
    probed = [service[name]["httpGet"] for name in ("readinessProbe", "livenessProbe")]
    assert [one["path"] for one in probed] == ["/health/ready", "/health/live"]
    assert {one["path"] for one in probed} <= {
        getattr(route, "path", None) for route in routed(every_operation().by_name.values()).routes
    }
    assert {(one["port"], one["scheme"]) for one in probed} == {("api", "HTTPS")}
    named = {one["valueFrom"]["secretKeyRef"]["name"] for one in service["env"] if "secretKeyRef" in str(one)}
    named |= {one["secret"]["secretName"] for one in pod["volumes"] if "secret" in one}
    page = (PACKAGING.parent / "docs" / "how-to" / "operate" / "start-the-service.md").read_text(encoding="utf-8")
    assert named and all(f"`{name}`" in page for name in named), "whoever installs it is told of each secret"


def test_what_compose_mounts_is_what_the_service_uses() -> None:
    mounted, settings = composed()
    assert unclosed(mounted, settings) == (set(), set())
    assert unclosed(mounted | {"/run/unused"}, settings)[0] == {"/run/unused"}, "control"
    assert unclosed(mounted - {"/run/tls/ca.crt"}, settings)[1] == {"/run/tls/ca.crt"}, "control"


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
    page = (PACKAGING.parent / "docs" / "reference" / "metrics.md").read_text(encoding="utf-8")
    dashboard = (PACKAGING / "grafana" / "kvcustody.json").read_text()
    for name in set(re.findall(r"kvcustody_\w+", dashboard)):
        assert re.sub(r"_bucket$", "", name) in page, name


def test_the_chart_starts_changed_settings_anew_and_brings_renewed_keys() -> None:
    values = yaml.safe_load((CHART / "values.yaml").read_text())
    template = (CHART / "templates" / "stateful-set.yaml").read_text()
    pods = []
    for settings in (values["settings"], values["settings"] | {"log_level": "debug"}):
        made = yaml.safe_load(fill(template, values | {"settings": settings}, "kvcustody"))
        pods.append(made["spec"]["template"])
    sums = [pod["metadata"]["annotations"]["checksum/settings"] for pod in pods]
    assert sums[0] != sums[1], "control: the same settings have the same sum"
    renewing = next(each for each in pods[0]["spec"]["containers"] if each["name"] == "renewed-keys")
    mounts = {mount["mountPath"]: mount for mount in renewing["volumeMounts"]}
    assert mounts["/run/secrets/tls"]["readOnly"] and "readOnly" not in mounts["/run/tls"]
