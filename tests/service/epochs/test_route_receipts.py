"""Route receipts at a control plane: handed in by a door and a worker, asked for by operators, in metrics."""

from __future__ import annotations

from typing import Any

import pytest

from kvcustody.audit.evidence.routes.route_receipts import RoutePeriod, read_routes
from kvcustody.audit.kinds import RouteFound, RouteSent
from kvcustody.governance.edge.route_receipt import request_digest
from kvcustody.governance.observability.metrics import MEASURES
from kvcustody.governance.service.fleet.metrics_samples import route_samples
from kvcustody.governance.service.ingest.worker_protocol import HEADER, PROTOCOL
from kvcustody.governance.service.service import Service
from standins.service.service_world import MEDIA, Batch, Worker, register

RECEIPT = request_digest("r1") + "0f" * 8
SENT = MEDIA | {HEADER: str(PROTOCOL)}


def handed(client: Any, key: str, sender: Worker, batch: Batch) -> Any:
    return client("PUT", f"{sender.path}/batches/{batch.first}", key, content=batch.body, headers=SENT)


@pytest.fixture(scope="module")
def halves(client: Any, people: Any) -> None:
    door, worker = Worker("door"), Worker("worker")
    for each in (door, worker):
        assert register(client, people[each.name], each).status_code == 200
    at_us = door.now_us
    lost = request_digest("r2") + "0e" * 8
    for receipt, promised in ((RECEIPT, 112), (lost, -1)):
        sent = RouteSent(at_us, "acme", receipt, "subject", 0, 0, 0, "worker", "w1", 200, 4, 1, 3, promised, 900_000)
        assert handed(client, people["door"], door, door.batch([sent])).status_code == 200
    found = RouteFound(worker.now_us, "acme", RECEIPT, True, 128, 96, 2, 40, False, True)
    assert handed(client, people["worker"], worker, worker.batch([worker.started(), found])).status_code == 200


def test_operators_see_measures_receipts_and_findings(client: Any, people: Any, halves: None) -> None:
    ever = "since=0&until=9000000000000000"
    made = client("GET", f"/v1/routes?{ever}", people["operator"]).json()
    assert (made["receipts"], made["requests"], made["locality"], made["hit_length"]) == (2, 1, 0.75, 96.0)
    assert (made["promised_tokens"], made["kept_tokens"], made["stale_misses"]) == (112, 96, 1)
    assert made["queue_delta_mean"] is None and made["imbalance"] is None, "one worker has nobody to compare with"
    assert made["scores"] == [{"score_from": 0.81, "requests": 1, "prompt_tokens": 128, "found_tokens": 96}]
    first = client("GET", f"/v1/routes/receipts?{ever}&limit=1", people["auditor"]).json()
    second = client("GET", f"/v1/routes/receipts?{ever}&limit=1&cursor={first['next']}", people["auditor"]).json()
    assert {one["items"][0]["receipt"][:16] for one in (first, second)} == set(map(request_digest, ("r1", "r2")))
    assert second["next"] is None
    mine = client("GET", f"/v1/routes/receipts?{ever}&request=r1", people["operator"]).json()["items"]
    assert [one["receipt"] for one in mine] == [RECEIPT]
    assert mine[0]["sent"]["target"] == "w1" and mine[0]["found"][0]["worker"] == "worker"
    wrong = client("GET", f"/v1/routes/findings?{ever}", people["operator"]).json()["items"]
    assert ("promise-not-found", RECEIPT) in {(one["problem"], one["receipt"]) for one in wrong}


def test_what_they_measure_is_in_the_metrics(service: Service, halves: None) -> None:
    with service.reading() as connection:
        every = read_routes(connection, RoutePeriod(0, 1 << 60), now_us=1 << 60).receipts
        now_us = every[-1].at_us + 1
        made = {(name, labels): value for name, labels, value in route_samples(connection, now_us)}
    assert made["route_locality_ratio", ("worker",)] == 0.75 and made["route_stale_misses", ("worker",)] == 1
    assert made["route_receipts", ()] == 2 and made["route_promised_found_tokens", ()] == 96
    assert ("route_queue_delta", ()) not in made, "one worker has nobody to compare with"
    assert {name for name, _ in made} < {measure.name for measure in MEASURES}
