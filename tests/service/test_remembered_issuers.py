"""Whose tenants there are is remembered by the service, and another process's assignment counts at its next request."""

from __future__ import annotations

import subprocess
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
from sqlalchemy import Connection, Engine, event

from kvcustody.audit.evidence.processes.orders import orders_to_sign
from kvcustody.audit.evidence.query.issuers import RememberedIssuers, known_issuers
from kvcustody.audit.kinds import BARE, Event, IssuerAssigned
from kvcustody.audit.tlog.signing_key import SigningKey
from kvcustody.clock import VirtualClock
from kvcustody.console.policy.orders import order_signature
from kvcustody.governance.service.service import Service
from kvcustody.tenants import Issuers
from standins.erasure.signing import OLGA, opened_as, orders, put


def assign(service: Service, issuer: str, *more: str) -> None:
    """As an operator does beside the service: in a process of its own."""
    command = [sys.executable, "-m", "kvcustody.console.main", "policy", "assign-issuer", issuer, *more]
    place = ["--ledger", service.settings.database_url, "--actor", "olga"]
    subprocess.run([*command, *place], check=True, capture_output=True)


class _Stale(RememberedIssuers):
    """The control: what was read first is never read again."""

    def known(self, connection: Connection) -> Issuers:
        if self._read[0] < 0:
            super().known(connection)
        return self._read[1]


@pytest.mark.parametrize("memory", [RememberedIssuers, _Stale])
def test_an_issuer_that_another_process_assigns_counts_at_once(
    make_service: Callable[..., Service],
    make_people: Callable[..., Any],
    make_client: Callable[..., Any],
    memory: type[RememberedIssuers],
) -> None:
    service = make_service()
    service._issuers = memory()
    client, auditor = make_client(service), make_people(service)["auditor"]
    assign(service, "corp", "--bare")
    asked = "/v1/audit/events?tenant=acme^partner"
    assert [service.named(said) for said in ("acme", "acme^corp")] == ["acme", "acme"]
    assert client("GET", asked, auditor).status_code != 200, "nobody assigned that issuer yet"
    assign(service, "partner")
    assert (client("GET", asked, auditor).status_code == 200) is (memory is RememberedIssuers)


def test_an_assignment_is_read_once_and_one_that_is_signed_later_counts(any_store: Engine, tmp_path: Path) -> None:
    store, clock, issuers = opened_as(any_store, orders(OLGA)), VirtualClock(), RememberedIssuers()
    asked: list[str] = []
    event.listen(any_store, "before_cursor_execute", lambda *how: asked.append(str(how[2])))

    def known() -> tuple[str, ...]:
        with store.connect() as connection:
            found = issuers.known(connection)
            assert found == known_issuers(connection)
        return found.all

    def ordered(folder: str, make: Callable[[int], Event], signer: SigningKey | None) -> tuple[str, ...]:
        clock.advance(1_000_000)
        put(any_store, tmp_path / folder, clock, make, None if signer is None else orders(signer))
        return known()

    assert known() == ()
    assert ordered("corp", lambda at_us: IssuerAssigned(at_us, "corp", BARE, "olga"), OLGA) == ("corp",)
    partner = ordered("partner", lambda at_us: IssuerAssigned(at_us, "partner", "qualified", "olga"), None)
    assert partner == ("corp",), "nobody signed it"
    with store.connect() as connection:
        [unsigned] = orders_to_sign(connection)
    signed = ordered("later", lambda at_us: order_signature(unsigned, at_us, "olga", "test"), OLGA)
    assert signed == ("corp", "partner")
    asked.clear()
    with store.connect() as connection:
        issuers.known(connection)
    assert asked and not [text for text in asked if "events.leaf" in text]
