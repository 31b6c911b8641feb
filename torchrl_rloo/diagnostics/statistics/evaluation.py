r"""Estimates from ``n`` samples per prompt: pass@k, maj@k, and intervals of their means over the prompts.

Estimates are exact expectations over the subsets of ``k`` of the ``n`` samples, so they add no noise.
"""

from __future__ import annotations

import math
from collections import Counter
from collections.abc import Hashable, Sequence
from statistics import NormalDist
from typing import NamedTuple

import torch

from torchrl_rloo.functional.statistics import wilson_interval

CONFIDENCE_LEVEL = 0.95  # default confidence level of all intervals


class Interval(NamedTuple):
    """Mean with the bounds of its confidence interval, NaN if there are too few values."""

    mean: float
    low: float
    high: float


def pass_at_k(correct: torch.Tensor, total: torch.Tensor | int, k: int) -> torch.Tensor:
    r"""Return the unbiased estimate of pass@k (Chen et al. 2021, arXiv 2107.03374, eq. 1).

    It computes :math:`1 - \binom{n-c}{k} / \binom{n}{k}`, the probability that one of ``k`` samples is correct, as a
    product that neither overflows nor cancels.

    Args:
        correct: ``[P]``, number :math:`c` of correct samples per prompt.
        total: number :math:`n` of samples per prompt, ``[P]`` or one number; at least ``k``.
        k: number of samples per subset, at least 1.

    Returns:
        ``[P]``, float64.

    Raises:
        ValueError: if ``k`` is not in ``1..n``, or ``correct`` not in ``0..n``.

    Example:
        >>> pass_at_k(torch.tensor([0, 1, 4]), 4, 2).tolist()
        [0.0, 0.5, 1.0]
    """
    total = torch.as_tensor(total)
    _check_k(k, int(total.min()))
    if bool((correct < 0).any()) or bool((correct > total).any()):
        raise ValueError(f"correct={correct.tolist()} must be between 0 and total={total.tolist()}")
    return 1.0 - _subset_probability(total - correct, total, k)


def best_at_k(scores: torch.Tensor, k: int) -> torch.Tensor:
    r"""Return the expected best score of ``k`` of a prompt's ``n`` samples.

    It computes :math:`\sum_i s_{(i)} [F(i) - F(i-1)]` with :math:`F(i) = \binom{i}{k} / \binom{n}{k}`, the
    probability that all ``k`` are among the ``i`` lowest. With scores 0 and 1 it equals :func:`pass_at_k`.

    Args:
        scores: ``[P, n]``, finite numbers.
        k: number of samples per subset, between 1 and ``n``.

    Returns:
        ``[P]``, float64.

    Raises:
        ValueError: if ``k`` is not in ``1..n``.

    Example:
        >>> best_at_k(torch.tensor([[0.0, 1.0], [0.5, 0.25]]), 2).tolist()
        [1.0, 0.5]
    """
    n = scores.shape[-1]
    _check_k(k, n)
    among_lowest = _subset_probability(torch.arange(n + 1), torch.tensor(n), k)
    return scores.double().sort(-1).values @ among_lowest.diff()


def maj_at_k(answers: Sequence[Hashable | None], scores: Sequence[float], k: int) -> float:
    r"""Return the expected score of the majority answer of ``k`` of a prompt's ``n`` samples.

    It is the exact mean over all subsets of ``k`` samples and over fair draws among tied answers. Samples without an
    answer do not vote, and a subset without votes scores 0. An answer scores the mean of its samples.

    Args:
        answers: ``n`` answers, None for no answer.
        scores: ``n`` scores of the samples.
        k: number of samples per subset, between 1 and ``n``.

    Returns:
        The expected score of one prompt.

    Raises:
        ValueError: if ``k`` is not in ``1..n``, or the lengths differ.

    Example:
        >>> maj_at_k(["7", "7", "8"], [1.0, 1.0, 0.0], 3)
        1.0
        >>> maj_at_k(["7", "8", None], [1.0, 0.0, 0.0], 3)
        0.5
    """
    n = len(answers)
    if len(scores) != n:
        raise ValueError(f"answers and scores must have equal lengths, got {n} and {len(scores)}")
    _check_k(k, n)
    earned: dict[Hashable, list[float]] = {}
    for answer, score in zip(answers, scores, strict=True):
        if answer is not None:
            earned.setdefault(answer, []).append(float(score))
    counts = [len(values) for values in earned.values()]
    wins = {count: _win_probability(counts, count, n, k) for count in set(counts)}
    return math.fsum(wins[len(values)] * math.fsum(values) / len(values) for values in earned.values())


