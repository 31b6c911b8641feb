"""Statistics that exclude masked or missing values: of tokens, of groups, and of the diversity of samples."""

from __future__ import annotations

import math
from collections.abc import Hashable, Sequence
from statistics import NormalDist
from typing import NamedTuple

import torch


class Interval(NamedTuple):
    """Mean with the bounds of its confidence interval, NaN if there are too few values."""

    mean: float
    low: float
    high: float


def masked_mean(values: torch.Tensor, mask: torch.Tensor) -> torch.Tensor:
    """Return the mean of ``values`` under a mask or under weights; 0 if their sum is 0."""
    total = mask.sum()
    return (torch.where(mask > 0, values, 0.0) * mask).sum() / torch.where(total > 0, total, 1)


def nanstd(values: torch.Tensor) -> torch.Tensor:
    """Return the unbiased standard deviation of the values that are not NaN; NaN for fewer than two.

    Shapes: ``values [N]``.
    """
    present = values[~values.isnan()]
    return present.std() if len(present) > 1 else present.new_tensor(torch.nan)


def effective_sample_size(log_ratio: torch.Tensor) -> torch.Tensor:
    """Return the effective share of the samples under importance weights: ``(sum w)^2 / (N sum w^2)``.

    Args:
        log_ratio: ``[N]`` log importance weights, one per independent sample (a row, not a token).

    Returns:
        A scalar in ``(0, 1]``; 1 if all weights are equal, NaN if ``N`` is 0.
    """
    n = log_ratio.new_tensor(float(log_ratio.numel()))
    return (2 * log_ratio.logsumexp(0) - (2 * log_ratio).logsumexp(0) - n.log()).exp()


def wilson_interval(share: torch.Tensor, counts: torch.Tensor, z: float = 1.96) -> tuple[torch.Tensor, torch.Tensor]:
    """Return the Wilson confidence interval of a proportion, which is within [0, 1] and valid for small counts.

    Wilson 1927, with ``p`` the proportion and ``n`` the count::

        (p + z^2 / 2n +- z * sqrt(p * (1 - p) / n + z^2 / 4n^2)) / (1 + z^2 / n)
    """
    center = share + z**2 / (2 * counts)
    half = z * (share * (1 - share) / counts + z**2 / (4 * counts**2)).sqrt()
    scale = 1 + z**2 / counts
    return ((center - half) / scale).clamp(min=0), ((center + half) / scale).clamp(max=1)


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


class GroupRanges(NamedTuple):
    """Range of the returns of ``n`` groups: ``[n]``, or ``[n, F]`` with ``F`` returns per row."""

    low: torch.Tensor  # smallest return; infinity if all members abstained
    high: torch.Tensor  # largest return; minus infinity if all members abstained
    answered: torch.Tensor  # int64, number of members that did not abstain


def group_ranges(returns: torch.Tensor, groups: torch.Tensor) -> GroupRanges:
    """Return the smallest and largest return of each group, and how many of its members answered.

    Shapes: ``returns [N]``, ``groups [N]``.
    """
    n = int(groups.max()) + 1 if len(groups) else 0
    answered, shape = ~returns.isnan(), (n, *returns.shape[1:])
    index = groups.reshape(-1, *[1] * (returns.ndim - 1)).expand_as(returns)
    lows, highs = torch.where(answered, returns, torch.inf), torch.where(answered, returns, -torch.inf)
    low = returns.new_full(shape, torch.inf).scatter_reduce(0, index, lows, "amin")
    high = returns.new_full(shape, -torch.inf).scatter_reduce(0, index, highs, "amax")
    return GroupRanges(low, high, answered.new_zeros(shape, dtype=torch.int64).index_add(0, groups, answered.long()))


def has_signal(ranges: GroupRanges, tolerance: float = 0.0) -> torch.Tensor:
    """Return bool ``[n]``: True for groups in which two members answered and differ by more than ``tolerance``.

    With ``F`` returns per row, one differing return is enough.
    """
    differs = (ranges.answered > 1) & (ranges.high - ranges.low > tolerance)
    return differs if differs.ndim == 1 else differs.any(-1)


NGRAM = 4  # tokens of an n-gram
SKETCH_SIZE = 32  # hashes that a sketch keeps
# Odd constants of 62 bits; products wrap around at 64 bits
_FACTORS = (0x1F83D9ABFB41BD6B, 0x2545F4914F6CDD1D, 0x3C6EF372FE94F82B, 0x1B873593CC9E2D51)
_MIX = 0x2127599BF4325C37


def ngram_hashes(ids: torch.Tensor) -> torch.Tensor:
    """Return a hash of each run of ``NGRAM`` tokens.

    Shapes: ``ids [T]`` to ``[T - NGRAM + 1]`` int64.
    """
    count = max(1, len(ids) - NGRAM + 1)
    hashes = torch.full((count,), len(ids) if len(ids) < NGRAM else NGRAM, dtype=torch.int64, device=ids.device)
    for offset in range(min(NGRAM, len(ids))):
        hashes += (ids[offset : offset + count] + 1) * _FACTORS[offset]
    return _mixed(hashes)


def sequence_hash(ids: torch.Tensor) -> torch.Tensor:
    """Return one int64 that differs between different sequences, but for a collision in 2^64.

    Shapes: ``ids [T]``.
    """
    places = torch.arange(1, len(ids) + 1, device=ids.device) * _FACTORS[0]
    return _mixed(ids + places).sum() + len(ids)


def ngram_statistics(ids: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
    """Return the sketch of a sequence and the share of its n-grams that are repetitions.

    The sketch has the ``SKETCH_SIZE`` smallest different hashes of n-grams, which are the same sample in every
    sequence. Shorter than that, it is complete.

    Shapes: ``ids [T]`` to ``[K]`` int64.
    """
    hashes = ngram_hashes(ids)
    distinct = hashes.unique()
    return distinct[:SKETCH_SIZE], torch.tensor(1 - len(distinct) / len(hashes))


def distinct_share(values: Sequence[Hashable]) -> float:
    """Return the share of the other values of a group that differ from each other: 0 if all are equal, 1 if none."""
    return (len(set(values)) - 1) / (len(values) - 1)


def overlap(sketches: Sequence[torch.Tensor]) -> float:
    """Estimate the n-grams that sequences share: 0 if none occurs in two of them, 1 if all have the same.

    It is ``(1 - distinct / total) * G / (G - 1)`` of ``G`` sequences, whose different n-grams are counted over all
    sequences (``distinct``) and in each (``total``). Sketches estimate it from the n-grams below a common hash.
    """
    full = [s[-1] for s in sketches if len(s) == SKETCH_SIZE]
    values = torch.cat(list(sketches))
    if full:
        values = values[values <= torch.stack(full).min()]
    share = 1 - len(values.unique()) / len(values)
    return share * len(sketches) / (len(sketches) - 1)


def _mixed(hashes: torch.Tensor) -> torch.Tensor:
    """Spread the bits of hashes, so that the smallest ones are a random sample."""
    hashes = (hashes ^ (hashes >> 31)) * _MIX
    return hashes ^ (hashes >> 29)
