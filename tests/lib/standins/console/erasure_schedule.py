"""Which subjects of a labelled trace ask for erasure, and when."""

from __future__ import annotations

import math
from collections.abc import Iterable

from kvcustody.clock import MICROSECONDS
from kvcustody.lab.replay.traces.model import TraceRequest
from kvcustody.lab.replay.traces.seeded_draws import draw
from kvcustody.lab.replay.workload.labels import ErasureLabel, Label


def erasure_schedule(
    labelled: Iterable[tuple[TraceRequest, Label]],
    *,
    seed: int,
    rate: float = 0.03,
    racing: float = 0.3,
    mean_delay_us: int = 120 * MICROSECONDS,
) -> list[ErasureLabel]:
    """Which subjects ask for erasure, and when: `racing` of them while their requests still run, the rest
    after.
    """
    first: dict[str, int] = {}
    last: dict[str, int] = {}
    for request, label in labelled:
        first.setdefault(label.subject, request.at_us)
        last[label.subject] = request.at_us
    schedule: list[ErasureLabel] = []
    for subject, begin in first.items():
        if draw(seed, "er", subject) >= rate:
            continue
        end = last[subject]
        if draw(seed, "mid", subject) < racing:
            at = begin + (end - begin) * draw(seed, "midt", subject)
        else:
            at = end - mean_delay_us * math.log(1 - draw(seed, "dl", subject))
        schedule.append(ErasureLabel(round(at), subject))
    return sorted(schedule)
