"""One benchmark as a command: its options, its rounds, and its figures with the facts they were measured under.

    bench = Bench(__doc__, "numpy", rounds=5)
    bench.add("--blocks", type=int, default=4096)
    options = bench.parse()
    times = alternate({"plain": plain, "governed": governed}, options.rounds, warm=1)
    bench.keep({"ratio": paired(times["governed"], times["plain"])._asdict()})

1. Every benchmark has `--json FILE` (or `--out FILE`); `--rounds`, `--only`, `--strict`, `--pin` where it says so.
2. Peers take turns and the order turns too, so that drift and cache warmth fall on all.
"""

from __future__ import annotations

import argparse
import contextlib
import gc
import json
import os
from collections.abc import Callable, Iterator, Mapping
from pathlib import Path
from typing import Any, TypeVar

import hardware

Result = TypeVar("Result")


class Bench:
    """The command line of a benchmark, and where its figures go. `versions`: packages that matter to them."""

    def __init__(
        self,
        doc: str | None,
        *versions: str,
        rounds: int | None = None,
        only: str | None = None,
        strict: bool = False,
        pin: bool = False,
        facts: str = "facts",
    ) -> None:
        self._versions, self._facts = versions, facts
        self._parser = argparse.ArgumentParser(description=doc, formatter_class=argparse.RawDescriptionHelpFormatter)
        self.add = self._parser.add_argument
        self.add("--json", "--out", type=Path, help="also write the figures here, with what they were measured on")
        if rounds is not None:
            self.add("--rounds", type=int, default=rounds, help="of everything (default: %(default)s)")
        if only is not None:
            self.add("--only", default=None, help=only)
        if strict:
            self.add("--strict", action="store_true", help="exit 1 where a goal is missed")
        if pin:
            self.add("--pin", type=int, help="run on this core only")

    def parse(self) -> argparse.Namespace:
        """The options, in force."""
        self.options = self._parser.parse_args()
        if getattr(self.options, "pin", None) is not None:
            os.sched_setaffinity(0, {self.options.pin})
        self._load = [round(load, 2) for load in os.getloadavg()]
        return self.options

    def keep(self, figures: Mapping[str, Any], *, show: bool = False) -> dict[str, Any]:
        """The figures with the facts, written where `--json` says; `show` prints them too."""
        facts = hardware.facts(*self._versions) | {"load_average": self._load}
        document = {**(facts if not self._facts else {self._facts: facts}), **figures}
        text = json.dumps(document, indent=1, default=str) + "\n"
        if show:
            print(text, end="")
        if self.options.json is not None:
            self.options.json.parent.mkdir(parents=True, exist_ok=True)
            self.options.json.write_text(text)
        return document

    def status(self, met: bool) -> int:
        """The exit status where goals are met or not."""
        return int(self.options.strict and not met)


class Silent:
    """In place of what measures: counts nothing, whatever it is told; for `FirstAsked` the moment that it is told."""

    evicted = look_up_ns = stalled = 0

    def __getattr__(self, name: str) -> Callable[..., int]:
        return nothing

    def take(self, request: object, now_us: int) -> int:
        """When a request was first asked for: now."""
        return now_us


def table(header: list[str], rows: list[list[str]]) -> str:
    """A Markdown table."""
    lines = [header, ["---"] * len(header), *rows]
    return "\n".join("| " + " | ".join(line) + " |" for line in lines)


def nothing(*what: object, **how: object) -> int:
    """Does nothing."""
    return 0


def turned(names: list[str], turn: int) -> list[str]:
    """The names, beginning at a different one each turn."""
    cut = turn % len(names)
    return names[cut:] + names[:cut]


def alternate(sides: Mapping[str, Callable[[], Result]], rounds: int, *, warm: int = 0) -> dict[str, list[Result]]:
    """What each side answers, once a round, in turns; the first `warm` rounds count for nothing."""
    results: dict[str, list[Result]] = {name: [] for name in sides}
    for number in range(-warm, rounds):
        for name in turned(list(sides), number):
            answer = sides[name]()
            if number >= 0:
                results[name].append(answer)
    return results


@contextlib.contextmanager
def frozen() -> Iterator[None]:
    """The garbage collector looks at new objects only, as in an engine that froze what it loaded.

    To look at the 200,000 objects of a process that has imported the product stops it for 0.1 s.
    """
    gc.collect()
    gc.freeze()
    try:
        yield
    finally:
        gc.unfreeze()
