"""Leaves as OCSF events (schema.ocsf.io 1.5.0), by a table of each kind's class and severity.

1. Every kind has its row; a kind without one is an error here and in a test, never a guess.
2. The whole leaf travels in `unmapped`, so nothing is lost by the mapping; the leaf, not the OCSF event, is evidence.
3. `metadata.uid` is log, idx and the beginning of the leaf's hash (`leaf_id`): a receiver drops what it has seen by it.
   After a restore another leaf may stand at a place that was sent before; the hash keeps the two apart.
4. Classes, activities and statuses are those of github.com/ocsf/ocsf-schema (`events/`), whose enumerations only
   grow; a test holds the copy that the table is checked against. A finding's status is where it stands, not whether
   it worked.
"""

from __future__ import annotations

from typing import Any, NamedTuple

from kvcustody.audit.evidence.query.events import EventRow
from kvcustody.audit.leaf.merkle import leaf_hash
from kvcustody.errors import LedgerError

VERSION = "1.5.0"
INFORMATIONAL, LOW, MEDIUM, HIGH = 1, 2, 3, 4
SUCCESS, FAILURE, UNKNOWN = 1, 2, 0
NEW, IN_PROGRESS, RESOLVED = 1, 2, 4  # of a finding
OTHER = 99

LIFECYCLE, API, DATASTORE, EVENT_LOG, ENTITY, COMPLIANCE, DETECTION = 6002, 6003, 6005, 1008, 3004, 2003, 2004
CREATE, READ, UPDATE, DELETE = 1, 2, 3, 4  # of API activity and entity management


class OcsfClass(NamedTuple):
    """A kind of leaf in OCSF: class, activity, its name, severity; `failed` names the outcomes that are failures."""

    class_uid: int
    activity_id: int
    activity: str
    severity: int = INFORMATIONAL
    failed: tuple[str, ...] = ()


