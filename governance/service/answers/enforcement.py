"""For whom workers enforce their policy, and what was foreseen of whom they monitor."""

from __future__ import annotations

from typing import Any

from kvcustody.audit.evidence.processes import enforcement
from kvcustody.governance.service.access.caller import Caller
from kvcustody.governance.service.access.roles import Permission
from kvcustody.governance.service.operations.desk import Desk, ReadOperation
from kvcustody.governance.service.operations.operation import Operation

POLICY_STEPS = (
    Permission.APPROVE_POLICY,
    Permission.STAGE_POLICY,
    Permission.NARROW_POLICY,
    Permission.WRITE_POLICY,
)
"""Whoever takes a step of a release sees what is in effect too."""


def enforcement_on_record(desk: Desk) -> dict[str, Any]:
    """The newest order, what processes at work do, when anybody was monitored, and what was foreseen."""
    with desk.reading() as connection:
        order = enforcement.newest_order(connection)
        return {
            "order": None if order is None else order._asdict(),
            "workers": [one._asdict() for one in enforcement.worker_enforcement(connection)],
            "periods": [one._asdict() for one in enforcement.monitored_periods(connection)],
            "forecasts": [one.data() for one in enforcement.forecasts(connection)],
        }


def _enforcement(desk: Desk, caller: Caller) -> dict[str, Any]:
    return enforcement_on_record(desk)


GET_ENFORCEMENT = ReadOperation(
    Operation(
        "getEnforcement",
        "GET",
        "/v1/policies/enforcement",
        Permission.READ_POLICY,
        "policies",
        also=POLICY_STEPS,
    ),
    _enforcement,
)
