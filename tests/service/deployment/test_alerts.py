"""The Prometheus rules: each names existing metrics and an existing runbook, and fires only on its planted fault.

Faults of a service and of its workers are planted in a real service. Prometheus' own `promtool` evaluates what the
service then exposes (`apt-get install prometheus`; skipped where it is not installed). Faults that take hours, and that
other suites plant (an erasure that was missed), are given as the samples that those suites expect.
"""

from __future__ import annotations

import json
import re
import shutil
import subprocess
from collections.abc import Callable, Iterable
from pathlib import Path
from typing import Any

import pytest
import yaml
from tests.service.health.test_verdict import World, batches, clock, signer_refuses, thread, unsealed

from kvcustody.governance.observability.metrics import BY_NAME, Sample, exposition
from kvcustody.governance.service.access.roles import Role
from kvcustody.governance.service.health.verdict import TroubleKind
from kvcustody.governance.service.service import Service
from standins.service.service_world import Worker, register, ship

ROOT = Path(__file__).resolve().parents[3]
RULES = ROOT / "packaging" / "prometheus" / "kvcustody.rules.yaml"
GROUPS = yaml.safe_load(RULES.read_text())["groups"]
ALERTS = {rule["alert"]: rule for group in GROUPS for rule in group["rules"] if "alert" in rule}
RECORDED = {rule["record"]: rule for group in GROUPS for rule in group["rules"] if "record" in rule}
RUNBOOK = ROOT / "docs" / "how-to" / "fleet" / "answer-an-alert.md"


def metrics_of(expression: str) -> Iterable[tuple[str, dict[str, str]]]:
    """The metrics of an expression by their names without a prefix, with the labels that it matches."""
    for name, matchers in re.findall(r"\bkvcustody_(\w+)(?:\{([^}]*)\})?", expression):
        yield name, dict(re.findall(r'(\w+)=~?"([^"]*)"', matchers))


@pytest.mark.parametrize("rule", (ALERTS | RECORDED).values(), ids=(ALERTS | RECORDED).keys())
def test_a_rule_names_metrics_and_labels_that_exist(rule: dict[str, Any]) -> None:
    named = list(metrics_of(rule["expr"]))
    assert named or any(name in rule["expr"] for name in RECORDED)
    for name, matched in named:
        measure = BY_NAME.get(name) or BY_NAME.get(name.removesuffix("_bucket"))
        assert measure is not None, name
        assert matched.keys() <= set(measure.labels), name
    for labels in re.findall(r"by \(([^)]*)\)", rule["expr"]):
        known = {label for name, _ in named for label in BY_NAME.get(name, BY_NAME["worker_up"]).labels} | {"le"}
        assert set(labels.split(", ")) <= known


def test_each_alert_has_its_runbook_and_each_runbook_its_alert() -> None:
    headings = re.findall(r"^## (Kvcustody\w+)$", RUNBOOK.read_text(), re.MULTILINE)
    assert sorted(headings) == sorted(ALERTS) and len(headings) == len(set(headings))
    for name, rule in ALERTS.items():
        assert rule["labels"]["severity"] in ("page", "ticket")
        assert rule["annotations"]["runbook_url"].endswith(f"answer-an-alert.md#{name.lower()}")


BY_THEIR_OWN_METRICS = {TroubleKind.LEDGER: "ledger_admitting", TroubleKind.SINK: "sink_dead_batches"}


def test_each_kind_of_problem_has_its_alert() -> None:
    named = [one for rule in ALERTS.values() for one in metrics_of(rule["expr"])]
    kinds = {kind for _, labels in named for kind in labels.get("kind", "").split("|")}
    metrics = {name for name, _ in named}
    for kind in TroubleKind:
        assert (kind in kinds) != (BY_THEIR_OWN_METRICS.get(kind) in metrics), kind


