"""Bandwidth of scrubs by piece size, adjacent and scattered, against the driver's own memset and `zero_()`."""

from __future__ import annotations

import argparse
from typing import Any

from device import scrub

from gpu.report import Report

RATIO_MIN = 0.5  # far below what is expected: less is a launch that went wrong, not a slow day
LARGE = 32 << 10  # bytes: pieces from here on should come near to a memset


def run(report: Report, lab: Any) -> None:
    """Each point also reads back that what it wrote is zero; in a rehearsal speed decides nothing."""
    options = argparse.Namespace(device=lab.device, mib=lab.size(1024, 1), layers=4, repeats=lab.size(9, 1))
    pieces = scrub.FULL_PIECES if not lab.rehearsal else scrub.PIECES[:2]
    for piece in pieces:
        for order in scrub.ORDERS:
            point = measured(lab, piece, order, options)
            figures = {name: round(value, 3) for name, value in point.items() if isinstance(value, float)}
            fast = lab.rehearsal or piece < LARGE or point["paired_ratio"] >= RATIO_MIN
            report.check(f"{piece >> 10} KiB, {order}", fast, **figures, strategy=point["strategy"])


def measured(lab: Any, piece: int, order: str, options: argparse.Namespace) -> dict[str, Any]:
    """One point; what was not measured is absent. The stand-in has no clock: torch's own path is timed there."""
    with lab.by_torch():
        point = scrub.measure(piece, order, options)
    to_memset = point.scrub_gbps / point.memset_gbps
    found = point._asdict() | {"to_memset": to_memset, "ratio": point.ratio}
    return {name: value for name, value in found.items() if value == value}
