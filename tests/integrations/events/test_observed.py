"""An observed engine: residencies, tenants, deadlines, gaps, bounds, and leaves that never count as custody."""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable
from pathlib import Path
from typing import Any

import msgspec
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from sqlalchemy import select

from kvcustody.audit.evidence.counters.read_figures import tenant_totals
from kvcustody.audit.evidence.coverage.conservation import PoolCounts, conservation
from kvcustody.audit.evidence.coverage.summary import coverage
from kvcustody.audit.kinds import Event, ObservationGap, ObservedOverdue, ObservedRemoved, ObservedStored
from kvcustody.audit.store.database.engine import open_store
from kvcustody.audit.store.schema.ledger import events as leaves_table
from kvcustody.audit.store.schema.ledger import incarnations
from kvcustody.audit.write.event_writer import EventWriter
from kvcustody.clock import VirtualClock
from kvcustody.errors import IdentityError, PolicyError
from kvcustody.integrations.events.observed_engine import ObservedEngine
from kvcustody.integrations.events.sequence_gaps import Delivered, Missed, Restarted
from kvcustody.migrations.upgrade import upgrade
from kvcustody.policies.reading.load_policy import load_policy
from kvcustody.policies.table.compile import compile_policy
from standins import builders
from standins.integrations.observed_totals import observed_totals

POLICY = """
schema: kvcustody/policy@1
name: watched
profile: shared
classifications: [public, internal, restricted]
classify: [{tenant: acme, as: internal}, {tenant: beta, as: public}]
tenants:
  acme: {quota: {guaranteed: 20%, cap: 60%}}
  beta: {quota: {guaranteed: 20%, cap: 60%}}
rules:
  - {id: own, effect: permit, action: reuse, when: {reader: owner}}
retention:
  public:     {idle: 1h,  absolute: 4h, active_max: 1h}
  internal:   {idle: 10m, absolute: 1h, active_max: 1h}
  restricted: {idle: 1m, absolute: 5m, active_max: 1m}
scrub: {default: {within: 1s, verify: all}}
offload: {public: never, internal: never, restricted: never}
audit: {on_outage: {decisions: deny, lifecycle: spill, own_hits: aggregate}}
"""
TABLE = compile_policy(load_policy(POLICY.encode(), name="watched.yaml"), revision=1)
SALTS = {"salt-of-acme": "acme", "salt-of-beta": "beta"}
MINUTE, HOUR = 60_000_000, 3_600_000_000


class Engine:
    """A vLLM engine's stream in a few words, and the observer at its other end."""

    def __init__(self, **options: Any) -> None:
        self.clock = VirtualClock(now_us=100 * HOUR)
        self.observed = ObservedEngine(
            "gpu-1", TABLE, self.clock, tenants_by_salt=options.pop("tenants_by_salt", SALTS), **options
        )
        self.sequence = 0

    def send(self, *events: Any, ts: float | None = None) -> None:
        ts = self.clock.utc_us() / 1e6 if ts is None else ts
        self.raw(msgspec.msgpack.encode([ts, events, 0]))

    def raw(self, payload: bytes) -> None:
        self.observed.arrive(Delivered(self.sequence, payload, False))
        self.sequence += 1

    def store(
        self,
        *hashes: int,
        parent: int | None = None,
        salt: str | None = None,
        ts: float | None = None,
        **more: Any,
    ) -> None:
        extra = [(salt,), *[None] * (len(hashes) - 1)] if salt else None
        self.send(
            {
                "type": "BlockStored",
                "block_hashes": [number.to_bytes(32, "big") for number in hashes],
                "parent_block_hash": None if parent is None else parent.to_bytes(32, "big"),
                "token_ids": [1] * 16 * len(hashes),
                "block_size": 16,
                "medium": "GPU",
                "extra_keys": extra,
                **more,
            },
            ts=ts,
        )

    def remove(self, *hashes: int, **more: Any) -> None:
        self.send(
            {
                "type": "BlockRemoved",
                "block_hashes": [n.to_bytes(32, "big") for n in hashes],
                "medium": "GPU",
                **more,
            }
        )

    def clear(self) -> None:
        self.send({"type": "AllBlocksCleared"})

    def kinds(self) -> list[str]:
        return [type(event).__name__ for event in self.observed.drain()]


