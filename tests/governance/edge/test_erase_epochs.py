"""Erase epochs: what a snapshot keeps, finds and refuses, held against a dictionary."""

from __future__ import annotations

import random

import pytest

from kvcustody.clock import VirtualClock
from kvcustody.errors import ServiceError
from kvcustody.governance.edge.current_namespaces import CurrentNamespaces
from kvcustody.governance.edge.erase_epochs import (
    NO_EPOCHS,
    EpochScope,
    EpochTags,
    EraseEpochs,
    KnownEpochs,
    RaisedEpoch,
)
from kvcustody.governance.edge.router_namespace import NamespaceAge, RouterNamespaces
from kvcustody.times import DAY_US
from standins.integrations import door_world

TAGS = EpochTags(bytes(32))
SCOPES = [EpochScope("idp", "acme", f"person-{number}") for number in range(50)]


def _raised(seed: int, count: int) -> list[RaisedEpoch]:
    chance = random.Random(seed)
    number, found = 0, []
    for _ in range(count):
        number += chance.randint(1, 3)
        found.append(RaisedEpoch(number, TAGS.of(chance.choice(SCOPES))))
    return found


def test_the_epoch_of_a_scope_is_the_newest_of_its_numbers() -> None:
    raised = _raised(1, 200)
    epochs = EraseEpochs(raised, version=raised[-1].number)
    newest = {one.tag: one.number for one in raised}
    assert {scope: epochs.epoch(TAGS.of(scope)) for scope in SCOPES} == {
        scope: newest.get(TAGS.of(scope), 0) for scope in SCOPES
    }
    assert epochs.epoch(TAGS.of(EpochScope("idp", "acme", "nobody"))) == 0


def test_tags_with_equal_first_halves_are_told_apart() -> None:
    tag = bytes(range(16))
    near = tag[:8] + bytes(8)
    epochs = EraseEpochs([RaisedEpoch(1, tag), RaisedEpoch(2, near), RaisedEpoch(3, tag[:8] + b"\xff" * 8)], version=3)
    assert (epochs.epoch(tag), epochs.epoch(near), epochs.epoch(tag[:8] + b"\x01" * 8)) == (1, 2, 0)


@pytest.mark.parametrize("seed", range(20))
def test_a_snapshot_in_parts_is_the_whole_snapshot(seed: int) -> None:
    raised = _raised(seed, 100)
    chance = random.Random(seed)
    known, at = EraseEpochs(), 0
    while at < len(raised):
        upto = min(len(raised), at + chance.randint(0, 30))
        version = raised[upto - 1].number if upto else 0
        floor = chance.randint(known.floor, version)
        known = known.extended(raised[at:upto], version=version, floor=floor)
        whole = EraseEpochs([one for one in raised[:upto] if one.number > floor], version=version, floor=floor)
        assert known.digest == whole.digest
        assert all(known.epoch(TAGS.of(scope)) == whole.epoch(TAGS.of(scope)) for scope in SCOPES)
        at = upto


def test_a_lost_changed_or_added_raise_changes_the_digest() -> None:
    raised = _raised(3, 50)
    version = raised[-1].number
    true = EraseEpochs(raised, version=version).digest
    for place in range(len(raised)):
        one = raised[place]
        lost = raised[:place] + raised[place + 1 :]
        other = [*raised[:place], RaisedEpoch(one.number, bytes(16)), *raised[place + 1 :]]
        assert true not in {EraseEpochs(change, version=version).digest for change in (lost, other)}
    assert EraseEpochs([*raised, RaisedEpoch(version + 1, bytes(16))], version=version + 1).digest != true


@pytest.mark.parametrize(
    ("numbers", "version", "floor"),
    [([2, 2], 2, 0), ([3, 2], 3, 0), ([1], 1, 1), ([5], 4, 0), ([], 1, 2)],
)
def test_numbers_out_of_order_are_refused(numbers: list[int], version: int, floor: int) -> None:
    with pytest.raises(ServiceError, match="numbers must rise"):
        EraseEpochs([RaisedEpoch(number, bytes(16)) for number in numbers], version=version, floor=floor)


def test_an_older_snapshot_and_a_short_tag_are_refused() -> None:
    known = EraseEpochs([RaisedEpoch(5, bytes(16))], version=5, floor=2)
    for version, floor in ((4, 2), (5, 1)):
        with pytest.raises(ServiceError, match="older"):
            known.extended([], version=version, floor=floor)
    with pytest.raises(ServiceError, match="16 bytes"):
        EraseEpochs([RaisedEpoch(1, b"short")], version=1)


def test_a_raise_reaches_its_own_scope_and_no_other() -> None:
    whose = [
        ("idp", "acme", "ada", None),
        ("idp", "acme", "ada", "s-1"),
        ("idp", "acme", "bo", None),
        ("idp", "acme", None, "ada"),
        ("idp", "acme", None, None),
        ("other", "acme", "ada", None),
        ("idp", "beta", "ada", None),
    ]

    def touched(scope: EpochScope) -> list[int]:
        epochs = EraseEpochs([RaisedEpoch(7, TAGS.of(scope))], version=7)
        return [at for at, who in enumerate(whose) if KnownEpochs(epochs, TAGS).of(*who) != NO_EPOCHS]

    assert touched(EpochScope()) == [0, 1, 2, 3, 4, 5, 6]
    assert touched(EpochScope("idp", "acme")) == [0, 1, 2, 3, 4]
    assert touched(EpochScope("idp", "acme", "ada")) == [0, 1]
    assert touched(EpochScope("idp", "acme", session="ada")) == [3]
    assert touched(EpochScope("idp", "acme", is_shared=True)) == [4]


def test_names_end_with_an_epoch_and_with_their_days() -> None:
    namespaces = RouterNamespaces(door_world.secret())

    def name(person: str, **age: object) -> str:
        return namespaces.of("idp", "acme", person, None, NamespaceAge(**age))  # type: ignore[arg-type]

    plain = namespaces.of("idp", "acme", "ada")
    assert name("ada", epochs=(0, 0, 0)) == plain
    raised = [name("ada", epochs=epochs) for epochs in ((1, 0, 0), (0, 1, 0), (0, 0, 1), (0, 0, 2))]
    assert len({plain, *raised}) == 5
    first_days = {}
    for number in range(40):
        person = f"person-{number}"
        by_day = [name(person, at_utc_us=day * DAY_US, days=7) for day in range(21)]
        assert 3 <= len(set(by_day)) <= 4
        assert by_day == sorted(by_day, key=by_day.index)  # a name that ended does not come back
        first_days[person] = next(day for day in range(21) if by_day[day] != by_day[0])
    assert len(set(first_days.values())) > 3  # and not all change on one day


def test_names_end_after_the_days_that_the_control_plane_says() -> None:
    """A raise is kept for as long: with more days of its own, a process would give an ended name again."""
    clock = VirtualClock(0, 100 * DAY_US)
    names = CurrentNamespaces(RouterNamespaces(door_world.secret()), clock, days=3650)
    said = KnownEpochs(EraseEpochs(), TAGS, 7)
    before = {known: names.of("idp", "acme", "ada", known=known) for known in (None, said)}
    clock.advance(7 * DAY_US)
    assert names.of("idp", "acme", "ada", known=said) != before[said]
    assert names.of("idp", "acme", "ada") == before[None], "control: its own days are more"
