"""One tier over a toy device: what comes back is what went in, of one's own, in time; what ends is found nowhere."""

from __future__ import annotations

import hashlib
import random
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest

from kvcustody.errors import DeviceError, StoreError
from kvcustody.governance.erasure.selector import Selector
from kvcustody.governance.orphans.scans import tier_findings
from kvcustody.governance.tiers.copies.index import PublishedRun, TierShare
from kvcustody.governance.tiers.seal.object_layout import object_bytes
from kvcustody.governance.tiers.stores.store_protocol import Deleted
from standins.governance.store_servers import KINDS, MOST, StoreServer
from standins.governance.tier_place import ABSOLUTE_US, BLOCK, STEP, Place, content, keys_of


@pytest.fixture(params=["host", "nvme", *MOST])
def place(request: pytest.FixtureRequest, tmp_path: Path, server: Callable[[str], StoreServer]) -> Iterator[Place]:
    place = Place(tmp_path, request.param, server=server(request.param) if request.param in KINDS else None)
    yield place
    live, there = place.counted()
    assert live == there == len(place.tier), "copies begun, less those ended, are those in the store"
    gone = {one.number for one in place.seen if one.step == "destroyed"}
    assert gone == {one.number for one in place.seen if one.step == "ended"}, "and what ended is destroyed"
    counts = place.tier.counts
    assert counts.stored == counts.ended + counts.living and counts.ended == counts.destroyed == len(gone)
    place.tier.close()
    place.staging.close()
    place.world.close()


