"""A1-A3: what an attacker learns about a victim's prompts from order, cost and metadata.

The attacker is another tenant, or another subject of the victim's own tenant (the default private scope). Two kinds of
control: one domain for everybody ("no salt"), and a counter that is not kept per tenant.
"""

from __future__ import annotations

import time
from random import Random
from typing import Any

import numpy as np
import pytest
from msgspec.structs import asdict
from numpy.typing import NDArray

from kvcustody.audit.kinds.block_runs import FlatRuns
from kvcustody.governance.admission_outcome import Admission
from standins.redteam.two_worlds import AUC_GATE, BLOCK, World, auc, compare, everyone, strict, table, tokens

pytestmark = pytest.mark.system

# victim, attacker: (tenant, subject)
PAIRS = {
    "other tenant": (("victim", None), ("attacker", None)),
    "other subject": (("victim", "alice"), ("victim", "mallory")),
}
PAIR = pytest.mark.parametrize("pair", PAIRS.values(), ids=PAIRS)


def _build(pair: Any, **sizes: Any) -> World:
    return World(table(scope="subject" if pair[0][1] else "tenant"), **sizes)


# -- A1 -------------------------------------------------------------------------------------------------------


def _longest_prefix_first(world: World, who: Any, batch: list[Any]) -> list[int]:
    """A scheduler that serves a batch longest cached prefix first; returns the order, which is all it shows."""
    tenant, subject = who
    answers = [world.admit(tenant, prompt, subject=subject) for prompt in batch]
    assert all(isinstance(answer, Admission) for answer in answers)
    order = sorted(range(len(batch)), key=lambda at: -answers[at].hit_tokens)
    for at in order:
        world.finish(answers[at], len(batch[at]))
    return order


def _confirm_by_order(world: World, pair: Any, length: int, candidates: int) -> tuple[int, int]:
    """Rounds in which the right token was confirmed, and oracle positives, over the positions of a victim's prompt.

    Blocks are one token, the attacker's best case, and at each position it is even given the true prefix.
    """
    random = Random(11)
    secret = tokens(random, length).tolist()
    (tenant, subject), attacker = pair
    world.hit(tenant, [*secret, 1], subject=subject)
    confirmed = positives = 0
    for at in range(length):
        guesses = [*random.sample(range(40_000, 70_000), candidates - 1), secret[at]]
        random.shuffle(guesses)
        batch = [[*secret[:at], token, 2] for token in (90_000 + 2 * at, *guesses, 90_001 + 2 * at)]
        order = _longest_prefix_first(world, attacker, batch)
        ahead = order[: order.index(0)]  # what completed before the first dummy
        positives += len(ahead)
        confirmed += len(ahead) == 1 and guesses[ahead[0] - 1] == secret[at]
        world.step()
    return confirmed, positives


def _order_world(pair: Any) -> World:
    return _build(pair, blocks=60_000, block_tokens=1)