def series_of(text: str, before: str = "") -> list[dict[str, str]]:
    """What was exposed, for an hour; a counter has risen since `before`."""
    earlier = dict(re.findall(r"^(\S+(?: [^\n]*\})?) (\S+)$", before, re.MULTILINE))
    series = []
    for name, value in re.findall(r"^(kvcustody_[^\s{]+(?:\{.*\})?) (\S+)$", text, re.MULTILINE):
        if value != "NaN":
            rises = name in earlier and float(value) > float(earlier[name])
            values = f"{earlier[name]}x59 {value}" if rises else f"{value}x60"
            series.append({"series": name, "values": values})
    return series


def firing(folder: Path, series: list[dict[str, str]]) -> set[str]:
    """The alerts that fire after an hour of these series, by Prometheus' own evaluation."""
    tool = shutil.which("promtool")
    if tool is None:
        pytest.skip("promtool is not installed")
    checks = [{"expr": 'ALERTS{alertstate="firing"}', "eval_time": "1h"}]
    document = {
        "rule_files": [str(RULES)],
        "evaluation_interval": "1m",
        "tests": [{"interval": "1m", "input_series": series, "promql_expr_test": checks}],
    }
    (folder / "test.yaml").write_text(json.dumps(document))
    done = subprocess.run(
        [tool, "test", "rules", folder / "test.yaml"], capture_output=True, text=True, check=False, timeout=60
    )
    text = done.stdout + done.stderr
    assert done.returncode == 0 or "got:" in text, text
    return set(re.findall(r'alertname=\\?"(\w+)\\?"', text))


@pytest.fixture
def world(make_service: Callable[..., Service], make_client: Any, make_people: Any) -> World:
    service = make_service(root_interval_seconds=0.2)
    return World(service, make_client(service), make_people(service))


def exposed(world: World) -> str:
    answer = world.client("GET", "/metrics", world.operator)
    assert answer.status_code == 200
    return str(answer.text)


def says(world: World, **status: float) -> None:
    """A worker reports these counters."""
    key, worker = world.people.add("gpu-0", Role.WORKER), Worker("gpu-0")
    assert register(world.client, key, worker).status_code == 200
    counters = {name.replace("__", "."): value for name, value in status.items()}
    assert world.client("PUT", f"{worker.path}/status", key, json={"status": counters}).status_code == 200


SERVICE = [
    (batches, {"KvcustodyBatchesRefused"}),
    (signer_refuses, {"KvcustodyUnsigned"}),
    (clock, {"KvcustodyClockInDoubt"}),
    (thread, {"KvcustodyNotReady", "KvcustodyLedgerClosed"}),
    (unsealed, {"KvcustodyUnsigned"}),
]
WORKERS = [
    ({"ledger__spilled_bytes": 4096}, {"KvcustodyWorkerSpills"}),
    ({"lease__custody": -3}, {"KvcustodyLeaseOver"}),
    ({"drift": 2}, {"KvcustodyMemoryDrift"}),
]
LATER: list[tuple[Sample, str]] = [
    (("erasure_overdue_seconds_max", (), 60.0), "KvcustodyErasureOverdue"),
    (("erasure_next_deadline_seconds", (), 1800.0), "KvcustodyErasureDue"),
    (("deletion_coverage_ratio", ("acme",), 0.998), "KvcustodyDeletionUnproven"),
    (("next_end_seconds", ("certificate",), 86_400.0), "KvcustodyEndsSoon"),
    (("sink_failing_seconds", ("siem",), 1_000.0), "KvcustodySinkFailing"),
    (("sink_dead_batches", ("siem",), 1.0), "KvcustodySinkFailing"),
    (("worker_up", ("gpu-0",), 0.0), "KvcustodyWorkerSilent"),
    (("ledger_admitting", (), 0.0), "KvcustodyLedgerClosed"),
    (("ledger_checkpoint_age_seconds", (), 4_000.0), "KvcustodyUnsigned"),
]
ALIVE: Sample = ("service_trouble", ("database",), 0.0)


