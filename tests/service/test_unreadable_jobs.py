"""A job whose record cannot be read ends no list of jobs."""

from __future__ import annotations

from typing import Any

import pytest
from sqlalchemy import insert, update

from kvcustody.audit.store.schema.service import service_jobs
from kvcustody.governance.service.jobs import UNREAD
from kvcustody.governance.service.service import Service


def put(service: Service, **odd: Any) -> None:
    """Two jobs on record of the auditor, one of them with odd columns."""
    for job, values in (("readable", {}), ("odd", odd)):
        row = {
            "job": job, "kind": "report", "principal": "auditor", "tenant": None, "state": "finished", "done": 1,
            "total": 1, "parameters": "{}", "result": None, "error": None, "created_us": 7, "ended_us": 8,
            "owner": "another",
        }  # fmt: skip
        with service.engine.begin() as connection:
            connection.execute(service_jobs.delete().where(service_jobs.c.job == job))
            connection.execute(insert(service_jobs).values(**row))
            if values:
                connection.execute(update(service_jobs).where(service_jobs.c.job == job).values(**values))


@pytest.mark.parametrize(
    "odd",
    [
        {"parameters": "{"},
        {"parameters": "[]"},
        {"parameters": "null"},
        {"result": "\ufffd"},
        {"result": "7"},
        {"state": "of-tomorrow"},
        {"done": -1},
        {"total": -(1 << 62)},
    ],
    ids=str,
)
def test_a_list_goes_on_behind_a_job_that_cannot_be_read(
    service: Service, client: Any, people: Any, odd: dict[str, Any]
) -> None:
    """Control: the job beside it is shown as it is."""
    auditor = people["auditor"]
    put(service, **odd)
    answer = client("GET", "/v1/jobs", auditor)
    assert answer.status_code == 200, answer.text
    found = {item["job"]: (item["state"], item["error"]) for item in answer.json()["items"]}
    assert found == {"readable": ("finished", None), "odd": ("lost", UNREAD)}
