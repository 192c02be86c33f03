"""Who signs orders: the control plane for its callers, and a person whose command writes into the ledger."""

from __future__ import annotations

import json
from collections.abc import Iterator
from functools import partial
from pathlib import Path
from typing import Any

import orjson
import pytest
from sqlalchemy import Engine, select
from typer.testing import CliRunner

from kvcustody.audit.evidence.processes.enforcement import newest_order
from kvcustody.audit.evidence.processes.orders import orders_to_sign, unsigned_orders
from kvcustody.audit.evidence.query.issuers import known_issuers
from kvcustody.audit.kinds import EnforcementOrdered, LegalHoldChanged, WorkerStarted
from kvcustody.audit.store.database.engine import open_store
from kvcustody.audit.store.database.signed_orders import SignedOrders
from kvcustody.audit.store.schema.ledger import events
from kvcustody.audit.tlog.signing_key import SigningKey, create_signing_key
from kvcustody.audit.verify.ledger.fsck_ledger import fsck
from kvcustody.audit.write.record_operator_act import record_operator_acts
from kvcustody.clock import SystemClock, VirtualClock
from kvcustody.console.main import app
from kvcustody.console.policy.orders import order_signature
from kvcustody.errors import ServiceError, UnsignedOrderError
from kvcustody.governance.release.order_signing import read_signed_orders
from kvcustody.governance.release.trust import write_trust
from kvcustody.times import DAY_US, iso
from standins import builders
from standins.erasure.signing import (
    EVE,
    OLGA,
    ONE,
    READERS,
    erase_alpha,
    monitor,
    opened_as,
    orders,
    put,
)
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
        return [bytes(leaf) for leaf in connection.scalars(select(events.c.leaf).where(events.c.kind == kind))]


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
        assert "`enforcement-ordered` in `system`" in said and "repeat the order" in said
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
    monkeypatch.chdir(tmp_path)
    monkeypatch.setenv("KVCUSTODY_POLICY_TRUST", str(tmp_path / "trust.toml"))
    monkeypatch.setenv("KVCUSTODY_ORDER_KEY_PATH", str(tmp_path / "olga.key"))
    with builders.ledger(migrated, tmp_path / "ledger.db") as engine:
        builders.record(engine, tmp_path / "spill", [WorkerStarted(1, "one", 8, 1, 4096, "cpu", "test")], worker="one")
        yield engine


def run(folder: Path, *words: str) -> Any:
    return CliRunner().invoke(app, [*words, "--ledger", f"sqlite:///{folder}/ledger.db", "--json"])


