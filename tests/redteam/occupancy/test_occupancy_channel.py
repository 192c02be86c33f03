"""How much occupancy tells, in bits: in `strict` nothing, in `shared` nothing while both stay within their guarantees.

The controls are the settings in which the threat model says that the channel is open: the same measurement finds it
there.
"""

from __future__ import annotations

import pytest

from standins.redteam.occupancy_channel import AMOUNTS, SETTINGS, WAYS, measure, mutual_information

TOLD_TO_A_TENANT = tuple(way for way in WAYS if way != "numbers")


@pytest.mark.parametrize("running", [False, True])
@pytest.mark.parametrize("trials", [40, pytest.param(2_000, marks=pytest.mark.soak)])
def test_strict_tells_nothing(trials: int, running: bool) -> None:
    """Every way, block numbers included: each trial looks like every other."""
    found = measure(SETTINGS["strict"], trials, running=running, shuffles=20)
    assert {way: channel.bits for way, channel in found.items()} == dict.fromkeys(WAYS, 0.0)


@pytest.mark.parametrize("running", [False, True])
@pytest.mark.parametrize("trials", [40, pytest.param(2_000, marks=pytest.mark.soak)])
def test_shared_tells_nothing_within_guarantees(trials: int, running: bool) -> None:
    """What a tenant sees is the same; the block numbers, which it does not see, are not."""
    found = measure(SETTINGS["shared, within guarantees"], trials, running=running, shuffles=20)
    assert {way: found[way].bits for way in TOLD_TO_A_TENANT} == dict.fromkeys(TOLD_TO_A_TENANT, 0.0)
    assert found["numbers"].is_open, "void: block numbers in one pool move with everybody's load"


@pytest.mark.parametrize(
    ("setting", "running", "way"),
    [
        ("shared, the attacker borrows", False, "hits"),
        ("shared, the attacker borrows", False, "charge"),
        ("shared, the victim borrows", True, "room"),
    ],
)
def test_the_channels_of_borrowing_are_found(setting: str, running: bool, way: str) -> None:
    """The control: what the threat model says is open is measured as open."""
    assert measure(SETTINGS[setting], 60, running=running, shuffles=40)[way].is_open


def test_the_estimate_is_of_information() -> None:
    """A copy tells all of an amount, a constant nothing, its parity one bit."""
    amounts = [*range(AMOUNTS)] * 10
    assert mutual_information(amounts, amounts) == pytest.approx(3)
    assert mutual_information(amounts, [0] * 80) == 0
    assert mutual_information(amounts, [amount % 2 for amount in amounts]) == pytest.approx(1)