def test_control_a_service_in_order_fires_nothing(world: World, tmp_path: Path) -> None:
    says(world, running=1)
    assert firing(tmp_path, series_of(exposed(world))) <= {"KvcustodyEndsSoon"}, "keys of tests end within days"


@pytest.mark.parametrize(("plant", "alerts"), SERVICE, ids=lambda one: getattr(one, "__name__", None))
def test_a_fault_of_the_service_fires_its_alert(
    world: World, monkeypatch: pytest.MonkeyPatch, tmp_path: Path, plant: Callable[..., None], alerts: set[str]
) -> None:
    plant(world, monkeypatch)
    assert firing(tmp_path, series_of(exposed(world))) - {"KvcustodyEndsSoon"} == alerts


@pytest.mark.parametrize(("status", "alerts"), WORKERS)
def test_a_fault_of_a_worker_fires_its_alert(
    world: World, tmp_path: Path, status: dict[str, float], alerts: set[str]
) -> None:
    says(world, **status)
    assert firing(tmp_path, series_of(exposed(world))) - {"KvcustodyEndsSoon"} == alerts


def test_blocks_that_changed_in_memory_fire(world: World, tmp_path: Path) -> None:
    key, worker = world.people.add("gpu-0", Role.WORKER), Worker("gpu-0")
    assert register(world.client, key, worker).status_code == 200

    def mismatched(blocks: int) -> str:
        status = {"status": {"integrity_mismatched": blocks}}
        assert world.client("PUT", f"{worker.path}/status", key, json=status).status_code == 200
        return exposed(world)

    before = mismatched(1)
    assert "KvcustodyIntegrityMismatch" in firing(tmp_path, series_of(mismatched(3), before))
    assert "KvcustodyIntegrityMismatch" not in firing(tmp_path, series_of(before)), "control: it does not rise"


@pytest.mark.parametrize(("sample", "alert"), LATER, ids=lambda one: one if isinstance(one, str) else one[0])
def test_a_sample_past_its_bound_fires_its_alert(tmp_path: Path, sample: Sample, alert: str) -> None:
    assert firing(tmp_path, series_of(exposition([ALIVE, sample]).decode())) == {alert}


def test_slow_batches_fire(tmp_path: Path) -> None:
    """Ten batches a minute, each of which takes between five and ten seconds."""
    name = "kvcustody_batch_commit_seconds_bucket"
    series = [{"series": 'kvcustody_service_trouble{kind="database"}', "values": "0x60"}]
    series += [{"series": f'{name}{{le="{le}"}}', "values": v} for le, v in (("5.0", "0x60"), ("10.0", "0+10x60"))]
    series.append({"series": f'{name}{{le="+Inf"}}', "values": "0+10x60"})
    assert firing(tmp_path, series) == {"KvcustodyBatchesSlow"}


def test_no_metrics_fire(tmp_path: Path) -> None:
    assert firing(tmp_path, [{"series": "up", "values": "1x60"}]) == {"KvcustodyAbsent"}


def test_every_alert_is_fired_here() -> None:
    fired = {alert for _, alerts in (*SERVICE, *WORKERS) for alert in alerts} | {alert for _, alert in LATER}
    assert fired | {"KvcustodyIntegrityMismatch", "KvcustodyBatchesSlow", "KvcustodyAbsent"} == set(ALERTS)


def test_a_batch_is_counted_once_it_is_durable(world: World) -> None:
    key, worker = world.people.add("gpu-0", Role.WORKER), Worker("gpu-0")
    assert register(world.client, key, worker).status_code == 200
    assert "kvcustody_batch_commit_seconds_count" not in exposed(world)
    assert ship(world.client, key, worker, worker.batch([worker.started()])).status_code == 200
    assert "kvcustody_batch_commit_seconds_count 1.0" in exposed(world)
