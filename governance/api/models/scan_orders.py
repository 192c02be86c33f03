"""Scan orders for workers, as the API shows and takes them."""

from __future__ import annotations

from typing import Annotated, Any

from pydantic import Field, model_validator

from kvcustody.governance.api.models.base import Model, example
from kvcustody.governance.api.models.shown import page_of, shown
from kvcustody.governance.service.fleet.scan_orders import ScanOrder
from kvcustody.governance.service.operations.parameters import LARGE

_ORDER = "cd" * 16
_EXAMPLE = {
    "order": _ORDER, "worker": "gpu-0", "actor": "olive", "at_us": 1_780_000_000_000_000,
    "deadline_us": 1_780_003_600_000_000, "outcome": "scanned", "taken_us": 1_780_000_003_000_000,
    "answered_us": 1_780_000_004_000_000, "incarnation": "ab" * 16, "scan": 3, "findings": 1, "reason": None,
    "unread": "",
}  # fmt: skip

ScanOrderModel = shown(ScanOrder, "ScanOrder", _EXAMPLE)
ScanOrderPage = page_of(ScanOrderModel, "ScanOrders")


class ScanWanted(Model):
    """The deadline of a scan."""

    model_config = example({"deadline_seconds": 3600})

    deadline_seconds: Annotated[int, Field(strict=True, ge=1, le=7 * 86_400)] = 3600


class ScansOwed(Model):
    """Orders that the worker has not answered yet."""

    model_config = example({"orders": [_ORDER]})

    orders: list[str]


def _only(given: str, other: str) -> dict[str, Any]:
    """A schema of what has one of two properties."""
    return {
        "required": [given],
        "properties": {given: {"not": {"type": "null"}}, other: {"type": "null"}},
    }


class ScanDone(Model):
    """The outcome of an order: the number of the scan, or why there is none."""

    model_config = example({"scan": 3}, oneOf=[_only("scan", "reason"), _only("reason", "scan")])

    scan: Annotated[int | None, Field(strict=True, ge=1, lt=LARGE)] = None
    reason: Annotated[str | None, Field(min_length=1, max_length=200)] = None

    @model_validator(mode="after")
    def _one(self) -> ScanDone:
        if (self.scan is None) == (self.reason is None):
            raise ValueError("exactly one of `scan` and `reason` is needed")
        return self