def test_a_chain_is_a_residency_of_the_tenant_of_its_salt() -> None:
    engine = Engine()
    engine.store(1, 2, salt="salt-of-acme")
    engine.store(3, parent=2)
    engine.store(11, salt="salt-of-beta")
    engine.store(21, salt="somebody")
    shares = {share.tenant: (share.residencies, share.blocks) for share in engine.observed.shares()}
    assert shares == {"acme": (1, 3), "beta": (1, 1), None: (1, 1)}
    made = engine.observed.drain()
    assert [type(event) for event in made] == [ObservedStored] * 3
    acme, beta, nobody = made
    assert isinstance(acme, ObservedStored) and isinstance(nobody, ObservedStored)
    assert (acme.tenant, acme.blocks, acme.classification, acme.attribution) == (
        "acme",
        3,
        "internal",
        "salt",
    )
    assert acme.deadline_us == engine.clock.now_us() + HOUR
    assert (nobody.tenant, nobody.classification, nobody.attribution) == (None, "restricted", "none")
    assert nobody.deadline_us == engine.clock.now_us() + 5 * MINUTE
    assert isinstance(beta, ObservedStored) and beta.residency != acme.residency
    assert engine.observed.drain() == [], "nothing is said twice"


def test_the_limit_runs_from_the_root_of_the_chain() -> None:
    engine = Engine()
    engine.store(1, salt="salt-of-acme")
    engine.clock.advance(50 * MINUTE)
    engine.store(2, parent=1)
    assert engine.observed.overdue() == []
    engine.clock.advance(10 * MINUTE + 1)
    (late,) = engine.observed.overdue()
    assert late.blocks == 2 and engine.observed.stats().overdue_blocks == 2
    made = engine.observed.drain()
    assert [type(event) for event in made] == [ObservedStored, ObservedOverdue]
    assert made[1].blocks == 2 and made[1].tenant == "acme"  # type: ignore[union-attr]
    assert engine.kinds() == [], "overdue is recorded once"


def test_what_left_in_time_is_not_overdue_and_what_left_late_is_late() -> None:
    engine = Engine()
    engine.store(1, 2, salt="salt-of-acme")
    engine.remove(2)
    engine.clock.advance(HOUR + 1)
    engine.remove(1)
    assert engine.observed.overdue() == [] and engine.observed.stats().blocks == 0
    stored, removed, overdue = engine.observed.drain()
    assert isinstance(stored, ObservedStored) and isinstance(removed, ObservedRemoved)
    assert isinstance(overdue, ObservedOverdue) and overdue.blocks == 1, "on record although it left before the drain"
    assert (removed.cause, removed.blocks, removed.late, removed.remaining) == ("removed", 2, 1, 0)
    engine.remove(1, 77)
    assert engine.observed.stats().unmatched_removals == 2 and engine.kinds() == ["ObservationGap"]
    assert "nobody told of" in engine.observed.stats().unsure


def test_each_copy_of_a_key_is_held_until_its_own_removal() -> None:
    engine = Engine()
    engine.store(1, 2, 3, salt="salt-of-acme")
    engine.store(3, parent=2)  # computed again by somebody who had all but the last block
    assert engine.observed.stats().blocks == 4
    engine.remove(3)
    stats = engine.observed.stats()
    assert (stats.blocks, stats.unmatched_removals, stats.unsure) == (3, 0, ""), "the other copy serves hits"
    engine.remove(3)
    assert engine.observed.stats().blocks == 2 and engine.observed.stats().unsure == ""
    engine.remove(3)
    assert engine.observed.stats().unmatched_removals == 1 and engine.observed.stats().unsure


def test_copies_count_against_the_bound_and_go_with_a_clear() -> None:
    engine = Engine(blocks_max=3)
    engine.store(1, 2, salt="salt-of-acme")
    for _ in range(3):
        engine.store(2, parent=1)
    assert engine.observed.stats().blocks == 3 and engine.observed.stats().untracked_blocks == 2
    engine.send({"type": "AllBlocksCleared"})
    assert engine.observed.stats().blocks == 0 and engine.observed.stats().unsure == ""