def mean_interval(values: torch.Tensor, *, draws: float = 1.0, level: float = CONFIDENCE_LEVEL) -> Interval:
    r"""Return the mean over prompts, which are the independent units, with a confidence interval.

    Values in ``[0, 1]`` have Wilson's score interval (1927), which stays within the range. Its width is positive even
    if all values are 0 or all are 1 (0 of 20 gives 0 to 0.16). Values that are not all 0 or 1 use their effective
    number of Bernoulli trials, :math:`\mu (1-\mu) P / s^2`, and a Student quantile (Korn and Graubard 1998). On hard or
    easy tasks this interval keeps its coverage, where t and bootstrap intervals fall far below the level. Other values
    have a t interval, or NaN as bounds if they are equal: equal values do not show how much they vary.

    Args:
        values: ``[P]``, one value per prompt.
        draws: independent samples behind each value. ``draws * P`` bounds the effective number of trials, which is
            infinite if all values are equal.
        level: confidence level.

    Returns:
        The mean with its bounds, which are NaN for a single value that is not 0 or 1.

    Raises:
        ValueError: if there are no values, or a value is not finite.

    Example:
        >>> interval = mean_interval(torch.zeros(20))
        >>> interval.low, round(interval.high, 3)
        (0.0, 0.161)
    """
    values, n = round_values(values), len(values)
    if not n:
        raise ValueError("values is empty; an interval requires at least one prompt")
    mean, variance = float(values.mean()), float(values.var()) if n > 1 else 0.0
    z = NormalDist().inv_cdf(0.5 + level / 2)
    if is_binary(values):
        return _wilson(mean, n, z)
    if n == 1:
        return Interval(mean, math.nan, math.nan)
    # Values outside of [0, 1] have no binomial model: use a t interval
    t = student_quantile(0.5 + level / 2, n - 1)
    if not is_share(values):
        half = math.nan if is_constant(values) else t * math.sqrt(variance / n)
        return Interval(mean, mean - half, mean + half)
    # Wilson's interval at the number of Bernoulli trials that have the observed variance
    limit = max(draws, 1.0) * n
    trials = min(limit, mean * (1 - mean) * n / variance) if variance > 0 else limit
    return _wilson(mean, trials * (z / t) ** 2, z)


def round_values(values: torch.Tensor) -> torch.Tensor:
    """Convert values to float64, rounded to 12 decimals to remove the rounding errors of sums.

    Raises:
        ValueError: if a value is not finite.
    """
    if not bool(values.isfinite().all()):
        raise ValueError(f"values={values.tolist()!r:.200} must be finite; remove prompts without a score")
    return values.double().round(decimals=12)


def is_constant(values: torch.Tensor) -> bool:
    """Return whether all values are equal."""
    return bool((values == values[0]).all())


def is_share(values: torch.Tensor) -> bool:
    """Return whether all values are in [0, 1]."""
    return bool(((values >= 0) & (values <= 1)).all())


def is_binary(values: torch.Tensor) -> bool:
    """Return whether all values are 0 or 1."""
    return bool(((values == 0) | (values == 1)).all())


def student_quantile(p: float, df: int) -> float:
    """Return the quantile of Student's t distribution with ``df`` degrees of freedom.

    It inverts the finite series of Abramowitz and Stegun 26.7.3-4 by bisection.

    Args:
        p: probability, from 0.5 to 1.
        df: degrees of freedom, at least 1. Above 5000 it returns the normal quantile.

    Example:
        >>> round(student_quantile(0.975, 9), 4)
        2.2622
    """
    if df > 5000:  # differs from the normal quantile by less than 0.02 %
        return NormalDist().inv_cdf(p)
    low, high = 0.0, 1.0
    while _student_cdf(high, df) < p:
        high *= 2
    for _ in range(60):
        middle = (low + high) / 2
        low, high = (middle, high) if _student_cdf(middle, df) < p else (low, middle)
    return (low + high) / 2


def _student_cdf(t: float, df: int) -> float:
    angle = math.atan(t / math.sqrt(df))
    odd = df % 2
    steps = torch.tensor(range(2 if odd else 1, df - 1, 2), dtype=torch.float64)
    terms = torch.cat([torch.ones(1).double(), (steps / (steps + 1) * math.cos(angle) ** 2).cumprod(0)])
    series = math.sin(angle) * float(terms.sum())
    if not odd:
        return 0.5 + series / 2
    return 0.5 + (angle + (series * math.cos(angle) if df > 1 else 0.0)) / math.pi


def _wilson(mean: float, n: float, z: float) -> Interval:
    low, high = map(float, wilson_interval(torch.tensor(mean).double(), torch.tensor(n).double(), z))
    # Remove the rounding error of bounds that are 0 or 1 exactly
    return Interval(mean, 0.0 if mean == 0 else low, 1.0 if mean == 1 else high)


