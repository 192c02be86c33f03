"""What reports ask: totals, a subject's custody, a block's history, findings and gaps, on both databases (R-AUD-2)."""

from __future__ import annotations

from typing import Any

import numpy as np
import orjson
from sqlalchemy import Engine, delete, select

from kvcustody.audit.evidence.counters.read_figures import denials_by_rule, tenant_totals
from kvcustody.audit.evidence.coverage.custody_units import CustodySelection, last_event_us, read_units
from kvcustody.audit.evidence.coverage.summary import coverage, periods_of
from kvcustody.audit.evidence.processes import sequence_gaps
from kvcustody.audit.evidence.query import custody as queries
from kvcustody.audit.evidence.subjects.subject_table import names_of
from kvcustody.audit.kinds import (
    BlocksAttached,
    CustodyEnded,
    ErasureCompleted,
    ErasureRequested,
    OrphanFound,
    OrphanScanned,
    PolicyActivated,
    ReceiptRecorded,
    ResidencyOpened,
    ResidencyReleased,
    WorkerStarted,
)
from kvcustody.audit.kinds.block_runs import Run, decode, flatten
from kvcustody.audit.leaf import LEAF_BYTES_MAX
from kvcustody.audit.store.schema.leaf_tables import (
    erasure_results,
    erasures,
    orphan_scans,
    policy_revisions,
    releases,
)
from kvcustody.audit.store.schema.ledger import events


