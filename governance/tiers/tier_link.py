"""Whether moving blocks to or from one tier is worth it, by the costs and gains of earlier moves.

    link = TierLink()
    choice = link.choose_restore(size, recompute_us, now_us)     # recompute_us None: not known yet
    link.restored(size, blocks, took_us)                         # how it went
    choice = link.choose_store(size, recompute_us)
    link.stored(size, blocks, took_us)

1. A copy is restored where that is expected to be faster than computing its blocks.
2. A run that leaves is stored where the expected saving is more than storing takes. The saving is the time that a
   restore would save, for the share of stored copies that comes back. Of the stores that seem not to pay, one in
   `TRIED` is made, to learn whether they pay. A trial covers a chain: the runs before a stored run are stored too,
   since nothing comes back behind a hole.
3. As long as either time is unknown, blocks are moved, because only a trial can measure it.
4. A tier that is not used is tried now and then (`LinkWatch`).
5. An `interactive` request restores only where this is expected to be faster even if the prediction is as wrong as
   predictions have been. Nothing is tried on it. A tier that was slower is tried on `batch` requests.
6. A shared store is searched for others' copies where look-up and restore together are expected to be faster than
   computing. The look-up's time is part of a restore's expected time, and of its measured time.
"""

from __future__ import annotations

from typing import NamedTuple

from kvcustody.audit.kinds import TransferDecided
from kvcustody.governance.tiers.tier import CopyCounts
from kvcustody.governance.tiers.transfer_rates import LinkWatch, TierUse, TransferRates

TRIED = 16
_LOOK_SHARE = 0.1  # of the newest look-up in what the next is expected to take
_PRIOR_STORED, _PRIOR_USED = 64, 32  # blocks: what comes back, as long as little is known
AGAINST = ("slower", "does not pay", "busy", "uncertain", "untried")
"""The reasons for not moving."""


class TransferChoice(NamedTuple):
    """Whether to move, and why; what either way is expected to take, in microseconds, 0 where that is not known."""

    moves: bool
    reason: str
    transfer_us: int
    recompute_us: int