def test_blocks_that_no_use_was_seen_of_are_told_apart_from_overdue_ones() -> None:
    engine = Engine()
    engine.store(1, salt="salt-of-acme")
    engine.clock.advance(11 * MINUTE)
    assert engine.observed.stats().unused_residencies == 1 and engine.observed.overdue() == []
    engine.store(1, salt="salt-of-acme")  # vLLM in full report mode tells of reuse like this
    stats = engine.observed.stats()
    assert stats.unused_residencies == 0 and stats.blocks == 1 and stats.residencies == 1
    engine.clock.advance(50 * MINUTE)
    assert len(engine.observed.overdue()) == 1, "a use moves no absolute limit"


def test_an_engines_own_time_counts_but_never_the_future() -> None:
    engine = Engine()
    now_s = engine.clock.utc_us() / 1e6
    engine.store(1, salt="salt-of-acme", ts=now_s - 1800)
    engine.store(2, salt="salt-of-acme", ts=now_s + 1e6)
    engine.store(3, salt="salt-of-acme", ts=float("nan"))
    old, future, senseless = (event.deadline_us for event in engine.observed.drain())  # type: ignore[union-attr]
    assert old == engine.clock.now_us() + HOUR // 2
    assert future == senseless == engine.clock.now_us() + HOUR


@pytest.mark.parametrize("how", ["clear", "restart"])
def test_a_clear_or_a_restart_ends_everything(how: str) -> None:
    engine = Engine()
    engine.store(1, 2, salt="salt-of-acme")
    engine.store(9)
    engine.observed.arrive(Missed(5, 7, "not to be replayed"))
    assert engine.observed.stats().unsure
    engine.clear() if how == "clear" else engine.observed.arrive(Restarted(8))
    stats = engine.observed.stats()
    assert stats.blocks == stats.residencies == 0 and not stats.unsure and stats.missed_batches == 3
    removed = [event for event in engine.observed.drain() if isinstance(event, ObservedRemoved)]
    cause = "cleared" if how == "clear" else "engine-restarted"
    assert [(event.cause, event.blocks, event.remaining) for event in removed] == [
        (cause, 2, 0),
        (cause, 1, 0),
    ]


def test_a_gap_is_on_record_and_makes_the_counts_unsure() -> None:
    engine = Engine()
    engine.observed.arrive(Missed(0, 4, "before observation began"))
    (gap,) = engine.observed.drain()
    assert gap == ObservationGap(engine.clock.now_us(), "gpu-1", "before observation began", 0, 4)
    assert engine.observed.stats().unsure == "before observation began"


def test_unreadable_batches_are_gaps_counted_and_bounded() -> None:
    engine = Engine()
    for _ in range(500):
        engine.raw(b"\xdd\xff\xff\xff\xff")
    engine.send({"type": "BlockMoved"})
    stats = engine.observed.stats()
    assert stats.malformed == 500 and stats.unknown == 1 and "cannot be read" in stats.unsure
    gaps = engine.observed.drain()
    assert len(gaps) == 10 and gaps[-1].last_batch == 500  # type: ignore[union-attr]


def test_memory_is_bounded_and_says_so() -> None:
    engine = Engine(blocks_max=10)
    engine.store(*range(100), salt="salt-of-acme")
    engine.store(200, salt="salt-of-acme")
    stats = engine.observed.stats()
    assert stats.blocks == 10 and stats.untracked_blocks == 91 and "more than 10" in stats.unsure
    assert engine.kinds().count("ObservationGap") == 1


def test_a_chain_in_another_tier_is_the_same_chain() -> None:
    engine = Engine()
    engine.store(1, 2, salt="salt-of-acme")
    engine.store(1, 2, medium="CPU")
    engine.remove(1, 2)
    stats = engine.observed.stats()
    assert stats.blocks == 2 and stats.residencies == 1, "the copy in the other tier is still held"
    engine.remove(1, 2, medium="CPU")
    assert engine.observed.stats().blocks == 0


