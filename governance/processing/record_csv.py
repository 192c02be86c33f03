"""A record of processing as CSV rows for a register."""

from __future__ import annotations

from kvcustody.audit.exports.csv_table import csv_text
from kvcustody.audit.reports.document import Document
from kvcustody.governance.cases.recipients import GrantedRecipient
from kvcustody.governance.processing.record import ProcessingRecord, record_of_facts
from kvcustody.times import iso, readable


def to_csv(document: Document) -> bytes:
    """Return the record as CSV rows, one a policy and classification; what a spreadsheet would run is quoted."""
    record = record_of_facts(document.facts)
    shared = (
        "role",
        "activity",
        "controller",
        "contact",
        "officer",
        "purposes",
        "subjects",
        "data",
        "transfers",
    )
    limits = record.time_limits[0]._fields if record.time_limits else ()
    last = (
        "controllers",
        "recipients",
        "erasure_within",
        "measures",
        "controls",
        "policies",
        "history",
        "orders",
        "digest",
    )
    rows = [["since", "until", "checkpoint", *shared, *limits, *last]]
    policies = "; ".join(_policy_text(record, one.digest) for one in record.policies)
    for limit in record.time_limits:
        mine = [one for one in record.recipients if one.policy_digest == limit.policy_digest]
        cells = [iso(record.since_us), iso(record.until_us), str(record.checkpoint)]
        cells += [str(getattr(record, name)) for name in shared] + list(limit)
        cells += [
            "; ".join(f"{one.tenant}: {one.name}" for one in record.controllers),
            "; ".join(_recipient_text(one) for one in mine if one.at_most == limit.classification),
            record.erasure_within,
            " ".join(record.measures),
            "; ".join(f"{one.control}: {one.status}" for one in record.controls),
            policies,
            record.history,
            record.orders,
            document.digest(),
        ]
        rows.append(cells)
    return csv_text(rows).encode()


def _recipient_text(one: GrantedRecipient) -> str:
    return f"{one.reader} reads {one.owner} up to {one.at_most} ({one.by})"


def _policy_text(record: ProcessingRecord, digest: str) -> str:
    """When a policy was in effect."""
    one = next(each for each in record.policies if each.digest == digest)
    until = readable(one.until_us) if one.until_us else "now"
    return f"{one.name} {one.digest} from {readable(one.since_us)} to {until}"