TABLE: dict[str, OcsfClass] = {
    "worker-started": OcsfClass(LIFECYCLE, 3, "Start"),
    "worker-stopped": OcsfClass(LIFECYCLE, 4, "Stop"),
    "worker-died": OcsfClass(LIFECYCLE, 4, "Stop", HIGH),
    "worker-returned": OcsfClass(LIFECYCLE, 3, "Start", HIGH),
    "worker-closing-asked": OcsfClass(LIFECYCLE, OTHER, "Ask", HIGH),
    "policy-activated": OcsfClass(ENTITY, UPDATE, "Update", MEDIUM),
    "policy-staged": OcsfClass(ENTITY, UPDATE, "Update", MEDIUM),
    "enforcement-ordered": OcsfClass(ENTITY, UPDATE, "Update", HIGH),
    "enforcement-changed": OcsfClass(ENTITY, UPDATE, "Update", HIGH),
    "request-monitored": OcsfClass(API, OTHER, "Decide", LOW),
    "policy-text": OcsfClass(ENTITY, UPDATE, "Update"),
    "release-step": OcsfClass(ENTITY, UPDATE, "Update", MEDIUM),
    "grants-revoked": OcsfClass(ENTITY, DELETE, "Delete", MEDIUM),
    "key-event": OcsfClass(ENTITY, UPDATE, "Update", MEDIUM),
    "keys-dropped": OcsfClass(ENTITY, DELETE, "Delete", MEDIUM),
    "keys-ordered": OcsfClass(ENTITY, UPDATE, "Update", MEDIUM),
    "attempts-refused": OcsfClass(API, OTHER, "Refuse", MEDIUM),
    "issuer-assigned": OcsfClass(ENTITY, UPDATE, "Update", MEDIUM),
    "report-key": OcsfClass(ENTITY, UPDATE, "Update", MEDIUM),
    "signing-key": OcsfClass(ENTITY, UPDATE, "Update", MEDIUM),
    "principal-changed": OcsfClass(ENTITY, UPDATE, "Update", MEDIUM),
    "access": OcsfClass(API, READ, "Read"),
    "decision": OcsfClass(API, OTHER, "Decide", LOW, ("deny",)),
    "hit-counted": OcsfClass(API, OTHER, "Decide", INFORMATIONAL, ("deny",)),
    "hit-counters": OcsfClass(API, OTHER, "Decide", INFORMATIONAL, ("deny",)),
    "residency-opened": OcsfClass(DATASTORE, 5, "Write"),
    "blocks-assigned": OcsfClass(DATASTORE, 5, "Write"),
    "blocks-attached": OcsfClass(DATASTORE, 1, "Read"),
    "residency-released": OcsfClass(DATASTORE, OTHER, "Release"),
    "blocks-released": OcsfClass(DATASTORE, OTHER, "Release"),
    "holds-narrowed": OcsfClass(DATASTORE, OTHER, "Narrow", LOW),
    "custody-ended": OcsfClass(DATASTORE, 7, "Delete"),
    "custody-changed": OcsfClass(DATASTORE, 7, "Delete"),
    "receipt": OcsfClass(DATASTORE, 7, "Delete", INFORMATIONAL, ("failed",)),
    "copies-stored": OcsfClass(DATASTORE, 5, "Write"),
    "copies-ended": OcsfClass(DATASTORE, 7, "Delete"),
    "copies-locked": OcsfClass(DATASTORE, OTHER, "Lock"),
    "blocks-handed-over": OcsfClass(DATASTORE, OTHER, "Hand over"),
    "tier-inherited": OcsfClass(DATASTORE, OTHER, "Inherit"),
    "copies-destroyed": OcsfClass(DATASTORE, 7, "Delete"),
    "transfer-decided": OcsfClass(DATASTORE, OTHER, "Decide", INFORMATIONAL, ("failed",)),
    "erasure-requested": OcsfClass(COMPLIANCE, CREATE, "Create", MEDIUM),
    "erasure-applied": OcsfClass(COMPLIANCE, 2, "Update", LOW),
    "erasure-remaining": OcsfClass(COMPLIANCE, 2, "Update", MEDIUM),
    "erasure-reread": OcsfClass(COMPLIANCE, 2, "Update", LOW),
    "epoch-raised": OcsfClass(COMPLIANCE, 2, "Update", LOW),
    "epochs-taken": OcsfClass(COMPLIANCE, 2, "Update"),
    "hints-clipped": OcsfClass(API, OTHER, "Clip"),
    "route-sent": OcsfClass(API, OTHER, "Route"),
    "route-found": OcsfClass(API, OTHER, "Route"),
    "case-opened": OcsfClass(COMPLIANCE, CREATE, "Create", MEDIUM),
    "case-step": OcsfClass(COMPLIANCE, 2, "Update", LOW),
    "processing-restricted": OcsfClass(COMPLIANCE, 2, "Update", LOW),
    "custody-overdue": OcsfClass(COMPLIANCE, 2, "Update", LOW),
    "erasure-completed": OcsfClass(COMPLIANCE, 3, "Close", LOW, ("partial",)),
    "orphan-scanned": OcsfClass(COMPLIANCE, OTHER, "Scan"),
    "orphan-found": OcsfClass(DETECTION, CREATE, "Create", HIGH),
    "integrity-mismatch": OcsfClass(DETECTION, CREATE, "Create", HIGH),
    "observation-started": OcsfClass(LIFECYCLE, 3, "Start"),
    "observed-stored": OcsfClass(DATASTORE, 5, "Write"),
    "observed-removed": OcsfClass(DATASTORE, 7, "Delete"),
    "observed-overdue": OcsfClass(COMPLIANCE, CREATE, "Create", HIGH),
    "observation-gap": OcsfClass(EVENT_LOG, OTHER, "Gap", HIGH),
    "spill-started": OcsfClass(EVENT_LOG, OTHER, "Spill", MEDIUM),
    "replay-completed": OcsfClass(EVENT_LOG, OTHER, "Replay", LOW),
    "gap": OcsfClass(EVENT_LOG, OTHER, "Gap", HIGH),
    "withdrawn": OcsfClass(EVENT_LOG, OTHER, "Withdraw", MEDIUM),
    "retention-purged": OcsfClass(EVENT_LOG, 2, "Delete", MEDIUM),
    "legal-hold": OcsfClass(ENTITY, UPDATE, "Update", MEDIUM),
    "order-signed": OcsfClass(ENTITY, UPDATE, "Update", MEDIUM),
    "subject-unlinked": OcsfClass(ENTITY, DELETE, "Delete", MEDIUM),
    "sink-changed": OcsfClass(EVENT_LOG, OTHER, "Configure", MEDIUM),
    "report-schedule-changed": OcsfClass(ENTITY, UPDATE, "Update", MEDIUM),
    "scheduled-report-made": OcsfClass(API, READ, "Read"),
    "report-delivery": OcsfClass(API, READ, "Read", MEDIUM),
    "clock-confirmed": OcsfClass(ENTITY, UPDATE, "Update", HIGH),
    "schema-changed": OcsfClass(EVENT_LOG, OTHER, "Upgrade"),
    "log-broken": OcsfClass(EVENT_LOG, OTHER, "Break", HIGH),
}
_CATEGORIES = {
    1: "System Activity",
    2: "Findings",
    3: "Identity & Access Management",
    6: "Application Activity",
}
_CLOSE = 3  # of a finding
_OUTCOMES = ("outcome", "effect", "result")


