"""After the acknowledgement no canary of the erased, no look-up into what was theirs, others' hits unchanged."""

from __future__ import annotations

import pytest

from kvcustody.allocator.prefix.tree import PrefixTree
from kvcustody.clock import MICROSECONDS, VirtualClock
from kvcustody.governance.admission_outcome import Admission
from kvcustody.governance.erasure.selector import Selector
from kvcustody.governance.governor import pool_books as erasure
from kvcustody.governance.governor.governor import Governor
from kvcustody.lab.replay.workload.generator import WorkloadSpec, generate
from standins.console.erasure_schedule import erasure_schedule
from standins.erasure.histories import Histories
from standins.simulation.governed import MODEL, POLICY, governor, person

WAYS = [("subject", "abort"), ("subject", "finish"), ("tenant", "abort"), ("tenant", "finish")]


@pytest.mark.parametrize(("scope", "running"), WAYS)
def test_purge_over_random_histories(scope: str, running: str) -> None:
    world = Histories(7, scope=scope, running=running)
    found = world.run(60)
    assert (found.canaries, found.lookups, found.changed_hits) == (0, 0, 0)
    assert found.erased_blocks > 100 and found.others_hits > 100 and found.racing > 20, "void: nothing happened"
    assert world.governor.check() == [] and world.governor.scan() == []


@pytest.mark.soak
@pytest.mark.parametrize(("scope", "running"), WAYS)
def test_purge_over_a_hundred_thousand_histories(scope: str, running: str) -> None:
    found = Histories(11, scope=scope, running=running).run(25_000)
    assert (found.canaries, found.lookups, found.changed_hits) == (0, 0, 0)


def test_positive_control_an_erasure_that_leaves_the_cache(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(erasure, "topmost", lambda inside: [])
    monkeypatch.setattr(PrefixTree, "lapse", lambda self, hold, cause, now_us: None)
    monkeypatch.setattr(
        erasure._Covered, "domains", property(lambda self: set(), lambda self, value: None), raising=False
    )
    found = Histories(7).run(20)
    assert found.canaries > 20 and found.lookups > 20


def test_positive_control_an_index_purge_without_scrub(monkeypatch: pytest.MonkeyPatch) -> None:
    """Look-ups end, bytes stay: what a purge of the index alone would be."""
    world = Histories(7)
    clean = type(world.memory).scrub

    def pretends(self, shard, blocks, share):  # type: ignore[no-untyped-def]
        return clean(self, shard, blocks[:0], 0.0)

    monkeypatch.setattr(type(world.memory), "scrub", pretends)
    monkeypatch.setattr(type(world.memory), "nonzero_bytes", lambda self, blocks: 0)
    found = world.run(20)
    assert found.canaries > 20 and found.lookups == 0


class Race:
    """A workload in its own time, with subjects that ask for erasure while their requests run, or soon after."""

    def __init__(self, requests: int, running: str) -> None:
        self.clock = VirtualClock()
        policy = POLICY.replace("idle: 20s, absolute: 90s", "idle: 10m, absolute: 1h").replace("60%", "100%")
        policy = policy.replace("  a: {", "  default: {quota: {guaranteed: 0%, cap: 100%, borrow: true}}\n  a: {")
        policy += f"\nerasure: {{within: 20s, running: {running}}}\n"
        self.governor: Governor = governor(20_000, self.clock, policy=policy)
        self.written: dict[tuple[int, int], tuple[str, int]] = {}  # unit -> subject and when
        self.erased: dict[str, int] = {}
        self.hits = self.late = self.racing = self.erasures = 0
        self.running: list[tuple[int, object, str]] = []
        self.jobs = list(_jobs(requests))

    def run(self) -> Race:
        schedule = erasure_schedule(self.jobs, seed=1, rate=0.3, racing=0.5, mean_delay_us=5 * MICROSECONDS)
        queue = sorted(
            [(request.at_us, 1, number) for number, (request, _) in enumerate(self.jobs)]
            + [(each.at_us, 0, number) for number, each in enumerate(schedule)]
        )
        for at_us, is_request, number in queue:
            self.until(at_us)
            if is_request:
                self.request(number)
            else:
                self.erase(schedule[number].subject)
        self.until(self.clock.now_us() + 60 * MICROSECONDS)
        return self

    def until(self, at_us: int) -> None:
        while self.clock.now_us() < at_us:
            self.clock.advance(min(200_000, at_us - self.clock.now_us()))
            self.governor.step()
            now = self.clock.now_us()
            for entry in [entry for entry in self.running if entry[0] <= now]:
                self.running.remove(entry)
                self.governor.release(entry[1])

    def request(self, number: int) -> None:
        request, label = self.jobs[number]
        tokens = [int(block) * 4 + at for block in request.blocks[:40] for at in range(4)]
        tokens = [token % 2_000_000_000 for token in tokens] + [number]
        got = self.governor.admit(person(f"t{label.tenant}", label.subject), MODEL, tokens)
        if not isinstance(got, Admission):
            return
        generations = self.governor.managers[0].pool.generation[got.blocks].tolist()
        units = list(zip(got.blocks.tolist(), generations, strict=True))
        hit = got.hit_tokens // 4
        for unit in units[:hit]:
            subject, since = self.written[unit]
            self.late += since <= self.erased.get(subject, -1)
        self.hits += hit
        self.written.update(dict.fromkeys(units[hit:], (label.subject, self.clock.now_us())))
        self.governor.commit([got.request_id], [len(tokens)])
        self.running.append((self.clock.now_us() + 5 * MICROSECONDS, got.request_id, label.subject))

    def erase(self, subject: str) -> None:
        tenants = {label.tenant for _, label in self.jobs if label.subject == subject}
        self.racing += any(entry[2] == subject for entry in self.running)
        self.erasures += 1
        self.governor.erase(Selector(f"t{tenants.pop()}", subject))
        self.erased[subject] = self.clock.now_us()


def _jobs(requests: int):  # type: ignore[no-untyped-def]
    spec = WorkloadSpec(seed=3, tenants=4, conversations=requests // 3, span_seconds=600.0)
    made = generate(spec)
    return zip(made.requests, made.labels, strict=True)


@pytest.mark.parametrize("running", ["abort", "finish"])
def test_erasures_race_live_traffic(running: str) -> None:
    race = Race(400, running).run()
    assert race.late == 0
    assert race.hits > 300 and race.erasures > 10 and race.racing > 2
    assert not race.governor.erasures.pending and race.governor.check() == []


def test_positive_control_hits_on_the_erased_would_be_counted(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(Governor, "erase", lambda self, selector: None)
    assert Race(400, "abort").run().late > 10
