r"""Paired tests of two policies on the same prompts.

The prompts are the independent units. Each policy has one value per prompt: a score, pass@k, ...
"""

from __future__ import annotations

import math
from statistics import NormalDist
from typing import NamedTuple

import torch

from torchrl_rloo.diagnostics.statistics.evaluation import (
    CONFIDENCE_LEVEL,
    is_binary,
    is_constant,
    is_share,
    round_values,
    student_quantile,
)

_ENUMERATED = 16  # largest number of differing prompts whose sign patterns are all enumerated
_DRAWN = 100_000  # sign patterns drawn for more prompts
_TOLERANCE = 1e-9  # relative rounding error of sums of signed differences


class PairedTest(NamedTuple):
    """Result of :func:`paired_test` on ``second - first``.

    Attributes:
        difference: mean difference over the prompts.
        low: lower bound of its confidence interval; NaN where the values give none.
        high: upper bound of its confidence interval; NaN where the values give none.
        p_value: two-sided p-value of the hypothesis that the policies do not differ.
        p_error: standard error of ``p_value`` from the draw of sign patterns; 0 if it is exact.
        better: number of prompts on which the second has the higher value.
        worse: number of prompts on which the second has the lower value.
    """

    difference: float
    low: float
    high: float
    p_value: float
    p_error: float
    better: int
    worse: int


def paired_test(
    first: torch.Tensor, second: torch.Tensor, *, level: float = CONFIDENCE_LEVEL, seed: int = 0
) -> PairedTest:
    """Compare two policies' values on the same prompts.

    If all values are 0 or 1, it uses McNemar's exact test and :func:`paired_binary_interval`. Otherwise it uses
    :func:`sign_flip_test`, which equals McNemar's test on binary values, and a t interval. Equal differences have no
    t interval, as they do not show how much they vary. Of at least two values in ``[0, 1]`` they have
    :func:`paired_binary_interval` of the same mean; of other values their bounds are NaN.

    Args:
        first: ``[P]``, values of the first policy, for at least one prompt.
        second: ``[P]``, values of the second policy for the same prompts, in the same order.
        level: confidence level.
        seed: seed of the sign patterns, if they are too many to enumerate.

    Returns:
        The mean difference with its interval, p-value and counts.

    Raises:
        ValueError: if the shapes differ, there is no prompt, or a value is not finite.

    Example:
        >>> test = paired_test(torch.tensor([0, 0, 0, 0, 0, 1.0]), torch.ones(6))
        >>> test.better, test.worse, test.p_value
        (5, 0, 0.0625)
    """
    if first.shape != second.shape or first.ndim != 1 or not len(first):
        raise ValueError(
            f"first and second must have equal shapes [P], P at least 1, got {list(first.shape)} and "
            f"{list(second.shape)}"
        )
    first, second = round_values(first), round_values(second)
    difference = round_values(second - first)
    better, worse = int((difference > 0).sum()), int((difference < 0).sum())
    if is_binary(first) and is_binary(second):
        low, high = paired_binary_interval(better, worse, len(difference), level)
        p_value, p_error = mcnemar_test(better, worse), 0.0
    else:
        low, high = _mean_difference_interval(difference, is_share(first) and is_share(second), level)
        p_value, p_error = sign_flip_test(difference, seed=seed)
    return PairedTest(float(difference.mean()), low, high, p_value, p_error, better, worse)


def mcnemar_test(better: int, worse: int) -> float:
    r"""Return the exact two-sided p-value of McNemar's test.

    The p-value is :math:`\min(1, 2 P(X \le \min(b, w)))` with :math:`X` binomial of :math:`b + w` fair draws.

    Args:
        better: :math:`b`, number of prompts that only the second policy solves.
        worse: :math:`w`, number of prompts that only the first policy solves.

    Example:
        >>> mcnemar_test(5, 0), mcnemar_test(3, 3)
        (0.0625, 1.0)
    """
    n = better + worse
    tail = sum(math.comb(n, i) for i in range(min(better, worse) + 1))
    return min(1.0, 2 * tail / 2**n)  # integers, so exact for any n


def sign_flip_test(difference: torch.Tensor, *, seed: int = 0) -> tuple[float, float]:
    """Return the two-sided p-value of a mean difference under random signs of the prompts' differences.

    It enumerates all sign patterns of up to 16 nonzero differences. Beyond, it draws 100,000 and adds the observed one.

    Args:
        difference: ``[P]``, difference per prompt.
        seed: seed of the drawn patterns.

    Returns:
        The p-value, and its standard error from the draw of patterns (0 if all are enumerated).

    Example:
        >>> sign_flip_test(torch.tensor([0.5, 0.25, 0.0]))
        (0.5, 0.0)
    """
    size = round_values(difference).abs()
    size = size[size > 0]
    m = len(size)
    if not m:
        return 1.0, 0.0
    # Count sums that equal the observed one up to rounding as equally extreme
    observed = abs(float(difference.double().sum())) - _TOLERANCE * float(size.sum())
    if m <= _ENUMERATED:
        patterns = torch.arange(2**m)[:, None] >> torch.arange(m) & 1
        return float(((2.0 * patterns.double() - 1) @ size).abs().ge(observed).double().mean()), 0.0
    # Draw patterns in chunks of bounded memory
    generator, hits, chunk = torch.Generator().manual_seed(seed), 0, max(1, 2_000_000 // m)
    for start in range(0, _DRAWN, chunk):
        rows = min(chunk, _DRAWN - start)
        signs = torch.randint(2, (rows, m), generator=generator, dtype=torch.int8)
        hits += int(((2.0 * signs.double() - 1) @ size).abs().ge(observed).sum())
    p = (hits + 1) / (_DRAWN + 1)
    return p, math.sqrt(p * (1 - p) / _DRAWN)


def paired_binary_interval(
    better: float, worse: float, total: int, level: float = CONFIDENCE_LEVEL
) -> tuple[float, float]:
    """Return the confidence interval of the difference of two paired shares (Bonett and Price 2012).

    It is a Wald interval after adding one prompt to each kind of change, so its width is positive without changes.

    Args:
        better: number of prompts that only the second policy solves, or the sum of its gains of at most 1.
        worse: number of prompts that only the first policy solves, or the sum of the losses of at most 1.
        total: number of all prompts.
        level: confidence level.

    Returns:
        Lower and upper bound, within [-1, 1].
    """
    up, down = (better + 1) / (total + 2), (worse + 1) / (total + 2)
    z = NormalDist().inv_cdf(0.5 + level / 2)
    half = z * math.sqrt((up + down - (up - down) ** 2) / (total + 2))
    return max(-1.0, up - down - half), min(1.0, up - down + half)


def _mean_difference_interval(difference: torch.Tensor, shares: bool, level: float) -> tuple[float, float]:
    """Return the t interval of the mean, or the binary one of equal differences of shares."""
    n, mean = len(difference), float(difference.mean())
    if n == 1 or (is_constant(difference) and not shares):
        return math.nan, math.nan
    if is_constant(difference):
        total = float(difference.sum())
        return paired_binary_interval(max(total, 0.0), max(-total, 0.0), n, level)
    half = student_quantile(0.5 + level / 2, n - 1) * float(difference.std()) / math.sqrt(n)
    return mean - half, mean + half
