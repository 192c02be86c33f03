"""Places sessions with relative times on one time line, by recorded arrival times and a seed.

Which sessions overlap decides what a finite cache can keep, and a trace of separate sessions does not say it.
So the start of each session is drawn from real arrivals (Azure's), stretched, by a hash of (seed, session):
the same seed gives the same day on every machine.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import replace
from pathlib import Path

from kvcustody.clock import MICROSECONDS
from kvcustody.lab.replay.traces.length_traces import AzureLlm
from kvcustody.lab.replay.traces.model import Key, TraceRequest
from kvcustody.lab.replay.traces.seeded_draws import draw

DAY_US = 86_400 * MICROSECONDS
STRETCH = 8
"""An hour of recorded arrivals becomes a working day of session starts."""


def arrivals_us(path: Path) -> list[int]:
    """Return sorted arrival times of an Azure trace, from its first."""
    return [request.at_us for request in AzureLlm().read(path)]


def stagger(
    requests: Iterable[TraceRequest],
    arrivals: Sequence[int],
    *,
    seed: int = 1,
    stretch: int = STRETCH,
    horizon_us: int = DAY_US,
) -> list[TraceRequest]:
    """Return every request at its session's drawn start, in time order, cut `horizon_us` after the first."""
    starts: dict[Key, int] = {}
    placed: list[TraceRequest] = []
    for request in requests:
        start = starts.get(request.session)
        if start is None:
            pick = int(draw(seed, "start", request.session) * len(arrivals))
            start = starts[request.session] = stretch * arrivals[pick]
        placed.append(replace(request, at_us=start + request.at_us))
    placed.sort(key=lambda r: (r.at_us, str(r.session), r.turn))
    end_us = placed[0].at_us + horizon_us if placed else 0
    return [request for request in placed if request.at_us <= end_us]
