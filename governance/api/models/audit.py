"""The ledger, as the API shows it: leaves as they stand, and proofs in the C2SP forms that every verifier reads."""

from __future__ import annotations

from typing import Any

from kvcustody.audit.verify.ledger.stated_times import OddTime
from kvcustody.governance.api.models.base import Model, Utc, Whole, example
from kvcustody.governance.api.models.shown import page_of, shown

_EVENT = {
    "log": "tenant/acme",
    "idx": 7,
    "at_us": 1_780_000_000_000_000,
    "kind": "residency-opened",
    "leaf": {"schema": "kvcustody/event@1", "kind": "residency-opened", "tenant": "acme"},
}
_HASH = "9f86d081884c7d659a2feaa0c55ad015a3bf4f1b2b0b822cd15d6c15b0f00a08"


class EventModel(Model):
    """One leaf. Its canonical bytes are the JCS form (RFC 8785) of `leaf`."""

    model_config = example(_EVENT)

    log: str
    idx: Whole
    at_us: Utc
    kind: str
    leaf: dict[str, Any]


class EventPage(Model):
    """A page of leaves. A page may be short, even empty, and have a next one: the search is bounded."""

    model_config = example({"items": [_EVENT], "next": None, "as_of": 4})

    items: list[EventModel]
    next: str | None
    as_of: Whole | None


class FacetValueModel(Model):
    """A value, and the number of events that have it."""

    model_config = example({"value": "residency-opened", "events": 7})

    value: str
    events: Whole


class HistogramColumnModel(Model):
    """Events of one interval of time that begins at `at_us`."""

    model_config = example({"at_us": 1_780_000_000_000_000, "events": 7, "refused": 0})

    at_us: Utc
    events: Whole
    refused: Whole


class FacetModel(Model):
    """Values of one field; `counted`: from figures of all events, otherwise among the `sampled` newest leaves."""

    model_config = example({"name": "kind", "counted": True, "values": [{"value": "residency-opened", "events": 7}]})

    name: str
    counted: bool
    values: list[FacetValueModel]


class EventSummary(Model):
    """A summary of the matching leaves; `refused` counts events that were denied, failed or partial, by column of time.

    `exact` false: `total` is an estimate. A period of no more than four hours with at most 2,000 leaves is counted
    by the minute, another one in whole hours. Items of lists count each.
    """

    model_config = example(
        {
            "total": 7,
            "exact": True,
            "facets": [{"name": "kind", "counted": True, "values": [{"value": "residency-opened", "events": 7}]}],
            "sampled": 7,
            "column_us": 3_600_000_000,
            "columns": [{"at_us": 1_780_000_000_000_000, "events": 7, "refused": 0}],
        }
    )

    total: Whole
    exact: bool
    facets: list[FacetModel]
    sampled: Whole
    column_us: Whole
    columns: list[HistogramColumnModel]


class LogHeadModel(Model):
    """A sub-log: the number of its leaves, and the root of its tree."""

    log: str
    size: Whole
    root: str


class Logs(Model):
    """Sub-logs, as of a checkpoint."""

    model_config = example({"items": [{"log": "tenant/acme", "size": 12, "root": _HASH}], "next": None, "as_of": 4})

    items: list[LogHeadModel]
    next: str | None
    as_of: Whole


OddTimes = page_of(
    shown(
        OddTime,
        example={
            "log": "tenant/acme",
            "idx": 7,
            "kind": "residency-opened",
            "incarnation": "ab" * 16,
            "at_us": 1_811_536_000_000_000,
            "not_before_us": 1_780_000_000_000_000,
            "not_after_us": 1_780_000_060_000_000,
            "why": "ahead",
        },
    ),
    "OddTimes",
)


class CheckpointModel(Model):
    """A checkpoint of the root log: `note` is the signed C2SP note that covers it, null where none does."""

    model_config = example({"size": 4, "root": _HASH, "at_us": 1_780_000_000_000_000, "note": None})

    size: Whole
    root: str
    at_us: Utc
    note: str | None


class LeafProofModel(Model):
    """A leaf and the proof that a signed checkpoint covers it (C2SP tlog-proof, in the form of `kvcustody audit`)."""

    model_config = example({"event": _EVENT, "canonical": '{"schema":"kvcustody/event@1"}', "proof": "…"})

    event: EventModel
    canonical: str
    proof: str


class Consistency(Model):
    """A proof that a log of `size` leaves extends the one of `old_size`: RFC 6962 hashes, in hexadecimal."""

    model_config = example({"log": "root", "old_size": 2, "size": 4, "path": [_HASH]})

    log: str
    old_size: Whole
    size: Whole
    path: list[str]


class StreamPage(Model):
    """Leaves in the order in which they were sealed, in the requested shape; `next` continues where the page ends.

    `restarted`: the cursor is of another state of the ledger, as before a restore; these are its first leaves again.
    `purged`: leaves before `next` that retention deleted first.
    """

    model_config = example(
        {
            "items": [{"log": "tenant/acme", "idx": 7, "event": _EVENT["leaf"]}],
            "next": "bmV4dA",
            "more": False,
            "restarted": False,
            "purged": 0,
        }
    )

    items: list[dict[str, Any]]
    next: str
    more: bool
    restarted: bool
    purged: Whole
