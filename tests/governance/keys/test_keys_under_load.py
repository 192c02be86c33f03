"""Keys rotated, destroyed and shredded under load by two processes that are killed: nothing is lost, nothing opens.

After each kill: what was kept under a living epoch and of no erased subject comes back whole; what was not, never does,
in either process, under its old name or by its epoch's secret.
"""

from __future__ import annotations

import contextlib
import json
import random
import subprocess
import sys
from pathlib import Path
from typing import Any, NamedTuple

import pytest

from standins import PLACE
from standins.governance.tier_place import STEP

pytestmark = pytest.mark.system("a process that is killed while keys end loses copies, or opens what has ended")
TENANTS, SUBJECTS = ("acme", "beta"), 12
ROTATIONS = 20


class Kept(NamedTuple):
    tenant: str
    subject: str
    epoch: int
    prompt: str


class Victims:
    """Two processes of one store of keys; each has a tier of its own."""

    def __init__(self, folder: Path) -> None:
        self.folder = folder
        self.folders = [folder / f"tier-{name}" for name in range(2)]
        self.asked = 0
        for place in self.folders:
            place.mkdir()
        self.running = [self._start(place) for place in self.folders]

    def _start(self, place: Path) -> subprocess.Popen[str]:
        command = [sys.executable, str(PLACE / "robust" / "key_victim.py"), str(self.folder), str(place)]
        started = subprocess.Popen(command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True)
        assert started.stdout and json.loads(started.stdout.readline()) == [-1, "ready"]
        return started

    def begin(self, number: int, act: str, *what: Any) -> None:
        stdin = self.running[number].stdin
        self.asked += 1
        assert stdin
        print(json.dumps([self.asked, act, *what]), file=stdin, flush=True)

    def ask(self, number: int, act: str, *what: Any) -> Any:
        self.begin(number, act, *what)
        stdout = self.running[number].stdout
        assert stdout
        said, value = json.loads(stdout.readline())
        assert said == self.asked
        return value

    def kill(self, number: int) -> None:
        """While it works, or between two acts; and start it again."""
        self.running[number].kill()
        self.close(number)
        self.running[number] = self._start(self.folders[number])

    def close(self, number: int) -> None:
        one = self.running[number]
        one.kill()
        one.wait()
        for stream in (one.stdin, one.stdout):
            if stream is not None:
                with contextlib.suppress(BrokenPipeError):
                    stream.close()


class Load:
    """What is done, and what has to be true of it."""

    def __init__(self, folder: Path, seed: int) -> None:
        self.chance, self.victims = random.Random(seed), Victims(folder)
        self.live: list[set[Kept]] = [set(), set()]
        self.dead: list[set[Kept]] = [set(), set()]
        self.epochs = dict.fromkeys(TENANTS, 1)
        self.ended: set[tuple[str, int]] = set()
        self.acts = self.kills = self.checked = self.erasures = 0
        for number in range(2):
            for tenant in TENANTS:
                self.victims.ask(number, "keep", tenant, "s", 1, "first")

    def act(self) -> None:
        self.acts += 1
        number, tenant = self.chance.randrange(2), self.chance.choice(TENANTS)
        subject, drawn = f"s{self.chance.randrange(SUBJECTS)}", self.chance.random()
        if drawn < 0.3:
            self._keep(number, Kept(tenant, subject, self.epochs[tenant], f"p{self.acts}"))
        elif drawn < 0.98:
            self._bring(number)
        else:
            self._erase(tenant, subject)

    def _keep(self, number: int, kept: Kept) -> None:
        if self.victims.ask(number, "keep", *kept) == STEP:
            self.live[number].add(kept)

    def _bring(self, number: int) -> None:
        for wanted, kept in ((STEP, self.live[number]), (0, self.dead[number])):
            if kept:
                one = self.chance.choice(tuple(kept)) if len(kept) < 64 else next(iter(kept))
                assert self.victims.ask(number, "bring", *one) == wanted, one

    def _erase(self, tenant: str, subject: str, *, killed: int | None = None) -> None:
        """Every process follows an erasure, one that was killed in the middle of it once more."""
        self.erasures += 1
        for number in range(2):
            if number == killed:
                self.victims.begin(number, "erase", tenant, subject, f"e{self.erasures}")
                self._die(number)
            self.victims.ask(number, "erase", tenant, subject, f"e{self.erasures}")
            self._end(number, {one for one in self.live[number] if (one.tenant, one.subject) == (tenant, subject)})

    def rotate(self, *, killed: bool = False) -> None:
        """One process begins the next epoch and destroys the last; the other follows."""
        tenant, number = self.chance.choice(TENANTS), self.chance.randrange(2)
        old = self.epochs[tenant]
        self.epochs[tenant] = self.victims.ask(number, "rotate", tenant)
        if killed:
            self.victims.begin(number, "destroy", tenant, old)
            self._die(number)
        self.victims.ask(number, "destroy", tenant, old)
        self.victims.ask(1 - number, "follow")
        self.ended.add((tenant, old))
        for each in range(2):
            self._end(each, {one for one in self.live[each] if (one.tenant, one.epoch) == (tenant, old)})

    def _end(self, number: int, kept: set[Kept]) -> None:
        self.live[number] -= kept
        self.dead[number] |= set(list(kept)[:200])

    def _die(self, number: int) -> None:
        self.kills += 1
        self.victims.kill(number)

    def die(self) -> None:
        """In the middle of a store, which nobody was told of."""
        number, tenant = self.chance.randrange(2), self.chance.choice(TENANTS)
        self.victims.begin(number, "keep", tenant, "s0", self.epochs[tenant], f"torn{self.kills}")
        self._die(number)
        self.check(number)

    def check(self, number: int) -> None:
        """Everything, in one process."""
        for wanted, kept in ((STEP, self.live[number]), (0, self.dead[number])):
            for one in kept:
                assert self.victims.ask(number, "bring", *one) == wanted, (wanted, one)
                self.checked += 1
        for tenant, epoch in self.ended:
            assert not self.victims.ask(number, "opens", tenant, epoch)
        assert all(self.victims.ask(number, "opens", *each) for each in self.epochs.items()), "control"


@pytest.mark.parametrize(
    ("acts", "rotations", "kills"),
    [(300, 4, 2), pytest.param(100_000, ROTATIONS, 20, marks=pytest.mark.soak)],
)
def test_nothing_is_lost_and_nothing_opens(tmp_path: Path, acts: int, rotations: int, kills: int) -> None:
    load = Load(tmp_path, seed=acts)
    try:
        for number in range(acts):
            load.act()
            if number % (acts // rotations) == acts // rotations - 1:
                load.rotate(killed=number % 2 == 1)
            if number % (acts // kills) == acts // kills // 2:
                load.die()
        load._erase("acme", "s0", killed=0)
        for number in range(2):
            load.check(number)
    finally:
        for number in range(2):
            load.victims.close(number)
    assert load.checked > acts // 10 and all(load.live) and all(load.dead), "too little was shown"
    print(
        f"{load.acts} acts, {rotations} rotations, {load.erasures} erasures, {load.kills} kills: {load.checked} checked"
    )


def test_control_without_the_destruction_the_ended_epoch_opens(tmp_path: Path) -> None:
    load = Load(tmp_path, seed=1)
    try:
        for _ in range(40):
            load.act()
        old = load.epochs["acme"]
        load.epochs["acme"] = load.victims.ask(0, "rotate", "acme")
        load.ended.add(("acme", old))
        with pytest.raises(AssertionError):
            load.check(0)
    finally:
        for number in range(2):
            load.victims.close(number)
