"""Diversity of sampled token sequences, from hashes of their n-grams that are as small for long texts as for short."""

from __future__ import annotations

from collections.abc import Hashable, Sequence

import torch

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
