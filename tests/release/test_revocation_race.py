"""A grant is revoked between decision, attach and use, in every interleaving of three threads of six steps.

One thread owns the state, so its calls are the units that interleave; the only act of another thread is to leave a
command in the queue. All 17,153,136 interleavings are covered: two prefixes that leave the same state behind (the
fingerprint holds everything that the rest depends on, for no clock moves) are continued once.
"""

from __future__ import annotations

import itertools
from collections.abc import Callable, Iterator, Sequence
from random import Random
from typing import Any, NamedTuple

import pytest

from kvcustody.allocator.external.pool import ExternalPool
from kvcustody.clock import VirtualClock
from kvcustody.governance.external.engine_port import EnginePort
from kvcustody.governance.identity.principal import identify
from standins import builders
from standins.release.release_world import MODEL, PROMPT, READS, policy

TABLE, CLOSED = builders.table(policy(READS)), builders.table(policy(), 2)
STEPS, THREADS = 6, 3


class Race:
    """An engine with four blocks of the owner in its index, a reader about to attach them, and a revoker."""

    def __init__(self, narrow: Callable[[EnginePort], Any], *, valid_us: int | None = None) -> None:
        clock = self.clock = VirtualClock()
        self.pool = ExternalPool(16, shards=1, bytes_per_block=1, reserved=[0])
        expires_us = None if valid_us is None else clock.utc_us() + valid_us
        self.port = builders.port(TABLE, clock, engine=self, pool=self.pool, expires_utc_us=expires_us)
        self.index: dict[bytes, int] = {}
        self.narrow = narrow
        self.queued: Any = None
        self.residency: Any = None
        self.keys: Any = None
        self.blocks: list[int] = []
        self.attached_after = self.attached_before = 0
        self._publish_as_owner()
        self._use_first()
        self.threads: tuple[Sequence[Callable[[], object]], ...] = (
            (self.arrive, self.look_up, self.attach, self.hand_out, self.release, self.idle),
            (self.ask, self.idle, self.ask_again, self.idle, self.idle, self.idle),
            (self.port.step,) * STEPS,
        )

    # -- the engine's side of the port ----------------------------------------------------------------------

    def evict(self, blocks: Sequence[int]) -> None:
        self.index = {key: block for key, block in self.index.items() if block not in set(blocks)}

    def abort(self, request_ids: Sequence[object], cause: str) -> None:
        raise AssertionError("nothing is aborted here")

    def withhold(self, blocks: Sequence[int]) -> None:
        raise AssertionError("nothing fails to verify here")

    def wake(self) -> None:
        pass

    def find(self, key: bytes) -> int:
        return self.index.get(key, -1)

    def _publish_as_owner(self) -> None:
        owner = self.port.admit(identify(issuer="idp", tenant="holder"), MODEL, PROMPT, request_id="owner")
        keys = self.port.look_up(owner, self.find).keys  # type: ignore[arg-type]
        self.port.handed_out(owner, [1, 2, 3, 4, 5])  # type: ignore[arg-type]
        self.port.published(owner, [1, 2, 3, 4])  # type: ignore[arg-type]
        self.index = dict(zip(keys, [1, 2, 3, 4], strict=True))
        self.port.release(owner)  # type: ignore[arg-type]

    def _use_first(self) -> None:
        """The first use goes on record, so that the next one is served."""
        for name in ("first", "second"):
            self.residency = self.port.admit(identify(issuer="idp", tenant="reader"), MODEL, PROMPT, request_id=name)
            self.look_up()
            self.port.settle()
            self.port.release(self.residency)
        assert self.residency.granted_blocks == 4, "void: the grant must serve before the race"
        self.residency = self.keys = None

    # -- thread one: the reader's request -------------------------------------------------------------------

    def arrive(self) -> None:
        self.residency = self.port.admit(identify(issuer="idp", tenant="reader"), MODEL, PROMPT, request_id="race")
        assert self.port.may_start(self.residency) is None

    def look_up(self) -> None:
        self.keys = self.port.look_up(self.residency, self.find)

    def attach(self) -> None:
        """As adapters do: what the look-up found, as far as the port lets it be attached at this moment."""
        found = [self.find(key) for key in self.keys.keys[: self.keys.readable]]
        found = list(itertools.takewhile(lambda block: block >= 0, found))
        self.blocks = found[: self.port.attachable(self.residency, found)]
        self.port.attached(self.residency, self.blocks)
        if self.blocks and self.committed:
            self.attached_after += 1
        self.attached_before += bool(self.blocks) and not self.committed

    def hand_out(self) -> None:
        self.port.handed_out(self.residency, list(range(6, 11 - len(self.blocks))))

    def release(self) -> None:
        self.port.release(self.residency)

    # -- thread two: whoever revokes ------------------------------------------------------------------------

    def ask(self) -> None:
        self.queued = self.port.call(self.narrow)

    def ask_again(self) -> None:
        self.port.call(self.narrow).add_done_callback(lambda future: future.exception())

    def idle(self) -> None:
        pass

    @property
    def committed(self) -> bool:
        """Whether the revocation has been acknowledged."""
        return self.queued is not None and self.queued.done()

    def close(self) -> None:
        self.port.close()

    def fingerprint(self) -> tuple[object, ...]:
        """Everything that what happens next depends on."""
        mine = self.residency
        chain = getattr(mine, "keys", None)
        expected = getattr(mine, "expected", None)
        return (
            self.port._epoch,
            self.port.table.revision,
            self.port.revoked,
            len(self.port._commands),
            self.committed,
            getattr(chain, "epoch", None),
            expected.tolist() if hasattr(expected, "tolist") else expected,
            None if self.keys is None else (self.keys.readable, [self.find(key) for key in self.keys.keys]),
            tuple(self.blocks),
            self.attached_after,
            self.attached_before,
        )