class TierLink:
    """What one tier's use has taken. `always`: whatever is permitted is moved, whatever it takes."""

    __slots__ = (
        "_always",
        "against",
        "look_us",
        "looks",
        "restore_us",
        "restored_blocks",
        "restored_bytes",
        "restores",
        "skipped",
        "store_us",
        "stored_blocks",
        "stored_bytes",
        "stores",
        "watch",
    )

    def __init__(self, *, always: bool = False) -> None:
        self._always = always
        self.stores, self.restores = TransferRates(), TransferRates()
        self.stored_blocks = self.restored_blocks = self.stored_bytes = self.restored_bytes = 0
        self.store_us = self.restore_us = self.against = self.skipped = 0
        self.looks, self.look_us = 0, 0.0
        self.watch = LinkWatch()

    @property
    def reused(self) -> float:
        """Which part of what is stored comes back."""
        return (self.restored_blocks + _PRIOR_USED) / (self.stored_blocks + _PRIOR_STORED)

    def choose_store(
        self, size: int, recompute_us: float | None, *, is_busy: bool = False, is_awaited: bool = False
    ) -> TransferChoice:
        """Whether to store so many bytes (rule 2).

        `is_busy`: there is no room for it now. `is_awaited`: what goes on from it is stored already.
        """
        takes_us, again_us = self.stores.predict(size), self.restores.predict(size)
        if is_busy:
            reason = "busy"
        elif self._always:
            reason = "always"
        elif takes_us is None or again_us is None or recompute_us is None:
            reason = "not measured yet"
        elif self.reused * (recompute_us - again_us) > takes_us:
            reason = "pays"
        elif is_awaited:
            reason = "tried"
        else:
            self.skipped += 1
            reason = "tried" if self.skipped % TRIED == 0 else "does not pay"
        return self._choice(reason, takes_us, recompute_us)

    def choose_look(self, size: int, recompute_us: float | None, now_us: int, latency: str = "") -> str:
        """Why to ask a shared store for so many bytes that others may have stored there (rule 6); empty: do not."""
        takes_us = self.restores.predict(size)
        if self._always:
            return "always"
        if takes_us is None or recompute_us is None:
            return "" if latency == "interactive" and takes_us is None else "not measured yet"
        if self.pays_to_look(size, recompute_us, now_us):
            return "faster"
        return "tried" if latency != "interactive" and self.watch.due(now_us) else ""

    def pays_to_look(self, size: int, recompute_us: float | None, now_us: int) -> bool:
        """Whether look-up and restore are expected to be faster than computing, as far as is known; else left alone."""
        takes_us = self.restores.predict(size)
        if self._always or takes_us is None or recompute_us is None or takes_us + self.look_us < recompute_us:
            return True
        self.watch.left_alone(now_us)
        return False

    def looked(self, took_us: int) -> None:
        """A look-up in the shared store took so long, whatever it found."""
        share = 1.0 if not self.looks else _LOOK_SHARE
        self.looks += 1
        self.look_us += share * (took_us - self.look_us)

    def choose_restore(
        self,
        size: int,
        recompute_us: float | None,
        now_us: int,
        *,
        looks: bool = False,
        is_tried: bool = False,
        latency: str = "",
    ) -> TransferChoice:
        """Whether to restore so many bytes (rules 1 and 5). `looks`: nobody else looks at a link that is left alone.

        `is_tried`: the look-up was a trial, and this is what it was for.
        """
        takes_us = self.restores.predict(size)
        is_hurried, looks = latency == "interactive", looks or latency == "batch"
        if self._always:
            reason = "always"
        elif takes_us is None or recompute_us is None:
            reason = "untried" if is_hurried and takes_us is None else "not measured yet"
            if reason == "untried":
                self.watch.left_alone(now_us)
        elif is_hurried and takes_us < recompute_us <= takes_us * (1 + (self.restores.error or 0.0)):
            reason = "uncertain"
        elif takes_us < recompute_us:
            reason = "faster"
            self.watch.used()
        elif is_tried or (looks and not is_hurried and self.watch.due(now_us)):
            reason = "tried"
        else:
            reason = "slower"
            self.watch.left_alone(now_us)
        return self._choice(reason, takes_us, recompute_us)

    def _choice(self, reason: str, takes_us: float | None, recompute_us: float | None) -> TransferChoice:
        moves = reason not in AGAINST
        self.against += not moves
        return TransferChoice(moves, reason, int(takes_us or 0), int(recompute_us or 0))

    def stored(self, size: int, blocks: int, took_us: int) -> None:
        """So many bytes of so many blocks were stored."""
        self.stores.learn(size, took_us)
        self.stored_blocks += blocks
        self.stored_bytes += size
        self.store_us += took_us

    def restored(self, size: int, blocks: int, took_us: int, *, asked: int) -> None:
        """So many of the blocks that were `asked`, which are `size` bytes together, came back."""
        came = size * blocks // asked
        self.restores.learn(max(1, size * max(blocks, 1) // asked), took_us)
        self.restored_blocks += blocks
        self.restored_bytes += came
        self.restore_us += took_us

    def use(self, tier: str) -> TierUse:
        """What it did."""
        return TierUse(
            tier,
            self.stored_blocks,
            self.restored_blocks,
            self.stored_bytes,
            self.restored_bytes,
            self.store_us,
            self.restore_us,
            self.against,
            self.restores.error,
        )


class Moved(NamedTuple):
    """What a choice is about: blocks and bytes of a tenant in a tier; `residency` 0: for no request."""

    tier: str
    tenant: str
    residency: int
    blocks: int
    size: int


class Outcome(NamedTuple):
    """What came of a choice, how long it took, and of how many blocks, where it was a part; empty: nothing moved."""

    outcome: str = ""
    actual_us: int = 0
    part_blocks: int = 0


NOTHING_MOVED = Outcome()


def decided(
    now_us: int,
    action: str,
    moved: Moved,
    choice: TransferChoice,
    cost: Outcome = NOTHING_MOVED,
    latency: str = "",
) -> TransferDecided:
    """The leaf of a choice and of what came of it."""
    way = "transfer" if choice.moves else "recompute"
    expected = (choice.transfer_us, choice.recompute_us, way)
    outcome, actual_us, part_blocks = cost
    what = (choice.reason, part_blocks, latency)
    return TransferDecided(now_us, action, *moved, *expected, outcome, actual_us, *what)


def tier_figures(use: TierUse, counts: CopyCounts, capacity_bytes: int) -> dict[str, float]:
    """One tier's part of a worker's figures, by the keys of `metrics.MEASURES`."""
    figures = {
        "copies": counts.living,
        "used_bytes": counts.living_bytes,
        "capacity_bytes": capacity_bytes,
        "waiting": counts.waiting,
        "stored_blocks": use.stored_blocks,
        "restored_blocks": use.restored_blocks,
        "store_seconds": use.store_us / 1e6,
        "restore_seconds": use.restore_us / 1e6,
        "refused": counts.refused,
        "left_alone": use.decided_against,
        "prediction_error": use.error,
    }
    return {f"tier_{key}.{use.tier}": value for key, value in figures.items() if value is not None}
