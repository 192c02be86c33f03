"""D1, D5: what occupancy and eviction of one tenant do to another.

In `strict`, nothing: the transcript is the same byte for byte, block numbers included. In `shared`, a tenant within its
guarantee keeps its blocks; that its own borrowing shows another's load is said in docs/build/threat-model.md.
The control is one LRU over one account for everybody.
"""

from __future__ import annotations

from random import Random
from typing import Any

import pytest

from kvcustody.governance.admission_outcome import Admission
from kvcustody.governance.governor.pools import Pools
from standins.redteam.two_worlds import AUC_GATE, BLOCK, World, auc, compare, strict, table, tokens

BLOCKS = 512
HALF = BLOCKS // 2


def _strict() -> World:
    return World(strict(), blocks=BLOCKS, shows_blocks=True, options={"reserve_low": 16, "reserve_high": 32})


def _one_lru(monkeypatch: pytest.MonkeyPatch) -> None:
    """A control: one account, one queue, one quota for all tenants."""
    account_of = Pools.account

    def account(self: Pools, name: str, decisions: Any, leaves: Any = None) -> Any:
        return account_of(self, "victim", decisions)

    monkeypatch.setattr(Pools, "account", account)


def _shared_lru() -> World:
    return World(
        table(
            tenants="\n".join(
                f"  {name}: {{quota: {{guaranteed: 0%, cap: 100%, borrow: true}}}}" for name in ("victim", "attacker")
            )
        ),
        blocks=BLOCKS,
    )


# -- D1 -------------------------------------------------------------------------------------------------------

SETS = 24
SET_BLOCKS = 10


