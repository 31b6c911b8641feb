r"""Two policies on the same prompts: how far they differ, and whether chance alone would.

The prompts are the independent units. What is compared is one value per prompt and policy: a score, pass@k, ...
"""

from __future__ import annotations

import math
from statistics import NormalDist
from typing import NamedTuple

import torch

from torchrl_rloo.diagnostics.statistics.evaluation import LEVEL, clean, is_binary, student_quantile

_ENUMERATED = 16  # differing prompts up to which all 2^16 sign patterns are tried
_DRAWN = 100_000  # sign patterns tried otherwise
_TOLERANCE = 1e-9  # sums of signed differences that are equal but for rounding


class PairedTest(NamedTuple):
    """What :func:`paired_test` finds, of ``second - first``.

    Attributes:
        difference: mean over the prompts.
        low: lower end of its confidence interval.
        high: upper end.
        p_value: two-sided, of the hypothesis that the two do not differ.
        p_error: standard error of ``p_value`` where sign patterns were drawn; 0 where it is exact.
        better: prompts on which the second has the higher value.
        worse: prompts on which it has the lower.
    """

    difference: float
    low: float
    high: float
    p_value: float
    p_error: float
    better: int
    worse: int


def paired_test(first: torch.Tensor, second: torch.Tensor, *, level: float = LEVEL, seed: int = 0) -> PairedTest:
    """Compares two policies' values of the same prompts.

    Values 0 and 1 are tested by McNemar's exact test and have the interval of :func:`paired_binary_interval`; others by
    :func:`sign_flip_test`, which is the same test where the values are 0 and 1, and a t interval.

    Args:
        first: ``[P]``, at least one.
        second: ``[P]``, of the same prompts in the same order.
        level: of confidence.
        seed: of the sign patterns, where there are too many to try all.

    Raises:
        ValueError: if the shapes differ or there is no prompt.

    Example:
        >>> test = paired_test(torch.tensor([0, 0, 0, 0, 0, 1.0]), torch.ones(6))
        >>> test.better, test.worse, test.p_value
        (5, 0, 0.0625)
    """
    if first.shape != second.shape or first.ndim != 1 or not len(first):
        raise ValueError(
            f"first and second must have one value for each of the same prompts, got shapes {list(first.shape)} and "
            f"{list(second.shape)}"
        )
    first, second = clean(first), clean(second)
    difference = second - first
    better, worse = int((difference > 0).sum()), int((difference < 0).sum())
    if is_binary(first) and is_binary(second):
        low, high = paired_binary_interval(better, worse, len(difference), level)
        p_value, p_error = mcnemar_test(better, worse), 0.0
    else:
        low, high = _t_interval(difference, level)
        p_value, p_error = sign_flip_test(difference, seed=seed)
    return PairedTest(float(difference.mean()), low, high, p_value, p_error, better, worse)


def mcnemar_test(better: int, worse: int) -> float:
    r"""Two-sided exact p-value of McNemar's test: both changes are as likely, :math:`2 P(X \le \min)`, at most 1.

    Args:
        better: prompts that only the second policy got right.
        worse: prompts that only the first did.

    Example:
        >>> mcnemar_test(5, 0), mcnemar_test(3, 3)
        (0.0625, 1.0)
    """
    n = better + worse
    tail = sum(math.comb(n, i) for i in range(min(better, worse) + 1))
    return min(1.0, 2 * tail / 2**n)  # whole numbers, so exact for any n


def sign_flip_test(difference: torch.Tensor, *, seed: int = 0) -> tuple[float, float]:
    """Two-sided p-value of a mean difference, if each prompt's difference were as likely of the other sign.

    All sign patterns are tried up to 16 differences other than 0, else 100,000 drawn ones and the observed one.

    Args:
        difference: ``[P]``.
        seed: of the drawn patterns.

    Returns:
        The p-value, and its standard error from the draw of patterns (0 where all were tried).

    Example:
        >>> sign_flip_test(torch.tensor([0.5, 0.25, 0.0]))
        (0.5, 0.0)
    """
    size = difference.double().abs()
    size = size[size > 0]
    m = len(size)
    if not m:
        return 1.0, 0.0
    observed = abs(float(difference.double().sum())) - _TOLERANCE * float(size.sum())
    if m <= _ENUMERATED:
        patterns = torch.arange(2**m)[:, None] >> torch.arange(m) & 1
        return float(((2.0 * patterns.double() - 1) @ size).abs().ge(observed).double().mean()), 0.0
    generator, hits, chunk = torch.Generator().manual_seed(seed), 0, max(1, 2_000_000 // m)
    for start in range(0, _DRAWN, chunk):
        rows = min(chunk, _DRAWN - start)
        signs = torch.randint(2, (rows, m), generator=generator, dtype=torch.int8)
        hits += int(((2.0 * signs.double() - 1) @ size).abs().ge(observed).sum())
    p = (hits + 1) / (_DRAWN + 1)
    return p, math.sqrt(p * (1 - p) / _DRAWN)


def paired_binary_interval(better: int, worse: int, total: int, level: float = LEVEL) -> tuple[float, float]:
    """Interval of the difference of two shares of the same prompts (Bonett and Price 2012).

    A Wald interval after adding one prompt to either kind of change, so it has a width where no prompt changed.

    Args:
        better: prompts that only the second policy got right.
        worse: prompts that only the first did.
        total: all prompts.
        level: of confidence.
    """
    up, down = (better + 1) / (total + 2), (worse + 1) / (total + 2)
    z = NormalDist().inv_cdf(0.5 + level / 2)
    half = z * math.sqrt((up + down - (up - down) ** 2) / (total + 2))
    return max(-1.0, up - down - half), min(1.0, up - down + half)


def _t_interval(difference: torch.Tensor, level: float) -> tuple[float, float]:
    n = len(difference)
    if n == 1:
        return math.nan, math.nan
    half = student_quantile(0.5 + level / 2, n - 1) * float(difference.std()) / math.sqrt(n)
    return float(difference.mean()) - half, float(difference.mean()) + half
