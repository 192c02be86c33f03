"""Who signs orders: the control plane for its callers, and a person whose command writes into the ledger."""

from __future__ import annotations

import json
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import orjson
import pytest
from sqlalchemy import Engine, select
from typer.testing import CliRunner

from kvcustody.audit.database.engine import open_store
from kvcustody.audit.database.signed_orders import SignedOrders
from kvcustody.audit.events import EnforcementOrdered, WorkerStarted
from kvcustody.audit.processes.enforcement import newest_order
from kvcustody.audit.query.issuers import known_issuers
from kvcustody.audit.schema.ledger import events
from kvcustody.audit.tlog.signing_key import create_signing_key
from kvcustody.clock import SystemClock
from kvcustody.console.main import app
from kvcustody.errors import ServiceError
from kvcustody.governance.release.order_signing import read_signed_orders
from kvcustody.governance.release.trust import write_trust
from kvcustody.times import DAY_US, iso
from standins import builders
from standins.service.control_plane_world import ControlPlane

ORIGIN = "kvcustody.example/ledger"  # the default of both settings
PLACE, ORDER = "/v1/policies/enforcement:order", {"mode": "enforce", "reason": "test"}


@pytest.fixture
def plane(tmp_path: Path) -> Iterator[ControlPlane]:
    made = ControlPlane(tmp_path)
    yield made
    made.end()


def readers(folder: Path) -> SignedOrders:
    found = read_signed_orders(folder / "trust.toml", ORIGIN, None)
    assert found is not None
    return found


def leaves(store: Engine, kind: str) -> list[bytes]:
    with store.connect() as connection:
        return [
            bytes(leaf) for leaf in connection.scalars(select(events.c.leaf).where(events.c.kind == kind))
        ]


def test_the_control_plane_signs_what_its_callers_order(plane: ControlPlane, tmp_path: Path) -> None:
    with plane.connect("grace") as grace:
        grace.post(PLACE, ORDER)
    store = open_store(tmp_path / "ledger.db", read_only=True)
    [leaf] = leaves(store, "enforcement-ordered")
    said = readers(tmp_path).accepted(leaf, "enforcement-ordered")
    assert said is not None and said["actor"] == "grace"
    assert orjson.loads(leaf)["signature"].startswith("orders ")
    store.dispose()


def test_an_order_that_somebody_writes_beside_it_shows_in_health_and_is_given_to_nobody(
    plane: ControlPlane, tmp_path: Path
) -> None:
    store, clock = open_store(tmp_path / "ledger.db"), SystemClock()
    until = clock.utc_us() // 10**6 + 3600
    builders.record(
        store,
        tmp_path / "forger",
        [EnforcementOrdered(clock.now_us(), "monitor", (), 0, "ab" * 16, until, "olga", "forged")],
        worker="forger",
        clock=clock,
    )
    with plane.connect("olive") as olive, plane.connect("gpu-0") as worker:
        health = olive.get("/v1/health")
        assert health["orders_authenticated"]
        [said] = health["orders_not_followed"]
        assert "`enforcement-ordered` in `system`" in said and "give the order again" in said
        assert worker.get("/v1/worker/erasures")["enforcement"] is None
    with store.connect() as connection:
        assert newest_order(connection) is not None, "control: whoever asks nobody's signature follows it"
    store.dispose()


def test_a_control_plane_without_a_key_refuses_orders(tmp_path: Path) -> None:
    plane = ControlPlane(tmp_path, order_key_path=None)
    try:
        with plane.connect("grace") as grace, pytest.raises(ServiceError, match="order_key_path"):
            grace.post(PLACE, ORDER)
        store = open_store(tmp_path / "ledger.db", read_only=True)
        assert leaves(store, "enforcement-ordered") == []
        store.dispose()
    finally:
        plane.end()


