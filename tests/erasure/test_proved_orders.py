"""Orders are verified: `fsck` names each that nobody follows, and a certificate of such an erasure is not sound."""

from __future__ import annotations

import hashlib
import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import orjson
import pytest
from sqlalchemy import Connection, Engine, insert, select
from typer.testing import CliRunner

from kvcustody.audit.evidence.processes.orders import orders_to_sign, unsigned_orders
from kvcustody.audit.reports.document import Document
from kvcustody.audit.reports.erasure.certificate import issue
from kvcustody.audit.store.database import signed_orders
from kvcustody.audit.store.database.signed_orders import SignedOrders, authenticate
from kvcustody.audit.store.schema.ledger import events
from kvcustody.audit.store.schema.ledger import logs as log_rows
from kvcustody.audit.verify.documents.certificate_rules import ORDER_NOT_CHECKED
from kvcustody.audit.verify.ledger.fsck_ledger import FsckReport, fsck
from kvcustody.clock import VirtualClock
from kvcustody.console.main import app
from kvcustody.console.policy.orders import order_signature
from kvcustody.governance.release.trust import write_trust
from standins.audit.documents import verify_certificate
from standins.erasure.certificate_case import KEY, VKEYS, Case
from standins.erasure.signing import (
    EVE,
    OLGA,
    ONE,
    enforce,
    erase_alpha,
    hold,
    monitor,
    opened_as,
    orders,
    put,
    without_rules,
)


def _checked(store: Engine, signed: SignedOrders | None) -> FsckReport:
    with opened_as(store, signed).connect() as connection:
        return fsck(connection)


def _row(connection: Connection, kind: str) -> dict[str, Any]:
    return connection.execute(select(events).where(events.c.kind == kind)).first()._asdict()  # type: ignore[union-attr]


def _appended(connection: Connection, row: dict[str, Any], into: str, **changes: Any) -> None:
    """A leaf at the end of a log, its row saying what the leaf says."""
    found = connection.execute(select(log_rows).where(log_rows.c.name == into)).one()
    body = orjson.loads(row["leaf"]) | changes
    values = {"log": found.id, "idx": found.size, "leaf": orjson.dumps(body, option=orjson.OPT_SORT_KEYS)}
    values |= {name: body[name] for name in ("sequence", "kind") if name in changes}
    connection.execute(log_rows.update().where(log_rows.c.id == found.id).values(size=found.size + 1))
    connection.execute(insert(events).values(row | values))


def _edited(connection: Connection) -> None:
    row = _row(connection, "legal-hold")
    leaf = orjson.dumps(orjson.loads(row["leaf"]) | {"reason": "edited"}, option=orjson.OPT_SORT_KEYS)
    place = (events.c.log == row["log"], events.c.idx == row["idx"])
    connection.execute(events.update().where(*place).values(leaf=leaf))


FORGED: dict[str, tuple[str, Callable[[Connection], None]]] = {
    "edited": ("the signature does not fit", _edited),
    "copied with a sequence of its own": (
        "the signature does not fit",
        lambda c: _appended(c, _row(c, "legal-hold"), "tenant/acme", sequence=1 << 40),
    ),
    "moved to another log": (
        "the signature does not fit",
        lambda c: _appended(c, _row(c, "legal-hold"), "system", log="system", sequence=1 << 41),
    ),
    "inserted without a signature": (
        "it is not signed",
        lambda c: _appended(c, _row(c, "legal-hold"), "tenant/acme", sequence=1 << 42, signature=""),
    ),
}


@pytest.mark.parametrize("form", FORGED)
def test_fsck_names_an_order_that_somebody_forged(any_store: Engine, tmp_path: Path, form: str) -> None:
    """With its control: where nobody asks for signatures, no finding says so."""
    put(any_store, tmp_path / "hold", VirtualClock(), hold("placed"), orders(OLGA))
    put(any_store, tmp_path / "order", VirtualClock(), monitor, orders(OLGA))
    assert _checked(any_store, orders()).ok
    why, forge = FORGED[form]
    with any_store.begin() as connection:
        without_rules(connection)
        forge(connection)
    [named] = [one for one in _checked(any_store, orders()).problems if "nobody follows this order" in one.what]
    assert named.idx is not None and "`legal-hold`" in named.what and why in named.what
    assert not [one for one in _checked(any_store, None).problems if "follows" in one.what], "control"


def test_fsck_names_what_a_writer_of_the_ledger_ordered(any_store: Engine, tmp_path: Path) -> None:
    """A sound leaf in every other way: only its signature says that nobody who may gave the order."""
    clock = VirtualClock()
    put(any_store, tmp_path / "olga", clock, monitor, orders(OLGA))
    clock.advance(1_000_000)
    put(any_store, tmp_path / "eve", clock, enforce, orders(EVE))
    report = _checked(any_store, orders())
    assert [(one.log, "no key `eve` is trusted" in one.what or "eve" in one.what) for one in report.problems] == [
        ("system", True)
    ]
    assert _checked(any_store, None).ok, "control"


