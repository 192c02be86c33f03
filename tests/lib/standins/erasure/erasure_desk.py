"""A Governor with requests of two subjects, for erasures."""

from __future__ import annotations

from typing import Any

from kvcustody.clock import MICROSECONDS, VirtualClock
from kvcustody.governance.admission_outcome import Admission
from kvcustody.governance.erasure.selector import Selector
from kvcustody.governance.governor.governor import Governor
from standins.simulation.governed import MODEL, POLICY, governor, person

PROMPT = list(range(40))


X = Selector("a", "x")


class Desk:
    """A Governor with the few acts that these tests need."""

    def __init__(self, policy: str = POLICY, blocks: int = 256) -> None:
        self.clock = VirtualClock()
        self.governor: Governor = governor(blocks, self.clock, policy=policy)

    def start(self, tenant: str, subject: str, tokens: list[int]) -> Admission:
        got = self.governor.admit(person(tenant, subject), MODEL, tokens)
        assert isinstance(got, Admission)
        self.governor.commit([got.request_id], [len(tokens)])
        return got

    def serve(self, tenant: str, subject: str, tokens: list[int]) -> int:
        got = self.start(tenant, subject, tokens)
        self.governor.release(got.request_id)
        return got.hit_tokens

    def steps(self, seconds: float = 1.0) -> None:
        for _ in range(int(10 * seconds)):
            self.clock.advance(MICROSECONDS // 10)
            self.governor.step()

    def counts(self) -> Any:
        return self.governor._ledger.counts  # type: ignore[attr-defined]

    def healthy(self) -> bool:
        return self.governor.check() == [] and self.governor.scan() == []
