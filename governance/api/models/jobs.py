"""Jobs, as the API shows them."""

from __future__ import annotations

from typing import Annotated, Any, Literal

from pydantic import Field

from kvcustody.governance.api.models.base import Model, TenantName, Utc, Whole, example
from kvcustody.governance.service.operations.parameters import LARGE

_JOB = {
    "job": "cd" * 16,
    "kind": "export",
    "tenant": "acme",
    "state": "finished",
    "done": 1200,
    "total": 1200,
    "parameters": {"form": "ndjson"},
    "result": {"files": [{"name": "export.tar", "bytes": 90112, "sha256": "…"}]},
    "error": None,
    "created_us": 1_780_000_000_000_000,
    "ended_us": 1_780_000_009_000_000,
}


class JobModel(Model):
    """A long-running job: its progress and its result."""

    model_config = example(_JOB)

    job: str
    kind: str
    tenant: str | None
    state: Literal["waiting", "running", "finished", "failed", "cancelled", "lost"]
    done: Whole
    total: Whole | None
    parameters: dict[str, Any]
    result: dict[str, Any] | None
    error: str | None
    created_us: Utc
    ended_us: Utc | None


class JobPage(Model):
    """A page of your jobs, newest first."""

    model_config = example({"items": [_JOB], "next": None})

    items: list[JobModel]
    next: str | None


class ExportRequest(Model):
    """The part of the ledger to export: one tenant's log or all, as of a signed checkpoint."""

    model_config = example({"tenant": "acme", "form": "ndjson"})

    tenant: TenantName | None = None
    since: Annotated[int | None, Field(strict=True, ge=0, lt=LARGE)] = None
    until: Annotated[int | None, Field(strict=True, ge=0, lt=LARGE)] = None
    as_of: Annotated[int | None, Field(strict=True, ge=1, lt=LARGE)] = None
    form: Literal["ndjson", "csv", "parquet"] = "ndjson"