class Outcome(NamedTuple):
    interleavings: int
    states: int
    attached_after: int
    attached_before: int


def explore(narrow: Callable[[EnginePort], Any], steps: int) -> Outcome:
    """Every interleaving of `steps` steps of each thread, one world a state."""

    def run(path: Sequence[int]) -> Race:
        race = Race(narrow)
        at = [0] * THREADS
        for thread in path:
            race.threads[thread][at[thread]]()
            at[thread] += 1
        return race

    Place = tuple[tuple[int, ...], str]
    paths: dict[Place, int] = {((0,) * THREADS, ""): 1}
    example: dict[Place, tuple[int, ...]] = {((0,) * THREADS, ""): ()}
    states = after = before = interleavings = 0
    for _ in range(THREADS * steps):
        reached: dict[Place, int] = {}
        example_of: dict[Place, tuple[int, ...]] = {}
        for place, count in paths.items():
            for thread in range(THREADS):
                if place[0][thread] == steps:
                    continue
                path = (*example[place], thread)
                race = run(path)
                at = tuple(done + (number == thread) for number, done in enumerate(place[0]))
                key = at, repr(race.fingerprint())
                reached[key] = reached.get(key, 0) + count
                example_of.setdefault(key, path)
                states += 1
                if sum(at) == THREADS * steps:
                    interleavings += count
                    after += count * bool(race.attached_after)
                    before += count * bool(race.attached_before)
                race.close()
        paths, example = reached, example_of
    return Outcome(interleavings, states, after, before)


def revoke(port: EnginePort) -> None:
    port.revoke(["reads"], actor="brock")


def activate(port: EnginePort) -> None:
    if port.table.revision < CLOSED.revision:
        port.activate(CLOSED, actor="grace")


NARROWING = {"revoked": revoke, "a revision without the grant": activate}


@pytest.mark.parametrize("how", NARROWING)
def test_nothing_attaches_after_the_revocation(how: str) -> None:
    """B3, small: the first three steps of each thread, 1,680 interleavings."""
    found = explore(NARROWING[how], 3)
    assert found.interleavings == 1_680 and found.attached_before > 0, "void: the race must be won sometimes"
    assert found.attached_after == 0