def _check_k(k: int, n: int) -> None:
    if not 1 <= k <= n:
        raise ValueError(f"k={k} must be between 1 and the {n} samples of a prompt; lower k or sample more")


def _subset_probability(part: torch.Tensor, total: torch.Tensor, k: int) -> torch.Tensor:
    r"""Return the probability that ``k`` of ``total`` are all among ``part``, :math:`\prod_{j<k} (m-j) / (n-j)`."""
    taken = torch.arange(k, dtype=torch.float64)
    return ((part[..., None] - taken).clamp(min=0.0) / (total[..., None] - taken)).prod(-1)


def _win_probability(counts: Sequence[int], own: int, n: int, k: int) -> float:
    """Return the probability that an answer of ``own`` of the ``n`` samples wins the vote of ``k`` of them.

    Draw each sample independently with probability ``k/n``: given ``k`` draws in total, all subsets of ``k`` are
    equally likely, and independent probabilities multiply. ``ways[t, r, v]`` is the probability that the other answers
    have ``v`` votes in total, ``r`` of them exactly ``t`` and none more.
    """
    if k == n:
        return (own == max(counts)) / counts.count(own)
    # Start with the samples without an answer, which do not vote, and the answers of the most frequent count
    others = Counter(counts) - Counter([own])
    most, ties = min(own, k), min(sum(others.values()), k)
    silent = torch.tensor(_binomial_probabilities(n - sum(counts), n, k), dtype=torch.float64)
    count, number = others.most_common(1)[0] if others else (0, 0)
    del others[count]
    ways = torch.zeros(most + 1, ties + 1, k + 1, dtype=torch.float64)
    chances = _binomial_probabilities(count, n, k)
    for votes in range(most + 1):
        _set_ways(ways[votes], silent, chances[:votes], chances[votes], number)
    # Add the votes of the other answers, one answer at a time
    for count in others.elements():
        ways, before = torch.zeros_like(ways), ways
        for votes, chance in enumerate(_binomial_probabilities(count, n, k)):
            if chance == 0 or votes > most:
                continue  # this answer cannot win against more votes than it can have
            ways[votes + 1 :, :, votes:] += chance * before[votes + 1 :, :, : k + 1 - votes]
            ways[votes, 1:, votes:] += chance * before[votes, :-1, : k + 1 - votes]
    # Win with more votes than all others, or by a fair draw among the tied answers
    share = 1.0 / torch.arange(1, ties + 2, dtype=torch.float64)
    own_votes = _binomial_probabilities(own, n, k)
    won = math.fsum(own_votes[t] * float(ways[t, :, k - t] @ share) for t in range(1, most + 1))
    return won / _binomial_probabilities(n, n, k)[k]


def _set_ways(ways: torch.Tensor, start: torch.Tensor, fewer: Sequence[float], equal: float, number: int) -> None:
    """Set ``ways[r, v]`` for ``number`` answers alike, by the binomial theorem.

    Args:
        ways: ``[ties + 1, k + 1]``, zeros.
        start: ``[k + 1]``, probabilities of the votes so far.
        fewer: probabilities that an answer has 0, 1, ... votes, up to one less than the tie.
        equal: probability of a tie.
        number: number of answers.
    """
    below, votes, power = math.fsum(fewer), len(fewer), start
    for r in range(number, -1, -1):  # of which the others have fewer votes: `power` has their sum
        if r < len(ways) and r * votes < len(start):
            weight = _log_choose(number, r) + _log_power(equal, r) + _log_power(below, number - r)
            ways[r, r * votes :] = math.exp(weight) * power[: len(start) - r * votes]
        if below == 0:
            return
        before, power = power, torch.zeros_like(power)
        for v, chance in enumerate(fewer):
            power[v:] += chance / below * before[: len(start) - v]


def _log_power(base: float, exponent: int) -> float:
    return 0.0 if exponent == 0 else exponent * math.log(base) if base > 0 else -math.inf


def _binomial_probabilities(count: int, n: int, k: int) -> list[float]:
    """Return the probabilities that 0 to ``k`` of ``count`` samples are drawn, each with probability ``k/n``."""
    p = k / n
    chances = [
        math.exp(_log_choose(count, v) + v * math.log(p) + (count - v) * math.log1p(-p)) if p < 1 else float(v == count)
        for v in range(min(count, k) + 1)
    ]
    return chances + [0.0] * (k + 1 - len(chances))


def _log_choose(n: int, k: int) -> float:
    return math.lgamma(n + 1) - math.lgamma(k + 1) - math.lgamma(n - k + 1)
