"""What occupancy reveals: a victim holds one of eight amounts of the pool, and an attacker guesses which.

In one trial the attacker fills its sets, the victim takes the amount, and the attacker looks. What it sees in each way
is a symbol. The channel is measured in bits of mutual information between amount and symbol, at most log2(8) = 3:

- `hits`: how many of its sets it still finds;
- `room`: the largest prompt that is admitted to it, of 1/16 to 16/16 of the pool;
- `charge`: what its own account is charged, its statistics included;
- `numbers`: the number of the next block that it is given. Engine and operator see it; a tenant at the API does not.

The estimate is the plug-in one. It is positive by chance, so it is given with its 95 % quantile under shuffled amounts
(`chance`). A channel exists where the estimate is above that quantile. 0 bits means that every trial looked the same.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Hashable, Sequence
from math import log2
from random import Random
from typing import NamedTuple

from kvcustody.governance.admission_outcome import Admission
from standins.redteam.two_worlds import BLOCK, World, strict, table, tokens

BLOCKS = 256
AMOUNTS = 8
SET_BLOCKS = 4
WAYS = ("hits", "room", "charge", "numbers")


class Channel(NamedTuple):
    """One way of looking, in one setting: bits of an amount that one trial tells, and what chance alone would give."""

    bits: float
    chance: float

    @property
    def is_open(self) -> bool:
        """Whether more is told than chance alone would."""
        return self.bits > self.chance


class Setting(NamedTuple):
    """A deployment, and how much of the pool each of the two takes (shares of all blocks)."""

    build: Callable[[], World]
    attacker: float
    victim: float


_SHARED = """\
  victim:   {quota: {guaranteed: 50%, cap: 100%, borrow: true}}
  attacker: {quota: {guaranteed: 25%, cap: 100%, borrow: true}}"""


def _shared() -> World:
    return World(table(tenants=_SHARED), blocks=BLOCKS, shows_blocks=True)


def _strict() -> World:
    return World(strict(), blocks=BLOCKS, shows_blocks=True, options={"reserve_low": 8, "reserve_high": 16})


SETTINGS = {
    "shared, the attacker borrows": Setting(_shared, 0.75, 0.5),
    "shared, within guarantees": Setting(_shared, 0.22, 0.5),
    "shared, the victim borrows": Setting(_shared, 0.22, 0.75),
    "strict": Setting(_strict, 0.45, 0.45),
}


def trial(setting: Setting, amount: int, seed: int, running: bool) -> dict[str, Hashable]:
    """What the attacker sees in each way when the victim holds `amount`/7 of its share, cached or `running`."""
    world, random, own = setting.build(), Random(seed), Random(1)
    primed = [tokens(own, SET_BLOCKS * BLOCK + 1) for _ in range(int(setting.attacker * BLOCKS) // (SET_BLOCKS + 1))]
    for prompt in primed:
        world.ask("attacker", prompt)
    world.step()
    wanted = int(setting.victim * BLOCKS * amount / (AMOUNTS - 1)) // SET_BLOCKS
    for _ in range(wanted):
        answer = world.admit("victim", tokens(random, SET_BLOCKS * BLOCK))
        if isinstance(answer, Admission) and not running:
            world.finish(answer, SET_BLOCKS * BLOCK)
    world.step()
    world.observe_standing("attacker")
    charge = repr(world.seen)
    hits = sum(world.hit("attacker", prompt) > 0 for prompt in reversed(primed))
    first = world.admit("attacker", tokens(own, BLOCK))
    number = int(first.blocks[0]) if isinstance(first, Admission) else -1
    if isinstance(first, Admission):
        world.governor.release(first.request_id)
    room = 0
    for sixteenths in range(1, 17):
        answer = world.admit("attacker", tokens(own, BLOCKS * BLOCK * sixteenths // 16))
        if not isinstance(answer, Admission):
            break
        room = sixteenths
        world.governor.release(answer.request_id)
    return {"hits": hits, "room": room, "charge": charge, "numbers": number}


def mutual_information(amounts: Sequence[Hashable], symbols: Sequence[Hashable]) -> float:
    """Plug-in mutual information of two sequences of equal length, in bits."""
    count = len(amounts)
    left, right = Counter(amounts), Counter(symbols)
    both = Counter(zip(amounts, symbols, strict=True))
    return sum(n / count * log2(n * count / (left[amount] * right[symbol])) for (amount, symbol), n in both.items())


def measure(setting: Setting, trials: int, *, running: bool, shuffles: int = 200) -> dict[str, Channel]:
    """Each way's channel over `trials` trials, amounts drawn at random and each with other prompts of the victim."""
    random = Random(7)
    amounts = [random.randrange(AMOUNTS) for _ in range(trials)]
    seen = [trial(setting, amount, 1000 + at, running) for at, amount in enumerate(amounts)]
    channels: dict[str, Channel] = {}
    for way in WAYS:
        symbols = [view[way] for view in seen]
        by_chance = []
        for _ in range(shuffles):
            shuffled = amounts[:]
            random.shuffle(shuffled)
            by_chance.append(mutual_information(shuffled, symbols))
        chance = sorted(by_chance)[int(0.95 * shuffles)]
        channels[way] = Channel(mutual_information(amounts, symbols), chance)
    return channels
