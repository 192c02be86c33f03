"""Each panel of the dashboard has something to show: a real Prometheus scrapes a running `up` and answers its queries.

Grafana itself is not run here: it evaluates these same queries with Prometheus.
"""

from __future__ import annotations

import json
import math
import shutil
import socket
import subprocess
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import httpx
import pytest

from standins.console.start_up import Started, start

pytest.importorskip("torch", reason="the worker's blocks are tensors")

PACKAGING = Path(__file__).resolve().parents[3] / "packaging"
PROMETHEUS = shutil.which("prometheus")
WAIT_SECONDS = 200.0  # a device hangs after 60 s, and its blocks are orphan findings


@pytest.fixture
def prometheus(tmp_path: Path) -> Iterator[httpx.Client]:
    """A Prometheus that scrapes a running `up` each second, as somebody who may read its figures."""
    if PROMETHEUS is None:
        pytest.skip("prometheus is not installed")
    up = start(tmp_path)
    with socket.create_server(("127.0.0.1", 0)) as probe:
        port = probe.getsockname()[1]
    config = tmp_path / "prometheus.yaml"
    config.write_text(json.dumps(scraping(up)))
    words = [PROMETHEUS, f"--config.file={config}", f"--web.listen-address=127.0.0.1:{port}"]
    running = subprocess.Popen(
        [*words, f"--storage.tsdb.path={tmp_path / 'series'}"], stdout=subprocess.DEVNULL, stderr=subprocess.DEVNULL
    )
    try:
        with httpx.Client(base_url=f"http://127.0.0.1:{port}/api/v1", timeout=10) as client:
            yield client
    finally:
        running.terminate()
        running.wait(30)
        up.end()


def scraping(up: Started) -> dict[str, Any]:
    """Prometheus' settings for this service, with the alert rules that are shipped."""
    address = up.said["url"].removeprefix("http://").partition("/")[0]
    job = {
        "job_name": "kvcustody",
        "authorization": {"credentials_file": up.said["keys"]["you"]},
        "static_configs": [{"targets": [address]}],
    }
    return {
        "global": {"scrape_interval": "1s", "evaluation_interval": "1s"},
        "rule_files": [str(PACKAGING / "prometheus" / "kvcustody.rules.yaml")],
        "scrape_configs": [job],
    }


def answers(client: httpx.Client, query: str) -> bool:
    """Whether Prometheus has a number for this query now."""
    try:
        found = client.get("/query", params={"query": query}).json()
    except httpx.TransportError:  # it starts
        return False
    assert found["status"] == "success", (query, found)
    return any(not math.isnan(float(series["value"][1])) for series in found["data"]["result"])


@pytest.mark.system("a panel of the dashboard shows nothing over a real service")
def test_every_query_of_the_dashboard_finds_series(prometheus: httpx.Client) -> None:
    """The control is a metric that nothing has. The alert rules are evaluated beside, without an error."""
    panels = json.loads((PACKAGING / "grafana" / "kvcustody.json").read_text())["panels"]
    queries = {f"{panel['title']}: {one['expr']}": one["expr"] for panel in panels for one in panel.get("targets", ())}
    assert len(queries) >= 20
    until = time.monotonic() + WAIT_SECONDS
    while queries and time.monotonic() < until:
        queries = {name: query for name, query in queries.items() if not answers(prometheus, query)}
        time.sleep(1.0)
    assert not queries
    assert not answers(prometheus, "kvcustody_no_such_metric")
    rules = prometheus.get("/rules").json()["data"]["groups"]
    assert rules and {rule["health"] for group in rules for rule in group["rules"]} == {"ok"}
