"""The scan in slices under load: no step exceeds its counted budget, and no run that is split is found.

Work is counted, never timed: by the scan's own units, and by the lines of it that Python runs.
"""

from __future__ import annotations

import sys
from collections.abc import Iterator
from types import FrameType
from typing import Any

import pytest

from kvcustody.allocator.prefix.node import KEY_BYTES
from kvcustody.governance.orphans import online_pool_scan as online_scan
from kvcustody.governance.orphans import slices
from kvcustody.governance.orphans.online_pool_scan import OnlineScan
from kvcustody.governance.orphans.slices import PIECE_BLOCKS, Budget, Slices
from standins.erasure.histories import Histories
from standins.simulation.governed import MODEL, person

PIECE = 96  # the dearest piece that J1 allows a step to go over by
LINES = 8  # the most lines that a unit of work stands for
SCANNED = {online_scan.__file__, slices.__file__}


class Timed(OnlineScan):
    """Counts what each step spends, and the lines of the scan that it runs."""

    def __init__(self, *arguments: Any) -> None:
        super().__init__(*arguments)
        self.units, self.lines = [0], [0]

    def step(self) -> None:
        self.units.append(0)
        self.lines.append(0)
        before = sys.gettrace()
        sys.settrace(self._trace)
        try:
            super().step()
        finally:
            sys.settrace(before)

    def _trace(self, frame: FrameType, event: str, argument: Any) -> Any:
        if frame.f_code.co_filename not in SCANNED:
            return None
        self.lines[-1] += event == "line"
        return self._trace

    def _spend(self, work: int) -> bool:
        self.units[-1] += work
        return super()._spend(work)


class Unbounded(Timed):
    """The control: never told that a step is over."""

    def _spend(self, work: int) -> bool:
        super()._spend(work)
        self._left = 1
        return False


def scan_of(world: Histories, kind: type[OnlineScan], work: int) -> Any:
    running = world.governor.running
    manager = world.governor.managers[0]
    return kind(manager, lambda sequence: running.get(sequence.id) is sequence, Budget(work))


@pytest.fixture(scope="module")
def full() -> Histories:
    """A pool of three pieces, a conversation a hundred turns deep, a long run, and a hundred holds of one tenant."""
    world = Histories(1, blocks=3 * PIECE_BLOCKS)
    mine, turns = person("a", "mia"), list(range(8))
    for turn in range(100):
        turns += range(100 * turn, 100 * turn + 8)
        ask(world, mine, [*turns, 1])
    ask(world, mine, list(range(50_000, 50_000 + 4 * 2000)))
    for other in range(100):
        ask(world, mine, [60_000 + other] * 9)
    ask(world, mine, turns, keep=True)
    return world


def ask(world: Histories, who: Any, tokens: list[int], *, keep: bool = False) -> Any:
    got = world.governor.admit(who, MODEL, tokens)
    world.governor.commit([got.request_id], [len(tokens)])
    if not keep:
        world.governor.release(got.request_id)
    world.governor.step()
    return got


def whole_round(scan: Any) -> Any:
    before = scan.rounds
    while scan.rounds == before:
        scan.step()
    return scan


@pytest.mark.parametrize("work", [16, 112])
def test_no_step_does_more_than_its_budget_and_one_piece(full: Histories, work: int) -> None:
    scan = whole_round(scan_of(full, Timed, work))
    assert scan.nodes > 200 and scan.holds > 100 and scan.blocks == 3 * PIECE_BLOCKS, "void: little to look at"
    assert max(scan.units) <= work + PIECE
    assert max(scan.lines) <= LINES * (work + PIECE)


def test_positive_control_a_step_that_never_ends_is_seen(full: Histories) -> None:
    scan = whole_round(scan_of(full, Unbounded, 112))
    assert max(scan.units) > 112 + PIECE
    assert max(scan.lines) > LINES * (112 + PIECE)


class Stripes(list[dict[bytes, Any]]):
    """The index's stripes, which know how far a pass over them has come, and the how-manieth it is."""

    at = passes = 0

    def __iter__(self) -> Iterator[dict[bytes, Any]]:
        self.passes += 1
        for self.at, stripe in enumerate(super().__iter__()):
            yield stripe


def run_to_split(world: Histories, at: int) -> tuple[list[int], list[int]] | None:
    """A cached run of six blocks and the stripes of its first key, its fourth and its sixth, where these fall well."""
    mine, tokens = person("a", "mia"), list(range(10_000 * at, 10_000 * at + 24))
    ask(world, mine, [*tokens, 1])
    tree = world.governor.managers[0].tree
    (node,) = tree.nodes()
    keys = [node.keys[KEY_BYTES * place : KEY_BYTES * place + KEY_BYTES] for place in (0, 3, 5)]
    whole, tail, last = (hash(key) & tree.index.mask for key in keys)
    return (tokens, [whole, tail, last]) if last + 1 < tail and tail + 1 < whole else None


def split_twice(world: Histories, scan: Any, run: tuple[list[int], list[int]]) -> int:
    """Findings about a run that is split twice in one round, so that this round misses its last block.

    Before the first pass is at the run and behind the stripe of its tail; then the tail, before the last pass is there
    and behind the stripe of the tail's tail.
    """
    (tokens, (whole, tail, last)), mine = run, person("a", "mia")
    stripes = world.governor.managers[0].tree.index.stripes
    whole_round(scan)
    rounds, passes, splits = scan.rounds, stripes.passes, 0
    while scan.rounds == rounds:
        scan.step()
        if splits == 0 and stripes.passes == passes + 1 and tail < stripes.at < whole:
            ask(world, mine, [*tokens[:12], 7])
            splits = 1
        elif splits == 1 and stripes.passes == passes + 2 and last < stripes.at < tail:
            ask(world, mine, [*tokens[:20], 7])
            splits = 2
    assert splits == 2 and world.governor.managers[0].tree.node_count == 3, "void: it was not split twice"
    for _ in range(4):
        whole_round(scan)
    return len(scan.take())


def found_in_splits() -> int:
    """Findings about five runs that are split where it is worst."""
    world, detected, runs = Histories(1), 0, 0
    index = world.governor.managers[0].tree.index
    index.stripes = Stripes(index.stripes)
    scan = scan_of(world, OnlineScan, 1)
    for at in range(1000):
        run = run_to_split(world, at)
        if run is not None:
            detected += split_twice(world, scan, run)
            runs += 1
            if runs == 5:
                return detected
        world.clock.advance(400_000_000)
        world.governor.step()
    raise AssertionError("void: no run fell well")


def test_a_run_that_is_split_during_a_round_is_no_finding() -> None:
    assert found_in_splits() == 0


def test_positive_control_one_round_alone_takes_a_split_for_an_orphan(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    agreed = Slices._suspect
    monkeypatch.setattr(Slices, "_suspect", lambda self, *seen, rounds=2: agreed(self, *seen[:3], 1))
    assert found_in_splits() > 0
