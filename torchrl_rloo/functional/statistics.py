"""Statistics that exclude masked or missing values: of tokens, of groups, and of the diversity of samples."""

from __future__ import annotations

from collections.abc import Hashable, Sequence
from typing import NamedTuple

import torch


def masked_mean(values: torch.Tensor, mask: torch.Tensor) -> torch.Tensor:
    """Return the mean of ``values`` under a mask or under weights; 0 if their sum is 0.

    Args:
        values: any shape.
        mask: same shape; bool, or weights of at least 0.

    Returns:
        A scalar.
    """
    total = mask.sum()
    return (torch.where(mask > 0, values, 0.0) * mask).sum() / torch.where(total > 0, total, 1)


def nanstd(values: torch.Tensor) -> torch.Tensor:
    """Return the unbiased standard deviation of the values that are not NaN; NaN for fewer than two.

    Args:
        values: ``[N]``.

    Returns:
        A scalar.
    """
    given = values[~values.isnan()]
    return given.std() if len(given) > 1 else given.new_tensor(torch.nan)


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

    Args:
        share: ``[...]`` proportions ``p``.
        counts: ``[...]`` counts ``n``.
        z: quantile of the normal distribution; 1.96 for 95 %.

    Returns:
        Lower and upper bounds, ``[...]`` each; NaN where the count is 0.
    """
    center = share + z**2 / (2 * counts)
    half = z * (share * (1 - share) / counts + z**2 / (4 * counts**2)).sqrt()
    scale = 1 + z**2 / counts
    return ((center - half) / scale).clamp(min=0), ((center + half) / scale).clamp(max=1)


class GroupRanges(NamedTuple):
    """Range of the returns of ``n`` groups: ``[n]``, or ``[n, F]`` with ``F`` returns per row.

    Attributes:
        low: smallest return; infinity if all members abstained.
        high: largest return; minus infinity if all members abstained.
        answered: int64, number of members that did not abstain.
    """

    low: torch.Tensor
    high: torch.Tensor
    answered: torch.Tensor


def group_ranges(returns: torch.Tensor, groups: torch.Tensor) -> GroupRanges:
    """Return the smallest and largest return of each group, and how many of its members answered.

    Args:
        returns: ``[N]`` or ``[N, F]``, NaN where a row abstains.
        groups: ``[N]`` int64, group index of each row, in ``0 .. n_groups - 1``.

    Example:
        >>> group_ranges(torch.tensor([1.0, 0.0, 0.5]), torch.tensor([0, 0, 1])).high.tolist()
        [1.0, 0.5]
    """
    n = int(groups.max()) + 1 if len(groups) else 0
    given, shape = ~returns.isnan(), (n, *returns.shape[1:])
    index = groups.reshape(-1, *[1] * (returns.ndim - 1)).expand_as(returns)
    low = returns.new_full(shape, torch.inf).scatter_reduce(0, index, torch.where(given, returns, torch.inf), "amin")
    high = returns.new_full(shape, -torch.inf).scatter_reduce(0, index, torch.where(given, returns, -torch.inf), "amax")
    return GroupRanges(low, high, given.new_zeros(shape, dtype=torch.int64).index_add(0, groups, given.long()))


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

    Args:
        ids: ``[T]`` int64 token ids.

    Returns:
        ``[T - NGRAM + 1]`` int64; ``[1]``, the hash of all tokens, for a shorter sequence.

    Example:
        >>> hashes = ngram_hashes(torch.tensor([1, 2, 3, 4, 1, 2, 3, 4]))
        >>> len(hashes), len(hashes.unique())
        (5, 4)
    """
    count = max(1, len(ids) - NGRAM + 1)
    hashes = torch.full((count,), len(ids) if len(ids) < NGRAM else NGRAM, dtype=torch.int64, device=ids.device)
    for offset in range(min(NGRAM, len(ids))):
        hashes += (ids[offset : offset + count] + 1) * _FACTORS[offset]
    return _mixed(hashes)


def sequence_hash(ids: torch.Tensor) -> torch.Tensor:
    """Return one int64 that differs between different sequences, but for a collision in 2^64.

    Args:
        ids: ``[T]`` int64 token ids.

    Returns:
        A scalar.
    """
    places = torch.arange(1, len(ids) + 1, device=ids.device) * _FACTORS[0]
    return _mixed(ids + places).sum() + len(ids)


def ngram_statistics(ids: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
    """Return the sketch of a sequence and the share of its n-grams that are repetitions.

    The sketch has the ``SKETCH_SIZE`` smallest different hashes of n-grams, which are the same sample in every
    sequence. Shorter than that, it is complete.

    Args:
        ids: ``[T]`` int64 token ids.

    Returns:
        ``[K]`` int64 in ascending order, ``K <= SKETCH_SIZE``; a float32 scalar.

    Example:
        >>> sketch, repetition = ngram_statistics(torch.tensor([1, 2, 3, 4, 1, 2, 3, 4]))
        >>> len(sketch), round(repetition.item(), 3)
        (4, 0.2)
    """
    hashes = ngram_hashes(ids)
    distinct = hashes.unique()
    return distinct[:SKETCH_SIZE], torch.tensor(1 - len(distinct) / len(hashes))


def distinct_share(values: Sequence[Hashable]) -> float:
    """Return the share of the other values of a group that differ from each other: 0 if all are equal, 1 if none are.

    Args:
        values: at least two values; equal ones are one answer, also if they are None.

    Example:
        >>> distinct_share(["4", "5", "4"]), distinct_share(["4", "4"]), distinct_share([3, 4])
        (0.5, 0.0, 1.0)
    """
    return (len(set(values)) - 1) / (len(values) - 1)


def overlap(sketches: Sequence[torch.Tensor]) -> float:
    """Estimate the n-grams that sequences share: 0 if none occurs in two of them, 1 if all have the same.

    It is ``(1 - distinct / total) * G / (G - 1)`` of ``G`` sequences, whose different n-grams are counted over all
    sequences (``distinct``) and in each (``total``). Sketches estimate it from the n-grams below a common hash.

    Args:
        sketches: the sketch of each sequence (:func:`ngram_statistics`), at least two.

    Example:
        >>> a, b = (ngram_statistics(torch.tensor(ids))[0] for ids in ([1, 2, 3, 4, 5], [2, 3, 4, 5, 6]))
        >>> overlap([a, a]), overlap([a, b])  # one of two 4-grams is in both
        (1.0, 0.5)
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
