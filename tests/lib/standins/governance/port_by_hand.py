"""An engine port without an engine: a test says by hand what the engine does."""

from __future__ import annotations

from collections.abc import Sequence

from kvcustody.allocator.external.pool import ExternalPool
from kvcustody.clock import VirtualClock
from kvcustody.governance.external.engine_control import EngineView
from kvcustody.governance.external.engine_port import EnginePort
from kvcustody.testkit.conformance.deployment import KeepingLedger, keyring, toy_model
from standins.builders import grant, policy, table

BLOCK = 16
MODEL = toy_model(BLOCK)
PROMPT = [*range(1, 4 * BLOCK + 1), 7]
POLICY = policy(more=grant("2027-01-01"))


class PortByHand:
    """An engine port without an engine: it is told by hand."""

    def __init__(self) -> None:
        self.ledger = KeepingLedger()
        clock = VirtualClock()
        self.pool = ExternalPool(64, bytes_per_block=64)
        self.port = EnginePort(
            self.pool, self, table(POLICY), keyring(clock), self.ledger, clock=clock, block_tokens=BLOCK
        )
        self.port.step()

    def evict(self, blocks: Sequence[int]) -> None:
        """Nothing is indexed."""

    def abort(self, request_ids: Sequence[object], cause: str) -> None:
        """Nothing runs long."""

    def withhold(self, blocks: Sequence[int]) -> None:
        """Everything verifies."""

    def wake(self) -> None:
        """Nobody sleeps."""

    def view(self) -> EngineView:
        raise NotImplementedError