@pytest.mark.parametrize("blocks", [1, 3, 4, 5, 11])
def test_what_went_in_comes_back(place: Place, blocks: int) -> None:
    acme = place.label("acme")
    assert place.bring(acme, "p", blocks) == 0
    assert place.keep(acme, "p", blocks) == blocks and place.keep(acme, "p", blocks) == 0
    assert place.bring(acme, "p", blocks) == blocks
    assert place.bring(acme, "p", blocks + 9) == blocks, "a longer prompt that goes on from there"
    assert len(place.tier) == -(-blocks // STEP)


def test_a_prompt_that_differs_later_has_what_it_shares(place: Place) -> None:
    acme = place.label("acme")
    assert place.keep(acme, "p/8", 12) == 12
    assert place.bring(acme, "p/8", 12) == 12 and place.bring(acme, "p/8/other", 12) == 8
    assert place.bring(acme, "p/8", 12, depth=6) == 6, "from within an object"
    assert place.keep(acme, "p/8/other", 12, depth=8) == 4
    assert place.bring(acme, "p/8/other", 12) == 12


def test_nobody_else_finds_it(place: Place) -> None:
    """The same prompt, another tenant or subject: nothing, and not an object is read."""
    acme, ada = place.label("acme"), place.label("acme", "ada")
    assert place.keep(acme, "p", 8) == 8 and place.keep(ada, "q", 8) == 8
    for other, prompt in (
        (place.label("beta"), "p"),
        (ada, "p"),
        (place.label("acme", "bob"), "q"),
        (acme, "q"),
    ):
        assert place.tier.lookup(other, keys_of(prompt, 8), 0) == []
    assert place.bring(acme, "p", 8) == 8 == place.bring(ada, "q", 8)


def test_it_ends_with_its_ceiling_and_a_round_trip_gives_no_more(place: Place) -> None:
    acme = place.label("acme")
    place.keep(acme, "p", 4, lives_us=2_000_000)
    place.keep(acme, "q", 4, lives_us=60_000_000)  # the tier's own is sooner
    place.world.clock.advance(1_999_999)
    assert place.bring(acme, "p", 4) == 4
    place.world.clock.advance(1)
    assert place.bring(acme, "p", 4) == 0 and place.bring(acme, "q", 4) == 4
    assert place.tier.expire() == 1 and len(place.tier) == 1
    place.world.clock.advance(ABSOLUTE_US - 2_000_000)
    assert place.bring(acme, "q", 4) == 0
    assert place.tier.expire() == 1
    assert place.ends() == ["ceiling", "ceiling"]
    place.world.clock.advance(ABSOLUTE_US)
    place.tier.expire()
    living = place.world.shred.living()
    assert [key for key in living if key.kind == "bucket"] == [], "and the keys of its buckets"


def test_what_policy_does_not_let_here_does_not_come(place: Place) -> None:
    acme = place.label("acme")
    place.allowed = {}
    assert place.keep(acme, "p", 4) == 0 and len(place.tier.objects()) == 0


def test_a_subject_s_erasure_ends_its_copies_and_its_key_alone(place: Place) -> None:
    ada, bob, acme = place.label("acme", "ada"), place.label("acme", "bob"), place.label("acme")
    for label in (ada, bob, acme):
        assert place.keep(label, "p", 8) == 8
    subjects = {key.id for key in place.world.shred.living() if key.kind == "subject"}
    assert len(subjects) == 3, "ada's, bob's, and one of all of acme's together"
    done = place.tier.erase("e1", Selector("acme", "ada"), 0)
    assert done.objects == 4 and done.done and done.bytes > 4 * STEP * BLOCK
    assert place.bring(ada, "p", 8) == 0 and place.bring(bob, "p", 8) == 8
    assert place.bring(acme, "p", 8) == 0, "of a wider domain nobody here knows who wrote it"
    evidence = [(one.cause, one.number) for one in place.events() if one.step == "destroyed"]
    assert sum(cause == "key-destroyed" for cause, _ in evidence) == 4 and len(evidence) == 8
    assert len({key.id for key in place.world.shred.living() if key.kind == "subject"} & subjects) == 1
    assert place.tier.erase("e1", Selector("acme", "ada"), 0) == done, "asked again it says the same"
    assert place.keep(acme, "p", 8) == 8
    assert place.keep(ada, "p", 8) == 8 == place.bring(ada, "p", 8), "who comes again begins anew"
    assert place.tier.erase("e2", Selector("acme"), 0).objects == 6 and len(place.tier) == 0


def test_an_erasure_does_not_wait_for_a_store_that_is_away(place: Place, monkeypatch: pytest.MonkeyPatch) -> None:
    """Index and key at once, the bytes when the store is there again."""
    ada = place.label("acme", "ada")
    place.keep(ada, "p", 8)

    def away(names: object) -> None:
        raise StoreError("away")

    monkeypatch.setattr(place.store, "delete", away)
    done = place.tier.erase("e1", Selector("acme", "ada"), 0)
    assert not done.done and done.waiting == 2 and len(place.store.page(b"", 9)) == 2
    assert place.bring(ada, "p", 8) == 0
    assert not [key for key in place.world.shred.living() if key.kind == "subject"]
    monkeypatch.undo()
    assert place.tier.erase("e1", Selector("acme", "ada"), 0).done and len(place.tier.objects()) == 0


def test_an_erasure_counts_what_it_covers_once_and_nothing_of_others(
    place: Place, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A certificate compares the count with the copies that leaves end: one that is too high is never complete."""
    ada, beta = place.label("acme", "ada"), place.label("beta")
    place.keep(ada, "p", 8)
    place.keep(ada, "q", 4)
    place.keep(beta, "p", 4)
    own = place.tier.lookup(ada, keys_of("q", 4), 0)[0].name

    def away(names: object) -> None:
        raise StoreError("away")

    monkeypatch.setattr(place.store, "delete", away)
    place.tier.end_tenant("beta")
    place.tier.forget([own])  # the erased tenant's, and ended before
    for _ in range(2):
        done = place.tier.erase("e1", Selector("acme", "ada"), 0)
        assert (done.objects, done.waiting, done.unsure, done.done) == (0, 2, 1, False)
    monkeypatch.undo()
    done = place.tier.erase("e1", Selector("acme", "ada"), 0)
    assert (done.objects, done.waiting, done.unsure, done.done) == (2, 0, 0, True)


def test_a_run_is_here_when_each_of_its_objects_is(place: Place) -> None:
    """Objects end at 4, 8 and 10: another's, one that is gone, and one that ends elsewhere are no run that is here."""
    acme, keys = place.label("acme"), keys_of("p", 10)
    assert not place.tier.has_run(acme, keys, 0)
    assert place.keep(acme, "p", 10) == 10 and place.tier.has_run(acme, keys, 0)
    assert place.tier.has_run(acme, keys[32 * 2 :], 2) and place.tier.has_run(acme, keys[32 * 9 :], 9)
    assert not place.tier.has_run(acme, keys[: 32 * 9], 0), "none ends at 9"
    assert not place.tier.has_run(place.label("beta"), keys, 0)
    (middle,) = [one.name for one in place.tier.lookup(acme, keys, 4)[:1]]
    place.tier.destroy([middle])
    assert place.tier.has_run(acme, keys[: 32 * 4], 0) and not place.tier.has_run(acme, keys, 0)


def test_an_object_with_more_than_is_wanted_is_of_use(place: Place) -> None:
    """A prompt's last block is computed always: the object that ends with it brings those before it."""
    acme, keys, wrote = place.label("acme"), keys_of("p", 8), list[int]()
    assert place.keep(acme, "p", 8) == 8
    objects = place.tier.lookup(acme, keys, 0, 7)
    assert [(one.blocks, one.spare) for one in objects] == [(4, 0), (3, 1)]
    assert place.tier.lookup(acme, keys[: 32 * 7], 0) == objects[:1], "control: what ends behind is not known"

    def write(first: int, count: int, skip: int, data: memoryview) -> None:
        expected = b"".join(content(keys, first + at) for at in range(count))
        assert data[BLOCK * skip : BLOCK * (skip + count)] == expected
        wrote.extend(range(first, first + count))

    came = place.tier.load(acme, keys, 0, objects, write)
    assert wrote == list(range(7)) and sum(one.blocks for one in came) == 7
    assert place.tier.lookup(acme, keys, 6, 7)[0][1:] == (1, objects[1].size, 1)


def test_after_an_epoch_nothing_is_found_and_nothing_fails(place: Place) -> None:
    acme, beta = place.label("acme"), place.label("beta")
    assert place.keep(acme, "p", 8) == 8 == place.keep(beta, "p", 8)
    found = place.tier.lookup(acme, keys_of("p", 8), 0)
    assert len(found) == 2 and acme.spec is not None
    place.world.keyring.destroy(acme.spec.owner, 1)
    assert place.bring(acme, "p", 8) == 0 and place.keep(acme, "q", 4) == 0
    assert place.tier.load(acme, keys_of("p", 8), 0, found, lambda *_: None) == [], "nor what was found before"
    assert place.bring(beta, "p", 8) == 8


def test_a_device_that_fails_leaves_no_plaintext_and_no_object(place: Place) -> None:
    acme = place.label("acme")
    until_us = place.world.clock.now_us() + ABSOLUTE_US
    run = PublishedRun(acme, keys_of("p", 4), bytes(32), 0, 0, until_us, until_us)

    def fails(first: int, count: int, into: memoryview) -> None:
        into[:8] = b"canary!!"
        raise DeviceError("the device is gone")

    with pytest.raises(DeviceError, match="gone"):
        place.tier.store(run, fails)
    assert len(place.tier) == 0 and place.store.used_bytes == 0 and len(place.tier.objects()) == 0
    with place.staging.take(8) as plain:
        assert plain is not None and not any(plain)
    assert place.keep(acme, "p", 4) == 4 == place.bring(acme, "p", 4)


def test_entries_say_since_when_in_the_process_s_own_time(place: Place) -> None:
    """As scans compare them with other books, whatever the wall clock says."""
    acme, now_us = place.label("acme"), place.world.clock.now_us()
    place.keep(acme, "p", 4)
    place.world.clock.advance(5_000_000)
    entries = [*place.tier.index().values(), *place.tier.objects().values()]
    assert [(one.tenant, one.since_us) for one in entries] == [("acme", now_us)] * 2


Lie = Callable[[memoryview, bytes], bytes]


@pytest.mark.parametrize(
    "lie",
    [
        lambda data, other: bytes(data[:-1]) + bytes([data[-1] ^ 1]),
        lambda data, other: bytes(data[: len(data) // 2]),
        lambda data, other: bytes(data) + b"\0",
        lambda data, other: other,
        lambda data, other: random.Random(1).randbytes(len(data)),
        lambda data, other: b"",
    ],
    ids=["a bit", "cut", "longer", "another's", "random", "empty"],
)
def test_a_store_that_lies_gives_misses(place: Place, lie: Lie, monkeypatch: pytest.MonkeyPatch) -> None:
    acme, beta = place.label("acme"), place.label("beta")
    place.keep(acme, "p", 4)
    place.keep(beta, "p", 4)
    assert place.bring(acme, "p", 4) == 4, "control"
    load, held = place.store.prepare_load, list[bytes]()

    def prepare(name: bytes) -> memoryview | None:
        data = load(name)
        other = next(one.name for one in place.store.page(b"", 9) if one.name != name)
        foreign = load(other)
        assert data is not None and foreign is not None
        held.append(lie(data, bytes(foreign)))
        foreign.release()
        place.store.complete_load(other)
        return memoryview(held[-1])

    monkeypatch.setattr(place.store, "prepare_load", prepare)
    assert place.bring(acme, "p", 4) == 0 and held
    monkeypatch.undo()
    assert place.bring(acme, "p", 4) == 0, "and it is ended"
    assert place.ends() == ["broken"]
    assert place.bring(beta, "p", 4) == 4


def test_a_store_that_fails_gives_misses_and_loses_nothing(place: Place, monkeypatch: pytest.MonkeyPatch) -> None:
    acme = place.label("acme")
    place.keep(acme, "p", 4)

    def fails(*_: object) -> None:
        raise StoreError("out of order")

    for step in ("prepare_store", "complete_store"):
        monkeypatch.setattr(place.store, step, fails)
        assert place.keep(acme, "q", 4) == 0
        monkeypatch.undo()
    monkeypatch.setattr(place.store, "prepare_load", fails)
    assert place.bring(acme, "p", 4) == 0
    monkeypatch.undo()
    assert place.bring(acme, "p", 4) == 4 and place.keep(acme, "q", 4) == 4


def test_a_full_tier_gives_up_what_was_used_least(tmp_path: Path) -> None:
    place = Place(tmp_path, "host", capacity=8 * 4096)
    acme = place.label("acme")
    for number in range(8):
        assert place.keep(acme, f"p{number}", 4) == 4
    assert place.bring(acme, "p0", 4) == 4
    assert place.keep(acme, "new", 4) == 4
    assert place.bring(acme, "p0", 4) == 4 and place.bring(acme, "p1", 4) == 0
    assert place.ends() == ["evicted"]
    place.tier.close()


def test_after_a_restart_files_are_found_again(tmp_path: Path) -> None:
    """Killed: nothing was ended. What was stored comes back to its own alone, and no longer than it may."""
    place = Place(tmp_path, "nvme")
    acme, ada, beta = place.label("acme"), place.label("acme", "ada"), place.label("beta")
    for label, prompt in ((acme, "p"), (ada, "q"), (beta, "r")):
        assert place.keep(label, prompt, 6, held_us=4_000_000, lives_us=9_000_000) == 6
    born_us = place.world.clock.now_us()
    place.store.close()
    place.world.clock.advance(3_000_000)
    place.open()
    assert (place.tier.found_at_start, place.tier.ended_at_start) == (6, 0) and len(place.tier) == 6
    assert [one.step for one in place.events()] == ["stored"] * 6
    assert place.bring(beta, "p", 6) == 0 == place.bring(ada, "p", 6) == place.bring(acme, "q", 6)
    assert place.bring(acme, "p", 6) == 6 == place.bring(ada, "q", 6)
    assert {(one.born_us, one.ceiling_us) for one in place.restored} == {(born_us, born_us + 9_000_000)}
    assert place.tier.erase("e", Selector("acme", "ada"), 0).objects == 4, "ada's, and what is acme's together"
    assert place.bring(beta, "r", 6) == 6
    place.world.clock.advance(1_000_000)
    assert place.bring(beta, "r", 6) == 0 and place.tier.expire() == 2
    place.tier.close()
    place.open()
    assert (place.tier.found_at_start, place.tier.ended_at_start) == (0, 0)
    place.tier.close()


def test_files_that_somebody_kept_do_not_come_back_after_an_erasure(tmp_path: Path) -> None:
    """Of the subject's own domain and of its tenant's: put back before a restart, they have no key any more."""
    place = Place(tmp_path, "nvme")
    acme, ada, bob = place.label("acme"), place.label("acme", "ada"), place.label("acme", "bob")
    for label in (acme, ada, bob):
        assert place.keep(label, "p", 4) == 4
    kept = {one: one.read_bytes() for one in (tmp_path / "tier").rglob("*") if len(one.name) == 64}
    place.tier.erase("e", Selector("acme", "ada"), 0)
    place.store.close()
    for file, data in kept.items():
        file.write_bytes(data)
    place.open()
    assert (place.tier.found_at_start, place.tier.ended_at_start) == (1, 2)
    assert place.bring(bob, "p", 4) == 4 and place.bring(ada, "p", 4) == 0 == place.bring(acme, "p", 4)
    place.tier.close()


def test_an_erasure_reaches_what_nobody_has_asked_for_since_the_restart(tmp_path: Path) -> None:
    place = Place(tmp_path, "nvme")
    acme, ada, bob = place.label("acme"), place.label("acme", "ada"), place.label("acme", "bob")
    beta = place.label("beta")
    for label in (acme, ada, bob, beta):
        assert place.keep(label, "p", 4) == 4
    place.store.close()
    place.open()
    assert place.tier.erase("e", Selector("acme", "ada"), 0).objects == 2
    assert place.bring(bob, "p", 4) == 4 and place.bring(ada, "p", 4) == 0 == place.bring(acme, "p", 4)
    assert place.tier.erase("f", Selector("acme"), 0).objects == 1
    assert place.bring(beta, "p", 4) == 4
    place.tier.close()


@pytest.mark.parametrize(
    ("what", "stays"),
    [("nothing", True), ("layout", False), ("policy", False), ("subject", False), ("cut", False)],
)
def test_a_restart_ends_what_may_not_be_found_again(tmp_path: Path, what: str, stays: bool) -> None:
    place = Place(tmp_path, "nvme")
    ada = place.label("acme", "ada")
    assert place.keep(ada, "p", 4) == 4
    place.store.close()
    if what == "subject":
        (key,) = (one for one in place.world.shred.living() if one.kind == "subject")
        place.world.shred.destroy(key.id)
    elif what == "policy":
        place.allowed = {}
    elif what == "cut":
        (file,) = (one for one in (tmp_path / "tier").rglob("*") if one.is_file() and len(one.name) == 64)
        file.write_bytes(file.read_bytes()[:-1])
    elif what == "layout":
        place.layout = hashlib.sha256(b"another").digest()
    place.open()
    assert (place.tier.found_at_start, place.tier.ended_at_start) == ((1, 0) if stays else (0, 1))
    assert len(place.tier.objects()) == stays
    place.tier.close()


def test_a_copy_is_due_when_what_held_it_lets_go_and_carries_its_ceiling(place: Place) -> None:
    acme, now_us = place.label("acme"), place.world.clock.now_us()
    assert place.keep(acme, "p", 4, held_us=1_000_000, lives_us=5_000_000) == 4
    place.world.clock.step_utc(-3_600_000_000)
    place.world.clock.advance(999_999)
    assert place.bring(acme, "p", 4) == 4
    (one,) = place.restored
    assert (one.born_us, one.ceiling_us) == (now_us, now_us + 5_000_000)
    place.world.clock.advance(1)
    assert place.bring(acme, "p", 4) == 0 and place.tier.expire() == 1


def test_a_new_policy_ends_what_may_not_stay(place: Place) -> None:
    acme = place.label("acme")
    assert place.keep(acme, "p", 4) == 4
    place.allowed = {"internal": 1_000_000}
    assert place.tier.narrow() == 0 and place.bring(acme, "p", 4) == 4
    place.world.clock.advance(1_000_000)
    assert place.bring(acme, "p", 4) == 0
    assert place.tier.expire() == 1 and place.keep(acme, "p", 4) == 4
    place.allowed = {}
    assert place.tier.narrow() == 1 and place.ends() == ["ceiling", "policy"]
    assert len(place.tier.objects()) == 0


def test_a_destroyed_epoch_ends_its_copies_with_their_key(place: Place) -> None:
    acme, beta = place.label("acme"), place.label("beta")
    assert place.keep(acme, "p", 4) == 4 == place.keep(beta, "p", 4)
    assert acme.spec is not None
    assert place.tier.narrow() == 0
    place.world.keyring.destroy(acme.spec.owner, 1)
    assert place.tier.narrow() == 1 and place.bring(beta, "p", 4) == 4
    events = [(one.step, one.cause) for one in place.events() if one.tenant == "acme"]
    by_store = place.store.ends_by
    assert events[1:] == [("ended", "key-destroyed"), ("destroyed", "key-destroyed"), ("destroyed", by_store)]


def test_a_tenant_takes_no_room_that_is_another_s(tmp_path: Path) -> None:
    """Each has half of eight objects for its own; whoever has more gives way, and a cap is never passed."""
    place = Place(tmp_path, "host", capacity=8 * 4096)
    acme, beta = place.label("acme"), place.label("beta")
    place.shares = {"acme": TierShare(0.5, 1.0), "beta": TierShare(0.5, 0.5)}
    for number in range(3):
        assert place.keep(acme, f"p{number}", 4) == 4
    for number in range(12):
        assert place.keep(beta, f"q{number}", 4) == 4
    assert all(place.bring(acme, f"p{number}", 4) == 4 for number in range(3))
    assert sum(place.bring(beta, f"q{number}", 4) == 4 for number in range(12)) == 4
    for number in range(3, 12):
        assert place.keep(acme, f"p{number}", 4) == 4
    assert sum(place.bring(beta, f"q{number}", 4) == 4 for number in range(12)) == 4, "acme gave way to itself"
    assert sum(place.bring(acme, f"p{number}", 4) == 4 for number in range(12)) == 4
    place.tier.close()


def test_who_has_room_for_one_object_has_each_of_a_run_in_turn(tmp_path: Path) -> None:
    """One is not refused because the one before it, which would make room, is still being written."""
    place = Place(tmp_path, "host")
    acme, capacity = place.label("acme"), place.store.capacity_bytes
    one = place.store.taken(object_bytes(STEP * BLOCK, enclosed=False, checked=False))
    place.shares = {"acme": TierShare(0.0, 1.5 * one / capacity)}
    assert place.keep(acme, "p", 3 * STEP) == 3 * STEP
    assert len(place.tier) == 1 and place.tier.counts.refused == 0
    assert place.bring(acme, "p", 3 * STEP, 2 * STEP) == STEP, "the last one is there"


@pytest.mark.parametrize("operations", [1500, pytest.param(100_000, marks=pytest.mark.soak)])
def test_no_order_of_operations_prolongs_a_life_or_crosses_a_tenant(tmp_path: Path, operations: int) -> None:
    """Stores, loads, ends and clock steps at random: a hit is of one's own, before its ceiling, and whole."""
    place, drawn = Place(tmp_path, "host", capacity=64 * 4096), random.Random(7)
    labels = [
        place.label("acme"),
        place.label("beta"),
        place.label("acme", "ada"),
        place.label("beta", "bob"),
    ]
    last: dict[tuple[int, str], int] = {}
    hits = 0
    for _ in range(operations):
        who, prompt, what = drawn.randrange(4), f"p{drawn.randrange(6)}", drawn.random()
        now_us = place.world.clock.utc_us()
        if what < 0.4:
            lives_us = drawn.choice((500_000, 2_000_000, 100_000_000))
            if place.keep(labels[who], prompt, 8, lives_us=lives_us):
                last[who, prompt] = max(last.get((who, prompt), 0), now_us + min(lives_us, ABSOLUTE_US))
        elif what < 0.8:
            if place.bring(labels[who], prompt, 8):
                hits += 1
                assert now_us < last.get((who, prompt), 0)
        elif what < 0.9:
            place.world.clock.advance(drawn.randrange(1_000_000))
            place.tier.expire()
        elif what < 0.92:
            label = labels[who]
            place.tier.erase(f"e{now_us}", Selector(label.tenant, label.subject), now_us)
            for other, one in enumerate(labels):
                if one.tenant == label.tenant and label.subject in (None, one.subject):
                    last = {key: until for key, until in last.items() if key[0] != other}
    assert hits > operations // 20, "void: almost nothing was found"
    live, there = place.counted()
    assert live == there == len(place.tier)
    place.tier.close()
    place.world.close()


def test_what_waits_for_a_store_that_is_away_is_no_orphan(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Controls: an object that nobody waits for, and one that the store said it deleted."""
    place = Place(tmp_path, "nvme")
    acme, beta = place.label("acme"), place.label("beta")
    assert place.keep(acme, "a", 4) == place.keep(beta, "b", 4) == 4
    ended = next(copy.name for copy in place.tier.copies() if copy.tenant == "acme")
    monkeypatch.setattr(place.store, "delete", _fails)
    assert not place.tier.erase("e1", Selector(tenant="acme"), place.world.clock.now_us()).done
    assert [one.name for one in place.store.page(b"", 10)].count(ended) == 1, "it is there still"
    assert place.orphans() == []
    monkeypatch.setattr(place.store, "delete", lambda names: Deleted(len(list(names)), 0))
    place.tier.expire()
    assert place.orphans() == ["tier object without index"], "said to be deleted, and there"
    monkeypatch.undo()
    assert place.orphans(repair=True) == ["tier object without index"]
    assert place.orphans() == [] and place.bring(beta, "b", 4) == 4


def test_what_a_store_took_and_did_not_say_so_is_no_orphan(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    place = Place(tmp_path, "nvme")
    completes = place.store.complete_store

    def late(name: bytes) -> None:
        completes(name)
        raise StoreError("did not answer in time")

    monkeypatch.setattr(place.store, "complete_store", late)
    monkeypatch.setattr(place.store, "delete", _fails)
    assert place.keep(place.label("acme"), "a", 4) == 0
    assert len(place.store.page(b"", 10)) == 1 and place.orphans() == []
    monkeypatch.undo()
    place.tier.expire()
    assert place.store.page(b"", 10) == [] and place.orphans() == []


def test_a_scan_goes_on_without_a_store_that_is_away(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    for name in ("a", "b"):
        (tmp_path / name).mkdir()
    place, other = Place(tmp_path / "a", "nvme"), Place(tmp_path / "b", "nvme")
    other.keep(other.label("acme"), "a", 4)
    other.store.delete([other.tier.copies()[0].name])
    monkeypatch.setattr(place.store, "page", _fails)
    now_us = place.world.clock.now_us()
    found = [one.finding.orphan for one in tier_findings([place.tier, other.tier], now_us)]
    assert found == ["index without tier object"]


def _fails(*_: object) -> None:
    raise StoreError("away")


def test_of_two_that_end_alike_the_longer_is_kept(place: Place) -> None:
    acme = place.label("acme")
    assert place.keep(acme, "p", 4, 3) == 1 and place.bring(acme, "p", 4, 3) == 1 and place.bring(acme, "p", 4) == 0
    assert place.keep(acme, "p", 4, 1) == 3 and place.bring(acme, "p", 4, 1) == 3
    assert place.keep(acme, "p", 4, 2) == 0, "it has that"
    assert place.keep(acme, "p", 4) == 4 and place.bring(acme, "p", 4) == 4
    assert place.ends() == ["evicted", "evicted"] and place.bring(acme, "p", 4, 3) == 1
