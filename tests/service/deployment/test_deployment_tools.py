"""The deployment files, read by the tools that people run: Helm itself, Kubernetes' schemas, and Compose.

Each is skipped where its tool is not installed: `pip install helm-python-sdk kubernetes-validate` (Helm 4 as a library,
and the schemas of Kubernetes' own API), `apt-get install docker-compose`. None needs a cluster or a container runtime.
"""

from __future__ import annotations

import copy
import shutil
import subprocess
from pathlib import Path
from typing import Any

import pytest
import yaml
from tests.service.deployment.test_deployment import (
    CHART,
    COMPOSE,
    KINDS,
    PACKAGING,
    REACHED,
    charted,
    kustomized,
)
from tests.service.deployment.test_fleet_deployment import CHART as FLEET
from tests.service.deployment.test_fleet_deployment import charted as fleet_objects

KUBERNETES = "1.31"


def helm() -> Any:
    return pytest.importorskip("helm_python", reason="helm-python-sdk is not installed")


CHANGED = {
    "settings": REACHED | {"issuers": [*REACHED["issuers"], {"keys": "https://<&>.example"}]},
    "tracing_endpoint": "http://collector.example:4318",
    "database_port": 6432,
    "egress": [{"ports": [{"port": 8443}]}],
}


def rendered(chart_folder: Path = CHART, **changed: Any) -> list[dict[str, Any]]:
    """A chart's objects as Helm renders them."""
    with helm().Chart.load(str(chart_folder)) as chart:
        manifests = chart.render(changed, name=chart_folder.name, namespace="default")
    return [one for text in manifests.values() for one in yaml.safe_load_all(text) if one]


def check(objects: list[dict[str, Any]]) -> None:
    """Every field of every object is one that Kubernetes has, of its type."""
    schemas = pytest.importorskip("kubernetes_validate", reason="kubernetes-validate is not installed")
    for one in objects:
        schemas.validate(one, KUBERNETES, strict=True)


@pytest.mark.parametrize("changed", [{}, CHANGED], ids=["as it comes", "with addresses"])
def test_helm_renders_what_the_other_tests_read(changed: dict[str, Any]) -> None:
    found = {one["kind"]: one for one in rendered(**changed)}
    expected, settings = charted(**changed)
    assert yaml.safe_load(found.pop("ConfigMap")["data"]["service.yaml"]) == settings
    assert found == expected and found.keys() == KINDS


@pytest.mark.parametrize("changed", [{}, {"workers": ["a", "b", "c"], "doors": ["front"]}])
def test_helm_renders_the_fleet_that_the_other_tests_read(changed: dict[str, Any]) -> None:
    def named(objects: list[dict[str, Any]]) -> dict[tuple[str, str], dict[str, Any]]:
        return {(one["kind"], one["metadata"]["name"]): one for one in objects}

    assert named(rendered(FLEET, **changed)) == named(fleet_objects(**changed))


@pytest.mark.parametrize("chart", [CHART, FLEET], ids=lambda folder: folder.name)
def test_helm_has_nothing_against_a_chart(chart: Path) -> None:
    found = helm().lint(str(chart))
    assert found["total_charts_linted"] == 1 and not found["errors"]
    assert max((one["severity"] for one in found["messages"]), default=0) <= 1, found  # 1: "an icon is recommended"


@pytest.mark.parametrize("made", ["kustomize", "helm", "fleet"])
def test_every_field_is_one_that_kubernetes_has(made: str) -> None:
    charts = {"helm": CHART, "fleet": FLEET}
    objects = rendered(charts[made]) if made in charts else [*kustomized()[0].values()]
    check(objects)
    wrong = copy.deepcopy(next(one for one in objects if one["kind"] == "StatefulSet"))
    wrong["spec"]["template"]["spec"]["containers"][0]["securityContext"]["readOnlyRootFileSystem"] = True
    with pytest.raises(Exception, match="readOnlyRootFileSystem"):  # a misspelt field is found
        check([wrong])


def test_compose_reads_its_file(tmp_path: Path) -> None:
    tool = shutil.which("docker-compose")
    if tool is None:
        pytest.skip("docker-compose is not installed")
    shutil.copytree(PACKAGING, tmp_path / "packaging")
    folder = tmp_path / "packaging" / COMPOSE.name
    (folder / "secrets").mkdir()
    document = yaml.safe_load((folder / "compose.yaml").read_text())
    for name in (*(Path(one["file"]).name for one in document["secrets"].values()), "service.env"):
        (folder / "secrets" / name).touch()
    del document["name"]  # Compose 1.29, which Debian has, does not know it

    def config() -> subprocess.CompletedProcess[str]:
        (folder / "compose.yaml").write_text(yaml.safe_dump(document))
        command = [tool, "-f", str(folder / "compose.yaml"), "config"]
        return subprocess.run(command, capture_output=True, text=True, timeout=60, check=False)

    read = config()
    assert read.returncode == 0, read.stderr
    assert yaml.safe_load(read.stdout)["services"].keys() == document["services"].keys()
    document["services"]["service"]["read_onlyy"] = True
    assert "read_onlyy" in config().stderr, "control"