def test_a_person_signs_what_her_command_writes(desk: Engine, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    until = iso(SystemClock().utc_us() + DAY_US)
    order = ("policy", "enforce", "monitor", "--until", until, "--reason", "test")
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
    assert second.exit_code != 0 and "omit `--bare`" in second.output
    done = run(tmp_path, *assign, "https://partner.example", *who)
    assert json.loads(done.output)["issuers"] == ["https://corp.example", "https://partner.example"]
    signed = readers(tmp_path)
    assert all(signed.accepted(leaf, "issuer-assigned") is not None for leaf in leaves(desk, "issuer-assigned"))
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


def test_a_person_signs_the_orders_from_before_orders_were_signed(any_store: Engine, tmp_path: Path) -> None:
    """Each of them counts again, from its own time; with its control: before, nobody follows one."""
    clock, key = VirtualClock(), opened_as(any_store, orders(OLGA))
    for number, (made, _) in enumerate(READERS.values()):
        for part, order in enumerate((*made, erase_alpha)):
            clock.advance(1_000_000)
            put(any_store, tmp_path / f"{number}-{part}", clock, order, None)
    with any_store.connect() as connection:
        believed = {name: read(connection) for name, (_, read) in READERS.items()}
    with opened_as(any_store, orders()).connect() as connection:
        assert not any(read(connection) for _, read in READERS.values()), "control"
    with key.connect() as connection:
        to_sign = orders_to_sign(connection)
        assert len(unsigned_orders(connection)) == len(to_sign) > 5
    record_operator_acts(key, lambda at_us: [order_signature(one, at_us, "olga", "test") for one in to_sign])
    with opened_as(any_store, orders()).connect() as connection:
        assert {name: read(connection) for name, (_, read) in READERS.items()} == believed
        assert unsigned_orders(connection) == () and orders_to_sign(connection) == []
    with opened_as(any_store, orders(EVE)).connect() as connection:
        assert all(read(connection) for _, read in READERS.values()), "who reads needs no key of its own"


@pytest.mark.parametrize("forged", ["signed by nobody", "signed by a stranger"])
def test_nobody_but_a_trusted_key_signs_an_order_from_before(any_store: Engine, tmp_path: Path, forged: str) -> None:
    clock = VirtualClock()
    put(any_store, tmp_path / "order", clock, monitor, None)
    with opened_as(any_store, orders()).connect() as connection:
        [order] = orders_to_sign(connection)
    signature = partial(order_signature, order, actor="olga", reason="test")
    put(any_store, tmp_path / "forger", clock, signature, orders(EVE) if "stranger" in forged else None)
    with opened_as(any_store, orders()).connect() as connection:
        assert newest_order(connection) is None
    put(any_store, tmp_path / "olga", clock, signature, orders(OLGA))
    with opened_as(any_store, orders()).connect() as connection:
        assert newest_order(connection) is not None, "control"


def test_the_command_lists_first_and_signs_what_it_is_asked_to(
    desk: Engine, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    clock = SystemClock()
    until = clock.utc_us() // 10**6 + 3600
    order = EnforcementOrdered(clock.now_us(), "monitor", (), 0, "ab" * 16, until, "olga", "before")
    hold = LegalHoldChanged(clock.now_us(), "h-1", "acme", "placed", "before", "dora")
    builders.record(desk, tmp_path / "before", [order, hold], worker="before", clock=clock)
    sign = ("policy", "sign-orders", "--actor", "olga")
    listed = json.loads(run(tmp_path, *sign).stdout)
    assert [one["kind"] for one in listed["orders"]] == ["enforcement-ordered", "legal-hold"]
    assert not listed["signed"] and len(listed["not_followed"]) == 2 and leaves(desk, "order-signed") == []
    assert [tuple(one.values()) for one in listed["counts"]] == [
        ("enforcement-ordered", "olga", 1),
        ("legal-hold", "dora", 1),
    ]
    refused = run(tmp_path, *sign, "--yes").output
    assert "2 orders of `dora`, `olga`: nothing is signed" in refused, "all of them only where that is said"
    assert leaves(desk, "order-signed") == []
    monkeypatch.delenv("KVCUSTODY_ORDER_KEY_PATH")
    assert "KVC615" in run(tmp_path, *sign, "--all", "--yes").output, "who may not give orders signs none"
    monkeypatch.setenv("KVCUSTODY_ORDER_KEY_PATH", str(tmp_path / "olga.key"))
    one = listed["orders"][0]
    place = f"{one['log']}/{one['idx']}"
    chosen = run(tmp_path, *sign, "--order", place, "--yes")
    assert len(json.loads(chosen.output)["not_followed"]) == 1, chosen.output
    assert "no unsigned order at this place" in run(tmp_path, *sign, "--order", place).output
    assert json.loads(run(tmp_path, *sign, "--all", "--yes").stdout)["not_followed"] == []
    assert len(leaves(desk, "order-signed")) == 2
    with desk.connect() as connection:
        assert fsck(connection).ok
    monkeypatch.delenv("KVCUSTODY_POLICY_TRUST")
    assert "set KVCUSTODY_POLICY_TRUST" in run(tmp_path, *sign).output


def _before(desk: Engine, folder: Path) -> None:
    """Three orders from before orders were signed, of two kinds and two authors."""
    clock = SystemClock()
    until = clock.utc_us() // 10**6 + 3600
    given = [
        EnforcementOrdered(clock.now_us(), "monitor", (), 0, "ab" * 16, until, "olga", "before"),
        LegalHoldChanged(clock.now_us(), "h-1", "acme", "placed", "before", "dora"),
        LegalHoldChanged(clock.now_us(), "h-2", "acme", "placed", "before", "eve"),
    ]
    builders.record(desk, folder / "before", given, worker="before", clock=clock)


@pytest.mark.parametrize(
    ("chosen", "kinds"),
    [
        (("--kind", "legal-hold"), ["legal-hold", "legal-hold"]),
        (("--kind", "legal-hold", "--author", "dora"), ["legal-hold"]),
        (("--author", "olga", "--author", "dora"), ["enforcement-ordered", "legal-hold"]),
        (("--all",), ["enforcement-ordered", "legal-hold", "legal-hold"]),
    ],
)
def test_the_command_signs_the_kinds_and_authors_that_were_chosen(
    desk: Engine, tmp_path: Path, chosen: tuple[str, ...], kinds: list[str]
) -> None:
    _before(desk, tmp_path)
    sign = ("policy", "sign-orders", "--actor", "olga", *chosen)
    assert not json.loads(run(tmp_path, *sign).stdout)["signed"] and not leaves(desk, "order-signed")
    assert sorted(one["kind"] for one in json.loads(run(tmp_path, *sign, "--yes").stdout)["orders"]) == kinds
    assert sorted(orjson.loads(leaf)["of_kind"] for leaf in leaves(desk, "order-signed")) == kinds
    for wrong, where in (("--kind", "of this kind"), ("--author", "by this author")):
        output = run(tmp_path, "policy", "sign-orders", "--actor", "olga", wrong, "nothing").output
        assert f"no unsigned order {where}" in output


@pytest.mark.parametrize(("key", "signs"), [("ada", False), ("grace", False), ("olga", True)])
def test_only_a_key_with_the_role_orders_signs_orders_from_before(
    desk: Engine, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, key: str, signs: bool
) -> None:
    """The keys of an author and of an approver are trusted for policies, and for no order. Control: Olga's."""
    _before(desk, tmp_path)
    monkeypatch.setenv("KVCUSTODY_ORDER_KEY_PATH", str(tmp_path / f"{key}.key"))
    output = run(tmp_path, "policy", "sign-orders", "--actor", key, "--all", "--yes").output
    assert ("with the role `orders`" in output) is not signs, output
    assert len(leaves(desk, "order-signed")) == (3 if signs else 0)


def test_orders_and_their_authors_are_listed_before_they_are_signed(desk: Engine, tmp_path: Path) -> None:
    _before(desk, tmp_path)
    url = f"sqlite:///{tmp_path}/ledger.db"
    sign = ("policy", "sign-orders", "--actor", "olga", "--ledger", url)
    refused = CliRunner().invoke(app, [*sign, "--yes"])
    for said in ("legal-hold by dora: 1", "legal-hold by eve: 1", "enforcement-ordered by olga: 1"):
        assert said in refused.output
    assert "nothing is signed" in refused.output and refused.exit_code and not leaves(desk, "order-signed")
    signed = CliRunner().invoke(app, [*sign, "--kind", "legal-hold", "--yes"])
    assert signed.output.index("legal-hold by eve: 1") < signed.output.index("2 orders signed"), signed.output


def trusted(folder: Path, *signers: SigningKey) -> Path:
    """A trust configuration with these keys that sign orders."""
    people = [SigningKey.generate(name) for name in ("ada", "grace")]
    rows = [(str(key.verifier), role, None) for key, role in zip(people, ("author", "approver"), strict=True)]
    rows += [(str(key.verifier), "orders", None) for key in signers]
    path = folder / "trust.toml"
    path.write_text(write_trust("prod", rows))
    return path


def signed_hold(signer: SigningKey) -> bytes:
    """A leaf with the signature of somebody who may sign orders, or not."""
    body = {"kind": "legal-hold-changed", "log": "system", "incarnation": "ab" * 16, "sequence": 1}
    signature = orders(signer, ledger=ORIGIN).sign(orjson.dumps(body))
    return orjson.dumps(body | {"signature": signature})


def test_keys_that_are_added_and_taken_away_count_without_a_restart(tmp_path: Path) -> None:
    path, leaf = trusted(tmp_path, ONE), signed_hold(OLGA)
    orders = read_signed_orders(path, ORIGIN, None)
    assert orders is not None
    beside = orders.beside([])  # as a connection has it
    assert orders.accepted(leaf, "legal-hold-changed") is None and len(orders.newly_refused()) == 1
    trusted(tmp_path, ONE, OLGA)
    for view in (orders, beside):
        assert view.accepted(leaf, "legal-hold-changed") is not None and view.refusal(leaf) is None
    assert not orders.newly_refused()
    trusted(tmp_path, ONE)
    for view in (orders, beside):
        assert view.accepted(leaf, "legal-hold-changed") is None and view.refusal(leaf) is not None
    assert not orders.newly_refused(), "it is on record already"


def test_a_process_signs_while_its_key_is_trusted(tmp_path: Path) -> None:
    key = create_signing_key(tmp_path / "desk.key", "desk")
    orders = read_signed_orders(trusted(tmp_path, key), ORIGIN, tmp_path / "desk.key")
    assert orders is not None and orders.may_sign
    trusted(tmp_path, ONE)
    assert not orders.may_sign
    with pytest.raises(UnsignedOrderError):
        orders.sign(orjson.dumps({"kind": "legal-hold-changed"}))
    trusted(tmp_path, ONE, key)
    assert orders.may_sign and orders.sign(orjson.dumps({"kind": "legal-hold-changed"})).startswith("desk ")