@pytest.mark.soak
@pytest.mark.parametrize("how", NARROWING)
def test_nothing_attaches_after_the_revocation_in_any_interleaving(how: str) -> None:
    """B3, full: three threads of six steps."""
    found = explore(NARROWING[how], STEPS)
    assert found.interleavings == 17_153_136 and found.attached_before > 0
    assert found.attached_after == 0


@pytest.mark.parametrize("how", NARROWING)
def test_check_then_use_attaches_after_the_revocation(how: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """B3's control: a decision that stays good until it is used."""
    monkeypatch.setattr(EnginePort, "_forget_lookups", lambda self: None)
    assert explore(NARROWING[how], 3).attached_after >= 1, "void: check-then-use must lose the race"


def test_the_merging_of_equal_states_changes_no_outcome() -> None:
    """Random interleavings, run as they are: each ends as the merged exploration says that it may."""
    for path in _random_paths(40):
        race = Race(revoke)
        at = [0] * THREADS
        for thread in path:
            race.threads[thread][at[thread]]()
            at[thread] += 1
        assert race.attached_after == 0, path
        race.close()


def _random_paths(count: int) -> Iterator[list[int]]:
    random = Random(3)
    for _ in range(count):
        path = [thread for thread in range(THREADS) for _ in range(STEPS)]
        random.shuffle(path)
        yield path


@pytest.mark.parametrize(("wait_us", "attached"), [(59_999_999, 4), (60_000_000, 0)])
def test_a_lease_that_runs_out_between_decision_and_attach(wait_us: int, attached: int) -> None:
    """Looked up within the lease, attached after it: a miss, and the control a microsecond before."""
    race = Race(revoke)
    race.port.renew_lease(race.clock.now_us() + 60_000_000)
    race.arrive()
    race.look_up()
    race.clock.advance(wait_us)
    race.attach()
    assert len(race.blocks) == attached
    race.close()


@pytest.mark.parametrize(("wait_us", "readable"), [(59_999_999, 4), (60_000_000, 0)])
def test_an_expired_revision_lets_nothing_be_found_or_attached(wait_us: int, readable: int) -> None:
    """The own scope too, between decision and attach as well; the control a microsecond before."""
    race = Race(revoke, valid_us=60_000_000)
    owner = identify(issuer="idp", tenant="holder")
    early, late = (race.port.admit(owner, MODEL, PROMPT, request_id=name) for name in ("early", "late"))
    assert race.port.look_up(early, race.find).readable == 4  # type: ignore[arg-type]
    race.clock.advance(wait_us)
    assert race.port.attachable(early, [1, 2, 3, 4]) == readable  # type: ignore[arg-type]
    assert race.port.look_up(late, race.find).readable == readable  # type: ignore[arg-type]
    race.close()


def test_without_the_lease_the_own_scope_is_attached_all_the_same() -> None:
    race = Race(revoke)
    race.port.renew_lease(0)
    mine = race.port.admit(identify(issuer="idp", tenant="holder"), MODEL, PROMPT, request_id="own")
    assert race.port.look_up(mine, race.find).readable == 4  # type: ignore[arg-type]
    assert race.port.attachable(mine, [1, 2, 3, 4]) == 4  # type: ignore[arg-type]
    race.close()


def test_nothing_attaches_after_the_grant_has_expired_since_the_look_up() -> None:
    """A request that looked up in time and waits reads nothing of another's once the grant is over."""
    until_us = 1_798_761_600_000_000  # 2027-01-01
    for late, attached in ((0, True), (1, False)):
        race = Race(revoke)
        race.clock.advance(until_us - 1 - race.clock.utc_us())
        race._publish_as_owner()
        race._use_first()
        race.arrive()
        race.look_up()
        assert race.residency.granted_blocks == 4
        race.clock.advance(late)
        race.attach()
        assert bool(race.blocks) is attached
        race.port.release(race.residency)
        if late:
            race.arrive()
            race.look_up()
            assert race.residency.granted_blocks == 0
            again = race.port.resume(race.residency, PROMPT) if race.port.release(race.residency) else None
            race.port.look_up(again, race.find)  # type: ignore[arg-type]
            assert again.granted_blocks == 0  # type: ignore[union-attr]
        race.close()