def test_commands_that_read_a_ledger_show_the_orders_that_workers_follow(
    any_store: Engine, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Control: where the settings name no trust, every order counts."""
    clock = VirtualClock()
    put(any_store, tmp_path / "hold", clock, hold("placed"), orders(OLGA))
    clock.advance(1_000_000)
    for folder, order in (("lift", hold("lifted")), ("monitor", monitor), ("erase", erase_alpha)):
        put(any_store, tmp_path / folder, clock, order, None)
    rows = [(str(key.verifier), role, None) for key, role in ((EVE, "author"), (ONE, "approver"), (OLGA, "orders"))]
    (tmp_path / "trust.toml").write_text(write_trust("prod", rows))
    is_file = any_store.dialect.name == "sqlite"
    url = f"sqlite:///{tmp_path / 'ledger.db'}" if is_file else any_store.url.render_as_string(hide_password=False)

    def shown() -> tuple[int, bool, set[str]]:
        commands = (["audit", "hold", "list"], ["policy", "enforcement"])
        commands += (["erasure", "list"], ["erasure", "status", "e-1"])
        holds, enforcement, listed, single = (
            json.loads(CliRunner().invoke(app, [*command, "--ledger", url, "--json"]).stdout) for command in commands
        )
        return (
            len(holds["holds"]),
            enforcement["order"] is not None,
            {single["state"], listed["items"][0]["state"]},
        )

    assert shown() == (0, True, {"complete"}), "control"
    monkeypatch.setenv("KVCUSTODY_POLICY_TRUST", str(tmp_path / "trust.toml"))
    monkeypatch.setenv("KVCUSTODY_LEDGER_ORIGIN", "example.com/ledger")
    assert shown() == (1, False, {"not-followed"})


@pytest.mark.parametrize("remembered", [0, 1])
def test_an_order_is_named_also_where_no_more_are_remembered(
    any_store: Engine, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, remembered: int
) -> None:
    """Forgeries that fill the memory hide none of the later ones: from health, from `fsck`, from who signs them."""
    monkeypatch.setattr(signed_orders, "_REFUSED_MAX", remembered)
    put(any_store, tmp_path / "eve", VirtualClock(), monitor, None)
    readers = orders()
    with opened_as(any_store, readers).connect() as connection:
        assert len(unsigned_orders(connection)) == len(orders_to_sign(connection)) == 1
    assert not _checked(any_store, readers).ok
    assert len(readers.newly_refused()) == remembered, "what is remembered is bounded"


def _certificate(case: Case, signed: SignedOrders | None) -> Document:
    with opened_as(case.store, signed).connect() as connection:
        return issue(connection, case.done.erasure, KEY, case.opening, now_us=case.world.clock.utc_us())


class Desk:
    """An erasure that a worker carried out, its request signed or not."""

    def __init__(self, store: Engine, folder: Path, signed: SignedOrders | None) -> None:
        authenticate(store, signed)
        self.case = Case(store, folder)
        authenticate(store, None)


@pytest.mark.parametrize("signed", [True, False], ids=["signed", "unsigned"])
def test_a_certificate_says_whether_its_order_counts(any_store: Engine, tmp_path: Path, signed: bool) -> None:
    case = Desk(any_store, tmp_path, orders(OLGA) if signed else None).case
    blind, seeing = _certificate(case, None), _certificate(case, orders())
    assert blind.facts["outcome"] == "complete" and "order" not in blind.facts
    found = verify_certificate(blind.to_bytes(), VKEYS, case.opening)
    assert found.ok and ORDER_NOT_CHECKED in found.unchecked, "control: nobody asks"
    asked = verify_certificate(blind.to_bytes(), VKEYS, case.opening, orders())
    if signed:
        assert seeing.facts["outcome"] == "complete" and "order" not in seeing.facts
        assert asked.ok and ORDER_NOT_CHECKED not in asked.unchecked
        elsewhere = verify_certificate(blind.to_bytes(), VKEYS, case.opening, orders(ledger="example.com/other"))
        assert ["the signature does not fit" in one for one in elsewhere.problems] == [True]
        return
    assert [one.partition(":")[0] for one in asked.problems] == ["nobody follows its request"]
    assert seeing.facts["outcome"] == "partial" and "it is not signed" in seeing.facts["order"]
    assert not verify_certificate(seeing.to_bytes(), VKEYS, case.opening).ok
    with opened_as(any_store, orders()).connect() as connection:
        [order] = [one for one in orders_to_sign(connection) if one.kind == "erasure-requested"]
    put(
        any_store,
        tmp_path / "olga",
        case.world.clock,
        lambda at_us: order_signature(order, at_us, "olga", "test"),
        orders(OLGA),
    )
    case.sign()
    again = _certificate(case, orders())
    assert again.facts["outcome"] == "complete"
    assert verify_certificate(again.to_bytes(), VKEYS, case.opening, orders()).ok, "it carries the leaf that signs"
    leaf = next(one["leaf"] for one in again.facts["leaves"] if "erasure-requested" in one["leaf"])
    assert order.digest == hashlib.sha256(leaf.encode()).hexdigest()
