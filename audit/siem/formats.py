"""How leaves are told to security monitoring: OCSF, CloudEvents, or the leaf itself."""

from __future__ import annotations

from enum import StrEnum
from typing import Any

from kvcustody.audit.query.events import EventRow
from kvcustody.audit.siem.cloudevents import BATCH_TYPE, cloud_event
from kvcustody.audit.siem.ocsf import ocsf


class SiemFormat(StrEnum):
    """How leaves are told to others."""

    OCSF = "ocsf"
    CLOUDEVENTS = "cloudevents"
    LEAF = "leaf"


def told(row: EventRow, shape: SiemFormat) -> dict[str, Any]:
    """A leaf in a shape."""
    if shape is SiemFormat.OCSF:
        return ocsf(row)
    if shape is SiemFormat.CLOUDEVENTS:
        return cloud_event(row)
    return {"log": row.log, "idx": row.idx, "event": row.body}


def media_of(shape: SiemFormat) -> str:
    """The media type of an array in a shape."""
    return BATCH_TYPE if shape is SiemFormat.CLOUDEVENTS else "application/json"