def test_a_scope_in_the_stream_counts_only_where_it_is_trusted() -> None:
    custody = {"tenant": "beta", "scope": "tenant", "classification": "internal", "domain": 1, "revision": 1}
    for trusted, expected in ((False, None), (True, "beta")):
        engine = Engine(scope_trusted=trusted)
        engine.store(1, kvcustody=custody)
        (stored,) = engine.observed.drain()
        assert isinstance(stored, ObservedStored) and stored.tenant == expected
        assert stored.classification == ("internal" if trusted else "restricted"), "a claim only raises"
    engine = Engine(scope_trusted=True)
    engine.store(1, kvcustody={**custody, "tenant": "../x y"})
    (stored,) = engine.observed.drain()
    assert stored.tenant is None  # type: ignore[union-attr]


def test_what_nobody_can_be_told_by_is_what_the_operator_says() -> None:
    engine = Engine(unattributed_as="public")
    engine.store(1)
    (stored,) = engine.observed.drain()
    assert isinstance(stored, ObservedStored)
    assert stored.classification == "public" and stored.deadline_us == engine.clock.now_us() + 4 * HOUR
    with pytest.raises(PolicyError, match="secret"):
        Engine(unattributed_as="secret")
    with pytest.raises(IdentityError):
        Engine(tenants_by_salt={"x": "not a tenant"})


def test_deadlines_of_ended_chains_are_forgotten() -> None:
    engine = Engine()
    for number in range(3000):
        engine.store(number, salt="salt-of-acme")
        engine.remove(number)
    engine.observed.drain()
    assert len(engine.observed._deadlines) <= 1024


ops = st.lists(
    st.one_of(
        st.tuples(st.just("store"), st.integers(0, 9), st.integers(0, 9), st.sampled_from([None, *SALTS])),
        st.tuples(st.just("remove"), st.integers(0, 9)),
        st.tuples(st.just("clear")),
        st.tuples(st.just("restart")),
        st.tuples(st.just("wait"), st.integers(1, 90)),
        st.tuples(st.just("drain")),
    ),
    max_size=60,
)


@settings(max_examples=200, deadline=None)
@given(script=ops)
def test_leaves_add_up_to_what_is_held(script: list[tuple[Any, ...]]) -> None:
    """Whatever happens: stored - removed = held, per residency, and `remaining` is right in every last leaf."""
    engine, model, events = Engine(), Counter[int](), list[Event]()
    for op, *args in script:
        if op == "store":
            number, parent, salt = args
            is_root = parent >= number
            engine.store(number, parent=None if is_root else parent, salt=salt)
            model[number] += not (is_root and model[number])  # else it is a use
        elif op == "remove":
            engine.remove(args[0])
            model[args[0]] = max(0, model[args[0]] - 1)
        elif op == "wait":
            engine.clock.advance(args[0] * MINUTE)
        elif op == "drain":
            events += engine.observed.drain()
        else:
            engine.clear() if op == "clear" else engine.observed.arrive(Restarted(1))
            model.clear()
        assert engine.observed.stats().blocks == model.total()
    events += engine.observed.drain()
    held: dict[int, int] = {}
    for event in events:
        if isinstance(event, ObservedStored):
            held[event.residency] = held.get(event.residency, 0) + event.blocks
        elif isinstance(event, ObservedRemoved):
            held[event.residency] -= event.blocks
            assert held[event.residency] >= event.remaining >= 0 and event.late <= event.blocks
    live = {number: residency.blocks for number, residency in engine.observed._live.items()}
    assert {number: blocks for number, blocks in held.items() if blocks} == live
    assert sum(live.values()) == model.total()


# -- the ledger -------------------------------------------------------------------------------------------------------


@pytest.fixture
def ledger(store: Any, tmp_path: Path) -> Callable[[list[Event]], Any]:
    def write(events: list[Event]) -> Any:
        clock = VirtualClock(now_us=100 * HOUR)
        builders.record(store, tmp_path / "spill", events, worker="observer", clock=clock)
        return store

    return write


