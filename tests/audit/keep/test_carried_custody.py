"""A tenant's holdings stay correct when retention drops hand-outs before their ends, or leaves were lost."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np
import pytest
from sqlalchemy import Engine, func, select

from kvcustody.audit.evidence.counters.read_figures import tenant_totals
from kvcustody.audit.exports.export_writer import write_export
from kvcustody.audit.exports.ledger_source import LedgerSource
from kvcustody.audit.keep import uncount
from kvcustody.audit.keep.purge_and_legal_hold import purge
from kvcustody.audit.kinds import (
    CustodyEnded,
    ResidencyOpened,
    ResidencyReleased,
    WorkerStarted,
    WorkerStopped,
)
from kvcustody.audit.kinds.block_runs import Run
from kvcustody.audit.kinds.ledger_events import GapRecorded
from kvcustody.audit.store.schema.ledger import events
from kvcustody.audit.tlog.checkpoint_signer import CheckpointSigner
from kvcustody.audit.tlog.signing_key import SigningKey
from kvcustody.audit.verify.ledger.fsck_ledger import fsck
from kvcustody.audit.write.fold import fold
from kvcustody.clock import SystemClock

KEY = SigningKey.generate("ledger.example/carried")
SHARES = {"acme": 3, "beta": 2}  # blocks of each request


def runs(first: int, count: int) -> tuple[Run, ...]:
    return (Run(np.arange(first, first + count, dtype=np.int64), first + 1),)


def opened(at_us: int, residency: int, tenant: str, first: int) -> ResidencyOpened:
    written = runs(first, SHARES[tenant])
    return ResidencyOpened(
        at_us, residency, tenant, None, None, False, "internal", (1,), (), ("own",), 1, 9 * 10**6, written
    )


class Ledger:
    """A process that ended, whose ends of custody are dated later than its end; and one that runs."""

    def __init__(self, store: Engine, make_writer: Any, folder: Path, *, lost: bool) -> None:
        self.store, self._folder = store, folder
        begun = SystemClock().now_us() - 10_000_000
        old = make_writer(store, worker="old")
        old.submit([WorkerStarted(begun, "old", 64, 1, 4096, "cpu", "test")])
        old.submit([opened(begun + 1, 1, "acme", 0), opened(begun + 2, 2, "beta", 3)])
        if lost:  # the hand-out of two more, which end below
            old.submit([GapRecorded(begun + 3, "spill lost", 1 << 41, 1 << 41)])
        assert old.flush()
        self.while_it_ran = self.held()
        for number, (tenant, count) in enumerate(SHARES.items(), 1):
            first, more = (0 if tenant == "acme" else 3), 2 * lost * (tenant == "beta")
            old.submit([ResidencyReleased(begun + 5_000, number, tenant, "finish", (), 0)])
            ended = runs(first, count + more)
            old.submit([CustodyEnded(begun + 5_001, tenant, "internal", ended, "finished", 9, 9, 9, 1_000)])
        old.submit([WorkerStopped(begun + 700, "old", "stopped", 5, (5,))])
        assert old.flush()
        old.close()
        new = make_writer(store, worker="new", spill_directory=folder / "spill-2")
        at_us = SystemClock().now_us()
        new.submit([WorkerStarted(at_us, "new", 64, 1, 4096, "cpu", "test"), opened(at_us, 1, "acme", 0)])
        assert new.flush()

    def held(self) -> dict[str, int | None]:
        with self.store.connect() as connection:
            return {row.tenant: row.held_blocks for row in tenant_totals(connection)}

    def problems(self) -> list[str]:
        with self.store.connect() as connection:
            return [problem.what for problem in fsck(connection).problems]

    def purge(self) -> int:
        """Drop what is old; how many leaves that is."""
        CheckpointSigner(self.store, [KEY], memory=self._folder / "signed", clock=SystemClock()).sign_once()
        export = self._folder / "export"
        write_export(export, LedgerSource(self.store), made_at_us=1)
        people = {"actor": "operator", "approver": "dpo", "reason": "schedule"}
        with self.store.connect() as connection:
            stopped = select(func.max(events.c.at_us)).where(events.c.kind == "worker-stopped")
            limit_us = int(connection.scalar(stopped) or 0) + 1
        plans = purge(self.store, limit_us, export, [str(KEY.verifier)], **people)
        return sum(plan.leaves for plan in plans)


@pytest.mark.parametrize("lost", [False, True])
def test_custody_is_what_it_was_after_a_purge(store: Engine, make_writer: Any, tmp_path: Path, *, lost: bool) -> None:
    ledger = Ledger(store, make_writer, tmp_path, lost=lost)
    held = {"acme": 3, "beta": 0}
    assert ledger.while_it_ran == ({"acme": None, "beta": None} if lost else SHARES)
    assert ledger.held() == held
    assert ledger.purge() == 2, "void: the hand-outs are there still"
    assert ledger.held() == held and ledger.problems() == []
    fold(store)
    assert ledger.held() == held and ledger.problems() == []


def test_positive_control_without_the_carried_balance_a_tenant_holds_less_than_nothing(
    store: Engine, make_writer: Any, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(uncount, "custody_of", lambda figures: 0)
    ledger = Ledger(store, make_writer, tmp_path, lost=False)
    ledger.purge()
    assert ledger.held() == {"acme": 0, "beta": -2}
    assert any("`beta` holds -2 blocks, and the leaves 0" in what for what in ledger.problems())
