"""What was decided about moving copies, asked of the ledger: recounted from what the Governor decided."""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
from sqlalchemy import Engine, event

from kvcustody.allocator.prefix.node import KEY_BYTES
from kvcustody.audit.evidence.copies.transfers import (
    SIZES,
    RecordedTransfer,
    TransferFilter,
    TransferSize,
    explain_request,
    has_tiers,
    tier_summaries,
    transfer_summary,
    transfers,
)
from kvcustody.audit.store.database.engine import open_store
from kvcustody.audit.store.schema.ledger import metadata
from kvcustody.console.tier.wording import decision_lines, error_share, lines_of
from kvcustody.governance.observability.prefill_cost import DeclaredRate
from standins.governance.decided_world import DecidedWorld
from standins.governance.offload_world import World, prompt

ALL = (0, 1 << 60)


@pytest.fixture(scope="module")
def decided(tmp_path_factory: pytest.TempPathFactory) -> DecidedWorld:
    return DecidedWorld(tmp_path_factory.mktemp("decided"))


@pytest.fixture(scope="module")
def ledger(decided: DecidedWorld) -> Iterator[Engine]:
    engine = open_store(decided.url, read_only=True)
    yield engine
    engine.dispose()


def every(ledger: Engine, wanted: TransferFilter, limit: int, *, newest: bool = True) -> list[RecordedTransfer]:
    """Page after page."""
    listed: list[RecordedTransfer] = []
    after, pages = None, 0
    with ledger.connect() as connection:
        while pages == 0 or after is not None:
            page = transfers(connection, wanted, after=after, limit=limit, newest=newest)
            assert len(page.transfers) <= limit
            listed += page.transfers
            after, pages = page.next, pages + 1
    assert pages == max(1, -(-len(listed) // limit))
    return listed


def test_the_world_has_what_there_is_to_ask(decided: DecidedWorld) -> None:
    """Control: none of the cases below is empty."""
    outcomes = Counter(one.outcome for one in decided.of("restore", choice="transfer"))
    assert outcomes["done"] >= 6 and outcomes["partial"] >= 2 and outcomes["failed"] >= 2
    reasons = {(one.action, one.reason) for one in decided.decisions}
    assert reasons >= {
        ("restore", "not measured yet"), ("restore", "faster"), ("restore", "slower"),
        ("store", "not measured yet"), ("store", "pays"), ("store", "does not pay"),
    }  # fmt: skip
    assert {one.tenant for one in decided.of("restore")} == {"acme", "beta"}


@pytest.mark.parametrize("limit", [7, 1000])
@pytest.mark.parametrize("tenant", [None, "acme"])
def test_oldest_first_is_newest_first_turned_round(
    decided: DecidedWorld, ledger: Engine, limit: int, tenant: str | None
) -> None:
    wanted = TransferFilter(tenant)
    newest = every(ledger, wanted, limit)
    assert len(newest) > 7
    assert every(ledger, wanted, limit, newest=False) == newest[::-1]


@pytest.mark.parametrize("limit", [7, 1000])
def test_every_decision_is_there_newest_first(decided: DecidedWorld, ledger: Engine, limit: int) -> None:
    transfers = every(ledger, TransferFilter(), limit)
    assert [one.at_us for one in transfers] == sorted((one.at_us for one in transfers), reverse=True)
    counted = Counter(tuple(one)[1:] for one in transfers)
    expected = Counter(
        (
            one.tenant, one.action, one.tier, one.residency, one.blocks, one.bytes, one.transfer_us,
            one.recompute_us, one.choice, one.outcome, one.actual_us, one.reason, one.part_blocks,
            one.latency_class,
            one.at_us + decided.offset_us,
        )
        for one in decided.decisions
    )  # fmt: skip
    assert counted == expected and {one.incarnation for one in transfers} == {decided.incarnation}


@pytest.mark.parametrize(
    ("wanted", "action", "said"),
    [
        (TransferFilter(action="restore", outcome="failed"), "restore", {"outcome": "failed"}),
        (TransferFilter(action="restore", outcome="none"), "restore", {"outcome": ""}),
        (TransferFilter(choice="recompute", action="store"), "store", {"choice": "recompute"}),
        (TransferFilter(tenant="beta", action="restore"), "restore", {"tenant": "beta"}),
        (TransferFilter(tenant="acme", action="store"), "store", {"tenant": "acme"}),
        (TransferFilter(tier="host", residency=0), "store", {}),
        (TransferFilter(tier="nvme", action="store"), "store", {"tier": "nvme"}),
    ],
)
def test_filters_choose_what_a_recount_chooses(
    decided: DecidedWorld, ledger: Engine, wanted: TransferFilter, action: str, said: dict[str, object]
) -> None:
    found = every(ledger, wanted, 5)
    assert len(found) == len(decided.of(action, **said))
    assert [one.at_us for one in found] == sorted((one.at_us for one in found), reverse=True)
    assert {one.action for one in found} <= {action}


def test_a_period_has_its_beginning_and_not_its_end(decided: DecidedWorld, ledger: Engine) -> None:
    moments = sorted({one.at_us for one in decided.decisions})
    first, last = moments[2] + decided.offset_us, moments[5] + decided.offset_us
    found = every(ledger, TransferFilter(since_us=first, until_us=last), 50)
    wanted = [one for one in decided.decisions if first <= one.at_us + decided.offset_us < last]
    assert 0 < len(found) == len(wanted) < len(decided.decisions)
    assert every(ledger, TransferFilter(incarnation="0" * 32), 50) == []


def of_size(done: list[tuple[int, int, int]], at: int) -> TransferSize:
    """A recount of those whose bytes are of one size."""
    end = SIZES[at + 1] if at + 1 < len(SIZES) else 1 << 62
    mine = [(took, predicted) for size, took, predicted in done if SIZES[at] <= size < end]
    known = [(took, predicted) for took, predicted in mine if predicted]
    predicted_us, took_us = sum(one[1] for one in known), sum(one[0] for one in known)
    return TransferSize(SIZES[at], len(mine), sum(one[0] for one in mine), len(known), predicted_us, took_us)


@pytest.mark.parametrize("tenant", [None, "acme", "beta", "nobody"])
def test_a_summary_is_what_a_recount_says(decided: DecidedWorld, ledger: Engine, tenant: str | None) -> None:
    with ledger.connect() as connection:
        rows = {row.action: row for row in transfer_summary(connection, *ALL, tenant=tenant)}
    for action in ("store", "restore"):
        mine = [one for one in decided.of(action) if tenant in (None, one.tenant)]
        if not mine:
            assert action not in rows
            continue
        row, moved = rows[action], [one for one in mine if one.choice == "transfer"]
        done = [one for one in moved if one.outcome == "done"]
        known = [one for one in done if one.transfer_us]
        assert (row.tier, row.decisions, row.transfers) == ("host", len(mine), len(moved))
        came = [one for one in moved if one.outcome == "partial"]
        assert row.blocks == sum(one.blocks for one in done) + sum(one.part_blocks for one in came)
        assert row.bytes == sum(one.bytes for one in done) + sum(
            one.bytes * one.part_blocks // one.blocks for one in came
        )
        assert row.measured_us == sum(one.actual_us for one in moved)
        assert (row.partial, row.failed) == tuple(
            sum(one.outcome == name for one in moved) for name in ("partial", "failed")
        )
        assert row.against == Counter(one.reason for one in mine if one.choice != "transfer")
        assert (row.predicted, row.predicted_us) == (len(known), sum(one.transfer_us for one in known))
        assert row.predicted_actual_us == sum(one.actual_us for one in known)
        sized = [(one.bytes, one.actual_us, one.transfer_us) for one in done]
        assert list(row.sizes) == [of_size(sized, at) for at in range(len(SIZES)) if of_size(sized, at).transfers]
        wrong = sum(abs(one.transfer_us - one.actual_us) for one in known)
        assert row.error == pytest.approx(wrong / row.predicted_actual_us)
        saved = sum(one.recompute_us - one.actual_us for one in done)
        saved += sum(one.recompute_us * one.part_blocks // one.blocks - one.actual_us for one in came)
        saved -= sum(one.actual_us for one in moved if one.outcome == "failed" and one.recompute_us)
        assert row.saved_us == (saved if action == "restore" else None)


def test_what_was_done_is_what_the_tier_counted(decided: DecidedWorld, ledger: Engine) -> None:
    """Another source: the worker's own counters. What came in part is in both."""
    with ledger.connect() as connection:
        [tier] = tier_summaries(connection, *ALL)
        assert tier_summaries(connection, 0, 1)[0].transfers == ()
        restores, stores = tier.transfers
        assert restores.saved_us is not None and tier.net_us == restores.saved_us - stores.measured_us
        assert has_tiers(connection) and has_tiers(connection, tenant="acme")
        assert not has_tiers(connection, tenant="nobody")
    use = decided.uses["host"]
    assert use.restored_blocks == restores.blocks
    assert (stores.blocks, stores.bytes, stores.measured_us) == (
        use.stored_blocks, use.stored_bytes, use.store_us,
    )  # fmt: skip
    assert sum(restores.against.values()) + sum(stores.against.values()) == use.decided_against
    assert tier.stored >= tier.ended > 0


def test_one_request_is_explained(decided: DecidedWorld, ledger: Engine) -> None:
    """Every request that was decided about: each decision's numbers are in its words."""
    with ledger.connect() as connection:
        for one in decided.of("restore"):
            [found] = explain_request(connection, one.residency)
            assert found.incarnation == decided.incarnation and found.tenant == one.tenant
            row = found._asdict() | {"decisions": [each._asdict() for each in found.decisions]}
            assert one.reason in [each.reason for each in found.decisions]
            text = "\n".join(lines_of(row))
            assert f"found in host: {one.blocks} blocks" in text
            words = {
                "slower": "not to restore them",
                "faster": "to restore them, as that was",
                "not measured yet": "only trying",
            }
            assert words[one.reason] in text
            if one.outcome in ("partial", "failed"):
                expected = "nothing came"
                if one.outcome == "partial":
                    assert 0 < one.part_blocks < one.blocks
                    expected = f"{one.part_blocks} blocks were restored; the missing ones"
                [own] = [each for each in row["decisions"] if each["bytes"] == one.bytes]
                words_of = "\n".join(decision_lines(own))
                assert expected in words_of and "saved" not in words_of and words_of in text
        assert explain_request(connection, one.residency, tenant="nobody") == ()
        other = "beta" if one.tenant == "acme" else "acme"
        assert explain_request(connection, one.residency, tenant=other) == ()
        assert explain_request(connection, one.residency, incarnation="0" * 32) == ()
        assert explain_request(connection, one.residency, worker="nobody") == ()
        assert len(explain_request(connection, one.residency, worker="worker-0")) == 1
        assert explain_request(connection, 10**6) == ()


def test_a_request_of_which_nothing_was_in_a_tier(decided: DecidedWorld, ledger: Engine) -> None:
    asked = {one.residency for one in decided.of("restore")}
    with ledger.connect() as connection:
        found = explain_request(connection, 1)
    assert 1 not in asked and found[0].decisions == ()
    assert "no tier had the following blocks" in lines_of(found[0]._asdict())[1]


def test_an_error_is_a_share_of_what_was_measured() -> None:
    done = {"transfer_us": 80, "actual_us": 100, "outcome": "done"}
    assert error_share(done) == pytest.approx(0.2)
    assert error_share(done | {"transfer_us": 0}) is None
    assert error_share(done | {"outcome": "partial"}) is None


def test_a_ledger_without_tiers_knows_none(store: Engine) -> None:
    with store.connect() as connection:
        assert not has_tiers(connection) and tier_summaries(connection, *ALL) == ()
        assert transfers(connection).transfers == ()


def test_pages_are_read_by_the_index(ledger: Engine) -> None:
    """What a page costs does not grow with the history: the newest rows are found, not sorted."""
    assert "ix_transfer_decisions_at" in {index.name for index in metadata.tables["transfer_decisions"].indexes}
    asked: list[str] = []

    @event.listens_for(ledger, "before_cursor_execute")
    def note(connection: Any, cursor: Any, statement: str, values: Any, *_: Any) -> None:
        if "FROM transfer_decisions" in statement and "EXPLAIN" not in statement:
            cursor.execute("EXPLAIN QUERY PLAN " + statement, values)
            asked.append(" ".join(str(row) for row in cursor.fetchall()))

    for tenant in (None, "acme"):
        every(ledger, TransferFilter(tenant), 25)
    event.remove(ledger, "before_cursor_execute", note)
    assert len(asked) > 4 and not [plan for plan in asked if "TEMP B-TREE" in plan], asked
    assert "ix_transfer_decisions_at" in asked[0]


def stores_of(folder: Path, mine: Callable[[World], None]) -> list[RecordedTransfer]:
    """Stores on record after a worker with a host tier did this and stopped."""
    world = World(folder, "host")
    mine(world)
    world.worker.close()
    engine = open_store(f"sqlite:///{folder / 'ledger.db'}", read_only=True)
    found = every(engine, TransferFilter(action="store"), 1000)
    engine.dispose()
    return found


def test_a_store_that_the_tier_did_not_take_is_on_record_as_failed(tmp_path: Path) -> None:
    """Control: one that is there already is no decision, and what is taken is done."""
    refused: list[int] = []

    def full(world: World) -> None:
        (tier,) = world.tiers

        def store(run: Any, read: Any) -> int:
            refused.append(len(run.keys) // KEY_BYTES)
            return 0

        tier.store = store  # type: ignore[method-assign]
        for number in range(2):
            world.serve("acme", prompt(1, 10))
            world.crowd(number)

    found = stores_of(tmp_path, full)
    assert {(one.choice, one.outcome) for one in found} == {("transfer", "failed")}
    assert sorted(one.blocks for one in found) == sorted(refused) != []
    (tmp_path / "other").mkdir()

    def twice(world: World) -> None:
        for _ in range(3):
            world.serve("acme", prompt(1, 10))
            world.crowd()

    assert {one.outcome for one in stores_of(tmp_path / "other", twice)} == {"done"}


def test_one_in_sixteen_of_what_does_not_pay_says_that_it_was_tried(tmp_path: Path) -> None:
    def slow(world: World) -> None:
        assert world.worker.governor.offload is not None
        for number in range(12):
            if number == 2:  # both ways are measured
                world.worker.governor.offload.transfers.cost = DeclaredRate(1e12)
            world.serve("acme", prompt(1, 10))
            world.crowd(number)

    found = stores_of(tmp_path, slow)[::-1]
    seems = [one.reason for one in found if one.reason in ("does not pay", "tried")]
    assert len(seems) >= 32
    assert 0 < seems.count("tried") <= len(seems) // 8, "one in sixteen, and what goes before it in its chain"
    assert {one.outcome for one in found if one.reason == "tried"} <= {"done", "failed"}
    assert {one.choice for one in found if one.reason == "does not pay"} == {"recompute"}
