"""Pages that are written from what is served are current; packaging is well-formed and as closed as it says."""

from __future__ import annotations

import configparser
from pathlib import Path

from kvcustody.governance.api.declarations import every_operation
from kvcustody.governance.api.openapi_document import whole_document
from kvcustody.governance.observability.metrics import (
    MEASURES,
    exposition,
    families,
    of_worker,
    worker_status,
)
from kvcustody.governance.service.access.roles import PERMISSIONS
from kvcustody.governance.service.problem_details import TYPES
from kvcustody.governance.service.settings import (
    ServiceSettings,
)

ROOT = Path(__file__).resolve().parents[3]


def test_the_query_that_is_taken_is_the_one_that_is_documented() -> None:
    api = every_operation()
    documented = {
        operation["operationId"]: {item["name"] for item in operation.get("parameters", ()) if item["in"] == "query"}
        for methods in whole_document()["paths"].values()
        for operation in methods.values()
    }
    taken = {name: api.functions[name].queries for name in api.by_name}
    assert taken == documented and "tenant" in documented["listEvents"]


def test_the_pages_show_every_role_and_problem() -> None:
    text = (ROOT / "docs" / "reference" / "roles.md").read_text(encoding="utf-8")
    assert all(f"| `{role.value}` |" in text for role in PERMISSIONS)
    problems = (ROOT / "docs" / "reference" / "problems.md").read_text(encoding="utf-8")
    assert all(kind.uri in problems for kind in TYPES.values())


def test_the_unit_is_closed_and_names_settings() -> None:
    unit = configparser.ConfigParser(strict=False, interpolation=None, delimiters=("=",))
    unit.optionxform = str  # type: ignore[method-assign,assignment]
    text = (ROOT / "packaging" / "systemd" / "kvcustody.service").read_text()
    unit.read_string(text)
    assert unit["Service"]["Type"] == "notify" and unit["Service"]["CapabilityBoundingSet"] == ""
    assert unit["Service"]["ExecStart"].endswith("kvcustody serve") and unit["Service"]["NoNewPrivileges"] == "yes"
    for line in text.splitlines():
        if line.startswith("Environment=KVCUSTODY_SERVICE_"):
            name = line.split("=")[1].removeprefix("KVCUSTODY_SERVICE_").lower()
            assert name in ServiceSettings.model_fields or name == "config"


def test_the_container_runs_as_nobody_special() -> None:
    text = (ROOT / "packaging" / "Containerfile").read_text()
    lines = [line for line in text.splitlines() if line and not line.startswith((" ", "#"))]
    assert "USER 10001:10001" in lines and lines[-1] == 'CMD ["serve"]' and "torch" not in "".join(lines)


def test_every_measure_can_be_exposed_and_is_named_once() -> None:
    samples = []
    for measure in MEASURES:
        labels = tuple("x" for _ in measure.labels)
        parts = ("le.0.5", "le.inf", "sum") if measure.kind == "histogram" else ()
        samples += [(measure.name, (*labels, part), 1.0) for part in parts]
        samples += [] if parts else [(measure.name, labels, 1.0)]
    assert len({measure.name for measure in MEASURES}) == len(MEASURES)
    text = exposition(samples).decode()
    for measure in MEASURES:
        name = f"kvcustody_{measure.name}" + "_bucket" * (measure.kind == "histogram")
        assert f"{name}{{" in text or f"{name} 1.0" in text, measure.name
        assert (measure.kind == "counter") == measure.name.endswith("_total")
    assert len(list(families(samples))) == len(MEASURES)


def test_a_workers_status_becomes_its_metrics() -> None:
    from kvcustody.governance.observability.stats import PoolStats, Stats
    from kvcustody.governance.observability.tenant_counters import TenantCounters

    tally = TenantCounters()
    tally.requests, tally.hit_blocks, tally.deferred = 7, 3, {"quota": 2}
    pool = PoolStats(10, {"clean": 4, "active": 5, "cached": 1}, 12, (8, 9), 2, 3, {"lru": 1}, 4, 0)
    status = worker_status(Stats({"acme": tally}, (pool,), 2), block_tokens=16)
    samples = {(name, labels): value for name, labels, value in of_worker("gpu-0", status)}
    assert samples["kv_cache_blocks", ("gpu-0", "active")] == 5 and samples["kv_cache_usage_ratio", ("gpu-0",)] == 0.6
    assert samples["prefix_cache_hits_tokens_total", ("gpu-0",)] == 48
    assert (
        samples["requests_deferred_total", ("gpu-0", "quota")] == 2
        and samples["scrubbed_blocks_total", ("gpu-0", "1")] == 9
    )
    assert not any("acme" in "".join(labels) for _, labels in samples)
