"""Who sets the clock: a step back revives no grant and no segment, and a step ahead ends none for ever."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

from kvcustody.clock import MICROSECONDS, VirtualClock
from kvcustody.deadline_clock import DeadlineClock
from kvcustody.governance.decisions.segment_matcher import declare
from kvcustody.governance.identity.domain_spec import tenant_owner
from standins.builders import keyring_in_memory
from standins.redteam.two_worlds import BLOCK, ISSUER, MODEL, World, table

DAY, YEAR = 86_400 * MICROSECONDS, 365 * 86_400 * MICROSECONDS
PROMPT = list(range(1, 6 * BLOCK + 1))
UNTIL = "2026-01-02"  # a day after the virtual clock's beginning
GRANT = f"grants: [{{id: reads, owner: victim, reader: attacker, at_most: low, until: {UNTIL}, reason: t}}]"


class Deployment:
    """A machine with one way from the victim's cache to the attacker's requests, which ends on `UNTIL`."""

    def __init__(self, kind: str, folder: Path) -> None:
        self.ring = keyring_in_memory(VirtualClock())
        self.path = folder / "clock.json"
        self.sharing = GRANT if kind == "grant" else self._segment()
        self.world = self.start(VirtualClock())
        self.subjects = 0

    def _segment(self) -> str:
        owner = tenant_owner(ISSUER, "victim")
        self.ring.ensure([owner])
        made = declare(self.ring, owner, PROMPT, model=MODEL.digest, block_tokens=BLOCK)
        who = "id: shared, owner: victim, tenants: [victim, attacker], classification: low"
        what = f"digest: 'hmac:{made.digest}', tokens: {made.tokens}, expires: {UNTIL}"
        return f"segments: [{{{who}, {what}}}]"

    def start(self, clock: VirtualClock) -> World:
        self.world = World(
            table(sharing=self.sharing), blocks=512, keyring=self.ring, clock=clock, clock_path=self.path
        )
        return self.world

    def crossed(self) -> int:
        """Tokens of the victim's that a principal of the attacker's who was never seen before is served."""
        world, hits = self.world, 0
        world.step()
        world.ask("victim", PROMPT)
        for _ in range(2):  # a first use is a miss until it is on record
            self.subjects += 1
            answer = world.admit("attacker", PROMPT, salt=f"salt-{self.subjects}", subject=f"s{self.subjects}")
            hits = answer.hit_tokens
            world.governor.abort(answer.request_id)
            world.governor.settle()
        return hits

    def pass_the_end(self) -> None:
        self.world.clock.advance(DAY - MICROSECONDS)
        assert self.crossed() > 0, "void: it must serve while it lasts"
        self.world.clock.advance(MICROSECONDS)
        assert self.crossed() == 0


@pytest.fixture(params=["grant", "segment"])
def deployment(request: Any, tmp_path: Path) -> Deployment:
    return Deployment(request.param, tmp_path)


BACK = [MICROSECONDS, 20 * DAY]


@pytest.mark.parametrize("back_us", BACK)
def test_a_step_back_revives_nothing_for_a_new_principal(deployment: Deployment, back_us: int) -> None:
    deployment.pass_the_end()
    deployment.world.clock.step_utc(-back_us)
    assert deployment.crossed() == 0


@pytest.mark.parametrize("boot", ["virtual", "another"])
@pytest.mark.parametrize("back_us", BACK)
def test_nor_does_it_over_a_restart(deployment: Deployment, back_us: int, boot: str) -> None:
    deployment.pass_the_end()
    deployment.world.time.keep()  # as its thread does, and an orderly end
    clock = deployment.world.clock
    now_us = clock.now_us() if boot == clock.boot else 3 * MICROSECONDS
    deployment.start(VirtualClock(now_us, clock.utc_us() - back_us, boot))
    assert deployment.crossed() == 0


@pytest.mark.parametrize("back_us", BACK)
def test_positive_control_the_wall_clock_revives_it(
    deployment: Deployment, back_us: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    def follow(clock: DeadlineClock) -> None:
        clock.offset_us = clock._wall.utc_us() - clock._wall.now_us()

    monkeypatch.setattr(DeadlineClock, "look", follow)
    deployment.start(VirtualClock())
    deployment.pass_the_end()
    deployment.world.clock.step_utc(-back_us)
    assert deployment.crossed() > 0


def test_ten_years_ahead_end_nothing_that_is_in_use_and_open_nothing_anew(deployment: Deployment) -> None:
    world = deployment.world
    world.clock.step_utc(10 * YEAR)
    assert deployment.crossed() == 0
    assert world.governor.tenant_counters["attacker"].denials == {"clock-in-doubt": 2}
    world.clock.step_utc(-10 * YEAR)
    assert deployment.crossed() > 0, "a clock that is set right again gives everything back"
    world.clock.step_utc(10 * YEAR)
    assert deployment.crossed() > 0, "what was in use goes on by the boot clock"
    world.clock.advance(DAY)
    assert deployment.crossed() == 0, "and ends by it"


def test_ten_years_that_an_operator_confirms_end_it_for_good(deployment: Deployment) -> None:
    world = deployment.world
    assert deployment.crossed() > 0
    world.clock.step_utc(10 * YEAR)
    assert deployment.crossed() > 0
    world.time.confirm()
    assert deployment.crossed() == 0
    world.clock.step_utc(-10 * YEAR)
    assert deployment.crossed() == 0
