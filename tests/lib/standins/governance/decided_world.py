"""A ledger that a Governor with a host tier wrote, and what it decided, as it decided it."""

from __future__ import annotations

from pathlib import Path
from typing import Any

from kvcustody.audit.kinds import TransferDecided
from kvcustody.clock import VirtualClock
from kvcustody.governance.observability.metrics import worker_status
from kvcustody.governance.observability.prefill_cost import DeclaredRate
from standins.governance.offload_world import World, prompt


class DecidedWorld:
    """Restores that were faster, slower, came in part and failed, of two tenants; stores that paid and did not.

    `decisions` are taken at the Governor, before they are leaves. `mine` are acme's requests that were decided about.
    """

    def __init__(self, folder: Path, clock: VirtualClock | None = None) -> None:
        self.world = World(folder, "host", clock=clock)
        self.url = f"sqlite:///{folder / 'ledger.db'}"
        self.decisions: list[TransferDecided] = []
        offload = self.world.worker.governor.offload
        assert offload is not None
        self.offload = offload
        take = offload.transfers.take_decisions

        def taking() -> list[TransferDecided]:
            taken = take()
            self.decisions += taken
            return taken

        offload.transfers.take_decisions = taking  # type: ignore[method-assign]
        self._serve(6, 1.0)  # a second a token: moving is faster
        self._cut(1)
        self._serve(2, 1.0)
        self._cut(0)
        self._serve(2, 1.0)
        self._cut(None)
        self._serve(3, 1e12)  # no time at all: moving is slower
        self._serve(2, 1e12, seeds=(3, 4))  # and what is not there yet stays away
        self.offset_us = self.world.clock.utc_us() - self.world.clock.now_us()
        self.incarnation = self.world.worker.writer.incarnation
        self.uses = {use.tier: use for use in offload.transfers.uses()}
        self.status = worker_status(self.world.worker.governor.stats(), 16)
        self.world.worker.close()

    def _serve(self, times: int, tokens_a_second: float, seeds: tuple[int, int] = (1, 2)) -> None:
        self.offload.transfers.cost = DeclaredRate(tokens_a_second)
        for number in range(times):
            for tenant, seed in zip(("acme", "beta"), seeds, strict=True):
                self.world.serve(tenant, prompt(seed, 10))
            self.world.clock.advance(1_000_000)
            self.world.crowd(number)

    def _cut(self, objects: int | None) -> None:
        """Of what a look-up found, so many objects come from now on; None: all of them."""
        (tier,) = self.offload.tiers
        load = type(tier).load

        def loading(label: Any, keys: Any, depth: int, found: list[Any], write: Any) -> Any:
            return load(tier, label, keys, depth, found[:objects], write) if objects != 0 else []

        tier.load = loading  # type: ignore[method-assign]

    def of(self, action: str, **said: object) -> list[TransferDecided]:
        """The decisions that are so."""
        return [
            one
            for one in self.decisions
            if one.action == action and all(getattr(one, name) == value for name, value in said.items())
        ]
