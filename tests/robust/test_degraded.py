"""What is refused or put off without harm: identities, shortage of blocks, and a ledger that is away."""

from __future__ import annotations

import sqlite3
import time
from collections.abc import Callable
from pathlib import Path

import numpy as np
import orjson
import pytest
from sqlalchemy import Engine, select

from kvcustody.allocator.pool.memory_protocol import UnbackedMemory
from kvcustody.audit.store.database.engine import open_store
from kvcustody.audit.store.schema.ledger import events
from kvcustody.errors import CapacityError, CustodyError, IdentityError
from kvcustody.governance.admission_outcome import AdmissionRefused, Deferred
from kvcustody.governance.governor.pools import Pools
from kvcustody.governance.identity.principal import Principal, identify
from kvcustody.ids import TenantId
from standins.robust.custody_world import BLOCK, MODEL, QUICK, CustodyWorld

Make = Callable[..., CustodyWorld]


IDENTITIES: dict[str, tuple[dict[str, object], str]] = {
    "no tenant": ({"tenant": None}, "KVC200: tenant: missing"),
    "no issuer": ({"issuer": None}, "KVC200: issuer: missing"),
    "a number": ({"tenant": 7}, "KVC200: tenant: must be text, not `int`"),
    "empty": ({"tenant": ""}, "KVC200: tenant: "),
    "a wildcard": ({"tenant": "*"}, "KVC200: tenant: "),
    "a space": ({"tenant": "acme corp"}, "KVC200: tenant: "),
    "a path": ({"tenant": "a/../b"}, "KVC200: tenant: has a `.` or `..` path segment"),
    "too long": ({"tenant": "a" * 129}, "KVC200: tenant: "),
    "not normal": ({"tenant": "cafe\u0301"}, "KVC200: tenant: "),
    "a control character": ({"asserted": {"session": "a\nb"}}, "KVC200: session: "),
    "contradicted": (
        {"verified": {"subject": "alice"}, "asserted": {"subject": "bob"}},
        "KVC200: subject: asserted value contradicts the verified claim",
    ),
    "a route without slash": ({"route": "chat"}, "KVC200: route: must begin with `/`"),
}


@pytest.mark.parametrize("case", IDENTITIES)
def test_a_malformed_identity_is_one_line_and_quotes_nothing(case: str) -> None:
    wrong, expected = IDENTITIES[case]
    with pytest.raises(IdentityError) as caught:
        identify(**({"issuer": "idp", "tenant": "acme"} | wrong))  # type: ignore[arg-type]
    line = str(caught.value)
    assert line.startswith(expected) and "\n" not in line
    for value in wrong.values():
        assert not isinstance(value, str) or len(value) < 3 or value not in line


def test_a_refused_request_changes_nothing(make: Make) -> None:
    world = make(seed=4).run(60)
    before, running = world.governor.counts(), dict(world.governor.running)
    stranger = Principal("idp", TenantId("alpha"))
    assert isinstance(world.governor.admit(stranger, MODEL, []), AdmissionRefused)
    with pytest.raises(CustodyError, match="KVC100: token ids must be integers of 31 bits"):
        world.governor.admit(stranger, MODEL, [-5])
    with pytest.raises(CustodyError, match="KVC400: request `unknown` is not running here"):
        world.governor.commit(("unknown",), (1,))
    assert world.governor.counts() == before and dict(world.governor.running) == running
    assert world.governor.check() == [] and world.broken() == set()


def test_a_shortage_of_blocks_is_put_off_and_harms_nobody(make: Make) -> None:
    """8 blocks, `cap: 70%`: five for one tenant. The second request waits until the first has left."""
    world = make(blocks=8)
    first = world.admit("alpha", np.arange(5 * BLOCK, dtype=np.int32))
    assert first is not None
    table = world.governor.blocks(first.request_id).copy()
    principal = Principal("idp", TenantId("alpha"))
    prompt = np.arange(1000, 1000 + 5 * BLOCK, dtype=np.int32)
    for _ in range(3):
        answer = world.governor.admit(principal, MODEL, prompt, request_id="second")
        assert isinstance(answer, Deferred) and answer.reason
        world.wait(1)
    assert np.array_equal(world.governor.blocks(first.request_id), table)
    assert world.governor.check() == [] and world.broken() == set()
    world.governor.abort(first.request_id)
    world.wait(10)
    assert not isinstance(world.governor.admit(principal, MODEL, prompt, request_id="second"), Deferred)
    assert world.broken() == set()


def test_a_pool_of_no_blocks_is_refused_in_one_line() -> None:
    with pytest.raises(CapacityError) as caught:
        Pools(lambda count: UnbackedMemory(count, 1), 0)
    assert str(caught.value) == "KVC500: a pool needs at least one block, got `0`"


def kinds(store: Engine, incarnation: str) -> list[tuple[str, str]]:
    with store.connect() as connection:
        bodies = map(orjson.loads, connection.scalars(select(events.c.leaf).order_by(events.c.sequence)))
        return [(body["kind"], str(body.get("tenant"))) for body in bodies if body["incarnation"] == incarnation]


def test_a_new_tenant_waits_for_the_record_of_its_key(store: Engine, make: Make, tmp_path: Path) -> None:
    """While the ledger is away its first epoch keys nothing, however often it asks; others go on."""
    engine = open_store(tmp_path / "ledger.db", timeout_seconds=0.05)
    world = make(engine=engine, settings=QUICK._replace(durable_seconds=0.3))
    prompt = np.arange(3 * BLOCK + 1, dtype=np.int32)
    assert world.admit("alpha", prompt) is not None and world.writer.flush()
    other = sqlite3.connect(tmp_path / "ledger.db", isolation_level=None, timeout=1.0)
    other.execute("BEGIN EXCLUSIVE")
    newcomer = Principal("idp", TenantId("beta"))
    for _ in range(3):
        answer = world.governor.admit(newcomer, MODEL, prompt, request_id="new")
        assert isinstance(answer, Deferred) and answer.reason == "ledger"
        going = world.admit("alpha", prompt)
        assert going is not None and going.hit_tokens == 3 * BLOCK
    assert world.governor.stats().tenants["beta"].deferred == {"ledger": 1}, "a request that asks again is counted once"
    other.execute("ROLLBACK")
    other.close()
    deadline = time.monotonic() + 60
    while isinstance(answer, Deferred) and time.monotonic() < deadline:
        answer = world.governor.admit(newcomer, MODEL, prompt, request_id="new")
    assert world.broken() == set()
    recorded = kinds(store, world.writer.incarnation)
    made, opened = recorded.index(("key-event", "beta")), recorded.index(("residency-opened", "beta"))
    assert made < opened, "the epoch was in use before it was on record"
    engine.dispose()
