"""A restriction of processing (GDPR 18) in a running vLLM with a host tier; each order arrives while it sleeps.

Without the order the same requests hit, on the device and from the tier: `control` is served beside the restricted
person, with the same prompts at the same places.
"""

from __future__ import annotations

import time
import uuid
from collections.abc import Callable
from pathlib import Path
from typing import Any

import orjson
from sqlalchemy import select

from kvcustody.audit.kinds import CaseOpened, CaseStepped
from kvcustody.audit.store.database.engine import open_store
from kvcustody.audit.store.schema.ledger import events
from kvcustody.clock import SystemClock
from kvcustody.governance.restriction.restricted_subjects import RESTRICTED
from standins import builders
from standins.engines.vllm.local_engine import BLOCK, LocalEngine
from standins.engines.vllm.tier_engines import OBJECT, PREFIX, displace, prompt, tier
from standins.waiting import until

CLOCK = SystemClock()
WHOLE = PREFIX * BLOCK
SECONDS = 60.0


class Case:
    """A case on the engine's ledger, stepped by another process's writer."""

    def __init__(self, engine: LocalEngine, folder: Path, tenant: str, subject: str) -> None:
        assert engine.deployment is not None
        self._url, self._folder, self._tenant = engine.deployment.ledger_url, folder, tenant
        self.id = uuid.uuid4().hex
        self._put(
            CaseOpened(
                CLOCK.now_us(),
                self.id,
                tenant,
                subject,
                "restriction",
                "mail",
                CLOCK.utc_us(),
                "UTC",
                (),
                "dana",
            )
        )

    def step(self, step: str, change: str) -> None:
        """Put a step on record, and wait for the engine's leaf; nobody sends it a request."""
        ground, reason = ("18(1)(a)", "") if step == "restrict" else ("", "checked")
        self._put(CaseStepped(CLOCK.now_us(), self.id, self._tenant, step, "", ground, "", reason, "", "dana"))
        said = {"case_id": self.id, "change": change}
        assert until(
            lambda: any(said.items() <= body.items() for body in self.leaves("processing-restricted")),
            SECONDS,
        ), f"the engine did not follow `{step}`"

    def leaves(self, kind: str) -> list[dict[str, Any]]:
        """Every leaf of a kind."""
        store = open_store(self._url, read_only=True)
        try:
            with store.connect() as connection:
                query = select(events.c.leaf).where(events.c.kind == kind)
                return [orjson.loads(bytes(leaf)) for leaf in connection.scalars(query)]
        finally:
            store.dispose()

    def _put(self, event: CaseOpened | CaseStepped) -> None:
        store = open_store(self._url)
        writer = builders.writer(store, self._folder / "desk", worker="desk", clock=CLOCK)
        writer.submit_durable(event)
        writer.close()
        store.dispose()


class Served:
    """Requests of one tenant; each has to end as it was asked to."""

    def __init__(self, engine: LocalEngine, tenant: str) -> None:
        self._engine, self._tenant = engine, tenant

    def ask(self, seed: int, subject: str = "ada") -> int:
        """Cached tokens."""
        answer = self._engine.ask(prompt(seed), tenant=self._tenant, subject=subject)
        assert answer.reason == "length" and len(answer.tokens) == 4, "0 failed"
        return answer.cached_tokens


def moved(engine: LocalEngine, act: Callable[[], object]) -> tuple[int, int]:
    """Objects that were stored and blocks that were restored while `act` ran."""
    before = settled(engine)
    act()
    after = settled(engine)
    return after[0] - before[0], after[1] - before[1]


def settled(engine: LocalEngine) -> tuple[int, int]:
    """Both counts, when they have not moved for half a second."""
    before = (-1, -1)
    while True:
        said = tier(engine)
        stored = sum(count for step, count in said["steps"].items() if step.startswith("stored"))
        now = (stored, said["restored_blocks"])
        if now == before:
            return now
        before = now
        time.sleep(0.5)


def test_what_is_kept_is_used_by_nobody_until_it_is_lifted(tiered: LocalEngine, tmp_path: Path) -> None:
    mine, control = Served(tiered, "held"), Served(tiered, "control")
    case = Case(tiered, tmp_path, "held", "ada")

    for served in (mine, control):
        assert served.ask(201) == 0
    displace(tiered)
    for served in (mine, control):
        assert served.ask(201) == WHOLE, "before: from the tier"
        assert served.ask(201) == WHOLE, "before: from the device"

    case.step("restrict", "restricted")
    assert mine.ask(201) == 0 and control.ask(201) == WHOLE, "on the device"
    displace(tiered)
    assert moved(tiered, lambda: mine.ask(201)) == (0, 0), "nothing comes back, nothing is copied"
    assert moved(tiered, lambda: mine.ask(202)) == (0, 0)
    assert mine.ask(202) == 0, "what was left meanwhile is withheld too"
    stored, restored = moved(tiered, lambda: (control.ask(201), control.ask(202)))
    assert (stored, restored) == (PREFIX // OBJECT, PREFIX), "control: others' copies are made and come back"
    assert mine.ask(201, subject="bob") == 0, "its neighbour has a domain of its own, and nothing in it"
    assert mine.ask(201, subject="bob") == WHOLE, "and is not restricted"
    opened = [body for body in case.leaves("residency-opened") if RESTRICTED in body["reasons"]]
    assert opened and {body["tenant"] for body in opened} == {"held"}

    case.step("lift-restriction", "lifted")
    displace(tiered)
    assert mine.ask(201) == control.ask(201) == WHOLE, "lifted: what is still there is found again"
    assert tiered.governance("check") == [] and tiered.governance("scan") == []
