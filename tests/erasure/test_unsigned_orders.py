"""A process without a key that signs orders: each of its calls that would write one is refused, and writes nothing."""

from __future__ import annotations

import ast
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import msgspec
import pytest
from sqlalchemy import Engine, func, select

from kvcustody.audit.keep.purge_and_legal_hold import (
    LogPlan,
    PurgeFacts,
    lift_hold,
    place_hold,
    record_purges,
)
from kvcustody.audit.keep.unlink_subject import unlink_subject
from kvcustody.audit.kinds import KINDS, WorkerStopped
from kvcustody.audit.leaf.leaf_schema import SIGNED_ORDERS, plain_type
from kvcustody.audit.store.database.signed_orders import authenticate
from kvcustody.audit.store.schema.ledger import events
from kvcustody.audit.write.event_writer import EventWriter
from kvcustody.clock import VirtualClock
from kvcustody.errors import ServiceError, UnsignedOrderError
from kvcustody.governance.erasure.selector import Selector
from kvcustody.governance.identity.principal import identify
from standins import builders
from standins.architecture.parsed import parsed_if_named
from standins.erasure.signing import OLGA, opened_as, orders
from standins.robust.custody_world import CustodyWorld
from standins.service.control_plane_world import ControlPlane

ROOT = Path(__file__).resolve().parents[2]
ROOMS = ("audit", "governance", "integrations", "console", "lab", "policies", "testkit")
SIGNED = {kind.__name__: kind for kind in KINDS if KINDS[kind].name in SIGNED_ORDERS}
_OF_TYPE: dict[Any, Any] = {int: 1, str: "x", str | None: None, tuple[str, ...]: ()}

# Every function that makes an order, and what it goes to; each of these refuses (below).
MAKERS = {
    "audit/keep/purge_and_legal_hold.py:place_hold": "record_operator_act",
    "audit/keep/purge_and_legal_hold.py:lift_hold": "record_operator_act",
    "audit/keep/purge_and_legal_hold.py:record_purges": "record_operator_acts",
    "audit/keep/unlink_subject.py:unlink_subject": "record_operator_act, Service.record",
    "console/policy/orders.py:assign_command": "record_operator_act",
    "console/policy/orders.py:order_signature": "record_operator_acts",
    "governance/cases/take_step.py:opened_event": "Service.record",
    "governance/cases/take_step.py:step_event": "Service.record",
    "governance/decisions/tenant_names.py:_meet": "Ledger.submit_durable",
    "governance/erasure/erasure_run.py:request_event": "Ledger.submit, record_operator_act, Service.record",
    "governance/monitoring/ordering.py:enforcement_order": "record_operator_act, Service.record",
    "governance/service/fleet/key_custody.py:order": "Service.record",
    "governance/service/fleet/worker_requests.py:assign_issuer": "Service.record",
}


def _makers(tree: ast.AST, path: str) -> Iterator[str]:
    """`path:function` of each call of the class of an order."""
    for function in ast.walk(tree):
        if isinstance(function, ast.FunctionDef):
            for node in ast.walk(function):
                if isinstance(node, ast.Call) and getattr(node.func, "id", "") in SIGNED:
                    yield f"{path}:{function.name}"


def test_every_function_that_makes_an_order_is_listed_here() -> None:
    functions = {
        made
        for room in ROOMS
        for path in (ROOT / room).rglob("*.py")
        for made in _makers(parsed_if_named(path, SIGNED), str(path.relative_to(ROOT)))
    }
    assert len(SIGNED) >= 9
    assert functions == set(MAKERS), "name what it goes to: that must refuse an order without a key"


DOORS: dict[str, Callable[[EventWriter, Any], object]] = {
    "submit": lambda writer, order: writer.submit([WorkerStopped(1, "w", "closed", 0, ()), order]),
    "submit_durable": lambda writer, order: writer.submit_durable(order),
    "begin_durable": lambda writer, order: writer.begin_durable(order, lambda: None),
}


