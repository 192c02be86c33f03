"""A tier that keeps nothing but numbers: what it would say of its copies, its counters, and who is right in the end."""

from __future__ import annotations

import hashlib
import random
from typing import NamedTuple

from kvcustody.audit.evidence.coverage.conservation import TierCounts
from kvcustody.governance.tiers.copy_event import CopyEvent

SECOND = 1_000_000
WITHIN_US = SECOND


class Copy(NamedTuple):
    """One copy, as the world knows it."""

    number: int
    name: bytes
    tenant: str
    classification: str
    blocks: int
    size: int
    due_us: int


class CopyWorld:
    """Steps of copies in one tier, from a seed. `living` and `waiting` are what is there now."""

    def __init__(self, tier: str = "host", seed: int = 1, start_us: int = 10 * SECOND) -> None:
        self.tier = tier
        self.now = start_us
        self.events: list[CopyEvent] = []
        self.living: dict[int, Copy] = {}
        self.waiting: dict[int, Copy] = {}
        self.destroyed: set[int] = set()
        self._chance = random.Random(seed)
        self._next = 1

    def store(self, *, due_us: int | None = None, tenant: str | None = None) -> Copy:
        """A copy more; its name is one of few, so that names come again."""
        taken = {copy.name for copy in (*self.living.values(), *self.waiting.values())}
        name = b""
        while not name or name in taken:
            name = hashlib.sha256(b"%d" % self._chance.randrange(60)).digest()
        chance = self._chance
        stored = Copy(
            self._next,
            name,
            tenant or chance.choice(["acme", "labs"]),
            chance.choice(["internal", "low"]),
            chance.randrange(1, 17),
            chance.randrange(1000, 9000),
            self.now + chance.randrange(SECOND, 20 * SECOND) if due_us is None else due_us,
        )
        self._next += 1
        self.living[stored.number] = stored
        self._say("stored", stored)
        return stored

    def end(self, copy: Copy, cause: str = "ceiling", erasure: str = "") -> None:
        """Nothing finds it from now on."""
        self.waiting[copy.number] = self.living.pop(copy.number)
        self._say("ended", copy, cause, erasure)

    def destroy(self, copy: Copy, evidence: str = "zeroed") -> None:
        """A piece of evidence."""
        self.waiting.pop(copy.number, None)
        self.destroyed.add(copy.number)
        self._say("destroyed", copy, evidence)

    def run(self, steps: int) -> CopyWorld:
        """Copies come, end at their ceilings or before, and are destroyed at once, later, or in two steps."""
        for _ in range(steps):
            self.now += self._chance.randrange(SECOND // 2)
            for copy in [copy for copy in self.living.values() if copy.due_us <= self.now]:
                self.end(copy)
            if self.living and self._chance.random() < 0.2:
                self.end(self._chance.choice([*self.living.values()]), "evicted")
            for copy in [*self.waiting.values()]:
                if self._chance.random() < 0.6:
                    self.destroy(copy, "key-destroyed" if self.tier == "nvme" else "zeroed")
                    if self.tier == "nvme":
                        self.now += 5
                        self.destroy(copy, "unlinked")
            if self._chance.random() < 0.7 and len(self.living) + len(self.waiting) < 40:
                self.store()
        return self

    def counts(self) -> TierCounts:
        """The tier's own counters, from its books and not from what it said."""
        steps = [event.step for event in self.events]
        sizes = {event.number: event.size for event in self.events}
        return TierCounts(
            self.tier,
            self._next - 1,
            len(self.destroyed) + len(self.waiting),
            len(self.destroyed),
            steps.count("destroyed"),
            len(self.living),
            len(self.waiting),
            sum(sizes[number] for number in self.living),
            sum(sizes[number] for number in self.waiting),
        )

    def _say(self, step: str, copy: Copy, cause: str = "", erasure: str = "") -> None:
        due_us = min(copy.due_us, self.now) if step == "ended" else copy.due_us
        whose = (copy.tenant, copy.classification, copy.blocks, copy.size)
        self.events.append(CopyEvent(step, copy.name, copy.number, *whose, self.now, due_us, cause, erasure))


def expected(worlds: list[CopyWorld], now_us: int) -> dict[tuple[str, str, str], dict[str, int]]:
    """Verdicts by tier, tenant and classification, one copy after the other, from what happened alone."""
    rows: dict[tuple[str, str, str], dict[str, int]] = {}
    for world in worlds:
        for number in range(1, 1 + max((event.number for event in world.events), default=0)):
            steps = [event for event in world.events if event.number == number]
            begun = steps[0]
            ends = [event for event in steps if event.step == "ended"]
            proofs = [event for event in steps if event.step == "destroyed"]
            if not ends and begun.due_us >= now_us:
                continue
            due_us = min(event.due_us for event in (begun, *ends))
            if not ends or not proofs:
                verdict = "open"
            else:
                in_time = max(ends[0].at_us, proofs[0].at_us) <= due_us + WITHIN_US
                verdict = "covered" if in_time else "late"
            row = rows.setdefault((world.tier, begun.tenant, begun.classification), {})
            row["due"] = row.get("due", 0) + 1
            row[verdict] = row.get(verdict, 0) + 1
            row["waiting"] = row.get("waiting", 0) + int(bool(ends) and not proofs)
            row["bytes"] = row.get("bytes", 0) + (begun.size if proofs else 0)
            for proof in proofs:
                name = proof.cause.replace("-", "_")
                row[name] = row.get(name, 0) + 1
    return rows
