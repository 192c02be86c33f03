"""How leaves are told to security monitoring: OCSF, CloudEvents, the leaf itself, or an extension's shape."""

from __future__ import annotations

from enum import StrEnum
from typing import Any, NamedTuple, Protocol, cast

from kvcustody.audit.query.events import EventRow
from kvcustody.audit.siem.cloudevents import BATCH_TYPE, cloud_event
from kvcustody.audit.siem.ocsf import ocsf
from kvcustody.errors import ConfigError
from kvcustody.extensions import SIEM_FORMATS, load, names_extension


class SiemFormat(StrEnum):
    """The shapes that are ours."""

    OCSF = "ocsf"
    CLOUDEVENTS = "cloudevents"
    LEAF = "leaf"


class LeafShape(Protocol):
    """How leaves are told to others."""

    @property
    def media_type(self) -> str:
        """The media type of an array of leaves."""

    def shape(self, row: EventRow) -> dict[str, Any]:
        """One leaf as a JSON object. It must carry the log and the index, by which a reader drops doubles."""


class _OwnShape(NamedTuple):
    format: SiemFormat

    @property
    def media_type(self) -> str:
        return BATCH_TYPE if self.format is SiemFormat.CLOUDEVENTS else "application/json"

    def shape(self, row: EventRow) -> dict[str, Any]:
        if self.format is SiemFormat.OCSF:
            return ocsf(row)
        if self.format is SiemFormat.CLOUDEVENTS:
            return cloud_event(row)
        return {"log": row.log, "idx": row.idx, "event": row.body}


def open_shape(name: str) -> LeafShape:
    """The shape of a name: one of `SiemFormat`, or `plugin:NAME`; raises `ConfigError`."""
    if names_extension(name):
        return cast(LeafShape, load(SIEM_FORMATS, name).make(LeafShape))
    try:
        return _OwnShape(SiemFormat(name))
    except ValueError:
        ours = ", ".join(SiemFormat)
        raise ConfigError(f"unknown shape `{name}`: one of {ours}, or `plugin:NAME`", shape=name) from None