def _leaves(store: Engine, *kinds: str) -> int:
    with store.connect() as connection:
        query = select(func.count()).select_from(events)
        return connection.scalar(query.where(events.c.kind.in_(kinds)) if kinds else query) or 0


@pytest.mark.parametrize("name", SIGNED)
def test_a_writer_without_a_key_takes_no_order(store: Engine, tmp_path: Path, name: str) -> None:
    kind = SIGNED[name]
    values = {field.name: _OF_TYPE[plain_type(field.type)] for field in msgspec.structs.fields(kind)}
    values["signature"] = ""
    order = kind(**values)
    with builders.writer(opened_as(store, orders()), tmp_path / "none") as writer:
        for door in DOORS.values():
            with pytest.raises(UnsignedOrderError, match=r"KVC615.*`order_key_path`.*role `orders`"):
                door(writer, order)
        assert writer.status().submitted_sequence == 0, "and nothing that came with it is queued"
    for number, signed in enumerate((None, orders(OLGA))):  # the controls: nobody asks, or there is a key
        with builders.writer(opened_as(store, signed), tmp_path / str(number)) as writer:
            writer.submit([order])
            assert writer.flush(60)
        assert _leaves(store, KINDS[kind].name) == number + 1


ACTS: dict[str, Callable[[Engine], object]] = {
    "place_hold": lambda store: place_hold(store, "h-1", "acme", actor="dora", reason="test"),
    "lift_hold": lambda store: lift_hold(store, "there", actor="dora", reason="test"),
    "record_purges": lambda store: record_purges(
        store, [LogPlan("tenant/acme", 0, 1, "")], PurgeFacts(1, "d", "dora", "olga", "test")
    ),
    "unlink_subject": lambda store: unlink_subject(store, "acme", "ada", keys=None, actor="dora", reason="test"),
}


@pytest.mark.parametrize("name", ACTS)
def test_an_operators_act_without_a_key_writes_nothing_at_all(store: Engine, name: str) -> None:
    place_hold(store, "there", "other", actor="dora", reason="test")
    before = _leaves(store)
    authenticate(store, orders())
    with pytest.raises(UnsignedOrderError):
        ACTS[name](store)
    assert _leaves(store) == before
    authenticate(store, None)
    ACTS[name](store)
    assert _leaves(store) > before, "control"


def test_a_worker_without_a_key_begins_no_erasure_and_meets_no_issuer(store: Engine, tmp_path: Path) -> None:
    signed = orders()
    authenticate(store, signed)
    world = CustodyWorld(store, tmp_path, worker="one", clock=VirtualClock())
    governor = world.governor
    try:
        with pytest.raises(UnsignedOrderError):
            governor.erase(Selector("alpha"))
        assert not governor.erasures.pending, "nothing was done"
        stranger = identify(issuer="https://idp.example", tenant="alpha")
        assert governor.tenant_name(stranger) == "alpha^https://idp.example"
        world.settle()
        world.writer.flush()
        assert _leaves(store, "erasure-requested", "erasure-applied", "issuer-assigned") == 0
    finally:
        world.close()
        world.writer.close()


def test_a_service_without_a_key_refuses_each_order_with_the_setting(tmp_path: Path) -> None:
    calls = (
        ("dora", "/v1/erasures", {"classification": "low", "deadline_seconds": 60}),
        ("grace", "/v1/policies/enforcement:order", {"mode": "enforce", "reason": "test"}),
    )
    for key in (None, tmp_path / "with" / "orders.signing"):
        folder = tmp_path / ("without" if key is None else "with")
        folder.mkdir()
        plane = ControlPlane(folder, **({"order_key_path": None} if key is None else {}))
        try:
            for who, path, body in calls:
                with plane.connect(who) as caller:
                    if key is not None:
                        caller.post(path, body)  # the control
                        continue
                    with pytest.raises(ServiceError, match="order_key_path") as refused:
                        caller.post(path, body)
                    assert refused.value.problem == "conflict"  # type: ignore[attr-defined]
        finally:
            plane.end()