def leaf_id(row: EventRow) -> str:
    """Return the id of a leaf within its log for a receiver (rule 3)."""
    return f"{row.idx}-{leaf_hash(row.leaf).hex()[:16]}"


def ocsf(row: EventRow, *, origin: str) -> dict[str, Any]:
    """Return the OCSF event of a leaf of the ledger with this identity.

    Raises `LedgerError` for a kind that the table lacks (rule 1).
    """
    mapping = TABLE.get(row.kind)
    if mapping is None:
        raise LedgerError(f"event `{row.kind}` has no OCSF mapping yet", kind=row.kind)
    body = row.body
    outcome = next((body[key] for key in _OUTCOMES if key in body), "")
    failed = outcome in mapping.failed
    event: dict[str, Any] = {
        "class_uid": mapping.class_uid,
        "category_uid": mapping.class_uid // 1000,
        "category_name": _CATEGORIES[mapping.class_uid // 1000],
        "activity_id": mapping.activity_id,
        "activity_name": mapping.activity,
        "type_uid": mapping.class_uid * 100 + mapping.activity_id,
        "severity_id": max(mapping.severity, MEDIUM) if failed else mapping.severity,
        "status_id": _status(mapping, outcome, failed),
        "time": row.at_us // 1000,
        "message": row.kind,
        "metadata": {
            "version": VERSION,
            "uid": f"{row.log}:{leaf_id(row)}",
            "log_name": row.log,
            "sequence": row.idx,
            "product": {"vendor_name": "kvcustody", "name": "kvcustody", "uid": origin},
        },
        "actor": _actor(body),
        "unmapped": body,
    }
    tenant = body.get("tenant") or body.get("reader") or body.get("of_tenant")
    if tenant:
        event["metadata"]["tenant_uid"] = tenant
    if body.get("trace"):
        event["metadata"]["correlation_uid"] = body["trace"]
    return event | _required(mapping.class_uid, row)


def _status(mapping: OcsfClass, outcome: str, failed: bool) -> int:
    if mapping.class_uid in (COMPLIANCE, DETECTION):
        standing = {CREATE: NEW, _CLOSE: IN_PROGRESS if failed else RESOLVED, OTHER: UNKNOWN}
        return standing.get(mapping.activity_id, IN_PROGRESS)
    return FAILURE if failed else SUCCESS if outcome else UNKNOWN


def _actor(body: dict[str, Any]) -> dict[str, Any]:
    if body.get("actor"):
        return {"user": {"name": body["actor"]}}
    return {"app_name": "kvcustody", "app_uid": body["incarnation"]}


def _required(class_uid: int, row: EventRow) -> dict[str, Any]:
    """What the class demands beyond the base event."""
    body = row.body
    source = {"uid": body["incarnation"]}
    if class_uid == API:
        return {
            "api": {"operation": str(body.get("operation") or body.get("action") or row.kind)},
            "src_endpoint": source,
        }
    if class_uid == DATASTORE:
        return {"src_endpoint": source, "database": {"name": "kv-cache", "type_id": OTHER}}
    if class_uid == ENTITY:
        name = body.get("principal") or body.get("name") or body.get("hold") or row.kind
        return {"entity": {"name": str(name), "type": row.kind}}
    if class_uid == LIFECYCLE:
        return {"app": {"name": "kvcustody", "uid": body["incarnation"], "vendor_name": "kvcustody"}}
    if class_uid == EVENT_LOG:
        return {"log_name": row.log, "device": {"type_id": OTHER, "uid": body["incarnation"]}}
    finding = {"title": row.kind, "uid": f"{row.log}:{leaf_id(row)}"}
    if class_uid == COMPLIANCE:
        return {"finding_info": finding, "compliance": {"control": row.kind}}
    return {"finding_info": finding}
