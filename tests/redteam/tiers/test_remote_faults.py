"""A store beyond the machine that dies, stands still, is full, lies or goes back in time: misses, and no wrong byte."""

from __future__ import annotations

import re
import signal
import time
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest

from kvcustody.errors import StoreError
from kvcustody.governance.erasure.selector import Selector
from kvcustody.governance.tiers.stores.guarded_store import GuardedStore
from kvcustody.governance.tiers.stores.remote_store import ENVELOPE_BYTES
from kvcustody.governance.tiers.stores.store_protocol import Locked
from kvcustody.governance.tiers.tier import SealedTier
from standins.governance.store_servers import (
    LOCKED,
    MOST,
    S3,
    VERSIONED,
    S3Server,
    StoreServer,
    ValkeyServer,
    absent,
)
from standins.governance.tier_place import ABSOLUTE_US, STEP, Place, keys_of
from standins.redteam.hostile_store import ATTACKS, HostileStore, unchecked
from standins.waiting import until

Server = Callable[[str], StoreServer]
SECONDS = 0.25


@pytest.fixture(params=MOST)
def hostile(request: pytest.FixtureRequest, tmp_path: Path, server: Server) -> Iterator[HostileStore]:
    made = HostileStore(tmp_path, "remote", server(request.param))
    yield made
    made.close()


