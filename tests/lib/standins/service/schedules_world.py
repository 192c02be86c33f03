"""Schedules of a service: made over the API, moved back in time as if nothing had run since, and looked at."""

from __future__ import annotations

import time
from typing import Any

import orjson
from sqlalchemy import select, update

from kvcustody.audit.store.database.engine import WRITE
from kvcustody.audit.store.schema.ledger import events
from kvcustody.audit.store.schema.service import service_report_schedules, service_reports
from kvcustody.governance.service.service import Service
from kvcustody.times import DAY_US

KEY = b"0123456789abcdef0123456789abcdef"
LATER = {"report_seconds": 3600.0}  # the thread waits: a test looks when it says so


def made(client: Any, key: str, **what: Any) -> dict[str, Any]:
    answer = client(
        "POST",
        "/v1/reports/schedules",
        key,
        json={"framework": "soc2", "every": "monthly", "formats": ["json"], **what},
    )
    assert answer.status_code == 201, answer.text
    return dict(answer.json())


def move_back(service: Service, schedule: str, days: int) -> None:
    """As if no service had looked for so many days."""
    table = service_report_schedules.c
    with service.engine.connect().execution_options(**WRITE) as connection, connection.begin():
        connection.execute(
            update(service_report_schedules)
            .where(table.schedule == schedule)
            .values(after_us=table.after_us - days * DAY_US)
        )


def set_rows(service: Service, **values: Any) -> None:
    with service.engine.connect().execution_options(**WRITE) as connection, connection.begin():
        connection.execute(update(service_reports).values(**values))


def reports(client: Any, key: str, schedule: str | None = None) -> list[dict[str, Any]]:
    """Oldest first."""
    answer = client("GET", "/v1/reports?limit=500", key)
    assert answer.status_code == 200, answer.text
    items = [each for each in answer.json()["items"] if schedule in (None, each["schedule"])]
    return sorted(items, key=lambda each: each["since_us"])


def settled(service: Service, client: Any, key: str, schedule: str) -> list[dict[str, Any]]:
    """What the schedule made, once nothing of it is under way."""
    deadline = time.monotonic() + 120
    while True:
        service.scheduler.turn()
        listed = reports(client, key, schedule)
        open_ = [
            each
            for each in listed
            if each["state"] in ("waiting", "making") and "ended before" in (each["error"] or "ended before")
        ]
        untried = [
            each for item in listed for each in item["deliveries"] if each["state"] == "waiting" and not each["tries"]
        ]
        if listed and not open_ and not untried:
            return listed
        assert time.monotonic() < deadline, listed
        time.sleep(0.02)


def on_record(service: Service, kind: str) -> list[dict[str, Any]]:
    with service.reading() as connection:
        query = select(events.c.leaf).where(events.c.kind == kind).order_by(events.c.idx)
        return [orjson.loads(leaf) for leaf in connection.scalars(query)]
