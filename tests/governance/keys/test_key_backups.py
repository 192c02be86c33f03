"""Backups of key files that somebody told of: nothing that they still have is called ended."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

import pytest

from kvcustody.audit.evidence.query.key_orders import CLOCKS_DIFFER_US
from kvcustody.audit.kinds import ErasureCompleted, Event
from kvcustody.clock import VirtualClock
from kvcustody.errors import KeyringError
from kvcustody.governance.erasure.selector import Selector
from kvcustody.governance.identity.domain_spec import tenant_owner
from kvcustody.governance.keys import key_backups
from kvcustody.governance.keys.key_backups import KeyBackups
from kvcustody.governance.keys.keyring import Keyring
from kvcustody.governance.keys.locked_buffer import KEY_BYTES, KeyBuffer
from kvcustody.governance.keys.root_key_wrapping import RootKeyWrapping
from kvcustody.governance.keys.wrapped_key_store import FileKeyStore
from standins.governance.offload_world import World, prompt

DAY_US = 86_400_000_000
NOW_US = 1_790_000_000_000_000


def test_those_from_before_a_moment_count_until_their_date(tmp_path: Path) -> None:
    backups = KeyBackups(tmp_path / "shred.keys")
    assert backups.open_until(NOW_US, NOW_US) == 0, "nobody told of any"
    backups.add(NOW_US - DAY_US, NOW_US + DAY_US)
    backups.add(NOW_US - DAY_US, NOW_US + 3 * DAY_US)
    backups.add(NOW_US + 2 * DAY_US, NOW_US + 9 * DAY_US)
    assert backups.path.stat().st_mode & 0o777 == 0o600
    assert backups.open_until(NOW_US, NOW_US) == NOW_US + 3 * DAY_US
    assert backups.open_until(NOW_US - DAY_US - CLOCKS_DIFFER_US, NOW_US) == NOW_US + 3 * DAY_US
    assert backups.open_until(NOW_US - DAY_US - CLOCKS_DIFFER_US - 1, NOW_US) == 0
    assert backups.open_until(NOW_US, NOW_US + 3 * DAY_US) == 0, "the third is from after that moment"


def test_the_end_of_a_root_key_ends_the_backups_that_it_alone_opens(tmp_path: Path) -> None:
    """Moves from A to B, the first of them cut short, and from B to C; a backup is made before and after each."""
    backups = KeyBackups(tmp_path / "keys.json")
    backup_times = {"A": 0, "A and B": 20, "B": 40, "C": 60}
    for at, root in ((10, b"A"), (30, b"A"), (50, b"B")):
        backups.moved(at, root)
    for number, at in enumerate(backup_times.values(), 1):
        backups.add(at, number * DAY_US)

    def opens() -> list[str]:
        known = backups._read()
        return [name for name, at in backup_times.items() if not key_backups._is_ended(at, known)]

    assert opens() == ["A", "A and B", "B", "C"]
    backups.end(b"B")
    assert opens() == ["A", "A and B", "C"], "A may be there still"
    assert backups.open_until(0, 0) == 4 * DAY_US, "control"
    backups.end(b"A")
    assert opens() == ["A and B", "C"]
    backups.end(b"C")
    assert opens() == ["A and B", "C"], "nothing was moved away from C"


def test_as_many_backups_are_known_as_were_told_of(tmp_path: Path) -> None:
    backups = KeyBackups(tmp_path / "keys.json")
    backups.add(NOW_US, NOW_US + DAY_US)
    backups.path.write_bytes(backups.path.read_bytes() * 60_000)
    backups.add(NOW_US, NOW_US + 2 * DAY_US)
    assert backups.open_until(NOW_US, NOW_US) == NOW_US + 2 * DAY_US


def test_a_torn_record_is_none_and_takes_no_other_with_it(tmp_path: Path) -> None:
    backups = KeyBackups(tmp_path / "shred.keys")
    backups.add(NOW_US, NOW_US + DAY_US)
    with backups.path.open("ab") as file:
        file.write(bytes(range(7)))
    assert backups.open_until(NOW_US, NOW_US) == NOW_US + DAY_US
    backups.add(NOW_US, NOW_US + 2 * DAY_US)
    assert backups.open_until(NOW_US, NOW_US) == NOW_US + 2 * DAY_US


@pytest.fixture
def world(tmp_path: Path) -> Iterator[World]:
    made = World(tmp_path, "nvme")
    yield made
    made.worker.close()


def results(world: World) -> list[tuple[str, str]]:
    """What the worker says of erasures, in order."""
    emitted: list[Event] = []
    emit = world.worker.governor.erasures._emit
    world.worker.governor.erasures._emit = lambda events: emitted.extend(events) or emit(events)  # type: ignore[func-returns-value]
    governor = world.worker.governor
    result = governor.erase(Selector("acme"))
    for _ in range(3):
        world.clock.advance(2_000_000)
        governor.step()
    if governor.erasures.pending:
        assert not governor.erasures.looks_at_blocks and governor.erasures.next_due_us() > world.clock.now_us()  # type: ignore[operator]
        world.clock.advance(governor.table.policy.erasure.within_us)
        governor.step()
        world.clock.advance(30 * DAY_US)
        governor.step()
    assert result.erasure not in governor.erasures.pending
    return [(one.outcome, one.reason) for one in emitted if isinstance(one, ErasureCompleted)]


def test_an_erasure_is_not_complete_while_a_known_backup_has_the_keys_that_it_destroyed(world: World) -> None:
    assert world.serve("acme", prompt(1, 8)) == 0
    now_us = world.clock.utc_us()
    backups = KeyBackups(world.folder / "shred.keys")
    backups.add(now_us, now_us + 20 * DAY_US)
    backups.add(now_us + DAY_US, now_us + 90 * DAY_US)  # it was made without them
    [(first, why), (last, _)] = results(world)
    assert (first, last) == ("partial", "complete") and why.startswith("backups of its keys can be opened until ")


def test_what_no_known_backup_has_is_complete_at_once(world: World) -> None:
    """The control of the last one; and what cannot be read is not taken for none."""
    assert world.serve("acme", prompt(1, 8)) == 0
    backups = KeyBackups(world.folder / "shred.keys")
    backups.add(world.clock.utc_us() - 9 * DAY_US, world.clock.utc_us() - 1)
    assert results(world) == [("complete", "")]
    backups.path.unlink()
    backups.path.symlink_to(world.folder / "elsewhere")
    (world.folder / "elsewhere").touch()
    with pytest.raises(KeyringError, match="cannot be read"):
        backups.open_until(0, 0)
    erased = world.worker.governor.erase(Selector("acme")).erasure
    for _ in range(3):
        world.clock.advance(2_000_000)
        world.worker.governor.step()
    assert erased in world.worker.governor.erasures.pending


def test_an_epoch_that_a_known_backup_has_is_gone_when_none_opens_any_more(tmp_path: Path) -> None:
    owner, clock = tenant_owner("idp", "acme"), VirtualClock(utc_us=NOW_US)
    ring = Keyring(FileKeyStore(tmp_path / "keys.json"), RootKeyWrapping(KeyBuffer.random(KEY_BYTES)), clock)
    ring.ensure([owner])
    KeyBackups(tmp_path / "keys.json").add(NOW_US, NOW_US + DAY_US)
    assert ring.destroy(owner, 1).fact.in_service == "owed"
    [fact] = ring.end_in_service()
    assert (fact.in_service, fact.ends_utc) == ("pending", NOW_US + DAY_US) and ring.end_in_service() == ()
    other = RootKeyWrapping(KeyBuffer.random(KEY_BYTES))
    assert ring.rewrap(other) == (), "what a backup has stands in no way"
    clock.advance(DAY_US)
    assert [fact.in_service for fact in ring.end_in_service()] == ["gone"] and ring.end_in_service() == ()
    ring.ensure([owner])
    ring.rotate(owner)
    assert ring.destroy(owner, 2).fact.in_service == "", "control: no backup has it"
