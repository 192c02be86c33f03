"""The fit of what prefills take: of all fits without negative terms, none is better, and what was so is found again."""

from __future__ import annotations

from itertools import combinations

import numpy as np
import pytest

from kvcustody.governance.observability.prefill_cost import LEARNED_MIN, PrefillCost, pairs

PREFILLS = 60
TERMS = [terms for many in (1, 2, 3) for terms in combinations(range(3), many)]


def drawn(seed: int) -> tuple[np.ndarray, np.ndarray, np.ndarray]:
    """Tokens computed, tokens before them, and times that follow one of several laws, or none."""
    random = np.random.default_rng(seed)
    computed = random.integers(1, 2000, PREFILLS).astype(float)
    before = random.integers(0, 2000, PREFILLS).astype(float)
    law = random.normal(size=3) * (1.0, 1e-3, 1e-6)
    noise = np.abs(random.normal(size=PREFILLS)) * random.choice([1e-3, 1.0])
    return computed, before, noise + law[0] + law[1] * computed + law[2] * pairs(computed, before)


def squares(work: np.ndarray, seconds: np.ndarray, coefficients: np.ndarray) -> float:
    """What a fit leaves."""
    return float(((work @ coefficients - seconds) ** 2).sum())


@pytest.mark.parametrize("seed", range(200))
def test_no_fit_without_negative_terms_is_better(seed: int) -> None:
    computed, before, seconds = drawn(seed)
    cost = PrefillCost()
    cost.learn(computed, before, seconds)
    cost.solve()
    work = np.stack((np.ones(PREFILLS), computed, pairs(computed, before)), axis=1)
    assert (cost.coefficients >= 0).all()
    least = float((seconds**2).sum())
    for terms in TERMS:
        part = np.linalg.lstsq(work[:, terms], seconds, rcond=None)[0]
        if (part >= 0).all():
            least = min(least, squares(work[:, terms], seconds, part))
    assert squares(work, seconds, cost.coefficients) <= least * (1 + 1e-6)


def test_a_law_is_found_again() -> None:
    computed, before, _ = drawn(1)
    law = np.array((0.02, 3e-4, 4e-8))
    cost = PrefillCost()
    cost.learn(computed, before, law[0] + law[1] * computed + law[2] * pairs(computed, before))
    cost.solve()
    assert cost.coefficients == pytest.approx(law, rel=1e-6)
    assert cost.seconds_of(700, 300) == pytest.approx(law @ (1, 700, 700 * 300 + 700 * 700 / 2))


def test_prefills_of_one_length_are_told_from_nothing_else() -> None:
    """Their terms cannot be told apart: what such a prefill takes is known all the same."""
    cost = PrefillCost()
    cost.learn(np.full(LEARNED_MIN, 512.0), np.zeros(LEARNED_MIN), np.full(LEARNED_MIN, 0.25))
    assert cost.seconds(np.array([512.0]), np.zeros(1)) == pytest.approx(0.25), "by whichever term"


def test_nothing_is_predicted_before_enough_is_known() -> None:
    cost = PrefillCost()
    cost.learn(np.full(LEARNED_MIN - 1, 512.0), np.zeros(LEARNED_MIN - 1), np.ones(LEARNED_MIN - 1))
    assert not cost.is_known
    assert cost.seconds_of(512, 0) == 0
