r"""Statistics over prompts: pass@k, maj@k, intervals of means, and paired tests of two policies.

Estimates are exact expectations over the subsets of ``k`` of the ``n`` samples, so they add no noise.
"""

from __future__ import annotations

import math
from collections import Counter
from collections.abc import Hashable, Sequence
from statistics import NormalDist
from typing import NamedTuple

import torch

from torchrl_rloo.functional.statistics import Interval, student_quantile, wilson_interval

CONFIDENCE_LEVEL = 0.95  # default confidence level of all intervals
_ENUMERATED = 16  # largest number of differing prompts whose sign patterns are all enumerated
_DRAWN = 100_000  # sign patterns drawn for more prompts
_TOLERANCE = 1e-9  # relative rounding error of sums of signed differences


def pass_at_k(correct: torch.Tensor, total: torch.Tensor | int, k: int) -> torch.Tensor:
    r"""Return the unbiased estimate of pass@k (Chen et al. 2021, arXiv 2107.03374, eq. 1).

    It computes :math:`1 - \binom{n-c}{k} / \binom{n}{k}`, the probability that one of ``k`` samples is correct, as a
    product that neither overflows nor cancels. ``correct`` (:math:`c`) and ``total`` (:math:`n`, also one number) are
    numbers of samples per prompt, ``[P]``; so is the result, in float64.

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
    probability that all ``k`` are among the ``i`` lowest. With scores 0 and 1 it equals :func:`pass_at_k`. Scores are
    ``[P, n]`` and finite, the result is ``[P]`` in float64.

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

    There are ``draws`` independent samples behind each of the ``P`` values. ``draws * P`` bounds the effective number
    of trials, which is infinite if all values are equal.

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
    """Convert values to float64, rounded to 12 decimals to remove the rounding errors of sums."""
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
    """Set ``ways[r, v]``, zeros so far, for ``number`` answers alike, by the binomial theorem.

    ``start`` has the probabilities ``[k + 1]`` of the votes so far, ``fewer`` those that an answer has 0, 1, ... votes,
    up to one less than the tie, and ``equal`` is that of a tie.
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


# Paired tests of two policies on the same prompts, which are the independent units


class PairedTest(NamedTuple):
    """Result of :func:`paired_test` on ``second - first``."""

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
    """Compare two policies' values ``[P]`` on the same prompts, in the same order.

    If all values are 0 or 1, it uses McNemar's exact test and :func:`paired_binary_interval`. Otherwise it uses
    :func:`sign_flip_test`, which equals McNemar's test on binary values, and a t interval. Equal differences have no
    t interval, as they do not show how much they vary. Of at least two values in ``[0, 1]`` they have
    :func:`paired_binary_interval` of the same mean; of other values their bounds are NaN.

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

    Example:
        >>> mcnemar_test(5, 0), mcnemar_test(3, 3)
        (0.0625, 1.0)
    """
    n = better + worse
    tail = sum(math.comb(n, i) for i in range(min(better, worse) + 1))
    return min(1.0, 2 * tail / 2**n)  # integers, so exact for any n


def sign_flip_test(difference: torch.Tensor, *, seed: int = 0) -> tuple[float, float]:
    """Return the two-sided p-value of a mean difference under random signs of the prompts' differences.

    It enumerates all sign patterns of up to 16 nonzero differences ``[P]``. Beyond, it draws 100,000 and adds the
    observed one.

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
