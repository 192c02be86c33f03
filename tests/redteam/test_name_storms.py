"""Invented names: whoever makes them up takes room from itself, and who comes after them is admitted."""

from __future__ import annotations

from typing import Any

import pytest

from kvcustody.allocator.external.pool import ExternalPool
from kvcustody.allocator.external.residency import ExternalResidency
from kvcustody.allocator.pool.block_state import CLEAN, DIRTY
from kvcustody.allocator.pool.memory_protocol import UnbackedMemory
from kvcustody.allocator.pool.pool import Pool
from kvcustody.clock import VirtualClock
from kvcustody.governance.admission_outcome import Admission, AdmissionRefused
from kvcustody.governance.external.engine_port import EnginePort
from kvcustody.governance.governor.governor import Governor
from kvcustody.governance.identity.principal import identify
from standins import builders
from standins.redteam.two_worlds import BLOCK, ISSUER, MODEL, World, table

PLACES, STORM = 8, 400
TENANTS = """\
  listed:  {quota: {guaranteed: 50%, cap: 50%}}
  default: {quota: {guaranteed: 5%, cap: 5%}, tenants_max: 8}"""
PROMPT = list(range(1, 3 * BLOCK + 1))
IDLE_US = 30 * 60 * 1_000_000
PROFILES = ["shared", "strict", "dedicated"]


def world(profile: str) -> World:
    return World(table(profile=profile, tenants=TENANTS), blocks=640)


def storm(opened: World, names: int = STORM) -> int:
    """Requests under names that nobody has heard of; how many were admitted."""
    admitted = 0
    for number in range(names):
        admitted += isinstance(opened.ask(f"invented-{number}", PROMPT), Admission)
        opened.step()
    return admitted


def lapse(opened: World) -> None:
    """Nobody asks for as long as a cache lasts."""
    for microseconds in (IDLE_US, 2_000_000, 1, 1):
        opened.step(microseconds)


@pytest.mark.parametrize("profile", PROFILES)
def test_after_a_storm_of_invented_names_a_newcomer_is_admitted(profile: str) -> None:
    opened = world(profile)
    assert storm(opened) >= PLACES
    if profile != "shared":  # what holds something keeps its place there: others' caches are not its to take
        assert isinstance(opened.ask("newcomer", PROMPT), AdmissionRefused)
        lapse(opened)
    assert opened.hit("newcomer", PROMPT) == 0
    assert opened.hit("newcomer", PROMPT) > 0
    governor = opened.governor
    lapse(opened)
    opened.ask("next", PROMPT)
    assert governor.check() == []
    assert sum(len(manager.accounts) for manager in governor.managers) <= PLACES + 1
    assert len(governor.tenant_counters) <= PLACES + 1


