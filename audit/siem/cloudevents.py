"""Leaves as CloudEvents 1.0 (JSON). `source` and `id` together are log and idx, so that a receiver can drop doubles.

`traceid` is an extension of ours: the registered `traceparent` also names a span, and a leaf is of a whole trace.
"""

from __future__ import annotations

from datetime import UTC, datetime
from typing import Any
from urllib.parse import quote

from kvcustody.audit.query.events import EventRow

BATCH_TYPE = "application/cloudevents-batch+json"


def cloud_event(row: EventRow, *, origin: str = "kvcustody") -> dict[str, Any]:
    """The CloudEvent of a leaf; `data` is the leaf itself."""
    made = {
        "specversion": "1.0",
        "id": str(row.idx),
        "source": f"urn:kvcustody:{quote(origin, safe='')}:{quote(row.log, safe='')}",
        "type": f"kvcustody.{row.kind}.v1",
        "time": datetime.fromtimestamp(row.at_us / 1_000_000, UTC).isoformat(timespec="microseconds"),
        "datacontenttype": "application/json",
        "data": row.body,
    }
    tenant = row.body.get("tenant") or row.body.get("reader")
    if tenant:
        made["subject"] = f"tenant/{tenant}"
    if row.body.get("trace"):
        made["traceid"] = row.body["trace"]
    return made