def _prime_and_probe(world: World, random: Random, at: int) -> None:
    """Fill the own quota with marked sets, then see which of them are still there, and try for more than there is."""
    own = [tokens(Random(1000 * (at // 4) + n), SET_BLOCKS * BLOCK + 1) for n in range(SETS)]
    if at % 4 < 2:
        for prompt in own:
            world.probe("attacker", prompt)
    else:
        for prompt in random.sample(own, 8):
            world.probe("attacker", prompt)
    if at % 4 == 3:
        greedy = [world.admit("attacker", tokens(random, 90 * BLOCK), request_id=("big", n)) for n in range(3)]
        for answer in greedy:
            world.observe("attacker", answer, 90 * BLOCK)
            if isinstance(answer, Admission):
                world.governor.release(answer.request_id)


def _work(world: World, random: Random, at: int) -> None:
    """A busy victim: long and short prompts, requests that stay, aborts, decoding, preemption, erasures."""
    governor = world.governor
    for _ in range(random.randrange(1, 8)):
        answer = world.admit("victim", tokens(random, random.randrange(1, 60) * BLOCK))
        if not isinstance(answer, Admission):
            continue
        which = random.randrange(5)
        if which == 0:
            governor.abort(answer.request_id)
        elif which == 1:
            governor.preempt(answer.request_id)
        elif which == 2 and len(governor.running) < 4:
            governor.commit([answer.request_id], [1])
        else:
            governor.commit([answer.request_id], [BLOCK * (len(answer.blocks) - 1)])
            governor.extend_many([answer.request_id], [1])
            governor.release(answer.request_id, "finished")
    if random.random() < 0.2:
        for request_id in [r for r in governor.running if r[0] == "victim"]:  # type: ignore[index]
            governor.release(request_id)


def test_prime_and_probe_sees_nothing_in_strict() -> None:
    """D1, small: 100 rounds of prime, probe and greed against a busy victim."""
    compared = compare(_strict, _prime_and_probe, _work, 100, checked_every=50)
    assert compared.first is None, compared


@pytest.mark.soak
@pytest.mark.parametrize("seed", range(4))
def test_prime_and_probe_at_full_size(seed: int) -> None:
    """D1, full: 4 * 8,000 rounds, about 10^6 requests of the two tenants in the two worlds."""
    compared = compare(_strict, _prime_and_probe, _work, 8_000, seed=seed * 100, checked_every=500)
    assert compared.first is None, compared


def _lost_sets(build: Any, count: int) -> tuple[list[float], list[float]]:
    """Prime, let the victim act or not, probe: sets the attacker lost, by what the victim did."""
    lost: tuple[list[float], list[float]] = ([], [])
    random = Random(21)
    for _ in range(count):
        world = build()
        primed = [tokens(random, SET_BLOCKS * BLOCK + 1) for _ in range(SETS)]
        for prompt in primed:
            world.ask("attacker", prompt)
        active = random.random() < 0.5
        for _ in range(30 if active else 0):
            world.ask("victim", tokens(random, 12 * BLOCK + 1))
        world.step()
        lost[active].append(sum(world.hit("attacker", prompt) == 0 for prompt in primed))
    return lost


def test_prime_and_probe_is_blind_in_strict_and_sees_through_one_lru(monkeypatch: pytest.MonkeyPatch) -> None:
    """D1 as a classifier, small: 60 trials; the shared LRU gives the victim's activity away."""
    assert auc(*_lost_sets(_strict, 60)) <= AUC_GATE
    _one_lru(monkeypatch)
    assert auc(*_lost_sets(_shared_lru, 30)) >= 0.9, "void: one LRU for all must show activity"


@pytest.mark.soak
def test_prime_and_probe_classifier_at_full_size(monkeypatch: pytest.MonkeyPatch) -> None:
    """D1 as a classifier, full: 4,000 trials."""
    assert auc(*_lost_sets(_strict, 4000)) <= AUC_GATE
    _one_lru(monkeypatch)
    assert auc(*_lost_sets(_shared_lru, 1000)) >= 0.9, "void: one LRU for all must show activity"


def _expire_together(world: World, random: Random, at: int) -> None:
    """Many holds of the victim that fall due in the same instants as the attacker's."""
    for n in range(60):
        world.ask("victim", tokens(random, BLOCK + 1), session=f"{at}-{n}")


def _expire_few(world: World, random: Random, at: int) -> None:
    """Three sets that will have expired by the next round: the own charge says whether they were swept."""
    for n in range(3):
        world.probe("attacker", tokens(Random(50 * at + n), SET_BLOCKS * BLOCK + 1))


def _sweep_world() -> World:
    return World(strict(), blocks=BLOCKS, shows_blocks=True, options={"sweep_batch": 8})


def test_anothers_expiries_do_not_delay_ones_own_in_strict() -> None:
    """D1 through the sweep: the bounded sweep of a step must not be used up by another tenant's holds."""
    compared = compare(_sweep_world, _expire_few, _expire_together, 20, step_us=31 * 60_000_000)
    assert compared.first is None, compared


def _check_shared_content(rounds: int) -> None:
    """Shared: content and hits, with room for both, so that nothing is evicted."""

    def build() -> World:
        return World(table(), blocks=65_536)

    def attack(world: World, random: Random, at: int) -> None:
        world.probe("attacker", tokens(Random(at // 2), 3 * BLOCK + 1))

    def victim(world: World, random: Random, at: int) -> None:
        world.ask("victim", tokens(Random(at // 2), random.randrange(1, 4) * BLOCK + 1))

    compared = compare(build, attack, victim, rounds)
    assert compared.first is None, compared


def test_shared_profile_shows_no_content_and_no_hit() -> None:
    """D1's content and hit channel in `shared`, small."""
    _check_shared_content(200)


@pytest.mark.soak
def test_shared_profile_at_full_size() -> None:
    """D1's content and hit channel in `shared`, full: 2 * 10^4 rounds."""
    _check_shared_content(20_000)


# -- D5 -------------------------------------------------------------------------------------------------------

GUARANTEED = """\
  victim:   {quota: {guaranteed: 50%, cap: 50%}}
  attacker: {quota: {guaranteed: 10%, cap: 100%, borrow: true}}"""


def _flooded(build: Any, flood: int) -> tuple[float, int]:
    """The victim's hit rate on its working set, and its deferrals, while the attacker offers `flood` pools' worth."""
    world = build()
    random = Random(5)
    working = [tokens(random, 8 * BLOCK + 1) for _ in range(24)]
    for prompt in working:
        world.ask("victim", prompt)
    per_turn = max(1, flood * BLOCKS // 12 // 240)
    hits = deferred = 0
    for turn in range(240):
        for _ in range(per_turn if flood else 0):
            world.ask("attacker", tokens(random, 12 * BLOCK))
        answer = world.ask("victim", working[turn % 24])
        deferred += not isinstance(answer, Admission)
        hits += isinstance(answer, Admission) and answer.hit_tokens > 0
        world.step()
    assert not world.governor.check()
    return hits / 240, deferred


FLOODED = {
    "strict": _strict,
    "shared": lambda: World(table(tenants=GUARANTEED), blocks=BLOCKS),
}


def _check_flood(build: Any, pools: int, monkeypatch: pytest.MonkeyPatch) -> None:
    calm, flooded = _flooded(build, 0), _flooded(build, pools)
    assert calm[0] - flooded[0] <= 0.01 and calm[1] == flooded[1] == 0, (calm, flooded)
    _one_lru(monkeypatch)
    calm, flooded = _flooded(_shared_lru, 0), _flooded(_shared_lru, max(pools, 100))
    assert calm[0] - flooded[0] >= 0.5, "void: one LRU for all must lose the victim's working set"


@pytest.mark.parametrize("profile", FLOODED)
def test_a_flood_evicts_nobody_within_its_guarantee(profile: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """D5, small: five pools' worth of prompts."""
    _check_flood(FLOODED[profile], 5, monkeypatch)


@pytest.mark.soak
@pytest.mark.parametrize("profile", FLOODED)
def test_eviction_flood_at_full_size(profile: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """D5, full: 2,000 pools' worth, about 10^6 blocks."""
    _check_flood(FLOODED[profile], 2000, monkeypatch)
