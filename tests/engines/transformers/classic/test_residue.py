"""What a cache leaves in its process's memory, read from outside: classes as they are, and governed.

The search looks for single tokens' key vectors in every writable mapping of a process that only feeds caches. Each
governed case has its control: the class it stands for, fed with other states by the same loop, leaves copies.
"""

from __future__ import annotations

import re
import subprocess
import sys
from collections.abc import Iterator
from functools import cache
from pathlib import Path
from typing import BinaryIO

import pytest
import torch

from standins import PLACE
from standins.engines.transformers.classic_victim import HEADS, STEPS, WIDTH, kind_of, model_of
from standins.engines.transformers.classic_world import plain_cache

pytestmark = pytest.mark.system

HERE = Path(__file__).parent
_WRITABLE = re.compile(r"([0-9a-f]+)-([0-9a-f]+) rw")
KINDS = ("dynamic", "static", "quantized", "offloaded", "sliding", "sliding-static")
TOKENS = (3, 23, 40, sum(STEPS) - 2)  # of the prompt, its last, decoded, almost the last
# How many copies of a token a governed cache may hold while it lives: one a layer, K and V apart, two in staging.
LIVING = {"offloaded": 2 * 3 + 4}


class Victim:
    """The searched process."""

    def __init__(self) -> None:
        self.process = subprocess.Popen(
            [sys.executable, str(PLACE / "engines" / "transformers" / "classic_victim.py")],
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            text=True,
        )

    def order(self, line: str) -> None:
        assert self.process.stdin is not None and self.process.stdout is not None
        print(line, file=self.process.stdin, flush=True)
        while (answer := self.process.stdout.readline().strip()) != "done":
            assert answer, "the victim has died"

    def found(self, needles: list[bytes]) -> list[int]:
        """How often each needle occurs in the victim's writable memory."""
        count = [0] * len(needles)
        with Path(f"/proc/{self.process.pid}/mem").open("rb", buffering=0) as memory:
            for low, high in self._writable():
                held = _read(memory, low, high)
                for number, needle in enumerate(needles):
                    count[number] += held.count(needle)
        return count

    def _writable(self) -> Iterator[tuple[int, int]]:
        for line in Path(f"/proc/{self.process.pid}/maps").read_text().splitlines():
            matched = _WRITABLE.match(line)
            if matched is not None:
                yield int(matched[1], 16), int(matched[2], 16)


def _read(memory: BinaryIO, low: int, high: int) -> bytes:
    """All of a mapping, or as much of it as the kernel gives."""
    held = bytearray()
    memory.seek(low)
    try:
        while len(held) < high - low and (piece := memory.read(high - low - len(held))):
            held += piece
    except OSError:  # pages of the kernel's own
        pass
    return bytes(held)


@pytest.fixture(scope="module")
def victim() -> Iterator[Victim]:
    started = Victim()
    yield started
    started.process.stdin.close()  # type: ignore[union-attr]
    assert started.process.wait(60) == 0


@cache
def needles(kind: str, seed: int) -> list[bytes]:
    """Key vectors of some tokens in head 0: as fed, and for a quantised cache as stored and as given back."""
    generator = torch.Generator().manual_seed(seed)
    steps = [torch.empty(1, HEADS, count, WIDTH).normal_(generator=generator) for count in STEPS]
    fed = torch.cat(steps, dim=2)[0, 0]
    sought = [fed[token].numpy().tobytes() for token in TOKENS]
    if kind == "quantized":
        twin = plain_cache(kind_of(kind), model_of(kind).config)
        given = [twin.update(step, step, 0)[0] for step in steps][-1][0, 0]
        stored = twin.layers[0]._quantized_keys[0].view(torch.uint8)[0, 0]
        sought += [given[token].numpy().tobytes() for token in TOKENS]
        sought += [stored[token].numpy().tobytes() for token in TOKENS]
    return sought


@pytest.mark.parametrize("kind", KINDS)
def test_nothing_is_left_behind(victim: Victim, kind: str) -> None:
    number = KINDS.index(kind)
    plain, governed = needles(kind, 1000 + number), needles(kind, 2000 + number)

    victim.order(f"fill {kind} {1000 + number} plain")
    used = victim.found(plain) if kind == "dynamic" else []
    victim.order("end")
    left = victim.found(plain)
    assert sum(left) > 0, "the control leaves nothing: the search would not see residue"

    victim.order(f"fill {kind} {2000 + number} governed")
    living = victim.found(governed)
    assert sum(living) > 0, "the cache holds nothing: there is nothing to end"
    layers = len(model_of(kind).config.get_text_config().per_layer_config)
    assert max(living) <= LIVING.get(kind, 2 * layers), "a superseded copy lies about"
    if kind == "dynamic":
        assert max(used) > 2 * layers, "the control's superseded copies would not be seen"
    victim.order("end")
    assert victim.found(governed) == [0] * len(governed)
