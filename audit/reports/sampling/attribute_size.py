"""The sample size for a stated risk, and the deviation rate implied by a sample's deviations.

Attribute sampling: where the true rate of deviations were `tolerable`, a sample of this size would show `expected` or
fewer with a chance of `risk` at most. The binomial distribution is used, which errs on the safe side for a population
that is not large. Rates are millionths; the arithmetic is decimal, so that every machine gives the same.
"""

from __future__ import annotations

from decimal import Decimal, localcontext

PPM = 1_000_000
RISK_PPM = 50_000  # where none is stated
SAMPLE_SIZE_MAX = 10_000
_DIGITS = 40


def attribute_sample_size(risk_ppm: int, tolerable_ppm: int, expected: int) -> int:
    """Return the smallest sample for a risk, at most `SAMPLE_SIZE_MAX`."""
    low, high = expected + 1, SAMPLE_SIZE_MAX
    while low < high:
        middle = (low + high) // 2
        if chance_of_at_most(expected, middle, tolerable_ppm) * PPM <= risk_ppm:
            high = middle
        else:
            low = middle + 1
    return low


def upper_limit_ppm(deviations: int, size: int, risk_ppm: int) -> int:
    """Return the rate that the population exceeds with probability `risk` at most, given a sample's deviations."""
    if not size or deviations >= size:
        return PPM
    low, high = 0, PPM
    while low < high:
        middle = (low + high) // 2
        if chance_of_at_most(deviations, size, middle) * PPM <= risk_ppm:
            high = middle
        else:
            low = middle + 1
    return low


def chance_of_at_most(deviations: int, size: int, rate_ppm: int) -> Decimal:
    """Return the probability of at most so many deviations among `size`, each with this rate."""
    if deviations >= size or not rate_ppm:
        return Decimal(1)
    if rate_ppm >= PPM:
        return Decimal(0)
    with localcontext() as context:
        context.prec = _DIGITS
        rate = Decimal(rate_ppm) / PPM
        odds = rate / (1 - rate)
        term = total = (1 - rate) ** size
        for number in range(deviations):
            term = term * (size - number) / (number + 1) * odds
            total += term
        return total
