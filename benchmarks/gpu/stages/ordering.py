"""Order between streams with random sleeps: hand-outs find zeros, no write is lost; without a wait both are seen."""

from __future__ import annotations

import random
from typing import Any, NamedTuple

import numpy as np
import torch

from gpu.report import Report
from kvcustody.kernels.ordered import OrderedScrub
from kvcustody.kernels.prepare import prepare
from kvcustody.kernels.segment import SegmentTable

LAYERS = 2


class Cycles(NamedTuple):
    """What some rounds of write, end, scrub and hand-out showed."""

    seen_bytes: int  # the highest byte that a hand-out found
    lost_blocks: int  # that hold something else than was written last
    dirty: int  # named by the read-back
    counted: bool  # the device's count is that of the list
    races: int | None


def run(report: Report, lab: Any) -> None:
    """The same rounds four times: whole, by what was handed out, and without either wait."""
    for named in (False, True):
        outcome = cycles(lab, seed=1, named=named)
        name = "waits only where a block was handed out" if named else "waits before every step"
        clean = outcome.seen_bytes == 0 and not outcome.lost_blocks and not outcome.dirty and outcome.counted
        report.check(
            f"{name}: hand-outs find zeros, no write is lost", clean and not outcome.races, **outcome._asdict()
        )
    for missing in ("used", "ordered"):
        outcome = cycles(lab, seed=2, **{missing: False})
        broken = bool(outcome.seen_bytes or outcome.lost_blocks)
        if outcome.races is not None:
            broken = broken and outcome.races > 0
        report.control(f"without `{missing}` it is seen", broken, **outcome._asdict())


def cycles(lab: Any, seed: int, *, used: bool = True, ordered: bool = True, named: bool = False) -> Cycles:
    """Rounds of one engine; the last use, the scrub or the next step is late, in turns and at random."""
    blocks, rounds = lab.size(512, 16), lab.size(60, 12)
    piece = lab.size(32 << 10, 64)
    tensors = [lab.tensor(blocks, piece) for _ in range(LAYERS)]
    table = SegmentTable.from_tensors(tensors)
    prepare(table)
    scrubber = OrderedScrub(table, streams=lab.streams())
    rng, generator = random.Random(seed), np.random.default_rng(seed)
    lists = [np.sort(generator.permutation(blocks)[: blocks // 3]) for _ in range(rounds)]
    indices = [lab.index(one) for one in lists]
    kept = [lab.index(one[:2]) for one in lists]
    busy = lab.stream()
    seen: list[torch.Tensor] = []
    last: dict[int, int] = {}
    fill(tensors, kept[0], 0)  # what torch loads at a first call is loaded
    peak(tensors, indices[0])
    before = lab.races()
    lab.synchronize()
    for turn, (listed, index, two) in enumerate(zip(lists, indices, kept, strict=True)):
        if turn % 3 == 0:
            lab.stall()  # the last use is late
        else:
            lab.pause(rng)
        lab.engine("write", lambda i=index, b=10 + turn: fill(tensors, i, b), table, listed)
        if used:
            scrubber.used()
        if used and turn % 3 == 1:  # the scrub is late: another stream of the engine's still uses the blocks
            with lab.on(busy):
                lab.stall()
                scrubber.used(busy)
        scrubber.launch([(listed, turn % 2 == 0)])
        if named:
            scrubber.hand_out(listed)
            scrubber.order_handed_out()
        elif ordered:
            scrubber.order_before()
        lab.engine("look", lambda i=index: seen.append(peak(tensors, i)), table, listed, writes=False)
        lab.engine("write", lambda i=two, b=100 + turn: fill(tensors, i, b), table, listed[:2])
        last |= dict.fromkeys(listed.tolist(), 0) | dict.fromkeys(listed[:2].tolist(), 100 + turn)
        lab.run_ahead(rng)
    lab.synchronize()
    answers = scrubber.settle()
    highest = torch.stack(tensors).amax(dim=(0, 2)).tolist()
    lowest = torch.stack(tensors).amin(dim=(0, 2)).tolist()
    lost = sum((highest[at], lowest[at]) != (last.get(at, 0),) * 2 for at in range(blocks))
    races = lab.races()
    return Cycles(
        max(int(one) for one in seen),
        lost,
        sum(len(batch) for answer in answers for batch in answer.dirty),
        table.scrubbed() == sum(map(len, lists)),
        None if races is None else races - (before or 0),
    )


def fill(tensors: list[torch.Tensor], index: torch.Tensor, byte: int) -> None:
    """The engine writes."""
    for one in tensors:
        one.index_fill_(0, index, byte)


def peak(tensors: list[torch.Tensor], index: torch.Tensor) -> torch.Tensor:
    """The highest byte, on the device."""
    return torch.stack([one[index].amax() for one in tensors]).amax()
