"""The engine port where an engine's workers compare blocks: what a reader of a changed block leaves behind."""

from __future__ import annotations

from collections.abc import Hashable

import numpy as np

from kvcustody.allocator.external.residency import ExternalResidency
from kvcustody.audit.kinds import IntegrityMismatch
from kvcustody.clock import VirtualClock
from kvcustody.governance.erasure.selector import Selector
from kvcustody.governance.external.engine_port import EnginePort
from kvcustody.governance.identity.principal import Principal
from kvcustody.testkit.conformance.deployment import KeepingLedger
from standins.builders import PortEngine, port, table
from standins.robust.custody_world import MODEL
from standins.robust.port_world import POLICY

BLOCK = 16
TOKENS = [*range(3 * BLOCK), 7]


class Engine(PortEngine):
    """An engine whose index is a dictionary, and what it was told to withhold."""

    def __init__(self) -> None:
        super().__init__()
        self.withheld: list[int] = []
        self.shares: list[tuple[float, list[int]]] = []  # read back of what was scrubbed
        self.ledger = KeepingLedger()
        self.port: EnginePort = port(
            table(POLICY + "integrity: {default: {verify: all}}\n"),
            VirtualClock(),
            engine=self,
            ledger=self.ledger,
            block_tokens=BLOCK,
            can_sum=True,
        )

    def withhold(self, blocks: list[int]) -> None:
        self.withheld += blocks

    def start(self, name: Hashable, attach: list[int], fresh: list[int]) -> ExternalResidency:
        """A request that attaches some blocks, and fills and publishes others."""
        residency = self.port.admit(Principal("idp", "alpha"), MODEL, TOKENS, request_id=name)
        assert isinstance(residency, ExternalResidency)
        assert self.port.may_start(residency) is None
        self.port.look_up(residency, lambda key: -1)
        self.port.attached(residency, attach)
        self.port.handed_out(residency, fresh)
        self.port.published(residency, fresh[:2], before=attach[-1] if attach else -1)
        return residency

    def step(self, differing: tuple[int, ...] = ()) -> list[Hashable]:
        """One step of the engine, whose worker finds that these differ; what the port says of it."""
        scrubs, sums = self.port.step(), self.port.sum_order()
        if scrubs is not None:
            self.shares += [(share, blocks.tolist()) for share, blocks in scrubs.batches]
            self.port.scrubbed(scrubs.number, 0, [_zeroed(blocks) for _, blocks in scrubs.batches], 0)
        self.port.settle_sums()
        if sums is None or not len(sums.compare):
            return []
        return self.port.compared(sums.number, 0, [one for one in differing if one in sums.compare])


def _zeroed(blocks: np.ndarray) -> object:
    from kvcustody.allocator.pool.memory_protocol import ScrubResult

    return ScrubResult("fill", "cpu", 0, 0, 0, "full", len(blocks), np.empty(0, dtype=np.int64))


def found_changed(engine: Engine) -> tuple[ExternalResidency, list[Hashable]]:
    """A request runs on cached blocks 1 and 2 when 2 is found changed."""
    engine.step()
    engine.port.release(engine.start("first", [], [1, 2, 3]))
    engine.step()
    engine.step()
    running = engine.start("running", [1, 2], [4, 5, 6])
    engine.step()
    assert engine.port.may_read(running, [1, 2]) is None
    return running, engine.step((2,))


def test_its_reader_goes_on_publishes_nothing_more_and_leaves_no_hold() -> None:
    engine = Engine()
    running, readers = found_changed(engine)
    assert readers == ["running"]
    assert sorted(engine.evicted) == [2, 4, 5], "with all that was computed from it"
    assert np.flatnonzero(engine.port.pool.indexed).tolist() == [1]
    engine.evicted.clear()
    engine.port.handed_out(running, [7])
    engine.port.published(running, [6, 7], before=5)
    assert engine.evicted == [6, 7], "an adapter that publishes it all the same is told to forget it"
    engine.port.release(running)
    engine.step()
    assert [hold.request_id for hold in engine.port.pool.hold_table.of(running.account)] == ["first"]
    assert engine.port.check() == []
    (leaf,) = [event for event in engine.ledger.events if isinstance(event, IntegrityMismatch)]
    assert (leaf.tenant, leaf.requests) == ("alpha", 1)


def test_a_second_time_the_engine_is_told_at_once_never_to_hand_it_out() -> None:
    """Its scrub fails, too, but only when a step has left that could have handed it out."""
    engine = Engine()
    running, _ = found_changed(engine)
    assert engine.withheld == []
    engine.port.release(running)
    engine.port.erase(Selector("alpha"))
    engine.shares.clear()
    engine.step()
    assert {share for share, blocks in engine.shares if 2 in blocks} == {1.0}, "the policy reads a quarter back"
    running, _ = found_changed(engine)
    assert engine.withheld == [2]
    engine.port.release(running)
    engine.step()
    engine.step()
    assert engine.port.pool.counts()["quarantined"] == 1
