"""Delivers reports to a webhook: one JSON document with every file, signed by Standard Webhooks.

1. Its id is the report's, so that a receiver knows a repetition as one.
2. What is larger than `_BODY_BYTES_MAX` is not sent in part: the delivery fails, and says why.
"""

from __future__ import annotations

import base64
import hashlib

import orjson

from kvcustody.audit.siem.sink import SinkError, WebhookSink
from kvcustody.governance.service.schedules.parcel import SCHEMA, Parcel

_BODY_BYTES_MAX = 32 << 20
_DEADLINE_SECONDS = 60.0


class WebhookDelivery:
    """Delivers to an address of the settings, https or loopback."""

    kind = "webhook"

    def __init__(self, name: str, url: str, key: bytes) -> None:
        self.name = name
        self._sink = WebhookSink(name, url, key, content_type="application/json", deadline_seconds=_DEADLINE_SECONDS)

    def deliver(self, parcel: Parcel) -> str:
        """Post the parcel (rule 2 of `parcel`)."""
        files = [
            {
                "name": name,
                "bytes": len(data),
                "sha256": hashlib.sha256(data).hexdigest(),
                "content": base64.b64encode(data).decode(),
            }
            for name, data in parcel.ordered()
        ]
        body = orjson.dumps({"schema": SCHEMA, **parcel.facts, "files": files}, option=orjson.OPT_SORT_KEYS)
        if len(body) > _BODY_BYTES_MAX:
            raise SinkError(f"webhook `{self.name}`: a report of {len(body)} bytes is too large to post")
        self._sink.deliver(f"report-{parcel.report}", body)
        return ""