def test_nothing_that_a_store_returns_in_an_objects_place_is_attached(
    hostile: HostileStore, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Swapped, cut, replayed, moved between tenants. Controls: the object itself; all, where nothing is opened."""
    has = hostile.stock()
    assert hostile.load() == STEP, "void: the object itself does not come"
    assert hostile.attack(2 * len(ATTACKS), ATTACKS, 7) == dict.fromkeys(ATTACKS, 0)
    assert has.name != has.mine[:32]
    with monkeypatch.context() as believed:
        unchecked(believed)
        assert sum(hostile.attack(len(ATTACKS), ATTACKS, 7).values()) >= 8, "void: nothing could be attached"


def test_what_a_store_says_of_owners_and_ends_opens_nothing(hostile: HostileStore) -> None:
    """An envelope that names another owner, or none: its bytes are what they were, and no copy is anybody else's."""
    has, server = hostile.stock(), hostile.server
    assert server is not None
    prefix = hostile.place.prefix
    for envelope in (bytes(ENVELOPE_BYTES), b"\xff" * ENVELOPE_BYTES):
        server.raw(prefix, has.name, envelope + has.mine)
        assert hostile.load() == STEP, "it is the object that was stored"
    server.raw(prefix, has.name, has.mine[: ENVELOPE_BYTES - 1])
    assert hostile.load() == 0


@pytest.fixture
def valkey(tmp_path: Path) -> Iterator[ValkeyServer]:
    """One of the test's own, to be killed."""
    if why := absent("valkey"):
        pytest.skip(why)
    made = ValkeyServer(tmp_path / "server", memory="3mb")
    yield made
    made.close()


class Guarded(Place):
    """As a worker has it: behind a deadline and a breaker."""

    def open(self) -> None:
        super().open()
        self.guarded = GuardedStore(self.store, seconds=SECONDS, clock=self.world.clock, pause_seconds=0.001)
        self.tier = SealedTier(
            self.guarded,
            self.world.keys,
            self.world.shred,
            self.staging,
            self.world.clock,
            self.tier._index.terms,
        )

    def answers(self) -> bool:
        """Whether the store is asked again, and answers."""
        self.world.clock.advance(100_000)
        try:
            self.guarded.page(b"", 1)
        except StoreError:
            return False
        return True


@pytest.fixture
def place(tmp_path: Path, valkey: ValkeyServer) -> Iterator[Guarded]:
    made = Guarded(tmp_path, "remote", 8 << 20, server=valkey)
    yield made
    made.tier.close()
    made.staging.close()
    made.world.close()


def test_a_store_that_is_killed_and_comes_back_empty(place: Guarded, valkey: ValkeyServer) -> None:
    """Misses meanwhile; then its lost copies end with their keys, each with evidence, and it is used as ever."""
    acme = place.label("acme")
    assert place.keep(acme, "p", 8) == 8 == place.bring(acme, "p", 8)
    valkey.kill()
    for _ in range(5):
        assert place.bring(acme, "p", 8) == 0 and place.keep(acme, "q", 4) == 0
    assert len(place.tier) == 2, "what it had is not given up for that"
    valkey.start()
    until(place.answers)
    assert place.bring(acme, "p", 8) == 0 and place.keep(acme, "r", 4) == 4 == place.bring(acme, "r", 4)
    assert place.orphans(repair=True) == ["index without tier object"], "a load had found the other"
    place.world.clock.advance(2 * ABSOLUTE_US)
    place.tier.expire()
    ended = {one.number for one in place.events() if one.step == "ended"}
    assert ended == {one.number for one in place.seen if one.step == "destroyed"} and len(ended) == 3
    assert place.orphans() == []


def test_a_worker_starts_while_the_store_is_away(place: Guarded, valkey: ValkeyServer) -> None:
    """Without what it had there; from when the store answers it is used, and what is in no index ends."""
    acme = place.label("acme")
    assert place.keep(acme, "p", 4) == 4
    [name] = place.tier.objects()
    before = valkey.raw(place.prefix, name)
    place.tier.close()
    valkey.kill()
    place.open()
    assert (place.tier.found_at_start, place.bring(acme, "p", 4), place.keep(acme, "q", 4)) == (0, 0, 0)
    valkey.start()
    valkey.raw(place.prefix, name, before)
    until(place.answers)
    assert place.bring(acme, "p", 4) == 0, "its own, which is in no index, is not found"
    assert place.keep(acme, "q", 4) == 4 == place.bring(acme, "q", 4)
    assert place.orphans(repair=True) == ["tier object without index"]
    assert place.keep(acme, "p", 4) == 4 == place.bring(acme, "p", 4)


def test_a_store_that_stands_still_costs_a_deadline_and_no_more(place: Guarded, valkey: ValkeyServer) -> None:
    acme, other = place.label("acme"), place.label("beta")
    assert place.keep(acme, "p", 8) == 8 and place.keep(other, "p", 4) == 4
    valkey.signal(signal.SIGSTOP)
    began = time.monotonic()
    for _ in range(20):
        assert place.bring(acme, "p", 8) == 0 and place.keep(acme, "q", 4) == 0
    assert time.monotonic() - began < 20 * SECONDS, "void: no time would tell one deadline from twenty"
    done = place.tier.erase("e", Selector("acme"), 0)
    assert not done.done and place.tier.lookup(acme, keys_of("p", 8), 0) == [], "an erasure does not wait for it"
    valkey.signal(signal.SIGCONT)
    until(place.answers)
    until(lambda: place.tier.expire() == 0 and place.tier.erase("e", Selector("acme"), 0).done)
    assert place.bring(other, "p", 4) == 4 and place.bring(acme, "p", 8) == 0


@pytest.mark.soak
def test_a_store_that_is_cut_off_for_a_minute(place: Guarded, valkey: ValkeyServer) -> None:
    """Work goes on without it: misses, nothing lost, nothing wrong, and what arrived late is found and ended."""
    acme, beta, hour_us = place.label("acme"), place.label("beta"), 3_600_000_000
    place.allowed = {"internal": hour_us}  # Valkey's own expiry goes by the time that really passes
    assert [place.keep(one, "p", 8, lives_us=hour_us) for one in (acme, beta)] == [8, 8]
    valkey.signal(signal.SIGSTOP)
    until_s, rounds = time.monotonic() + 60, 0
    while time.monotonic() < until_s:
        assert place.bring(acme, "p", 8) == 0 and place.keep(acme, f"cut {rounds}", 4, lives_us=hour_us) == 0
        place.world.clock.advance(10_000)  # the breaker asks now and then, and nothing is due
        rounds += 1
        if rounds == 3:
            assert not place.tier.erase("e", Selector("beta"), 0).done
        time.sleep(0.2)
    valkey.signal(signal.SIGCONT)
    until(place.answers)
    until(lambda: place.tier.expire() == 0 and place.tier.erase("e", Selector("beta"), 0).done)
    assert place.bring(acme, "p", 8) == 8, "its copies outlived the cut"
    assert place.bring(beta, "p", 8) == 0, "and an erasure that came meanwhile is complete"
    until(lambda: place.answers() and place.orphans(repair=True) == [])
    assert place.counted() == (2, 2) and place.keep(acme, "after", 4) == 4 == place.bring(acme, "after", 4)
    print(f"{rounds} rounds while the store was cut off")


def test_a_delete_that_answers_late_is_evidence_once_the_store_lists_nothing(
    place: Guarded, valkey: ValkeyServer
) -> None:
    """Nobody waited for it; asked again, the store has none of it. Control: what somebody else removed is none."""
    acme, beta = place.label("acme"), place.label("beta")
    assert place.keep(acme, "p", 4) == 4 == place.keep(beta, "p", 4)
    valkey.signal(signal.SIGSTOP)
    place.tier.end_tenant("acme")
    valkey.signal(signal.SIGCONT)
    until(place.answers)
    until(lambda: place.tier.expire() == 0 and place.tier.counts.destroyed == 1)
    assert [(one.number, one.cause) for one in place.events() if one.step == "destroyed"] == [(1, "deleted")]
    [name] = place.tier.objects()
    assert place.store.delete([name]).objects == 1
    place.tier.end_tenant("beta")
    assert place.tier.counts.destroyed == 1 and place.tier.counts.waiting == 1


def test_a_store_that_is_full_keeps_what_it_has(place: Guarded) -> None:
    """It has less room than our quota says; where it has some again, it is used."""
    acme, kept = place.label("acme"), 0
    while place.keep(acme, f"p{kept}", 16) == 16 and kept < 2000:
        kept += 1
    assert 0 < kept < 2000, "void: it was never full"
    place.world.clock.advance(1_000_000)
    assert place.bring(acme, "p0", 16) == 16 and place.tier.counts.refused > 0
    erased = place.tier.erase("e", Selector("acme"), 0)
    assert erased.objects + erased.waiting >= 4 * kept
    until(lambda: place.answers() and place.tier.expire() == 0 and not place.tier.counts.waiting)
    assert place.keep(acme, "again", 4) == 4 == place.bring(acme, "again", 4)


def test_a_store_that_goes_back_in_time_gives_nothing_back(hostile: HostileStore) -> None:
    """What ended is there again, whole: no look-up finds it, a scan does. Control: it was found before it ended."""
    place, server = hostile.place, hostile.server
    assert server is not None
    ada, acme = place.label("acme", "ada"), place.label("acme")
    for label in (ada, acme):
        assert place.keep(label, "p", 4) == 4 == place.bring(label, "p", 4)
    before = {name: server.raw(place.prefix, name) for name in place.tier.objects()}
    assert place.tier.erase("e", Selector("acme", "ada"), 0).done and not place.tier.objects()
    place.tier.end_tenant("acme")
    for name, data in before.items():
        server.raw(place.prefix, name, data)
    place.world.clock.advance(2_000_000)
    assert place.bring(ada, "p", 4) == 0 == place.bring(acme, "p", 4)
    assert place.orphans(repair=True) == ["tier object without index"] * len(before)
    assert place.store.page(b"", 9) == []


# -- versions and locks ------------------------------------------------------------------------------------------------


@pytest.fixture
def s3(server: Server) -> S3Server:
    there = server(S3)
    assert isinstance(there, S3Server)
    return there


class InBucket(Place):
    """A place in one of the server's buckets."""

    def __init__(self, folder: Path, server: S3Server, bucket: str) -> None:
        self.bucket = bucket
        super().__init__(folder, "remote", server=server)

    def made(self):  # type: ignore[no-untyped-def]
        assert isinstance(self.server, S3Server)
        store = super().made()
        store._client.close()
        store._client = self.server.make_client(self.prefix, 5.0, self.bucket)
        return store


def versions(server: S3Server, bucket: str, prefix: str) -> tuple[list[str], int]:
    """Ids of the versions, and how many delete markers the store lists."""
    text = server.ask("GET", bucket, query={"versions": "", "prefix": f"{prefix}/objects/"}).body.decode()
    ids = re.findall(r"<Version>.*?<VersionId>(.*?)</VersionId>.*?</Version>", text, re.DOTALL)
    return ids, text.count("<DeleteMarker>")


@pytest.mark.system
def test_the_end_of_an_object_is_that_of_every_version_and_marker(tmp_path: Path, s3: S3Server) -> None:
    """Control: a plain delete leaves all versions, and the old bytes read."""
    place = InBucket(tmp_path, s3, VERSIONED)
    acme = place.label("acme")
    assert place.keep(acme, "p", 4) == 4
    [name] = place.tier.objects()
    key = f"{place.prefix}/objects/{name.hex()}"
    old = s3.ask("GET", VERSIONED, key).body
    s3.ask("PUT", VERSIONED, key, body=b"another")
    s3.ask("DELETE", VERSIONED, key)
    ids, markers = versions(s3, VERSIONED, place.prefix)
    assert (len(ids), markers) == (2, 1)
    reads = [s3.ask("GET", VERSIONED, key, query={"versionId": one}).body for one in ids]
    assert old in reads, "void: a plain delete was enough"
    assert [one.name for one in place.store.page(b"", 9)] == [name], "a marker hides it from nobody who lists versions"
    gone = place.store.delete([name])
    assert (gone.objects, gone.versions, gone.markers) == (1, 2, 1)
    assert versions(s3, VERSIONED, place.prefix) == ([], 0)
    place.tier.close()


@pytest.mark.system
def test_what_is_locked_ends_by_its_key_and_is_asked_for_when_the_lock_ends(tmp_path: Path, s3: S3Server) -> None:
    place = InBucket(tmp_path, s3, LOCKED)
    ada = place.label("acme", "ada")
    assert place.keep(ada, "p", 4) == 4
    [name] = place.tier.objects()
    [locked] = place.store.delete([name]).locked
    day_us = 86_400_000_000
    now_us = time.time_ns() // 1000
    assert (
        isinstance(locked, Locked) and now_us + day_us - 600_000_000 < locked.until_us < now_us + day_us + 600_000_000
    )
    assert place.tier.erase("e", Selector("acme", "ada"), 0).waiting == 1, "its bytes are there"
    evidence = [one.cause for one in place.events() if one.step == "destroyed"]
    assert evidence == ["key-destroyed"] and place.bring(ada, "p", 4) == 0
    told = [one for one in place.events() if one.step == "locked"]
    assert [(one.number, one.erasure) for one in told] == [(1, "e")]
    assert place.tier._index.clock.of_boot(told[0].due_us) == locked.until_us, "until when, on record"
    asked = place.store._client._versions  # type: ignore[attr-defined]
    calls: list[bytes] = []
    place.store._client._versions = lambda one: calls.append(one) or asked(one)  # type: ignore[attr-defined]
    for _ in range(3):
        place.tier.expire()
    assert calls == [], "nobody asks before its time"
    place.tier.close()