@pytest.mark.parametrize("profile", PROFILES)
def test_positive_control_where_nobody_leaves_the_first_names_lock_everybody_out(
    profile: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(Governor, "_leaves", lambda self, tenant: False)
    opened = world(profile)
    assert storm(opened, 2 * PLACES) == PLACES
    lapse(opened)
    assert isinstance(opened.ask("newcomer", PROMPT), AdmissionRefused)


@pytest.mark.parametrize("profile", PROFILES)
def test_a_storm_takes_nothing_from_who_came_before_it_and_came_back(profile: str) -> None:
    opened = world(profile)
    for _ in range(2):
        opened.ask("regular", PROMPT)
        opened.ask("listed", PROMPT)
    storm(opened)
    assert opened.hit("regular", PROMPT) > 0 and opened.hit("listed", PROMPT) > 0


@pytest.mark.parametrize("profile", PROFILES)
def test_who_runs_keeps_its_place_and_all_others_get_one_answer(profile: str) -> None:
    opened = world(profile)
    running = [opened.admit(f"busy-{number}", PROMPT) for number in range(PLACES)]
    assert all(isinstance(one, Admission) for one in running)
    answers = {opened.admit(name, PROMPT, request_id="r").reason for name in ("a", "b", *map(str, range(50)))}
    assert len(answers) == 1
    [said] = answers
    assert not any(character.isdigit() for character in said) and "busy" not in said and "unlisted" not in said
    assert set(opened.governor.tenant_counters) == {f"busy-{number}" for number in range(PLACES)}
    for one in running:
        opened.governor.commit([one.request_id], [len(PROMPT)])
        opened.governor.release(one.request_id)
    lapse(opened)
    assert opened.hit("a", PROMPT) == 0 and opened.governor.check() == []


def test_what_is_given_back_in_strict_is_clean_and_its_own_again() -> None:
    opened = world("strict")
    for round_ in range(5):
        for number in range(PLACES):
            name = f"tenant-{round_}-{number % 4 if round_ % 2 else number}"
            assert isinstance(opened.ask(name, PROMPT), Admission)
        lapse(opened)
        [manager] = opened.governor.managers
        assert sum(partition.size for partition in manager.pool.partitions) <= 640
        assert opened.governor.check() == []
    assert opened.hit("tenant-0-1", PROMPT) == 0, "who comes back begins anew"


@pytest.mark.parametrize("demanded", [False, True], ids=["vacant", "control"])
@pytest.mark.parametrize("profile", ["strict", "dedicated"])
def test_blocks_that_did_not_verify_keep_no_place(
    profile: str, monkeypatch: pytest.MonkeyPatch, demanded: bool
) -> None:
    """One of each partition is quarantined for good: the rest is given on, that one to nobody. Control: all CLEAN."""
    if demanded:
        monkeypatch.setattr(Pool, "is_vacant", lambda self, part: part.clean_count == part.size)
    opened = world(profile)
    for number in range(PLACES):
        assert isinstance(opened.ask(f"before-{number}", PROMPT), Admission)
    real, bad = UnbackedMemory.scrub, list[tuple[int, int]]()

    def one_fails(self: UnbackedMemory, shard: int, blocks: Any, share: float) -> Any:
        made = real(self, shard, blocks, share)
        where = (id(self), int(blocks[0]) // 32)  # 5 % of 640 blocks are a partition
        if where in [(memory, block // 32) for memory, block in bad]:
            return made
        bad.append((id(self), int(blocks[0])))
        return made._replace(failed=blocks[:1])

    with monkeypatch.context() as patched:
        patched.setattr(UnbackedMemory, "scrub", one_fails)
        lapse(opened)
    assert len(bad) >= PLACES
    after = [opened.admit(f"after-{number}", PROMPT) for number in range(PLACES)]
    if demanded:
        assert all(isinstance(one, AdmissionRefused) for one in after), "void: a broken block keeps its place"
        return
    assert all(isinstance(one, Admission) for one in after)
    if profile == "strict":
        handed = {int(block) for one in after for block in one.blocks}
        assert not handed & {block for _, block in bad}
    assert opened.governor.check() == []


def port_storm(profile: str, names: int) -> tuple[EnginePort, list[Any]]:
    clock = VirtualClock()
    pool = ExternalPool(640, shards=1, bytes_per_block=1, reserved=[0])
    port = builders.port(table(profile=profile, tenants=TENANTS), clock, pool=pool, block_tokens=BLOCK)
    memory = UnbackedMemory(640, 1, clock=clock)
    answers = []
    for number in range(names):
        person = identify(issuer=ISSUER, tenant=f"invented-{number}")
        answer = port.admit(person, MODEL, PROMPT, request_id=number)
        if isinstance(answer, ExternalResidency) and port.may_start(answer) is None:
            port.look_up(answer, lambda key: -1)
            free = [block for block in range(1, 640) if pool.state[block] in (CLEAN, DIRTY)][:3]
            port.handed_out(answer, free)
            port.published(answer, free)
            port.release(answer)
        order = port.step()
        if order is not None:
            port.scrubbed(order.number, 0, [memory.scrub(0, blocks, share) for share, blocks in order.batches])
        clock.advance(1000)
        answers.append(answer)
    return port, answers


@pytest.mark.parametrize(("leaves", "last"), [(True, ExternalResidency), (False, AdmissionRefused)])
def test_the_same_beside_an_engine_that_allocates_by_itself(
    leaves: bool, last: type, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Not leaving is the control."""
    if not leaves:
        monkeypatch.setattr(EnginePort, "_leaves", lambda self, tenant: False)
    port, answers = port_storm("shared", 40)
    assert isinstance(answers[-1], last)
    assert all(isinstance(answer, ExternalResidency) for answer in answers[:PLACES])
    assert port.check() == []