@pytest.fixture
def desk(tmp_path: Path, migrated: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[Engine]:
    """A ledger, a trust configuration that names Olga, and her settings."""
    names = {"olga": "orders", "ada": "author", "grace": "approver"}
    keys = [(create_signing_key(tmp_path / f"{name}.key", name), role) for name, role in names.items()]
    rows = [(str(key.verifier), role, None) for key, role in keys]
    (tmp_path / "trust.toml").write_text(write_trust("prod", rows))
    monkeypatch.setenv("KVCUSTODY_POLICY_TRUST", str(tmp_path / "trust.toml"))
    monkeypatch.setenv("KVCUSTODY_ORDER_KEY_PATH", str(tmp_path / "olga.key"))
    with builders.ledger(migrated, tmp_path / "ledger.db") as engine:
        builders.record(
            engine, tmp_path / "spill", [WorkerStarted(1, "one", 8, 1, 4096, "cpu", "test")], worker="one"
        )
        yield engine


def run(folder: Path, *words: str) -> Any:
    return CliRunner().invoke(app, [*words, "--ledger", f"sqlite:///{folder}/ledger.db", "--json"])


def test_a_person_signs_what_her_command_writes(
    desk: Engine, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    until = iso(SystemClock().utc_us() + DAY_US)
    order = ("policy", "enforce", "monitor", "--until", until, "--actor", "olga", "--reason", "test")
    done = run(tmp_path, *order)
    assert done.exit_code == 0, done.output
    [leaf] = leaves(desk, "enforcement-ordered")
    assert readers(tmp_path).accepted(leaf, "enforcement-ordered") is not None
    monkeypatch.delenv("KVCUSTODY_ORDER_KEY_PATH")
    unsigned = run(tmp_path, *order)
    assert unsigned.exit_code != 0 and "order_key_path" in unsigned.output
    assert leaves(desk, "enforcement-ordered") == [leaf], "and nothing is on record"
    monkeypatch.setenv("KVCUSTODY_ORDER_KEY_PATH", str(tmp_path / "ada.key"))
    refused = run(tmp_path, *order)
    assert refused.exit_code != 0 and "names no key `ada` with the role `orders`" in refused.output


def test_a_person_assigns_the_issuers_of_a_ledger(desk: Engine, tmp_path: Path) -> None:
    assign = ("policy", "assign-issuer")
    who = ("--actor", "olga")
    early = run(tmp_path, *assign, "https://partner.example", *who)
    assert early.exit_code != 0 and "assign that one first" in early.output
    for _ in range(2):  # again changes nothing
        done = run(tmp_path, *assign, "https://corp.example", "--bare", *who)
        assert json.loads(done.output) == {"issuers": ["https://corp.example"]}, done.output
    second = run(tmp_path, *assign, "https://partner.example", "--bare", *who)
    assert second.exit_code != 0 and "leave `--bare` out" in second.output
    done = run(tmp_path, *assign, "https://partner.example", *who)
    assert json.loads(done.output)["issuers"] == ["https://corp.example", "https://partner.example"]
    signed = readers(tmp_path)
    assert all(
        signed.accepted(leaf, "issuer-assigned") is not None for leaf in leaves(desk, "issuer-assigned")
    )
    with desk.connect() as connection:
        assert known_issuers(connection).home == "https://corp.example"


def test_the_commands_make_such_a_key_and_name_it(tmp_path: Path) -> None:
    for name in ("ada", "grace", "control-plane"):
        words = ["policy", "key", str(tmp_path / f"{name}.key"), "--name", name]
        assert CliRunner().invoke(app, words).exit_code == 0
    public = {name: str(tmp_path / f"{name}.key.pub") for name in ("ada", "grace", "control-plane")}
    trust = ["policy", "trust", str(tmp_path / "trust.toml"), "--audience", "prod"]
    trust += ["--author", public["ada"], "--approver", public["grace"], "--orders", public["control-plane"]]
    done = CliRunner().invoke(app, trust)
    assert done.exit_code == 0, done.output
    made = read_signed_orders(tmp_path / "trust.toml", ORIGIN, tmp_path / "control-plane.key")
    assert made is not None and made.may_sign and not readers(tmp_path).may_sign