def test_totals_and_history_of_a_world(any_store: Engine, make_writer: Any, world: Any) -> None:
    played = world(11).run(150)
    writer = make_writer(any_store)
    writer.submit(played.events)
    assert writer.flush()
    with any_store.connect() as connection:
        totals = {row.tenant: row for row in tenant_totals(connection)}
        for tenant in played.tenants:
            opened = [e for e in played.events if isinstance(e, ResidencyOpened) and e.tenant == tenant]
            left = [e for e in played.events if isinstance(e, ResidencyReleased) and e.tenant == tenant]
            written = sum(len(run.blocks) for e in opened + left for run in e.written)
            assert (totals[tenant].residencies, totals[tenant].released) == (len(opened), len(left))
            assert totals[tenant].written_blocks == written
            joined = [e for e in played.events if isinstance(e, BlocksAttached) and e.tenant == tenant]
            attached = [e.attached for e in opened] + [e.runs for e in joined]
            assert joined and totals[tenant].attached_blocks == sum(
                len(run.blocks) for runs in attached for run in runs
            )

        ends = [e for e in played.events if isinstance(e, CustodyEnded)]
        unit = ends[len(ends) // 2].runs[0]
        block, generation = int(unit.blocks[0]), unit.generation
        history = queries.block_history(connection, writer.incarnation, block, generation)
        expected = []
        for event in played.events:
            lists = [getattr(event, name, ()) for name in ("attached", "written", "runs")]
            flat = flatten([run for runs in lists for run in runs])
            if generation and ((flat.blocks == block) & (flat.generations == generation)).any():
                expected.append(type(event).__name__)
        kinds = {
            "residency-opened": "ResidencyOpened",
            "blocks-attached": "BlocksAttached",
            "residency-released": "ResidencyReleased",
            "custody-ended": "CustodyEnded",
            "receipt": "ReceiptRecorded",
        }
        assert [kinds[item.kind] for item in history] == expected and "CustodyEnded" in expected
        assert queries.block_history(connection, writer.incarnation, block + 1, generation) == ()
        assert sequence_gaps.gaps(connection) == ()

        whole = coverage(connection).total
        start, end = writer.offset_us, writer.offset_us + played.now + 1
        lives = list(read_units(connection, CustodySelection(start, end), now_us=last_event_us(connection)))
        periods = periods_of(lives, start, end, 5_000_000)
        assert sum(row.due for _, row in periods) == whole.due - whole.overdue
        assert sum(row.in_time for _, row in periods) == whole.in_time


def test_custody_of_a_subject(any_store: Engine, make_writer: Any) -> None:
    writer = make_writer(any_store)

    def opened(residency: int, tenant: str, subject: str | None, session: str | None) -> ResidencyOpened:
        return ResidencyOpened(
            residency, residency, tenant, subject, session, True, "internal", (), (), ("own",), 4, 900
        )

    writer.submit(
        [
            opened(1, "acme", "alice", None),
            opened(2, "acme", "bob", None),
            opened(3, "acme", "alice", "chat"),
            opened(4, "labs", "alice", None),
            BlocksAttached(40, 3, "acme", (Run(np.arange(8, 12), 5),)),
            ResidencyReleased(50, 3, "acme", "finish", (Run(np.arange(3), 1),), 400),
        ]
    )
    assert writer.flush()
    with any_store.connect() as connection:
        found = queries.custody_of(connection, "acme", names_of(connection, "acme", "alice"))
        assert [row.residency for row in found] == [1, 3]
        assert (found[0].released_us, found[0].hold_us, found[0].written_blocks) == (None, None, 0)
        assert (found[0].attached_blocks, found[1].attached_blocks) == (0, 4)
        assert found[1].hold_us == writer.offset_us + 400 and found[1].written_blocks == 3
        assert found[1].absolute_us == writer.offset_us + 900 and found[1].revision == 4
        assert queries.custody_of(connection, "acme", names_of(connection, "acme", "carol")) == ()


def test_a_missing_continuation_and_a_missing_sequence_are_gaps(
    any_store: Engine, make_writer: Any, unguarded: Any
) -> None:
    writer = make_writer(any_store)
    blocks = np.random.default_rng(3).permutation(20_000)
    writer.submit(
        [
            WorkerStarted(1, "worker-1", 20_000, 1, 4096, "cpu", "test"),
            ResidencyReleased(2, 1, "acme", "finish", (Run(blocks, 1),), 0),
            WorkerStarted(3, "worker-1", 20_000, 1, 4096, "cpu", "test"),
        ]
    )
    assert writer.flush()
    with any_store.connect() as connection:
        assert sequence_gaps.gaps(connection) == ()
        parts = connection.scalars(select(releases.c.written_blocks).order_by(releases.c.part)).all()
        assert len(parts) > 5 and sum(parts) == 20_000
        unguarded(connection)
        connection.execute(delete(events).where(events.c.part == 3))
        (gap,) = sequence_gaps.gaps(connection)
        assert (gap.first_sequence, gap.cause) == (2, "a continuation leaf is missing")
        connection.execute(delete(events).where(events.c.sequence == 2))
        (gap,) = sequence_gaps.gaps(connection)
        assert (gap.first_sequence, gap.last_sequence, gap.cause) == (2, 2, "no leaf has these sequences")
        connection.rollback()


def test_every_other_event_has_its_row(any_store: Engine, make_writer: Any) -> None:
    writer = make_writer(any_store)
    run = (Run(np.array([4, 5]), 9),)
    writer.submit_durable(PolicyActivated(1, 3, "regulated-saas", "shared", "sha256:ab", "approver", 2))
    writer.submit(
        [
            ErasureRequested(2, "e-1", "acme", "subject", "alice", None, 900, "dpo"),
            ErasureCompleted(5, "e-1", "acme", "complete", 1, 2, 0),
            OrphanScanned(6, 1, "full", 5, 6, 10, 20, 1),
            OrphanFound(6, 1, 1, "lost finish", "disconnect", "acme", 77, run, "released", "recovered", 8),
            ReceiptRecorded(
                7, 1, 0, None, "memset", "cpu", 128, 1, 2, "launched", 0.0, 0, "ok", (Run(run[0].blocks, 0),)
            ),
        ]
    )
    assert writer.flush()
    with any_store.connect() as connection:
        assert connection.execute(select(policy_revisions.c.revision, policy_revisions.c.previous)).one() == (
            3,
            2,
        )
        assert connection.execute(select(erasures.c.erasure, erasures.c.at_boot_us)).one() == ("e-1", 2)
        assert connection.scalars(select(erasures.c.subject)).one() in names_of(connection, "acme", "alice")
        assert connection.execute(select(erasure_results.c.outcome)).one() == ("complete",)
        assert connection.execute(select(orphan_scans.c.findings)).one() == (1,)
        (finding,) = queries.findings(connection)
        assert finding[:5] == ("lost finish", "disconnect", "acme", 77, 2)
        assert queries.findings(connection, tenant="labs") == ()
        assert denials_by_rule(connection) == ()


def test_a_million_tokens_in_scattered_blocks_are_recorded_exactly(
    any_store: Engine, make_writer: Any, unguarded: Any
) -> None:
    """62,500 blocks of 16 tokens without two neighbours: continuation leaves of at most 8 KiB, and no block lost."""
    writer = make_writer(any_store)
    blocks = np.random.default_rng(16).permutation(1 << 18)[: 1_000_000 // 16]
    writer.submit(
        [
            WorkerStarted(1, "worker-1", 1 << 18, 1, 4096, "cpu", "test"),
            ResidencyOpened(2, 1, "acme", None, None, False, "internal", (), (), (), 1, 9, (Run(blocks, 1),)),
        ]
    )
    assert writer.flush()
    with any_store.connect() as connection:
        query = select(events.c.leaf).where(events.c.kind == "residency-opened").order_by(events.c.part)
        leaves = [bytes(leaf) for leaf in connection.scalars(query)]
        runs = [decode(item) for leaf in leaves for item in orjson.loads(leaf)["written"]]
        assert 10 < len(leaves) < 100 and max(map(len, leaves)) <= LEAF_BYTES_MAX
        assert np.array_equal(np.concatenate([run.blocks for run in runs]), blocks)
        assert [run.generation for run in runs] == [1, *np.cumsum([len(run.blocks) for run in runs[:-1]]) + 1]
        assert sequence_gaps.gaps(connection) == ()
        unguarded(connection)
        connection.execute(delete(events).where(events.c.part == len(leaves) // 2))
        (gap,) = sequence_gaps.gaps(connection)
        assert gap.cause == "a continuation leaf is missing"
        connection.rollback()