def a_day(engine: Engine) -> list[Event]:
    engine.store(1, 2, salt="salt-of-acme")
    engine.store(9)
    engine.clock.advance(HOUR + 1)
    made = engine.observed.drain()
    engine.remove(2)
    engine.observed.arrive(Missed(3, 3, "not to be replayed"))
    engine.observed.arrive(Restarted(4))
    return made + engine.observed.drain()


def test_observed_blocks_are_on_record_and_in_no_figure_of_custody(
    ledger: Callable[[list[Event]], Any],
) -> None:
    store = ledger(a_day(Engine()))
    with store.connect() as connection:
        acme, nobody = observed_totals(connection)
        assert acme == ("gpu-1", "acme", 1, 2, 2, 2, 1, 2, 1)
        assert nobody == ("gpu-1", "unattributed", 1, 1, 1, 1, 1, 1, 1)
        assert coverage(connection).rows == (), "no due unit, none covered, no bytes destroyed"
        assert all(value == 0 for value in coverage(connection).total[2:])
        (observer,) = connection.scalars(select(incarnations.c.uuid))
        nothing = PoolCounts(0, 0, 0, 0, 0, 0, (0,), 0)
        assert {identity.difference for identity in conservation(connection, observer, nothing)} == {0}
        totals = {row.tenant: row for row in tenant_totals(connection)}
        assert totals["acme"].residencies == totals["acme"].ended_blocks == totals["acme"].written_blocks == 0
        bodies = [bytes(leaf) for leaf in connection.scalars(select(leaves_table.c.leaf))]
    assert bodies and all(b"salt-of" not in body for body in bodies)
    secret = (1).to_bytes(32, "big")
    assert all(secret not in body and secret.hex().encode() not in body for body in bodies), "no hash in a leaf (W5)"
    assert any(b'"observed-overdue"' in body for body in bodies)


def test_an_observer_that_was_killed_is_closed_without_a_claim_about_memory(tmp_path: Path) -> None:
    store = open_store(tmp_path / "ledger.db")
    upgrade(store)
    clock = VirtualClock(now_us=100 * HOUR)
    options: dict[str, Any] = {"worker": "observer", "clock": clock, "spill_directory": tmp_path / "spill"}
    first = EventWriter(store, **options)
    first.submit(a_day(Engine()))
    first.close()  # its incarnation never said that it stopped
    second = EventWriter(store, **options)
    second.close()
    with store.connect() as connection:
        bodies = [bytes(row) for row in connection.scalars(select(leaves_table.c.leaf))]
        (died,) = [body for body in bodies if b'"worker-died"' in body]
        assert b"announced no memory" in died and b"driver" not in died
        assert coverage(connection).rows == ()


def test_mooncakes_standard_form_is_observed_by_tenant() -> None:
    """Two tenants' equal hashes are two blocks, and a clear of one tenant's leaves the other's."""
    engine = Engine(tenants_by_salt={"pool-a": "acme", "pool-b": "beta"})

    def send(kind: str, tenant: str, *hashes: int, **more: Any) -> None:
        event = {"event_type": kind, "tenant_id": tenant, "medium": "cpu", "seq_hashes": list(hashes), **more}
        engine.send(event, ts=engine.clock.utc_us() / 1e3)

    def shares() -> dict[str | None, int]:
        return {share.tenant: share.blocks for share in engine.observed.shares()}

    for tenant in ("pool-a", "pool-b", "unknown"):
        send("stored", tenant, 1, 2)
        send("stored", tenant, 3, parent_hash=2)
    assert shares() == {"acme": 3, "beta": 3, None: 3}
    send("removed", "pool-a", 3)
    send("cleared", "pool-b", medium="disk")
    assert shares() == {"acme": 2, "beta": 3, None: 3}
    send("cleared", "pool-b")
    assert shares() == {"acme": 2, None: 3} and engine.observed.stats().unsure == ""
    send("cleared", "unknown")
    assert shares() == {"acme": 2, None: 3} and "unknown tenant" in engine.observed.stats().unsure
    engine.clock.advance(HOUR + 1)
    assert engine.observed.overdue()[-1].tenant == "acme"
