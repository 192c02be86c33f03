"""Formats of leaves for security monitoring: OCSF, CloudEvents, the leaf itself, or an extension's format.

CloudEvents 1.0 (JSON): `source` names ledger (`ledger_identity`) and log, `id` the leaf in it (`leaf_id`), so that a
receiver can drop doubles. `traceid` is an extension of ours: the registered `traceparent` also names a span, and a leaf
is of a whole trace.
"""

from __future__ import annotations

from enum import StrEnum
from typing import Any, NamedTuple, Protocol, cast
from urllib.parse import quote

from kvcustody.audit.evidence.query.events import EventRow
from kvcustody.audit.siem.ocsf import leaf_id, ocsf
from kvcustody.errors import ConfigError
from kvcustody.extensions import SIEM_FORMATS, load, names_extension
from kvcustody.times import utc

BATCH_TYPE = "application/cloudevents-batch+json"


def cloud_event(row: EventRow, *, origin: str) -> dict[str, Any]:
    """Return the CloudEvent of a leaf; `data` is the leaf itself."""
    event = {
        "specversion": "1.0",
        "id": leaf_id(row),
        "source": f"urn:kvcustody:{quote(origin, safe='')}:{quote(row.log, safe='')}",
        "type": f"kvcustody.{row.kind}.v1",
        "time": utc(row.at_us).isoformat(timespec="microseconds"),
        "datacontenttype": "application/json",
        "data": row.body,
    }
    tenant = row.body.get("tenant") or row.body.get("reader")
    if tenant:
        event["subject"] = f"tenant/{tenant}"
    if row.body.get("trace"):
        event["traceid"] = row.body["trace"]
    return event


class SiemFormat(StrEnum):
    """The built-in formats."""

    OCSF = "ocsf"
    CLOUDEVENTS = "cloudevents"
    LEAF = "leaf"


class LeafShape(Protocol):
    """A format of leaves."""

    @property
    def media_type(self) -> str:
        """The media type of an array of leaves."""

    def shape(self, row: EventRow) -> dict[str, Any]:
        """Return one leaf as a JSON object. It must carry the log and the index, by which a reader drops duplicates."""


class _OwnShape(NamedTuple):
    format: SiemFormat
    origin: str

    @property
    def media_type(self) -> str:
        return BATCH_TYPE if self.format is SiemFormat.CLOUDEVENTS else "application/json"

    def shape(self, row: EventRow) -> dict[str, Any]:
        if self.format is SiemFormat.OCSF:
            return ocsf(row, origin=self.origin)
        if self.format is SiemFormat.CLOUDEVENTS:
            return cloud_event(row, origin=self.origin)
        return {"log": row.log, "idx": row.idx, "event": row.body}


def open_shape(name: str, origin: str) -> LeafShape:
    """Return the format with a name: one of `SiemFormat`, or `plugin:NAME`; `origin` is the ledger's identity.

    Raises `ConfigError`.
    """
    if names_extension(name):
        return cast(LeafShape, load(SIEM_FORMATS, name).make(LeafShape))
    try:
        return _OwnShape(SiemFormat(name), origin)
    except ValueError:
        ours = ", ".join(SiemFormat)
        raise ConfigError(f"unknown shape `{name}`: one of {ours}, or `plugin:NAME`", shape=name) from None
