"""The OCSF table against the published schema: classes, activities and their names, statuses."""

from __future__ import annotations

from typing import Any

import orjson
import pytest

from kvcustody.audit.evidence.query.events import EventRow
from kvcustody.audit.siem.ocsf import TABLE, ocsf

_CRUD = {1: "Create", 2: "Read", 3: "Update", 4: "Delete"}
_FINDING = {1: "Create", 2: "Update", 3: "Close"}
# github.com/ocsf/ocsf-schema, events/: category and class, and `activity_id` with its captions; 99 is Other everywhere.
PUBLISHED: dict[int, tuple[str, dict[int, str]]] = {
    1008: (  # events/system/event_log_activity.json
        "System Activity",
        dict(
            enumerate(
                (
                    "Clear",
                    "Delete",
                    "Export",
                    "Archive",
                    "Rotate",
                    "Start",
                    "Stop",
                    "Restart",
                    "Enable",
                    "Disable",
                ),
                1,
            )
        ),
    ),
    2003: ("Findings", _FINDING),  # events/findings/compliance_finding.json, finding.json
    2004: ("Findings", _FINDING),  # events/findings/detection_finding.json, finding.json
    3004: ("Identity & Access Management", _CRUD),  # events/iam/entity_management.json
    6002: (  # events/application/application_lifecycle.json
        "Application Activity",
        {1: "Install", 2: "Remove", 3: "Start", 4: "Stop"},
    ),
    6003: ("Application Activity", _CRUD),  # events/application/api_activity.json
    6005: (  # events/application/datastore_activity.json
        "Application Activity",
        dict(
            enumerate(
                (
                    "Read",
                    "Update",
                    "Connect",
                    "Query",
                    "Write",
                    "Create",
                    "Delete",
                    "List",
                    "Encrypt",
                    "Decrypt",
                ),
                1,
            )
        ),
    ),
}
REQUIRED = {
    1008: {"log_name"},
    2003: {"finding_info", "compliance"},
    2004: {"finding_info"},
    3004: {"entity"},
    6002: {"app"},
    6003: {"actor", "api", "src_endpoint"},
    6005: {"actor", "src_endpoint", "database"},
}


def event(kind: str, **body: Any) -> dict[str, Any]:
    body = {"kind": kind, "incarnation": "a" * 32, **body}
    return ocsf(EventRow("system", 7, 1_700_000_000_123_456, kind, body, orjson.dumps(body)), origin="ab" * 8)


@pytest.mark.parametrize("kind", sorted(TABLE))
def test_a_kind_is_what_the_schema_publishes(kind: str) -> None:
    made = event(kind)
    category, activities = PUBLISHED[made["class_uid"]]
    assert made["category_name"] == category
    if made["activity_id"] != 99:
        assert made["activity_name"] == activities[made["activity_id"]]
    assert made["activity_name"] and made.keys() >= REQUIRED[made["class_uid"]]


def test_a_finding_says_where_it_stands() -> None:
    """1 New, 2 In Progress, 4 Resolved (finding.json): what is 1 Success and 2 Failure everywhere else."""
    standing = {
        kind: event(kind, **body)["status_id"]
        for kind, body in {
            "erasure-requested": {},
            "erasure-applied": {},
            "erasure-completed": {"outcome": "complete"},
            "orphan-found": {"outcome": "reported"},
        }.items()
    }
    assert standing == {
        "erasure-requested": 1,
        "erasure-applied": 2,
        "erasure-completed": 4,
        "orphan-found": 1,
    }
    assert event("erasure-completed", outcome="partial")["status_id"] == 2
    assert event("orphan-scanned")["status_id"] == 0