@PAIR
def test_completion_order_confirms_no_token(pair: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    """A1, small: 24 positions of 10 candidates."""
    assert _confirm_by_order(_order_world(pair), pair, 24, 10) == (0, 0)
    control = _order_world(pair)
    everyone(control, monkeypatch)
    confirmed, _ = _confirm_by_order(control, pair, 24, 10)
    assert confirmed >= 0.9 * 24, "void: without scopes the order must give the prompt away"


@pytest.mark.soak
@PAIR
def test_completion_order_at_full_size(pair: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    """A1, full: 256 positions of 100 candidates, 25,600 probes."""
    assert _confirm_by_order(_order_world(pair), pair, 256, 100) == (0, 0)
    control = _order_world(pair)
    everyone(control, monkeypatch)
    confirmed, _ = _confirm_by_order(control, pair, 256, 100)
    assert confirmed >= 230, "void: without scopes the order must give the prompt away"


# -- A2 -------------------------------------------------------------------------------------------------------

LENGTHS = (1, 8, 16, 64, 256)


def _costs(world: World, pair: Any, length: int, count: int, measure: Any) -> tuple[list[float], list[float]]:
    """The attacker's cost for prefixes that the victim did not send, and for ones it did, in random order."""
    random = Random(length)
    (tenant, subject), (other, mallory) = pair
    costs: tuple[list[float], list[float]] = ([], [])
    for at in range(2 * count):
        sent = random.random() < 0.5
        prefix, decoy = tokens(random, length), tokens(random, length)
        world.hit(tenant, np.append(prefix if sent else decoy, 1), subject=subject)  # as much work in both classes
        costs[sent].append(measure(world, other, np.append(prefix, 2), mallory))
        if at % 64 == 0:
            world.step()
    return costs


def _virtual(world: World, tenant: str, prompt: NDArray[np.int32], subject: str | None) -> float:
    return len(prompt) - world.hit(tenant, prompt, subject=subject)


@PAIR
@pytest.mark.parametrize("length", LENGTHS)
def test_cost_tells_nothing(pair: Any, length: int, monkeypatch: pytest.MonkeyPatch) -> None:
    """A2, small: 100 per class and length, on the virtual clock."""
    assert auc(*_costs(_build(pair), pair, length, 100, _virtual)) <= AUC_GATE
    control = _build(pair)
    everyone(control, monkeypatch)
    area = auc(*_costs(control, pair, length, 100, _virtual))
    assert area >= 0.99 if length >= BLOCK else area == 0.5, "void: without scopes a full block must show"


@pytest.mark.soak
@PAIR
@pytest.mark.parametrize("length", LENGTHS)
def test_cost_at_full_size(pair: Any, length: int, monkeypatch: pytest.MonkeyPatch) -> None:
    """A2, full: 2,000 per class and length, on the virtual clock."""
    assert auc(*_costs(_build(pair), pair, length, 2000, _virtual)) <= AUC_GATE
    control = _build(pair)
    everyone(control, monkeypatch)
    area = auc(*_costs(control, pair, length, 2000, _virtual))
    assert area >= 0.99 if length >= BLOCK else area == 0.5, "void: without scopes a full block must show"


def _wall(world: World, tenant: str, prompt: NDArray[np.int32], subject: str | None) -> float:
    began = time.perf_counter_ns()
    answer = world.admit(tenant, prompt, subject=subject)
    took = time.perf_counter_ns() - began
    world.governor.abort(answer.request_id)
    return took


@pytest.mark.soak
@pytest.mark.parametrize("length", LENGTHS)
def test_admission_time_tells_nothing(length: int, monkeypatch: pytest.MonkeyPatch) -> None:
    """A2, the wall clock's part that is ours: the time of the admission call itself, in three verdicts."""
    pair = PAIRS["other tenant"]
    zeros, ones = _costs(_build(pair), pair, length, 4000, _wall)
    area = auc(zeros, ones)
    if area > AUC_GATE:
        half = len(zeros) // 2
        drift = auc(zeros[:half], zeros[half:])
        if drift > AUC_GATE:
            pytest.skip(f"inconclusive: A = {area:.3f}, and one class drifts by {drift:.3f} against itself")
        # A channel repeats; noise does not.
        area = auc(*_costs(_build(pair), pair, length, 4000, _wall))
    assert area <= AUC_GATE
    control = _build(pair)
    everyone(control, monkeypatch)
    if (
        length == 256
    ):  # shorter hits cost the admission call about as much as misses; their prefill is A2's virtual cost
        assert auc(*_costs(control, pair, length, 1000, _wall)) >= 0.75, "void: a hit must be faster to admit"


# -- A3 -------------------------------------------------------------------------------------------------------


def _victim_asks(world: World, random: Random, at: int) -> None:
    """The same prompts as the attacker's, and others, in all the ways a request may go."""
    shared = Random(at // 4)
    prompt = tokens(shared, 70)
    which = random.randrange(4)
    if which == 0:
        world.ask("victim", prompt, decode=random.randrange(20))
    elif which == 1:
        world.governor.abort(world.admit("victim", prompt).request_id)
    elif which == 2:
        world.ask("victim", tokens(random, 200), salt="s", classification="high")
    else:
        world.ask("victim", prompt, classification="sealed")


def _attacker_asks(world: World, random: Random, at: int) -> None:
    prompt = tokens(Random(at // 4), 70)
    world.probe("attacker", prompt[: random.choice((10, 33, 70))], decode=random.randrange(18))
    if at % 5 == 0:
        world.probe("attacker", prompt, classification="sealed")
        world.probe("attacker", prompt, salt="s")
        world.probe("attacker", [])
        world.probe("nobody", prompt)


def _metadata(rounds: int, runs: int, build: Any) -> float:
    compared = [compare(build, _attacker_asks, _victim_asks, rounds, seed=seed) for seed in range(runs)]
    first = next((c.first for c in compared if c.first is not None), None)
    assert first is None or first[1:], first
    return sum(c.different > 0 for c in compared) / runs


def _shared() -> World:
    return World(table())


def _strict() -> World:
    return World(strict(), shows_blocks=True)


class _OneTally(dict[str, Any]):
    """Counters that are not kept per tenant."""

    def get(self, key: Any, default: Any = None) -> Any:
        return super().get("all", default)

    def __setitem__(self, key: Any, value: Any) -> None:
        super().__setitem__("all", value)


def _unscoped_counter() -> World:
    world = World(table())
    world.governor.tenant_counters = _OneTally()
    stats = world.governor.stats
    world.governor.stats = lambda: stats()._replace(tenants=world.governor.tenant_counters)  # type: ignore[method-assign]
    return world


@pytest.mark.parametrize("build", [_shared, _strict])
def test_metadata_is_the_same_in_both_worlds(build: Any) -> None:
    """A3, small: 60 paired runs of 12 rounds, answers, ids, counters and charges byte for byte."""
    assert _metadata(12, 60, build) == 0
    assert _metadata(12, 60, _unscoped_counter) >= 0.99, "void: a counter for all must show the victim"


@pytest.mark.soak
@pytest.mark.parametrize("build", [_shared, _strict])
def test_metadata_at_full_size(build: Any) -> None:
    """A3, full: 10^4 paired runs."""
    assert _metadata(12, 10_000, build) == 0
    assert _metadata(12, 1000, _unscoped_counter) >= 0.99, "void: a counter for all must show the victim"


# What a tenant's own log shows of the pool as a whole: numbers of every tenant's work (docs/build/threat-model.md).
POOL_WIDE = {"residency", "launch", "domains", "attached", "written", "runs"}


def _own_log(world: World) -> list[tuple[str, dict[str, object]]]:
    own = [event for event in world.ledger.events if getattr(event, "tenant", None) == "attacker"]  # type: ignore[union-attr]
    return [(type(event).__name__, asdict(event)) for event in own]


def test_own_log_differs_in_pool_wide_numbers_and_in_nothing_else() -> None:
    """A3 on the ledger: a tenant's own events, in strict. Which fields tell of others is pinned here."""

    def run(active: bool) -> list[tuple[str, dict[str, object]]]:
        world = World(strict(), keep_events=True)
        attacker, victim = Random(5), Random(6)
        for at in range(40):
            if active:
                _victim_asks(world, victim, at)
            _attacker_asks(world, attacker, at)
            world.step()
        return _own_log(world)

    quiet, busy = run(False), run(True)
    assert [kind for kind, _ in quiet] == [kind for kind, _ in busy]
    differing = set()
    for (_, a), (_, b) in zip(quiet, busy, strict=True):
        differing |= {name for name in a if repr(_plain(a[name])) != repr(_plain(b[name]))}
    assert differing <= POOL_WIDE, differing
    assert "residency" in differing, "void: the harness must see the counters that are known to differ"


def _plain(value: object) -> object:
    if not isinstance(value, FlatRuns):
        return value
    blocks, generations, _ = value.arrays()
    return blocks.tolist(), generations.tolist()
